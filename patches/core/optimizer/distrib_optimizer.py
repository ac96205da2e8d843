"""P4: checkpoints of the distributed optimizer in fp32, and with torch's own Adam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from vtp_plugin.patching import PatchRecord

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P4",
            target=f"{_CLASS}.state_dict",
            build=_state_dict,
            why="before the first step torch's Adam has no state yet, and the method asserts that all parameters have "
            "taken the same number of steps: loading a checkpoint fails",
            versions=">=0.19,<0.20",
            remove_when="Megatron reads the step of an optimizer without state as 0",
        ),
        PatchRecord(
            id="P4b",
            target=f"{_CLASS}.load_state_dict",
            build=_load_state_dict,
            why="it gives all parameters one shared step tensor, which torch's Adam would count up once per parameter, "
            "then overwrites it with the step of the state that was there before; and in fp32 it writes into views of "
            "leaves outside no_grad",
            versions=">=0.19,<0.20",
            remove_when="every parameter gets a step tensor of its own, with the stored value",
        ),
        PatchRecord(
            id="P4c",
            target=f"{_CLASS}._set_main_param_and_optimizer_states",
            build=_set_states,
            why="it looks up every tensor of torch's Adam, but fully reshardable checkpoints hold no step per "
            "parameter",
            versions=">=0.19,<0.20",
            remove_when="Megatron leaves out what the checkpoint does not hold",
        ),
    )


def _state_dict(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _begin(self.optimizer)
        return original(self)

    return state_dict


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state with which torch's Adam itself would begin."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
            state.setdefault("step", torch.tensor(0.0))


def _load_state_dict(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        # In fp32 the main parameters are views of the model's, which autograd does not let a load overwrite.
        with torch.no_grad():
            original(self, state_dict)
        if distrib_optimizer.HAVE_APEX_OR_TE:
            return
        # Megatron stores one step for all parameters, in every group.
        step = state_dict["optimizer"]["param_groups"][0]["step"]
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step))

    return load_state_dict


def _set_states(original: Callable[[Any, Any, dict[str, Any]], None]) -> Callable[[Any, Any, dict[str, Any]], None]:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # What is no tensor is left as it is; the step comes with the state of the optimizer itself.
        with torch.no_grad():
            original(self, model_param, {"step": None, **tensors})

    return _set_main_param_and_optimizer_states
