"""What a multi-process training test runs, as data, and how its results are compared; used by parent and workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch

from tests.multiproc.cases.case_parts import Checks, Data, Execution, Model, Numerics, Stages
from tests.support.hosts import fitted, host_name

LR = {"sgd": 0.1, "adam": 0.01}
# Fields of cases that go together.
DISTRIBUTED: dict[str, Any] = {"optimizer": "adam", "distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
PER_TOKEN: dict[str, Any] = {"masked": True, "per_token_loss": True, "loss_tuple": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run, in parts; :meth:`of` writes it in a line."""

    stages: Stages
    model: Model = Model()
    data: Data = Data()
    numerics: Numerics = Numerics()
    execution: Execution = Execution()
    checks: Checks = Checks()

    @classmethod
    def of(cls, *, sizes: tuple[int, ...], **values: Any) -> Case:
        """Write a case in short: what differs from the defaults, by the names of the parts' fields.

        >>> case = Case.of(sizes=(1, 2), tied=True, num_steps=7)
        >>> case.stages.sizes, case.model.tied, case.data.num_steps
        ((1, 2), True, 7)
        """
        return cls(stages=Stages(sizes=sizes)).but(**values)

    def but(self, **values: Any) -> Case:
        """Give the same case with other values, by the names of the parts' fields.

        >>> str(Case.of(sizes=(1, 2), dp=2).but(tied=True, dp=3))
        '1,2 dp=3 tied'
        """
        own: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            own.setdefault(_PART_OF[name], {})[name] = value
        return replace(self, **{part: replace(getattr(self, part), **new) for part, new in own.items()})

    @property
    def world_size(self) -> int:
        stages = self.stages
        return sum(tp * cp * dp for tp, cp, dp in zip(stages.sizes, stages.cp_sizes, stages.dp_sizes, strict=True))

    @property
    def num_layers(self) -> int:
        model = self.model
        in_chunks = len(self.stages.sizes) * model.vpp * model.layers_per_chunk
        return sum(model.layers) or model.layout.count("t") or in_chunks

    @property
    def loss_stage(self) -> int:
        return 0 if self.model.layers else len(self.stages.sizes) - 1

    def num_microbatches_of(self, step: int) -> int:
        return self.data.num_microbatches + step * self.data.rampup

    def micro_batch_at(self, stage: int) -> int:
        dp_sizes = self.stages.dp_sizes
        return self.data.micro_batch * (max(dp_sizes) // dp_sizes[stage] if self.stages.dp_mode == "split" else 1)

    def batch_of(self, step: int) -> int:
        """Samples of a step."""
        stage = self.loss_stage
        return self.num_microbatches_of(step) * self.stages.dp_sizes[stage] * self.micro_batch_at(stage)

    def num_microbatches_at(self, stage: int, step: int) -> int:
        """Microbatches that a rank of a stage runs."""
        number, rest = divmod(self.batch_of(step), self.stages.dp_sizes[stage] * self.micro_batch_at(stage))
        assert not rest, f"{self} has no whole number of microbatches on stage {stage}"
        return number

    def __str__(self) -> str:
        """Show what differs from the defaults, for test ids."""
        default = Case(stages=Stages(sizes=self.stages.sizes))
        shown = [",".join(str(size) for size in self.stages.sizes)]
        for name in sorted(_PART_OF.keys() - {"save", "load", "wants_weights"}, key=_place_in_ids):
            value, usual = (getattr(getattr(case, _PART_OF[name]), name) for case in (self, default))
            if value != usual:
                shown.append(name if value is True else f"{name}={value}")
        return " ".join(shown).replace("_", "-")


_PART_OF = {
    field.name: part
    for part, kind in {
        "stages": Stages,
        "model": Model,
        "data": Data,
        "numerics": Numerics,
        "execution": Execution,
        "checks": Checks,
    }.items()
    for field in dataclasses.fields(kind)
}
# Ids show fields in the order that they have had since the first tests; what is not in here comes behind, by its name.
_IN_IDS = (
    "dp dp_list dp_mode micro_batch vpp vpp_group_size layers_per_chunk hidden layers plugin schedule in_flight "
    "transport sites order tied optimizer distributed_optimizer overlap_grad_reduce overlap_param_gather bucket_size "
    "dtype num_steps num_microbatches rampup batch_p2p overlap_p2p varying_lengths partial_batches seq length_step "
    "sequence_parallel cp cp_list gathered_attention attention mtp layout embedding_stages experts ep etp ep_list "
    "etp_list shards recompute deallocate clip count_zeros has_bias masked loss_tuple per_token_loss sums_loss "
    "num_evaluations collects align_grad_reduce loss_scale inf_at inf_cp_rank inf_dp_rank is_drawn wants_tied"
)


def _place_in_ids(name: str) -> tuple[int, str]:
    known = _IN_IDS.split()
    return (known.index(name) if name in known else len(known)), name


def oracle_of(case: Case) -> Case:
    """Give the uniform TP=1 run that computes the same: stages, chunks, replicas and arithmetic stay.

    An inf hits tensor-parallel rank 0; a constant loss scale in fp32 exists in the distributed optimizer only.
    """
    stages, model, numerics, checks = case.stages, case.model, case.numerics, case.checks
    drops = model.experts.startswith("dropping")
    return Case(
        stages=Stages(sizes=(1,) * len(stages.sizes), dp=stages.dp_sizes[case.loss_stage]),
        model=replace(model, shards=tuple(zip(stages.sizes, stages.cp_sizes, strict=True)) if drops else ()),
        data=replace(case.data, micro_batch=case.micro_batch_at(case.loss_stage)),
        numerics=numerics,
        execution=Execution(
            # Stock Megatron waits for the headers it sends, and hangs over gloo, where sends meet their receives.
            plugin="forced" if case.data.varying_lengths and model.vpp > 1 else "on",
            vpp_group_size=case.execution.vpp_group_size,
            distributed_optimizer=numerics.loss_scale is not None and numerics.dtype == "fp32",
        ),
        checks=Checks(
            inf_at=None if checks.inf_at is None else (checks.inf_at[0], 0, checks.inf_at[2]),
            load=checks.load,
            wants_weights=True,
        ),
    )


@dataclass(slots=True, kw_only=True)
class Part:
    """One rank's local part of a parameter, the one of ``index`` among ``count``.

    ``dim`` is None where every tensor-parallel rank holds all of it.
    """

    dim: int | None
    index: int
    count: int
    tensor: torch.Tensor


@dataclass(slots=True, kw_only=True)
class RankResult:
    """What one rank saw. Losses are there on the loss's stage only, ``tied`` on the two ends of a tied embedding.

    Attributes:
        losses: by step, by microbatch; every number as Megatron computed it.
        evaluations: as ``losses``, of the forward-only passes.
        successful: by step: the optimizer did not skip it.
        weights: by global name.
        tied: the local slice ``[V / tp, H]`` at the start and after every step.
        read: data batches that this rank took.
        allocations: by step: how often receives have needed fresh memory so far.
    """

    stage: int
    tp_rank: int
    dp_rank: int
    losses: list[list[float]] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_zeros: list[float] = field(default_factory=list)
    successful: list[bool] = field(default_factory=list)
    weights: dict[str, Part] = field(default_factory=dict)
    tied: list[torch.Tensor] = field(default_factory=list)
    read: int = 0
    allocations: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """A whole run, put together from its ranks.

    Attributes:
        losses: by replica, step and microbatch.
        grad_norms: by step; equal on all ranks to the last bit; -1 where the optimizer skipped the step.
        weights: whole tensors by global name; equal on all replicas and on all copies inside a stage, to the last bit.
    """

    ranks: list[RankResult]
    losses: list[list[list[float]]]
    evaluations: list[list[list[float]]]
    grad_norms: list[float]
    num_zeros: list[float]
    successful: list[bool]
    weights: dict[str, torch.Tensor]


def assemble(case: Case, ranks: Sequence[RankResult]) -> Run:
    """Put the ranks of a run together and check that those agree that must."""
    losses, evaluations = [], []
    for dp_rank in range(case.stages.dp_sizes[case.loss_stage]):
        ends = [r for r in ranks if r.stage == case.loss_stage and r.dp_rank == dp_rank]
        assert len(ends) == case.stages.sizes[case.loss_stage] * case.stages.cp_sizes[case.loss_stage]
        assert all(r.losses == ends[0].losses for r in ends), "the ranks that compute the loss disagree about it"
        assert [len(step) for step in ends[0].losses] == [*map(case.num_microbatches_of, range(case.data.num_steps))]
        losses.append(ends[0].losses)
        evaluations.append(ends[0].evaluations)
    for name in ("grad_norms", "num_zeros", "successful"):
        values = [getattr(r, name) for r in ranks]
        assert all(value == values[0] for value in values), f"ranks disagree about {name}: {values}"
    return Run(
        ranks=list(ranks),
        losses=losses,
        evaluations=evaluations,
        grad_norms=ranks[0].grad_norms,
        num_zeros=ranks[0].num_zeros,
        successful=ranks[0].successful,
        weights=_whole_weights(case, ranks),
    )


def _whole_weights(case: Case, ranks: Sequence[RankResult]) -> dict[str, torch.Tensor]:
    found: dict[str, list[Part]] = {}
    stages = case.stages
    for stage, (size, cp, dp) in enumerate(zip(stages.sizes, stages.cp_sizes, stages.dp_sizes, strict=True)):
        for dp_rank in range(dp):
            here = [r.tp_rank for r in ranks if (r.stage, r.dp_rank) == (stage, dp_rank)]
            assert sorted(here) == sorted([*range(size)] * cp)
    for rank in ranks:
        for name, part in rank.weights.items():
            found.setdefault(name, []).append(part)
    return {name: _join(name, parts) for name, parts in found.items()}


def _join(name: str, parts: Sequence[Part]) -> torch.Tensor:
    """Put a parameter together from the parts of all ranks of all stages that have it."""
    wholes = []
    for count in {part.count for part in parts}:
        copies: dict[int, torch.Tensor] = {}
        for part in parts:
            if part.count == count:
                kept = copies.setdefault(part.index, part.tensor)
                assert torch.equal(kept, part.tensor), f"copies of {name} differ"
        assert sorted(copies) == list(range(count)), f"{name}: parts {sorted(copies)} of {count}"
        if parts[0].dim is None:
            assert all(torch.equal(copy, copies[0]) for copy in copies.values()), f"copies of {name} differ in a stage"
            wholes.append(copies[0])
        else:
            wholes.append(torch.cat([copies[index] for index in range(count)], dim=parts[0].dim))
    # Stages of different sizes can have the same parameter, such as a tied embedding.
    assert all(torch.equal(whole, wholes[0]) for whole in wholes), f"copies of {name} differ between stages"
    return wholes[0]


def defaults_first(cases: Sequence[Case], num_defaults: int) -> list[Any]:
    """Let the first cases run by default, the others with the whole grids only."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.full] if i >= num_defaults else [])
        for i, case in enumerate(cases)
    ]


def assert_close(run: Run, oracle: Run, *, rel: float = 1e-5) -> None:
    """Compare every microbatch's loss and every grad norm."""
    assert len(run.grad_norms) == len(oracle.grad_norms) >= 4
    for what, ours, theirs in (
        ("losses", _flat(run.losses), _flat(oracle.losses)),
        ("grad norms", run.grad_norms, oracle.grad_norms),
    ):
        worst = largest_relative_difference(torch.tensor(ours), torch.tensor(theirs))
        assert worst <= rel, f"{what} differ by {worst:.2e} relative:\n{ours}\n{theirs}"
    moved = abs(oracle.losses[0][0][0] - oracle.losses[0][-1][0])
    assert moved > 0, "the run trains nothing, so it shows nothing"


def _flat(losses: list[list[list[float]]]) -> list[float]:
    return [loss for steps in losses for step in steps for loss in step]


def largest_relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Give max |a - b| / |b|; infinite where only one is finite, 0 where both are the same infinity or nan."""
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, ((ours - theirs).abs() / theirs.abs()).nan_to_num(nan=torch.inf))
    return float(difference.max())


def assert_weights_close(
    run: Run, oracle: Run, *, atol: float = 1e-5, rtol: float = 1e-5, without: str | None = None
) -> None:
    """Compare all weights, those apart whose names end in ``without``.

    After Adam give ``atol`` in units of lr * steps: it amplifies rounding of zero gradients.
    """
    assert run.weights.keys() == oracle.weights.keys() and run.weights
    for name, weight in run.weights.items():
        if without is not None and name.endswith(without):
            continue
        torch.testing.assert_close(
            weight, oracle.weights[name], atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_identical(run: Run, oracle: Run) -> None:
    """Compare losses, grad norms and all weights to the last bit."""
    assert run.losses == oracle.losses
    assert run.grad_norms == oracle.grad_norms
    assert run.weights.keys() == oracle.weights.keys() and run.weights
    for name, weight in run.weights.items():
        assert torch.equal(weight, oracle.weights[name]), f"{name} is not the same to the last bit"


class Runs:
    """Runs cases on a pool; every oracle once."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._host = host_name()
        self._kept: dict[Case, Run] = {}

    def run(self, case: Case) -> Run:
        """Train and put the result together."""
        case = fitted(case, self._host)
        ranks = self._pool.run(case.world_size, "tests.multiproc.jobs.core_job:train", {"case": case})
        return assemble(case, ranks)

    def kept(self, case: Case) -> Run:
        """Train, or return what an earlier call got."""
        if case not in self._kept:
            self._kept[case] = self.run(case)
        return self._kept[case]

    def oracle(self, case: Case) -> Run:
        """Give the uniform run that ``case`` must equal."""
        return self.kept_alike(case, oracle_of(fitted(case, self._host)))

    def kept_alike(self, case: Case, oracle: Case) -> Run:
        """As :meth:`kept`, of an oracle that predicts several tokens on as many ranks as the case, if that matters.

        Megatron 0.12 multiplies gradients through multi-token prediction by the tensor-parallel size of its stage.
        """
        if case.model.mtp and self._host == "0.12":
            oracle = oracle.but(sizes=(case.stages.sizes[case.loss_stage],) * len(oracle.stages.sizes))
        return self.kept(oracle)


Row = Mapping[str, object]


def pairs_of(row: Row) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Give all pairs of (name, value) in a row of a grid.

    >>> pairs_of({"a": 1, "b": 2})
    {(('a', 1), ('b', 2))}
    """
    return set(combinations(row.items(), 2))


def pairwise(rows: Iterable[Row]) -> list[Row]:
    """Choose rows so that every pair of values that occurs in some row occurs in a chosen one; greedy, deterministic.

    >>> len(pairwise({"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)))
    4
    """
    left = [(row, pairs_of(row)) for row in rows]
    open_pairs = set().union(*(pairs for _, pairs in left))
    chosen = []
    while open_pairs:
        row, pairs = max(left, key=lambda entry: len(entry[1] & open_pairs))
        chosen.append(row)
        open_pairs -= pairs
    return chosen
