"""Layouts in the words of frameworks that run Megatron: ``--for megatron|bridge|swift|verl``.

Most people with unequal devices start Megatron through a framework. For many a layout of one tensor-parallel size will
do, with layers shared out by hand. Names of flags and variables, read in the sources (none of these was run here but
ms-swift on CPUs): ms-swift 4.6.0 ``megatron/arguments/megatron_args.py``; Megatron-Bridge 0.6.2
``training/utils/omegaconf_utils.py``; verl 0.9.1 ``trainer/config/engine/megatron.yaml``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from vtp_plugin.config.flag import format_value
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.tune.search.evaluate import Candidate

_VERL: Final = "actor_rollout_ref.actor.megatron."
_TITLES: Final = {"megatron": "Megatron", "bridge": "Megatron-Bridge", "swift": "ms-swift", "verl": "verl"}
FRAMEWORKS: Final = tuple(_TITLES)
"""What ``--for`` takes."""


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


def framework_lines(name: str, best: tuple[Candidate, Launch], stock: tuple[Candidate, Launch] | None) -> Iterator[str]:
    """Write how a framework is started with the best layout that stock Megatron can run, and what that loses.

    Args:
        name: one of :data:`FRAMEWORKS`.
        best: the best layout, and that on its nodes.
        stock: likewise the best one of one size with equal replicas; None without one.
    """
    title, is_unequal = _TITLES[name], len({*best[0].sizes}) > 1
    sizes = format_value(best[0].sizes)
    yield ""
    if name == "swift" and is_unequal:
        layout = f"--pipeline_model_parallel_layout {shlex.quote(layout_string(best[0].layers, best[0].num_chunks))}"
        yield f"ms-swift with the plugin (docs/guides/ms-swift.md), {_BESIDES[name]}:"
        for node, number in _processes(best[1]):
            yield f"    {node}: VTP_FLAGS='--vtp-size-list {sizes}' NPROC_PER_NODE={number} megatron sft \\"
            yield f'        --external_plugins "$(vtp path swift)" {layout}'
    elif is_unequal and name != "megatron":
        yield f"{title} cannot run --vtp-size-list {sizes}"
    if stock is None:
        yield f"{title}: no layout of one size fits these devices"
        return
    if is_unequal:
        loss = stock[0].step_s / best[0].step_s
        yield f"the best layout of one size takes {loss:.3f} times as long as {sizes}"
    yield f"{title} with one size, {_BESIDES[name]}:"
    yield from _STARTS[name](stock[0], stock[1])


_OF_TORCHRUN: Final = "on each node with torchrun's --nnodes, --node-rank, --master-addr and --master-port"
_BESIDES: Final = {
    "megatron": _OF_TORCHRUN,
    "bridge": f"{_OF_TORCHRUN}; RECIPE is your script",
    "swift": "on each node with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set",
    "verl": "started once, where Ray's cluster has all nodes",
}


def _processes(launch: Launch) -> list[tuple[str, int]]:
    """Give how many processes each node starts; nodes alike in a row are one entry."""
    found: list[tuple[str, int]] = []
    for number, group in groupby(launch.nodes, key=lambda node: len(node.ranks)):
        names = [node.name for node in group]
        between = " to " if len(names) > 2 else " and "
        found.append((names[0] if len(names) == 1 else f"{names[0]}{between}{names[-1]}", number))
    return found


def _start_megatron(stock: Candidate, launch: Launch) -> Iterator[str]:
    flags = (word for name, value in _named(stock).items() for word in (f"--{name.replace('_', '-')}", value))
    return _on_nodes(launch, "torchrun --nproc-per-node {} SCRIPT", flags)


def _start_bridge(stock: Candidate, launch: Launch) -> Iterator[str]:
    overrides = (f"model.{name}={_quoted(value)}" for name, value in _named(stock).items())
    return _on_nodes(launch, "torchrun --nproc-per-node {} RECIPE", overrides)


def _start_swift(stock: Candidate, launch: Launch) -> Iterator[str]:
    flags = (word for name, value in _named(stock).items() for word in (f"--{name}", value))
    return _on_nodes(launch, "NPROC_PER_NODE={} megatron sft", flags)


def _on_nodes(launch: Launch, command: str, words: Iterable[str]) -> Iterator[str]:
    """Write what each node starts: a command with a place for its number of processes, and the words behind it."""
    behind = shlex.join(words)
    for node, number in _processes(launch):
        yield f"    {node}: {command.format(number)} {behind}"


def _start_verl(stock: Candidate, launch: Launch) -> Iterator[str]:
    found = _processes(launch)
    if len({number for _, number in found}) > 1:
        shown = ", ".join(f"{number} on {node}" for node, number in found)
        yield f"    not with verl's own launcher: trainer.n_gpus_per_node is one number, and this layout needs {shown}"
        return
    own = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    words = [
        f"{_VERL}{name}={value}" if name in own else f"+{_VERL}override_transformer_config.{name}={_quoted(value)}"
        for name, value in _named(stock).items()
    ]
    words += [f"trainer.n_gpus_per_node={found[0][1]}", f"trainer.nnodes={len(launch.nodes)}"]
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
