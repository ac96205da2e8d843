"""What the optimizer of a run holds, by parameter, read off the live objects and not by what stores them.

So it judges checkpoints: it knows how layers cut their parameters, and uses nothing that saves or loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import megatron.training.training as training
from megatron.core import parallel_state
from megatron.training import get_args

from tests.multiproc.cases.optimizer_state import Share
from tests.multiproc.hooks.in_place import Facts, before
from vtp_plugin.patches.certified.certified_tensors import named_parts

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def dump_optimizer(facts: Facts) -> None:
    """Note the optimizer's state before the third step, after which step it was saved or loaded."""

    @before(training, "train_step")
    def dump(_step: Any, _data: Any, model: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        if get_args().curr_iteration == 2:
            facts["optimizer"] = list(_shares(model, optimizer))


def _shares(model: list[Any], optimizer: Any) -> Iterator[Share]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, chunk in enumerate(model):
        for name, parameter, cut in whole_parts(chunk):
            for held in (found for part in parts if (found := _held_by(part, parameter)) is not None):
                yield _share(name, index, cut, *held)


def _held_by(optimizer: Any, parameter: Any) -> tuple[Any, dict[str, Any], int] | None:
    """Give what an optimizer holds of a parameter: master weight, state, and where in the parameter that begins."""
    places = getattr(optimizer, "model_param_group_index_map", None)
    state = getattr(optimizer.optimizer, "state", {})  # of experts, a stage without them has none
    if places is None:  # it is not distributed
        main = getattr(parameter, "main_param", parameter)
        return (main, state[main], 0) if main in state else None
    if parameter not in places:
        return None
    number, order = places[parameter]
    main = optimizer.optimizer.param_groups[number]["params"][order]
    return main, state[main], optimizer._get_model_param_range_map(parameter)["param"].start


def whole_parts(chunk: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the parameters of a chunk with their names in the whole model, and what part of it this rank has."""
    args: Any = get_args()
    for name, part in named_parts([chunk], args.num_experts or 0).items():
        is_tied = args.untie_embeddings_and_output_weights is False and name == "output_layer.weight"
        counted = re.sub(r"(decoder\.layers\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) - 1}", name)  # from 0 on
        whole = "embedding.word_embeddings.weight" if is_tied else counted
        cut = {
            "tp": (part.index, part.count),
            "axis": part.dim if part.count > 1 else None,
            "is_gated": part.is_gated,
            "shape": tuple(part.parameter.shape),
        }
        yield whole, part.parameter, cut


def _share(name: str, chunk: int, cut: dict[str, Any], main: Any, state: dict[str, Any], start: int) -> Share:
    return Share(
        name=name,
        holder=(parallel_state.get_pipeline_model_parallel_rank(), chunk),
        **cut,
        start=start,
        values={
            "weight": main.detach().float().flatten().numpy().copy(),
            **{key: value.float().flatten().numpy().copy() for key, value in state.items() if key in _MOMENTS},
        },
        step=float(state.get("step", 0.0)),
    )
