"""`torch-adam`: checkpoints of the distributed optimizer in fp32, and with torch's own Adam.

`bucket-gaps`: and with a bucket that is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.optimizer.param_groups import load_groups
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@replaces(
    f"{_CLASS}.state_dict",
    id="torch-adam",
    when=Moment.PLATFORM,
    why="before the first step torch's Adam has no state yet, and the method asserts that all parameters have taken "
    "the same number of steps: loading a checkpoint fails",
    remove_when="Megatron reads the step of an optimizer without state as 0",
)
def _state_dict(original: Callable[[Any], dict[str, Any]], optimizer: Any) -> dict[str, Any]:
    """Run `DistributedOptimizer.state_dict`; torch's Adam, which has no state before the first step, gets it first."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return original(optimizer)
    adam = optimizer.optimizer
    if adam is None or not _is_empty(adam):
        _begin(adam)
        return original(optimizer)
    with UndoStack().during(Name(optimizer, "optimizer"), _Stepped(adam)):
        return original(optimizer)


def _is_empty(adam: torch.optim.Optimizer) -> bool:
    return not any(group["params"] for group in adam.param_groups)


def _count(adam: torch.optim.Optimizer, *_: Any) -> None:
    for group in adam.param_groups:
        group["step"] += 1


class _Stepped:
    """An optimizer without parameters, with a state from which Megatron reads its number of steps."""

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self._adam = adam

    def state_dict(self) -> dict[str, Any]:
        found = self._adam.state_dict()
        return {**found, "state": {0: {"step": torch.tensor(float(found["param_groups"][0]["step"]))}}}


def _begin(adam: torch.optim.Optimizer) -> None:
    """Give every parameter the state with which torch's Adam itself would begin."""
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        return
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        state = adam.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state.setdefault("step", torch.tensor(0.0))


@replaces(
    f"{_CLASS}.load_state_dict",
    id="torch-adam/load",
    when=Moment.PLATFORM,
    why="it gives all parameters one shared step tensor, which torch's Adam would count up once per parameter, then "
    "overwrites it with the step of the state that was there before; and in fp32 it writes into views of leaves "
    "outside no_grad; besides, what `group-identity` says",
    remove_when="every parameter gets a step tensor of its own, with the stored value",
)
def _load_state_dict(session: Session, original: Callable[[Any, Any], None], optimizer: Any, state_dict: Any) -> None:
    """Run `DistributedOptimizer.load_state_dict`, then give each parameter of torch's Adam a step tensor of its own."""
    # In fp32 the main parameters are views of the model's, which autograd does not let a load overwrite.
    with torch.no_grad():
        load_groups(session, original, optimizer, state_dict)
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    # Megatron stores one step for all parameters, in every group.
    step = state_dict["optimizer"]["param_groups"][0]["step"]
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(float(step))
    if _is_empty(optimizer.optimizer):
        for group in optimizer.optimizer.param_groups:
            group["step"] = int(step)


@replaces(
    f"{_CLASS}._set_main_param_and_optimizer_states",
    id="torch-adam/set-states",
    when=Moment.PLATFORM,
    why="it looks up every tensor of torch's Adam, but fully reshardable checkpoints hold no step per parameter",
    remove_when="Megatron leaves out what the checkpoint does not hold",
)
def _set_states(
    original: Callable[[Any, Any, dict[str, Any]], None], optimizer: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    """Run `_set_main_param_and_optimizer_states` on tensors that a checkpoint may hold without their step."""
    # The stored step comes with the optimizer's state (`torch-adam/load`). Until then each has the one that all have:
    # Megatron 0.12 copies what it is given; later families skip it where it is no tensor.
    step = next((state["step"] for state in optimizer.optimizer.state.values() if "step" in state), None)
    with torch.no_grad():
        original(optimizer, model_param, {"step": step, **tensors})


@replaces(
    f"{_CLASS}.__init__",
    id="torch-adam/no-parameters",
    when=Moment.PLATFORM,
    why="every rank has an optimizer for experts with groups of their own where one stage has some; without "
    "parameters it takes no steps, but its number of steps is stored for all stages",
    remove_when="Megatron counts the steps of an optimizer without parameters, or stores none",
)
def _init(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Run `DistributedOptimizer.__init__`; an optimizer without parameters counts its steps from then on."""
    original(optimizer, *args, **kwargs)
    adam = optimizer.optimizer
    if isinstance(adam, torch.optim.Optimizer) and _is_empty(adam):
        for group in adam.param_groups:
            group.setdefault("step", 0)
        adam.register_step_post_hook(_count)


@replaces(
    f"{_CLASS}.sharded_param_state_fully_reshardable",
    unneeded={"<0.15": "it stores no optimizer so"},
    id="bucket-gaps",
    when=Moment.PLATFORM,
    why="it joins buckets without their padding and cuts parameters where they lie with it: what follows a padded "
    "bucket, such as that of a tied embedding, is stored shifted",
    remove_when="Megatron cuts what it has joined",
)
def _reshardable_state(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `sharded_param_state_fully_reshardable` with the places that parameters have without padding."""
    with ExitStack() as until:
        for buffer in optimizer.buffers:
            until.enter_context(UndoStack().during(Name(buffer, "param_index_map"), _without_padding(buffer)))
        return original(optimizer, *args, **kwargs)


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return for each parameter its start and end among the buckets joined without padding, and its bucket."""
    joined = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
    padding = [bucket.offset - start for bucket, start in zip(buffer.buckets, joined, strict=False)]
    places = buffer.param_index_map.items()
    return {param: (start - padding[bucket], end - padding[bucket], bucket) for param, (start, end, bucket) in places}
