"""Which layers that shall get adapters (LoRA) each stage holds, asked on all ranks before adapters are made.

A library such as PEFT looks for the layers by name in the part of the model that a rank has. On a stage that holds
none of them it ends, though the request is right: only the last stage has an ``output_layer``. And where no stage holds
them, each rank ends by itself. :func:`targets_of_chunks` looks on all stages first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import overload

import torch

from vtp_plugin.api import current_session
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.pipeline_layout import format_ranks
from vtp_plugin.runtime.step.step_times import Report
from vtp_plugin.util.text import one_line

__all__ = ["targets_of_chunks"]

_WRAPPED = ".base_layer"  # how PEFT names a layer that has adapters already


@overload
def targets_of_chunks(model_chunks: Sequence[torch.nn.Module], targets: str) -> list[str]: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def targets_of_chunks(model_chunks: Sequence[torch.nn.Module], targets: Sequence[str]) -> list[list[str]]: ...
def targets_of_chunks(
    model_chunks: Sequence[torch.nn.Module], targets: str | Sequence[str]
) -> list[str] | list[list[str]]:
    """Say which of the layers that shall get adapters each chunk of this rank holds; all ranks call it together.

    A layer is a module with a weight matrix, such as a linear layer, an embedding or a router.

    Args:
        model_chunks: model chunks of this rank.
        targets: PEFT's ``target_modules``, equal on all ranks: names, or ends of names behind a dot; or one regular
            expression that matches whole names.

    Returns:
        For every chunk those of the names that it holds; of a regular expression itself, or an empty text. A chunk that
        holds none gets no adapters: freeze its weights.

    Raises:
        ConfigError: no stage holds such a layer, ranks ask for different ones, or no list of sizes was given.
    """
    session = current_session()
    if session is None or not session.is_running:
        raise ConfigError(
            "targets_of_chunks(); it asks the stages of a run of the plugin; give a list of sizes, a uniform one will "
            "do, and call it after initialize_model_parallel()"
        )
    session.ranks.agree("check of adapters", lambda: {"layers with adapters": _checked(targets)})
    wanted = [targets] if isinstance(targets, str) else list(targets)
    layers = [_layers(chunk) for chunk in model_chunks]
    held = [[target for target in wanted if _holds(names, target, is_pattern=wanted == [targets])] for names in layers]
    own: Report = {
        "layers": {name: float(count) for name, count in Counter(map(_short, sum(layers, []))).items()},
        "targets": dict.fromkeys(sum(held, []), 1.0),
    }
    layout = session.planned.layout

    def refusal(reports: Sequence[Report]) -> str:
        missing = [target for target in wanted if not any(target in report["targets"] for report in reports)]
        stages = [reports[layout.stage_ranks(stage)[0]]["layers"] for stage in range(layout.num_stages)]
        return _describe(missing, stages) if missing else ""

    if text := one_line(session.ranks.share_reports(own, refusal)):
        raise ConfigError(text, shared=text)
    return ["".join(names) for names in held] if isinstance(targets, str) else held


def _checked(targets: str | Sequence[str]) -> str | list[str]:
    """Return names, or a regular expression, that can be looked for.

    Raises:
        ConfigError: there is none, or it is none.

    >>> _checked(["linear_qkv"])
    ['linear_qkv']
    >>> _checked([])
    Traceback (most recent call last):
    ...
    vtp_plugin.errors.ConfigError: adapters for []; layers have names; give some, such as ['linear_qkv']
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"adapters for {targets!r}; layers have names; give some, such as ['linear_qkv']")
    if not isinstance(targets, str):
        return names
    try:
        re.compile(targets)
    except re.error as error:
        raise ConfigError(
            f"adapters for {targets!r}; it is no regular expression ({error}); correct it, or give a list of names"
        ) from None
    return targets


def _layers(chunk: torch.nn.Module) -> list[str]:
    """Name the modules with a weight matrix; one that shares its matrix with another has None in its place."""
    modules = dict(chunk.named_modules())
    wrapped = [name.removesuffix(_WRAPPED) for name in modules if name.endswith(_WRAPPED)]
    found = [
        name
        for name, module in modules.items()
        if any(weight.ndim > 1 for weight in module.parameters(recurse=False)) or getattr(module, "weight", "") is None
    ]
    return wrapped + [name for name in found if not name.startswith(tuple(f"{layer}." for layer in wrapped))]


def _holds(names: Sequence[str], target: str, *, is_pattern: bool) -> bool:
    r"""Tell whether one of a chunk's layers is meant, by PEFT's rules.

    >>> _holds(["decoder.layers.0.linear_qkv"], "linear_qkv", is_pattern=False)
    True
    >>> _holds(["decoder.layers.0.linear_qkv"], "qkv", is_pattern=False)
    False
    >>> _holds(["decoder.layers.0.linear_qkv"], r".*\.linear_(qkv|proj)", is_pattern=True)
    True
    """
    if is_pattern:
        return any(re.fullmatch(target, name) for name in names)
    return any(name == target or name.endswith(f".{target}") for name in names)


def _short(name: str) -> str:
    """Give the end of a layer's name that says what it is.

    >>> _short("decoder.layers.0.mlp.linear_fc1"), _short("projector.0")
    ('linear_fc1', 'projector.0')
    """
    words = name.split(".")
    return ".".join(words[-2:] if words[-1].isdigit() else words[-1:])


def _describe(missing: Sequence[str], stages: Sequence[Mapping[str, float]]) -> str:
    """Say which layers no stage holds, and what each stage holds instead.

    >>> for part in _describe(["qk"], [{"qkv": 1, "proj": 1}, {"proj": 2}, {"proj": 2}]).split("; "):
    ...     print(part)
    adapters for qk
    no stage holds such a layer: stage 0 has 2 layers (1 proj, 1 qkv), stage 1-2 has 2 layers (2 proj)
    name layers that a stage holds
    """
    held = []
    for layers, alike in groupby(range(len(stages)), key=lambda stage: stages[stage]):
        names = ", ".join(f"{count:g} {name}" for name, count in sorted(layers.items()))
        held.append(f"stage {format_ranks(alike)} has {sum(layers.values()):g} layers ({names})")
    rule = f"no stage holds such a layer: {', '.join(held)}"
    return f"adapters for {', '.join(missing)}; {rule}; name layers that a stage holds"
