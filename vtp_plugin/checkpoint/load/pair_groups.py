"""Which stored group of parameters is which of this run's: told by what they hold, not by rates that flags change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from vtp_plugin.errors import ConfigError

Group = Mapping[str, Any]
"""A group of parameters of an optimizer: what it says of itself, by name."""

RATES: Final = ("max_lr", "min_lr", "start_wd", "end_wd", "lr_mult")
"""What the scheduler reads of a group, and flags may change at a resume."""
_KINDS: Final = ("is_expert_parallel", "is_decoupled_lr", "default_config", "wd_mult", "optimizer")
_MARKS: Final = (*RATES, *_KINDS)
# What the scheduler computes before each step.
_COMPUTED: Final = ("params", "lr", "weight_decay")


class Rates(Enum):
    """Whose rates a resumed run has."""

    OWN = "--override-opt_param-scheduler"
    STORED = "--use-checkpoint-opt_param-scheduler"
    SAME = ""
    """Neither is given: those of the run and of the checkpoint are to be the same."""


def marks(group: Group) -> dict[str, Any]:
    """Give what tells a group from others, under the names that it has: ``lr_mult`` may be ``pre_lr_mult``.

    >>> marks({"max_lr": 1e-3, "pre_wd_mult": 0.0, "betas": (0.9, 0.95)})
    {'max_lr': 0.001, 'pre_wd_mult': 0.0}
    """
    return {key: value for key, value in group.items() if key.removeprefix("pre_") in _MARKS}


def rates_of(group: Group) -> dict[str, Any]:
    """Give a group's rates.

    >>> rates_of({"max_lr": 1e-3, "wd_mult": 0.0})
    {'max_lr': 0.001}
    """
    return {key: value for key, value in group.items() if key.removeprefix("pre_") in RATES}


def _values(group: Group, names: Iterable[str]) -> tuple[Hashable, ...]:
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


def _exactly(group: Group) -> Hashable:
    return _values(group, _MARKS)


def _by_kind(group: Group) -> Hashable:
    return _values(group, (*_KINDS, "eps"))


# Of --use-mup groups have an eps of their own; a run with other flags may have groups that the stored one had not.
_LEVELS: Final[tuple[Callable[[Group], Hashable], ...]] = (
    _exactly,
    _by_kind,
    lambda group: _values(group, _KINDS),
    lambda group: _values(group, ("is_expert_parallel", "wd_mult")),
    lambda group: _values(group, ("is_expert_parallel",)),
)


def are_found(own: Sequence[Group], stored: Sequence[Group], rates: Rates) -> bool:
    """Tell whether each group of a run surely has its counterpart among stored ones, so that no more need be read."""
    key = _by_kind if rates is Rates.OWN else _exactly
    return {*map(key, own)} <= {*map(key, stored)}


def counterparts(where: str, own: Sequence[Group], stored: Sequence[Group], rates: Rates) -> list[Group]:
    """Find for each group of a run the stored one that trained its parameters.

    Args:
        where: the checkpoint, for errors.
        own: groups of this run.
        stored: groups of the checkpoint, in any order.
        rates: whose rates count. With the run's own, groups that differ in nothing else need not be told apart.

    Raises:
        ConfigError: a group has none, or it cannot be told which.

    >>> stored = [{"wd_mult": 1.0, "max_lr": 1e-3}, {"wd_mult": 0.0, "max_lr": 1e-3}]
    >>> own = [{"wd_mult": 0.0, "max_lr": 5e-4}, {"wd_mult": 1.0, "max_lr": 5e-4}]
    >>> [group["wd_mult"] for group in counterparts("iter_2", own, stored, Rates.OWN)]
    [0.0, 1.0]
    """
    return [_counterpart(where, place, group, stored, rates) for place, group in enumerate(own)]


def _counterpart(where: str, place: int, group: Group, stored: Sequence[Group], rates: Rates) -> Group:
    for level in _LEVELS:
        found = [other for other in stored if level(other) == level(group)]
        if not found:
            continue
        if level is _exactly:
            # Megatron 0.12 knows groups by their place.
            return stored[place] if place < len(stored) and level(stored[place]) == level(group) else found[0]
        left_out = {*_COMPUTED, *_MARKS} - ({*RATES} if rates is Rates.STORED else set())
        kept = [{key: value for key, value in other.items() if key not in left_out} for other in found]
        if any(other != kept[0] for other in kept):
            raise ConfigError(
                f"{where}: {len(found)} groups of parameters fit the one with {_shown(group)}, and differ in more than "
                f"the rates that {Rates.OWN.value} sets; use the options of the run that was saved, or load only the "
                "weights with --no-load-optim"
            )
        return found[0]
    raise ConfigError(
        f"{where}: no parameters were trained with {_shown(group)}; this run trains some so; use the options of "
        "the run that was saved, or load only the weights with --no-load-optim"
    )


def _shown(group: Group) -> str:
    return ", ".join(f"{name} {value}" for name, value in marks(group).items() if value is not None)


def difference(own: Sequence[Group], stored: Sequence[Group]) -> str:
    """Say the first rate in which groups differ from their counterparts; empty where they have the same.

    >>> difference([{"max_lr": 5e-4}], [{"max_lr": 1e-3}])
    'max_lr 0.0005, in the checkpoint 0.001'
    """
    for group, other in zip(own, stored, strict=True):
        for name in RATES:
            (here,), (there,) = _values(group, (name,)), _values(other, (name,))
            if here != there:
                return f"{name} {here}, in the checkpoint {there}"
    return ""
