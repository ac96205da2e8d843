"""What tests of MIMO models train, and how the ranks' results are put together; without torch or Megatron."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.hosts import ROOT

sys.path.insert(0, str(ROOT / "examples" / "mimo"))

from mimo_sizes import Sizes

NUM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class MimoCase:
    """One run.

    Attributes:
        vision, language: their grids; None trains all on one rank.
        sound: grid of a second encoder, whose ranks follow those of the first; needs clips.
        pictures: of the samples of every microbatch; the same in each step.
        clips: for the second encoder, as pictures; none without it.
        is_frozen: the encoder is not trained.
        clip: largest norm; 0 does not clip.
        optimizer: ``sgd`` or ``adam``.
        distributed_optimizer, overlap: of Megatron's gradient sums.
        is_stock: Megatron's own bridge.
        audit: file that records every message.
        counts_in_megatron: the language model's gradients are divided by Megatron, not by the example.
        bf16: weights, and what crosses, have 16 bits.
        is_planned: the plugin's order in the place of Megatron's 1F1B.
        has_fixed_shape: every replica of the encoder sends as many rows in every microbatch, without headers.
        in_flight: most microbatches in flight on every stage of every module, encoders first.
    """

    vision: Sizes | None = None
    language: Sizes | None = None
    sound: Sizes | None = None
    clips: tuple[tuple[int, ...], ...] = ()
    pictures: tuple[tuple[int, ...], ...] = ((0, 1, 2, 0, 1, 1), (0,) * 6, (2, 0, 0, 1, 0, 0), (1, 2, 1, 1, 0, 2))
    is_frozen: bool = False
    clip: float = 0.5
    optimizer: str = "sgd"
    distributed_optimizer: bool = False
    overlap: bool = False
    is_stock: bool = False
    audit: str | None = None
    counts_in_megatron: bool = False
    bf16: bool = False
    is_planned: bool = False
    has_fixed_shape: bool = False
    in_flight: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return sum(one.num_ranks for one in (self.vision, self.sound, self.language) if one is not None) or 1

    def alone(self) -> MimoCase:
        """Return the case of the same model, data and steps on one rank."""
        sizes: dict[str, Any] = {"vision": None, "sound": None, "language": None, "audit": None, "in_flight": None}
        ways = dict.fromkeys(
            ("distributed_optimizer", "overlap", "is_stock", "counts_in_megatron", "is_planned"), False
        )
        return replace(self, **sizes, **ways)

    def __str__(self) -> str:
        encoders = " and ".join(str(one) for one in (self.vision, self.sound) if one is not None)
        words = [f"{encoders} -> {self.language}"]
        words += [
            name
            for name in (
                *("is_frozen", "distributed_optimizer", "overlap", "is_stock"),
                *("bf16", "is_planned", "has_fixed_shape"),
            )
            if getattr(self, name)
        ]
        return ", ".join(words) + (", no clipping" if not self.clip else "")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of a parameter; ``axis`` is the one that tensor-parallel ranks share, ``values`` as it ends."""

    axis: int | None
    tp_rank: int
    values: np.ndarray
    gradient: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class MimoResult:
    """What one rank saw: of every step the sum of its losses, the number of its words, and the norm."""

    steps: list[tuple[float, float, float]]
    parts: dict[str, Part]


@dataclass(frozen=True, kw_only=True)
class MimoRun:
    """A run of all ranks.

    Attributes:
        losses, norms: of every step.
        weights: at the end.
        gradients: of the first step, before clipping.
    """

    losses: np.ndarray
    norms: np.ndarray
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def assemble(ranks: Sequence[MimoResult]) -> MimoRun:
    """Put a run together; copies must be equal to rounding, and all ranks must have the same norm."""
    steps = np.array([rank.steps for rank in ranks])
    sums = steps[:, :, :2].sum(axis=0)
    norms = steps[:, :, 2]
    assert (norms == norms[0]).all(), norms
    names = dict.fromkeys(name for rank in ranks for name in rank.parts)
    found = {name: [rank.parts[name] for rank in ranks if name in rank.parts] for name in names}
    return MimoRun(
        losses=sums[:, 0] / sums[:, 1],
        norms=norms[0],
        weights={
            name: _join(name, [(one.axis, one.tp_rank, one.values) for one in some]) for name, some in found.items()
        },
        gradients={
            name: _join(name, [(one.axis, one.tp_rank, one.gradient) for one in some if one.gradient is not None])
            for name, some in found.items()
            if some[0].gradient is not None
        },
    )


def _join(name: str, parts: Sequence[tuple[int | None, int, np.ndarray]]) -> np.ndarray:
    by_rank: dict[int, np.ndarray] = {}
    for axis, tp_rank, values in parts:
        first = by_rank.setdefault(tp_rank if axis is not None else 0, values)
        np.testing.assert_allclose(values, first, rtol=1e-5, atol=1e-7, err_msg=f"copies of {name}")
    axis = parts[0][0]
    return by_rank[0] if axis is None else np.concatenate([by_rank[rank] for rank in sorted(by_rank)], axis=axis)


def assert_trains_alike(run: MimoRun, oracle: MimoRun, *, rel: float = 1e-5, has_gradients: bool = True) -> None:
    """Compare losses, norms, gradients and weights, each with what is largest in it.

    Distributed optimizers have only shards of the gradients.
    """
    assert len(run.losses) == NUM_STEPS and abs(oracle.losses[0] - oracle.losses[-1]) > 1e-3, "it trains nothing"
    np.testing.assert_allclose(run.losses, oracle.losses, rtol=rel, err_msg="losses")
    np.testing.assert_allclose(run.norms, oracle.norms, rtol=rel, err_msg="norms")
    for what in ("gradients", "weights") if has_gradients else ("weights",):
        ours, theirs = getattr(run, what), getattr(oracle, what)
        assert ours.keys() == theirs.keys(), what
        for name, wanted in theirs.items():
            scale = max(float(np.abs(wanted).max()), 1e-4)
            worst = float(np.abs(ours[name] - wanted).max()) / scale
            assert worst <= rel, f"{what} of {name} differ by {worst:.1e} of their largest"


def gradient_distance(run: MimoRun, exact: MimoRun) -> float:
    """Return by how much the gradients of the first step differ, all together, relative to the exact ones."""
    differ = sum(float(np.square(run.gradients[name] - wanted).sum()) for name, wanted in exact.gradients.items())
    return (differ / sum(float(np.square(wanted).sum()) for wanted in exact.gradients.values())) ** 0.5


class MimoRuns:
    """Runs cases on a pool; every run on one rank once."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._kept: dict[MimoCase, MimoRun] = {}

    def run(self, case: MimoCase) -> MimoRun:
        """Train."""
        return assemble(self._pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:train", {"case": case}))

    def oracle(self, case: MimoCase) -> MimoRun:
        """Train on one rank, or return what an earlier call got."""
        alone = case.alone()
        if alone not in self._kept:
            self._kept[alone] = self.run(alone)
        return self._kept[alone]
