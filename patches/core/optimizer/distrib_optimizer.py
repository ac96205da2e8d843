"""The distributed optimizer, and which group a parameter belongs to.

`torch-adam`: checkpoints of the distributed optimizer in fp32, and with torch's own Adam.

`bucket-gaps`: and with a bucket that is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import accumulate
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer

from vtp_plugin.checkpoint.load.stored_optimizer import Group, Rates, Request, counterparts, difference, marks, rates_of
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.log import warning
from vtp_plugin.util.undo import Name, UndoStack

_PLAIN: Final = "megatron.core.optimizer.optimizer:FP32Optimizer"
_HALF: Final = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_KNOWS_RATES: Final = "max_lr" in getattr(megatron_optimizer, "param_group_identifier_keys", ())


def require_rates(where: str, own: Sequence[Group], found: Sequence[Group], rates: Rates) -> None:
    """Refuse other rates than the checkpoint's where nothing says whose count, as Megatron does.

    Raises:
        ConfigError: they differ.
    """
    # Older Megatrons take the checkpoint's; their scheduler compares its own.
    if rates is Rates.SAME and _KNOWS_RATES and (text := difference(own, found)):
        raise ConfigError(
            f"{where}: this run has {text}; a resume keeps its rates unless told otherwise; give {Rates.OWN.value} to "
            f"train with this run's, or {Rates.STORED.value} to keep the checkpoint's"
        )


@replaces(f"{_PLAIN}.sharded_state_dict", id="group-identity/plain-request", when=Moment.LIST)
@replaces(f"{_HALF}.sharded_state_dict", id="group-identity/half-request", when=Moment.LIST)
def _request(
    session: Session,
    original: Callable[..., dict[str, Any]],
    optimizer: Any,
    model_state: Any,
    is_loading: bool = False,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run `sharded_state_dict`; to load, nothing is said of this run's groups, which are found afterwards.

    Why: the numbers of the parameters of this run's groups are joined with stored groups by their places, which fails
    where a rate of its own makes one more group, and SGD has no function that it calls to begin.

    Remove when: groups of parameters are known by names of their parameters.
    """
    lacks_state = is_loading and optimizer.init_state_fn is None  # of SGD Megatron has none, and calls it
    with UndoStack().during(Name(optimizer, "init_state_fn"), _begin_of_group) if lacks_state else nullcontext():
        state = original(optimizer, model_state, is_loading, *args, **kwargs)
    if is_loading and session.is_active:
        del state.get("optimizer", state)["param_groups"]
    return state


@replaces(f"{_PLAIN}.load_state_dict", id="group-identity", when=Moment.LIST)
@replaces(f"{_HALF}.load_state_dict", id="group-identity/half", when=Moment.LIST)
def load_groups(session: Session, original: Callable[[Any, Any], None], optimizer: Any, state_dict: Any) -> None:
    """Run `load_state_dict` of an optimizer on the stored groups of this run's groups, in their order.

    Why: it knows groups of parameters by their places (0.12) or by numbers, rates among them (since 0.19), and takes
    their rates from the checkpoint: a resume with other ones keeps the old, or ends.

    Remove when: groups of parameters are known by names of their parameters.

    Raises:
        ConfigError: the groups cannot be told, or rates differ and nothing says whose count; on all ranks.
    """
    holder = next((state_dict[key] for key in ("optimizer", "optimizer_state_dict") if key in state_dict), state_dict)
    stored, inner = holder.get("param_groups"), optimizer.optimizer
    if stored is None or inner is None or not session.is_planned:
        return original(optimizer, state_dict)
    own: list[dict[str, Any]] = [{**group} for group in inner.param_groups]
    is_read_here = isinstance(state_dict.get("param_state"), Request)
    if not (session.is_active or is_read_here):
        _look_at_uniform(own, stored, session.loading.rates)
        return original(optimizer, state_dict)
    where, rates = "the checkpoint", session.loading.rates
    found = stored if is_read_here else counterparts(where, own, stored, rates)
    require_rates(where, own, found, rates)
    places = _places(inner, stored)
    holder["param_groups"] = [
        {**group, **marks(mine), "params": place} for group, mine, place in zip(found, own, places, strict=True)
    ]
    # Megatron's own search takes groups with the same rates for one.
    with UndoStack().during(Name(optimizer, "_filter_and_reorder_param_groups"), _as_given):
        original(optimizer, state_dict)
    for group, mine, other in zip(inner.param_groups, own, found, strict=True):
        group.update(marks(mine) if rates is Rates.OWN else marks(mine) | rates_of(other))


def _as_given(_own: Any, given: Any) -> Any:
    return given


