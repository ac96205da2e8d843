"""What tests of the model of examples/edge_pictures train, as data; how the ranks' results are put together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.multiproc.cases.mimo_cases import _join
from tests.support.hosts import ROOT

sys.path.insert(0, str(ROOT / "examples" / "edge_pictures"))

NUM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class PictureCase:
    """One run: what the example's ``Setup`` has, and how it is spread.

    Attributes:
        sizes, encoder, language: of the stages; layers of the parts of both.
        dp: replicas of every stage.
        dp_list: replicas of every stage where they differ.
        setup: other fields of ``Setup``.
        transport, sites, in_flight, split_backward: of the plugin.
        is_alone: without the plugin, on one rank that runs the microbatches of all replicas.
        is_evaluated: the steps' microbatches are passed forward before every step.
    """

    sizes: tuple[int, ...]
    encoder: tuple[int, ...]
    language: tuple[int, ...]
    dp: int = 1
    dp_list: tuple[int, ...] = ()
    num_microbatches: int = 4
    setup: tuple[tuple[str, Any], ...] = ()
    transport: str = "auto"
    sites: tuple[str, ...] = ()
    in_flight: tuple[int, ...] | None = None
    split_backward: bool = False
    is_alone: bool = False
    is_evaluated: bool = False

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        return self.dp_list or (self.dp,) * len(self.sizes)

    @property
    def world_size(self) -> int:
        return sum(size * dp for size, dp in zip(self.sizes, self.dp_sizes, strict=True))

    def alone(self) -> PictureCase:
        """Give the run on one rank that computes the same."""
        kept = tuple(
            (name, value) for name, value in self.setup if name in ("is_tied", "some_without", "optimizer", "is_frozen")
        )
        return PictureCase(
            sizes=(1,),
            encoder=(sum(self.encoder),),
            language=(sum(self.language),),
            num_microbatches=self.num_microbatches * self.dp_sizes[0],
            setup=kept,
            is_alone=True,
        )

    def __str__(self) -> str:
        lists = "_".join(",".join(map(str, one)) for one in (self.sizes, self.encoder, self.language))
        words = [f"{name}={value}" for name, value in self.setup]
        default = PictureCase(sizes=(), encoder=(), language=())
        for name in ("dp", "dp_list", "num_microbatches", "transport", "sites", "in_flight", "split_backward"):
            if getattr(self, name) != getattr(default, name):
                words.append(f"{name}={getattr(self, name)}")
        return " ".join([lists, *words])


@dataclass(kw_only=True)
class PictureResult:
    """What one rank saw.

    Attributes:
        losses: average of every step; 0 on ranks that compute none.
        evaluations: the same of the forward passes.
        parts: by name: axis of the cut, tensor-parallel rank, values.
        num_split: backwards of a step that are split.
    """

    losses: list[float]
    evaluations: list[float]
    norms: list[float]
    num_read: int
    parts: dict[str, tuple[int | None, int, np.ndarray]]
    num_split: int = 0


@dataclass(kw_only=True)
class PictureRun:
    """A whole run."""

    losses: np.ndarray
    evaluations: np.ndarray
    norms: np.ndarray
    weights: dict[str, np.ndarray]
    ranks: Sequence[PictureResult]


def assemble(ranks: Sequence[PictureResult]) -> PictureRun:
    """Put the ranks together; those that must agree do."""
    with_loss = [rank for rank in ranks if any(rank.losses)]
    for rank in with_loss:
        assert rank.losses == with_loss[0].losses
    assert all(rank.norms == ranks[0].norms for rank in ranks)
    names = dict.fromkeys(name for rank in ranks for name in rank.parts)
    return PictureRun(
        losses=np.array(with_loss[0].losses),
        evaluations=np.array(with_loss[0].evaluations),
        norms=np.array(ranks[0].norms),
        weights={name: _join(name, [rank.parts[name] for rank in ranks if name in rank.parts]) for name in names},
        ranks=ranks,
    )


def assert_trains_alike(run: PictureRun, oracle: PictureRun, *, atol: float = 0.0) -> None:
    """Compare losses, norms and weights, each weight with what is largest in it.

    Args:
        run: of the case.
        oracle: on one rank.
        atol: for weights besides; Adam amplifies the rounding of gradients that are nothing else.
    """
    assert len(run.losses) == NUM_STEPS and abs(oracle.losses[0] - oracle.losses[-1]) > 1e-3, "it trains nothing"
    np.testing.assert_allclose(run.losses, oracle.losses, rtol=1e-5, err_msg="losses")
    np.testing.assert_allclose(run.norms, oracle.norms, rtol=1e-5, err_msg="norms")
    assert run.weights.keys() - {"output_layer.weight"} == oracle.weights.keys() - {"output_layer.weight"}
    for name, wanted in oracle.weights.items():
        np.testing.assert_allclose(
            run.weights[name], wanted, rtol=0, atol=max(1e-5 * np.abs(wanted).max(), 1e-9, atol), err_msg=name
        )
