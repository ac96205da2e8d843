"""The optimizer's state of a whole run, put together from what its ranks hold; no torch, so that tests import it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.multiproc.cases.script_cases import ScriptRun

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process holds of one parameter's state.

    Attributes:
        name: of the parameter in the whole model; a tied output layer is called as its embedding.
        holder: pipeline rank and chunk; a tied weight has two.
        tp: rank and size of the group that shares the parameter.
        axis: along which it is cut; None if all have the whole.
        is_gated: the first half of its rows is the gate.
        shape: of the rank's part.
        start: where in the part, in order of memory, the share begins.
        values: master weight and moments, flat.
        step: number of steps.
    """

    name: str
    holder: tuple[int, int]
    tp: tuple[int, int]
    axis: int | None
    is_gated: bool
    shape: tuple[int, ...]
    start: int
    values: dict[str, Array]
    step: float


def whole_state(runs: Sequence[ScriptRun]) -> dict[tuple[str, str], Array]:
    """Put together weights, moments and steps of all parameters, by name and kind.

    Every element is held once by the replicas of a stage, and copies on several ranks and stages are equal.
    """
    parts: defaultdict[tuple[str, tuple[int, int]], list[Share]] = defaultdict(list)
    for run in runs:
        for share in run.facts["optimizer"]:
            parts[share.name, share.holder].append(share)
    found: dict[tuple[str, str], Array] = {}
    for (name, _), shares in parts.items():
        for kind in shares[0].values:
            value = _joined(shares, kind)
            known = found.setdefault((name, kind), value)
            np.testing.assert_array_equal(known, value, err_msg=f"copies of {kind} of {name}")
        (step,) = {share.step for share in shares}
        assert found.setdefault((name, "step"), step) == step, name
    return found


def _joined(shares: Sequence[Share], kind: str) -> Array:
    """Join what the ranks of one stage hold of a parameter."""
    by_rank: defaultdict[int, list[Share]] = defaultdict(list)
    for share in shares:
        by_rank[share.tp[0]].append(share)
    local = [_local(by_rank[rank], kind) for rank in range(shares[0].tp[1])]
    axis = shares[0].axis
    if axis is None:
        for other in local[1:]:
            np.testing.assert_array_equal(local[0], other)
        return local[0]
    if not shares[0].is_gated:
        return np.concatenate(local, axis)
    halves = [np.split(part, 2, axis) for part in local]
    return np.concatenate([half for side in zip(*halves, strict=True) for half in side], axis)


def _local(shares: Sequence[Share], kind: str) -> Array:
    """Join the shares of the replicas of one rank."""
    shape = shares[0].shape
    flat = np.full(int(np.prod(shape)), np.nan, dtype=np.float32)
    for share in shares:
        span = flat[share.start : share.start + share.values[kind].size]
        assert np.isnan(span).all(), f"{share.name} is held twice"
        span[...] = share.values[kind]
    assert not np.isnan(flat).any(), f"{shares[0].name} is not held as a whole"
    return flat.reshape(shape)


def assert_same_state(got: Sequence[ScriptRun], wanted: Sequence[ScriptRun]) -> None:
    """Check that two runs hold the same, to the last bit, and that it says something."""
    states = whole_state(got), whole_state(wanted)
    assert states[0].keys() == states[1].keys()
    moments = [value for (_, kind), value in states[1].items() if kind in ("exp_avg", "exp_avg_sq")]
    assert moments and all(np.any(value) for value in moments)
    assert len({value.tobytes() for value in moments}) == len(moments), "moments of two parameters are equal"
    for name, value in states[1].items():
        np.testing.assert_array_equal(states[0][name], value, err_msg=str(name), strict=name[1] != "step")