def _begin_of_group(inner: Any, *_: Any) -> None:
    """Give the parameters of SGD the momentum with which it begins itself."""
    for group in inner.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def _places(inner: Any, stored: Sequence[Group]) -> list[Any]:
    """Give the numbers of the parameters of each group.

    Raises:
        ConfigError: they are stored, as with --ckpt-format torch, and are those of other groups.
    """
    own = [group["params"] for group in inner.state_dict()["param_groups"]]
    if not any("params" in group for group in stored):
        return own
    if [len(group["params"]) for group in stored] != [*map(len, own)]:
        raise ConfigError(
            f"the checkpoint holds {len(stored)} groups of parameters, this run has {len(own)} of other sizes; "
            "--ckpt-format torch loads into the same ones only; use the options of the run that was saved, or load "
            "only the weights with --no-load-optim"
        )
    return [group["params"] for group in stored]


def _look_at_uniform(own: Sequence[Group], stored: Sequence[Group], rates: Rates) -> None:
    """Say what Megatron does with other rates on a uniform list, where it loads the optimizer by itself.

    Raises:
        ConfigError: it would end.
    """
    if _KNOWS_RATES:
        if text := difference(own, counterparts("the checkpoint", own, stored, Rates.OWN)):
            raise ConfigError(
                f"this run has {text}; Megatron tells groups of parameters apart by their rates, so equal TP sizes "
                "resume with the same ones only; give those, load only the weights with --no-load-optim, or save "
                f"once with unequal stages and {Rates.OWN.value}, and resume from there"
            )
    elif rates is Rates.OWN and len(own) == len(stored) and dist.get_rank() == 0 and (text := difference(own, stored)):
        warning(
            f"this run has {text}, and trains with the latter: this Megatron takes the rates of groups of parameters "
            f"from the checkpoint in spite of {Rates.OWN.value}; unequal stages take this run's"
        )


_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@replaces(f"{_CLASS}.state_dict", id="torch-adam", when=Moment.PLATFORM)
def _state_dict(original: Callable[[Any], dict[str, Any]], optimizer: Any) -> dict[str, Any]:
    """Run `DistributedOptimizer.state_dict`; torch's Adam, which has no state before the first step, gets it first.

    Why: before the first step torch's Adam has no state yet, and the method asserts that all parameters have taken the
    same number of steps: loading a checkpoint fails.

    Remove when: Megatron reads the step of an optimizer without state as 0.
    """
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


@replaces(f"{_CLASS}.load_state_dict", id="torch-adam/load", when=Moment.PLATFORM)
def _load_state_dict(session: Session, original: Callable[[Any, Any], None], optimizer: Any, state_dict: Any) -> None:
    """Run `DistributedOptimizer.load_state_dict`, then give each parameter of torch's Adam a step tensor of its own.

    Why: it gives all parameters one shared step tensor, which torch's Adam would count up once per parameter, then
    overwrites it with the step of the state that was there before; and in fp32 it writes into views of leaves outside
    no_grad; besides, what `group-identity` says.

    Remove when: every parameter gets a step tensor of its own, with the stored value.
    """
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


@replaces(f"{_CLASS}._set_main_param_and_optimizer_states", id="torch-adam/set-states", when=Moment.PLATFORM)
def _set_states(
    original: Callable[[Any, Any, dict[str, Any]], None], optimizer: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    """Run `_set_main_param_and_optimizer_states` on tensors that a checkpoint may hold without their step.

    Why: it looks up every tensor of torch's Adam, but fully reshardable checkpoints hold no step per parameter.

    Remove when: Megatron leaves out what the checkpoint does not hold.
    """
    # The stored step comes with the optimizer's state (`torch-adam/load`). Until then each has the one that all have:
    # Megatron 0.12 copies what it is given; later families skip it where it is no tensor.
    step = next((state["step"] for state in optimizer.optimizer.state.values() if "step" in state), None)
    with torch.no_grad():
        original(optimizer, model_param, {"step": step, **tensors})


@replaces(f"{_CLASS}.__init__", id="torch-adam/no-parameters", when=Moment.PLATFORM)
def _init(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Run `DistributedOptimizer.__init__`; an optimizer without parameters counts its steps from then on.

    Why: every rank has an optimizer for experts with groups of their own where one stage has some; without parameters
    it takes no steps, but its number of steps is stored for all stages.

    Remove when: Megatron counts the steps of an optimizer without parameters, or stores none.
    """
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
)
def _reshardable_state(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `sharded_param_state_fully_reshardable` with the places that parameters have without padding.

    Why: it joins buckets without their padding and cuts parameters where they lie with it: what follows a padded
    bucket, such as that of a tied embedding, is stored shifted.

    Remove when: Megatron cuts what it has joined.
    """
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
