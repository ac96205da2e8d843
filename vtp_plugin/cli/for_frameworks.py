"""Layouts in the words of frameworks that run Megatron: ``--for megatron|bridge|swift|verl``.

Most people with unequal devices start Megatron through a framework. For many a layout of one tensor-parallel size will
do, with layers shared out by hand. Names of flags and variables, read in the sources (none of these was run here but
ms-swift on CPUs): ms-swift 4.6.0 ``megatron/arguments/megatron_args.py``; Megatron-Bridge 0.6.2
``training/utils/omegaconf_utils.py``; verl 0.9.1 ``trainer/config/engine/megatron.yaml``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from vtp_plugin.cli.launch_text import launch_lines
from vtp_plugin.config.flag import format_value
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.tune.search.evaluate import Candidate

_VERL: Final = "actor_rollout_ref.actor.megatron."
_TITLES: Final = {"megatron": "Megatron", "bridge": "Megatron-Bridge", "swift": "ms-swift", "verl": "verl"}
FRAMEWORKS: Final = tuple(_TITLES)
"""What ``--for`` takes."""
LEAST_PERCENT: Final = 5
"""The gain in percent from which the plugin is advised."""
_LEAST_GAIN: Final = 1 + LEAST_PERCENT / 100


def add_for_flag(group: argparse._ArgumentGroup) -> None:
    """Declare ``--for``."""
    group.add_argument(
        "--for",
        dest="framework",
        choices=FRAMEWORKS,
        metavar="NAME",
        help="megatron, bridge, swift, verl: end with its layout of one size",
    )


def layout_string(layers: Sequence[int], num_chunks: int = 1) -> str:
    """Write layers as Megatron's pipeline layout, whose class the frameworks use, too.

    Args:
        layers: number of layers of every stage.
        num_chunks: virtual stages of every stage, which have equally many.

    >>> layout_string((19, 9, 4)), layout_string((1, 1)), layout_string((4, 4), 2)
    ('Et*19|t*9|t*4L', 'Et|tL', 'Et*2|t*2|t*2|t*2L')
    """
    parts = [number // num_chunks for _ in range(num_chunks) for number in layers]
    texts = ["t" if number == 1 else f"t*{number}" for number in parts]
    return "E" + "|".join(texts) + "L"


def advises_stock(best: Candidate, stock: Candidate | None) -> bool:
    """Whether to start what stock Megatron can run: it is nearly as quick, and the best layout is no U."""
    return stock is not None and len(best.layers) <= len(best.sizes) and stock.step_s < _LEAST_GAIN * best.step_s


def framework_lines(
    name: str,
    best: tuple[Candidate, Launch],
    stock: tuple[Candidate, Launch] | None,
    note: str = "",
    *,
    is_slurm: bool,
) -> Iterator[str]:
    """Write how a framework is started: with the advised layout first, with one size or with the plugin.

    Args:
        name: one of :data:`FRAMEWORKS`.
        best: the best layout, and that on its nodes.
        stock: likewise the best one of one size with equal replicas; None without one.
        note: what is to be said of the best layout's nodes.
        is_slurm: whether as a batch script.

    Raises:
        ConfigError: there is no batch script of this framework.
    """
    if is_slurm and name in ("swift", "verl"):
        raise ConfigError(f"--slurm --for {name}: the batch script starts torchrun; leave --slurm out")
    title, sizes = _TITLES[name], format_value(best[0].sizes)
    is_stock = advises_stock(best[0], stock and stock[0])
    own = [*_with_plugin(name, *best, note, is_slurm=is_slurm)]
    one = [f"{title}: no layout of one size fits the devices"]
    if stock is not None:
        one = [*_STARTS[name](*stock, is_slurm)]
        loss = stock[0].step_s / best[0].step_s
        if len({*best[0].sizes}) > 1:
            one.insert(0, f"the best layout of one size takes {loss:.3f} times as long as {sizes}")
            if is_stock:
                one[0] += f"; below {LEAST_PERCENT} % such a prediction says little: stay with one size"
    yield from (line for block in ((one, own) if is_stock else (own, one)) if block for line in ("", *block))


def _with_plugin(name: str, best: Candidate, launch: Launch, note: str, *, is_slurm: bool) -> Iterator[str]:
    """Write how the plugin starts the best layout, where it is in the framework; nothing where it is not needed."""
    sizes, is_unequal = format_value(best.sizes), len({*best.sizes}) > 1
    if name == "megatron":
        if "vtp_plugin" in launch.program:
            yield from launch_lines(launch, note, is_slurm=is_slurm)
    elif name == "swift" and is_unequal:
        layout = shlex.quote(layout_string(best.layers, best.num_chunks))
        plugin = ("--external_plugins", '"$(vtp path swift)"', "--pipeline_model_parallel_layout", layout)
        program = (f"VTP_FLAGS='--vtp-size-list {sizes}'", *_SWIFT, *plugin)
        yield from _swift_lines("with the plugin", launch, program)
    elif is_unequal:
        yield f"{_TITLES[name]} cannot run --vtp-size-list {sizes}"


def _start_megatron(stock: Candidate, launch: Launch, is_slurm: bool) -> Iterator[str]:
    flags = (word for name, value in _named(stock).items() for word in (f"--{name.replace('_', '-')}", value))
    own = replace(launch, program=("SCRIPT", "FLAGS", *map(shlex.quote, flags)))
    yield from launch_lines(own, is_slurm=is_slurm, what="start Megatron with one size")


def _start_bridge(stock: Candidate, launch: Launch, is_slurm: bool) -> Iterator[str]:
    overrides = (f"model.{name}={_quoted(value)}" for name, value in _named(stock).items())
    own, what = replace(launch, program=("RECIPE", *map(shlex.quote, overrides))), "start Megatron-Bridge with one size"
    yield from launch_lines(own, is_slurm=is_slurm, what=what, flags="RECIPE: your script")


def _start_swift(stock: Candidate, launch: Launch, is_slurm: bool) -> Iterator[str]:
    flags = (word for name, value in _named(stock).items() for word in (f"--{name}", shlex.quote(value)))
    yield from _swift_lines("with one size", launch, (*_SWIFT, *flags))


_SWIFT: Final = ("megatron", "sft")


def _swift_lines(how: str, launch: Launch, program: Sequence[str]) -> Iterator[str]:
    own = replace(launch, program=(*program, "FLAGS"), by_variables=True)
    flags = "FLAGS: your own of megatron sft; see docs/guides/ms-swift.md"
    yield from launch_lines(own, is_slurm=False, what=f"start ms-swift {how}", flags=flags)


def _start_verl(stock: Candidate, launch: Launch, is_slurm: bool) -> Iterator[str]:
    yield "start verl with one size once, where Ray's cluster has all nodes:"
    numbers = {launch.label(node): len(node.ranks) for node in launch.nodes}
    if len({*numbers.values()}) > 1:
        shown = ", ".join(f"{number} on {node}" for node, number in numbers.items())
        yield f"    not with verl's own launcher: trainer.n_gpus_per_node is one number, and this layout needs {shown}"
        return
    own = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    words = [
        f"{_VERL}{name}={value}" if name in own else f"+{_VERL}override_transformer_config.{name}={_quoted(value)}"
        for name, value in _named(stock).items()
    ]
    words += [f"trainer.n_gpus_per_node={len(launch.nodes[0].ranks)}", f"trainer.nnodes={len(launch.nodes)}"]
    yield f"    python -m verl.trainer.main_ppo {shlex.join(words)}"


_STARTS: Final = {"megatron": _start_megatron, "bridge": _start_bridge, "swift": _start_swift, "verl": _start_verl}


def _quoted(value: str) -> str:
    """Write a value as Hydra reads it: a text with signs in quotes."""
    return value if value.isdecimal() else f'"{value}"'


def _named(stock: Candidate) -> dict[str, str]:
    sizes = {"tensor_model_parallel_size": str(stock.sizes[0]), "pipeline_model_parallel_size": str(len(stock.sizes))}
    if len(stock.sizes) == 1:
        return sizes
    return {**sizes, "pipeline_model_parallel_layout": layout_string(stock.layers, stock.num_chunks)}
