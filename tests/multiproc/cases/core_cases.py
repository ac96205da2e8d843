"""What a multi-process training test runs, as data, and how its results are compared; used by parent and workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import pytest
import torch

from tests.support.hosts import fitted, host_name

Plugin = Literal["on", "forced", "reverted", "stock", "mapped"]

HIDDEN = 24
HEADS = 12  # 1, 2, 3 and 4 divide it
FFN = 48
VOCAB = 36
SEQ = 9
MICRO_BATCH = 2
LR = {"sgd": 0.1, "adam": 0.01}
# Fields of a case that go together.
DISTRIBUTED: dict[str, Any] = {"optimizer": "adam", "distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
PER_TOKEN: dict[str, Any] = {"masked": True, "per_token_loss": True, "loss_tuple": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run.

    Attributes:
        sizes: tensor-parallel size of every stage.
        dp: replicas of the pipeline.
        dp_list: data-parallel size of every stage; empty means ``dp`` on all.
        dp_mode: how stages of different ones work together.
        micro_batch: samples of a microbatch on the stage with most replicas.
        vpp: model chunks per stage; 2 and more use the interleaved schedule.
        vpp_group_size: microbatches that a chunk takes in a row; Megatron's default is the number of stages.
        layers_per_chunk: transformer layers of every chunk.
        hidden: size of the hidden states.
        layers: makes the pipeline U-shaped: layers of the edge's first part, of every cloud stage, of the edge's last.
        plugin: "on" applies it, "forced" for a uniform list too; "stock" is Megatron alone, on the CPU mapping, and
            "mapped" the same with what it needs on CPUs for sequence parallelism and experts; "reverted" trains with
            the plugin, takes it back and then trains as stock.
        schedule: "planned" runs the plugin's executor.
        in_flight: most microbatches in flight on every stage, of a planned schedule; empty for the default.
        sites: site of every stage; empty means one.
        num_microbatches: per step and replica of the stage with the loss.
        rampup: every step has one more than the one before.
        optimizer: Megatron's distributed optimizer takes "adam" only.
        has_bias: of linear layers. The key bias has no true gradient, so rounding decides whether it counts as zero.
        dtype: of weights and activations; gradients are always summed in fp32.
        bucket_size: parameters per gradient bucket.
        varying_lengths: every microbatch has another sequence length.
        partial_batches: every third microbatch has one sample fewer; needs varying shapes.
        seq: longest sequence; sequence parallelism needs a multiple of every size.
        length_step: difference of the lengths.
        sequence_parallel: on every stage of more than one tensor-parallel rank.
        cp: context-parallel size; needs the attention of the tests.
        cp_list: context-parallel size of every stage; empty means ``cp`` on all.
        gathered_attention: use the attention of the tests.
        attention: one of the kinds in ``attentions.py``; empty is Megatron's default.
        mtp: layers of multi-token prediction; they need rotary positions.
        layout: Megatron's pipeline layout; empty shares out the layers evenly, and prediction is on the last stage.
        embedding_stages: stages that the script says hold the word embedding, with a layout; empty for those that do.
        experts: one of the kinds in ``experts.py``; empty has none.
        ep, etp: Megatron's expert-parallel size, and tensor-parallel size of the experts.
        ep_list, etp_list: these sizes of every stage; empty means ``ep`` and ``etp`` on all.
        shards: of a reference, for every stage: tp and cp sizes whose ranks decide for themselves which tokens they
            drop. Empty lets Megatron decide among all tokens of a rank.
        loss_tuple: length of what the loss function returns.
        sums_loss: the loss function sums over the replicas of its stage, as in the scripts of Megatron 0.12. What is
            reported is still the loss of this replica.
        num_evaluations: forward-only passes before every training step.
        collects: these passes collect data other than the loss, which is the loss here.
        align_grad_reduce: Megatron's option: sums of gradients begin where the schedule says, not in the backward.
        loss_scale: constant one; fp16 without it scales dynamically.
        inf_at: (stage, tp_rank, step): one element of a gradient of this rank becomes an inf there.
        inf_cp_rank: only in this context-parallel replica, before its gradients are summed with the others'; None is in
            all of them, after that.
        inf_dp_rank: only in this data-parallel replica, after its gradients were summed with the others'; None is in
            all of them.
        save, load: directories of distributed checkpoints of the start weights.
        wants_weights: return the weights after the last step.
        is_drawn: start weights depend on nothing but their names; for what Megatron cannot save. Models with experts
            always start so.
        wants_tied: return both ends of the tied embedding at the start and after every step.
    """

    sizes: tuple[int, ...]
    dp: int = 1
    dp_list: tuple[int, ...] = ()
    dp_mode: Literal["multiplex", "split"] = "multiplex"
    micro_batch: int = MICRO_BATCH
    vpp: int = 1
    vpp_group_size: int | None = None
    layers_per_chunk: int = 1
    hidden: int = HIDDEN
    layers: tuple[int, ...] = ()
    plugin: Plugin = "on"
    schedule: Literal["stock", "planned"] = "stock"
    in_flight: tuple[int, ...] = ()
    transport: str = "auto"
    sites: tuple[str, ...] = ()
    order: str = "tp-cp-ep-dp-pp"
    tied: bool = False
    optimizer: Literal["sgd", "adam"] = "sgd"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int = 3000
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    num_steps: int = 4
    num_microbatches: int = 5
    rampup: bool = False
    batch_p2p: bool = False
    overlap_p2p: bool = False
    varying_lengths: bool = False
    partial_batches: bool = False
    seq: int = SEQ
    length_step: int = 2
    sequence_parallel: bool = False
    cp: int = 1
    cp_list: tuple[int, ...] = ()
    gathered_attention: bool = False
    attention: str = ""
    mtp: int = 0
    layout: str = ""
    embedding_stages: tuple[int, ...] = ()
    experts: str = ""
    ep: int = 1
    etp: int | None = None
    ep_list: tuple[int, ...] = ()
    etp_list: tuple[int, ...] = ()
    shards: tuple[tuple[int, int], ...] = ()
    recompute: bool = False
    deallocate: bool = False
    clip: float = 1.0
    count_zeros: bool = False
    has_bias: bool = True
    masked: bool = False
    loss_tuple: Literal[2, 3] = 2
    per_token_loss: bool = False
    sums_loss: bool = False
    num_evaluations: int = 0
    collects: bool = False
    align_grad_reduce: bool = True
    loss_scale: float | None = None
    inf_at: tuple[int, int, int] | None = None
    inf_cp_rank: int | None = None
    inf_dp_rank: int | None = None
    save: str | None = None
    load: str | None = None
    wants_weights: bool = False
    is_drawn: bool = False
    wants_tied: bool = False

    @property
    def world_size(self) -> int:
        return sum(tp * cp * dp for tp, cp, dp in zip(self.sizes, self.cp_sizes, self.dp_sizes, strict=True))

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        return self.dp_list or (self.dp,) * len(self.sizes)

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        return self.cp_list or (self.cp,) * len(self.sizes)

    @property
    def is_uniform(self) -> bool:
        lists = (self.ep_list, self.etp_list)
        is_equal = len(set(zip(self.sizes, self.cp_sizes, self.dp_sizes, strict=True))) == 1
        return is_equal and all(len(set(sizes)) <= 1 for sizes in lists)

    @property
    def num_layers(self) -> int:
        return sum(self.layers) or self.layout.count("t") or len(self.sizes) * self.vpp * self.layers_per_chunk

    def num_microbatches_of(self, step: int) -> int:
        return self.num_microbatches + step * self.rampup

    def micro_batch_at(self, stage: int) -> int:
        dp_sizes = self.dp_sizes
        return self.micro_batch * (max(dp_sizes) // dp_sizes[stage] if self.dp_mode == "split" else 1)

    def batch_of(self, step: int) -> int:
        """Samples of a step."""
        stage = self.loss_stage
        return self.num_microbatches_of(step) * self.dp_sizes[stage] * self.micro_batch_at(stage)

    def num_microbatches_at(self, stage: int, step: int) -> int:
        """Microbatches that a rank of a stage runs."""
        number, rest = divmod(self.batch_of(step), self.dp_sizes[stage] * self.micro_batch_at(stage))
        assert not rest, f"{self} has no whole number of microbatches on stage {stage}"
        return number

    @property
    def num_virtual(self) -> int:
        """Megatron's virtual pipeline size. In a U the edge has two chunks, and the cloud's second ones stay empty."""
        return 2 if self.layers else self.vpp

    @property
    def loss_stage(self) -> int:
        return 0 if self.layers else len(self.sizes) - 1

    def __str__(self) -> str:
        """Show what differs from the defaults, for test ids."""
        default = Case(sizes=self.sizes)
        parts = [",".join(str(size) for size in self.sizes)]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != getattr(default, field.name) and field.name not in ("save", "load", "wants_weights"):
                parts.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(parts).replace("_", "-")


def oracle_of(case: Case) -> Case:
    """Give the uniform TP=1 run that computes the same: stages, chunks, replicas and arithmetic stay.

    An inf hits tensor-parallel rank 0; a constant loss scale in fp32 exists in the distributed optimizer only.
    """
    return replace(
        case,
        sizes=(1,) * len(case.sizes),
        dp=case.dp_sizes[case.loss_stage],
        dp_list=(),
        dp_mode="multiplex",
        micro_batch=case.micro_batch_at(case.loss_stage),
        # Stock Megatron waits for the headers it sends, and hangs over gloo, where sends meet their receives.
        plugin="forced" if case.varying_lengths and case.vpp > 1 else "on",
        schedule="stock",
        in_flight=(),
        transport="auto",
        sites=(),
        order="tp-cp-ep-dp-pp",
        distributed_optimizer=case.loss_scale is not None and case.dtype == "fp32",
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        overlap_p2p=False,
        batch_p2p=False,
        sequence_parallel=False,
        cp=1,
        cp_list=(),
        ep=1,
        etp=None,
        ep_list=(),
        etp_list=(),
        shards=tuple(zip(case.sizes, case.cp_sizes, strict=True)) if case.experts.startswith("dropping") else (),
        recompute=False,
        deallocate=False,
        sums_loss=False,
        num_evaluations=0,
        collects=False,
        align_grad_reduce=True,
        bucket_size=Case(sizes=(1,)).bucket_size,
        inf_at=None if case.inf_at is None else (case.inf_at[0], 0, case.inf_at[2]),
        inf_cp_rank=None,
        inf_dp_rank=None,
        wants_weights=True,
        wants_tied=False,
        save=None,
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
    losses: list[list[float]]
    evaluations: list[list[float]]
    grad_norms: list[float]
    num_zeros: list[float]
    successful: list[bool]
    weights: dict[str, Part]
    tied: list[torch.Tensor]
    read: int
    allocations: list[int]


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
    for dp_rank in range(case.dp_sizes[case.loss_stage]):
        ends = [r for r in ranks if r.stage == case.loss_stage and r.dp_rank == dp_rank]
        assert len(ends) == case.sizes[case.loss_stage] * case.cp_sizes[case.loss_stage]
        assert all(r.losses == ends[0].losses for r in ends), "the ranks that compute the loss disagree about it"
        assert [len(step) for step in ends[0].losses] == [*map(case.num_microbatches_of, range(case.num_steps))]
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
    for stage, (size, cp, dp) in enumerate(zip(case.sizes, case.cp_sizes, case.dp_sizes, strict=True)):
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
        if case.mtp and self._host == "0.12":
            oracle = replace(oracle, sizes=(case.sizes[case.loss_stage],) * len(oracle.sizes))
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
