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
        names = _global_numbers(chunk)
        for name, parameter in chunk.named_parameters():
            for held in (found for part in parts if (found := _held_by(part, parameter)) is not None):
                yield _share(_whole_name(name, names), index, parameter, *held)


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


def _global_numbers(chunk: Any) -> dict[str, int]:
    """Give the number in the whole model of every layer and expert that a chunk numbers by itself."""
    found = {}
    for name, module in chunk.named_modules():
        if re.search(r"\.layers\.\d+$", name):
            found[name] = module.layer_number - 1
        if re.search(r"\.local_experts\.\d+$", name):
            own = int(name.rpartition(".")[2])
            per_rank = get_args().num_experts // parallel_state.get_expert_model_parallel_world_size()
            found[name] = parallel_state.get_expert_model_parallel_rank() * per_rank + own
    return found


def _whole_name(name: str, numbers: dict[str, int]) -> str:
    in_chunk = name  # a number in the whole model may be that of another layer in the chunk
    for prefix in sorted(numbers, key=len, reverse=True):
        if in_chunk.startswith(f"{prefix}."):
            head, _, _ = prefix.rpartition(".")
            name = f"{head}.{numbers[prefix]}{name[len(prefix) :]}"
    name = name.removeprefix("module.").removeprefix("module.")
    is_tied = get_args().untie_embeddings_and_output_weights is False and name == "output_layer.weight"
    return "embedding.word_embeddings.weight" if is_tied else name


def _cut(name: str, parameter: Any) -> dict[str, Any]:
    """Say what part of a whole parameter this rank has."""
    is_dense = getattr(parameter, "allreduce", True)
    group = (
        parallel_state.get_tensor_model_parallel_group if is_dense else parallel_state.get_expert_tensor_parallel_group
    )
    rank, size = group().rank(), group().size()
    is_cut = getattr(parameter, "tensor_model_parallel", False) and size > 1
    has_gate = get_args().swiglu or getattr(get_args(), "quick_geglu", False)
    return {
        "tp": (rank, size),
        "axis": parameter.partition_dim if is_cut else None,
        "is_gated": has_gate and ".linear_fc1." in name,
        "shape": tuple(parameter.shape),
    }


def _share(name: str, chunk: int, parameter: Any, main: Any, state: dict[str, Any], start: int) -> Share:
    return Share(
        name=name,
        holder=(parallel_state.get_pipeline_model_parallel_rank(), chunk),
        **_cut(name, parameter),
        start=start,
        values={
            "weight": main.detach().float().flatten().numpy().copy(),
            **{key: value.float().flatten().numpy().copy() for key, value in state.items() if key in _MOMENTS},
        },
        step=float(state.get("step", 0.0)),
    )
