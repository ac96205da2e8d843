"""`group-identity`: a resume with other rates finds the groups of parameters, whatever their rates were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as megatron_optimizer

from vtp_plugin.checkpoint.load.pair_groups import Group, Rates, counterparts, difference, marks, rates_of
from vtp_plugin.checkpoint.load.stored_optimizer import Request
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.log import warning
from vtp_plugin.util.undo import Name, UndoStack

_PLAIN: Final = "megatron.core.optimizer.optimizer:FP32Optimizer"
_HALF: Final = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_WHY: Final = (
    "it knows groups of parameters by their places (0.12) or by numbers, rates among them (since 0.19), and takes "
    "their rates from the checkpoint: a resume with other ones keeps the old, or ends"
)
_ORDER: Final = (
    "the numbers of the parameters of this run's groups are joined with stored groups by their places, which fails "
    "where a rate of its own makes one more group, and SGD has no function that it calls to begin"
)
_WHEN: Final = "groups of parameters are known by names of their parameters"
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


@replaces(
    f"{_PLAIN}.sharded_state_dict", id="group-identity/plain-request", when=Moment.LIST, why=_ORDER, remove_when=_WHEN
)
@replaces(
    f"{_HALF}.sharded_state_dict", id="group-identity/half-request", when=Moment.LIST, why=_ORDER, remove_when=_WHEN
)
def _request(
    session: Session,
    original: Callable[..., dict[str, Any]],
    optimizer: Any,
    model_state: Any,
    is_loading: bool = False,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run `sharded_state_dict`; to load, nothing is said of this run's groups, which are found afterwards."""
    lacks_state = is_loading and optimizer.init_state_fn is None  # of SGD Megatron has none, and calls it
    with UndoStack().during(Name(optimizer, "init_state_fn"), _begin) if lacks_state else nullcontext():
        state = original(optimizer, model_state, is_loading, *args, **kwargs)
    if is_loading and session.is_active:
        del state.get("optimizer", state)["param_groups"]
    return state


@replaces(f"{_PLAIN}.load_state_dict", id="group-identity", when=Moment.LIST, why=_WHY, remove_when=_WHEN)
@replaces(f"{_HALF}.load_state_dict", id="group-identity/half", when=Moment.LIST, why=_WHY, remove_when=_WHEN)
def load_groups(session: Session, original: Callable[[Any, Any], None], optimizer: Any, state_dict: Any) -> None:
    """Run `load_state_dict` of an optimizer on the stored groups of this run's groups, in their order.

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


def _begin(inner: Any, *_: Any) -> None:
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
