"""The runs of ``certify``: what each one shows, how many ranks it needs, and which of them fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vtp_plugin.errors import ConfigError

NUM_LAYERS: Final = 4
"""Transformer layers of the small model, whatever the stages."""
NUM_MICROBATCHES: Final = 4
"""Microbatches of a step, over all replicas."""
NUM_STEPS: Final = 3
"""Training steps of a run."""
LEAST_RANKS: Final = 3
"""Fewer ranks make no stages of different sizes."""
SEEDS: Final = (1, 2)
"""Of the reference runs whose start weights are changed by a rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTraining:
    """What a run computes: runs with equal ones must agree.

    Attributes:
        has_experts: the layers are mixtures of experts.
        dtype: of weights and activations.
        optimizer: of the steps.
    """

    has_experts: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer: Literal["sgd", "adam"] = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedRun:
    """One run of the small model.

    Attributes:
        shows: what it shows, in a few words.
        sizes: tensor-parallel size of every stage.
        training: what it computes.
        dp_list: data-parallel size of every stage; empty means 1.
        transport: how tensors cross boundaries.
        num_chunks: model chunks of every stage; 2 interleave.
        u_layers: layers of a U: the edge's first part, every cloud stage, the edge's last part.
        is_planned: in the plugin's own order.
        is_split: gradients of weights are computed where a stage would wait.
        is_sequence_parallel: on every stage of more than one rank.
        is_distributed: the distributed optimizer, with its communication overlapped.
        saved_by: as many ranks in stages of these sizes train and save the first step; empty: nothing is saved.
        killed_rank: this rank dies in the second step.
        seed: of a reference whose start weights are changed by a rounding; 0 changes none.
    """

    shows: str
    sizes: tuple[int, ...] = (1, 1)
    training: SmallTraining = SmallTraining()
    dp_list: tuple[int, ...] = ()
    transport: Literal["auto", "rank0", "sliced", "divided"] = "auto"
    num_chunks: int = 1
    u_layers: tuple[int, ...] = ()
    is_planned: bool = False
    is_split: bool = False
    is_sequence_parallel: bool = False
    is_distributed: bool = False
    saved_by: tuple[int, ...] = ()
    killed_rank: int | None = None
    seed: int = 0

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        """Data-parallel size of every stage."""
        return self.dp_list or (1,) * len(self.sizes)

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return 0 if self.u_layers else len(self.sizes) - 1

    @property
    def num_ranks(self) -> int:
        """How many ranks it takes.

        >>> CertifiedRun(shows="", sizes=(2, 1), dp_list=(1, 2)).num_ranks
        4
        """
        return sum(tp * dp for tp, dp in zip(self.sizes, self.dp_sizes, strict=True))

    @property
    def list_text(self) -> str:
        """The list of sizes as a user writes it, with what else sets the ranks.

        >>> CertifiedRun(shows="", sizes=(2, 1), dp_list=(1, 2)).list_text
        '2,1 dp 1,2'
        """
        text, dp = (",".join(map(str, sizes)) for sizes in (self.sizes, self.dp_list))
        return f"{text} dp {dp}" if dp else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is run, in order, and what is not.

    Attributes:
        references: uniform runs, for every training first as it is, then changed by a rounding.
        runs: what is compared with them.
        left_out: what a run would show, and why it is not run.
    """

    references: tuple[CertifiedRun, ...]
    runs: tuple[CertifiedRun, ...]
    left_out: dict[str, str] = field(default_factory=dict[str, str])


_EXPERTS = SmallTraining(has_experts=True)
_ADAM = SmallTraining(optimizer="adam")
_HALF = SmallTraining(dtype="bf16", optimizer="adam")
_WIDE = ((2, 4), (1, 4), (1, 3), (1, 2))
_WIDE_LAST = tuple(sizes[::-1] for sizes in _WIDE)
_PAIR = ((2, 3), (1, 2))
_SHORT: Final = ("one rank sends for a stage", "interleaved", "planned order", "U", "a rank dies")


def _rows() -> Iterator[tuple[CertifiedRun, tuple[tuple[int, ...], ...]]]:
    """Yield every run, and the sizes that may be taken, the widest first."""
    run = CertifiedRun
    yield run(shows="one rank sends for a stage", transport="rank0"), _WIDE
    yield run(shows="slices", transport="sliced"), _WIDE_LAST
    yield run(shows="divided between equal stages", transport="divided"), ((2, 2, 1, 1), (2, 2))
    yield run(shows="sequence parallelism", is_sequence_parallel=True), _WIDE
    yield run(shows="interleaved", num_chunks=2, is_sequence_parallel=True), _WIDE_LAST
    yield run(shows="planned order", is_planned=True), _PAIR
    yield run(shows="split backward", is_planned=True, is_split=True), _WIDE_LAST
    yield run(shows="U", u_layers=(1, 2, 1)), _WIDE
    yield run(shows="unequal replicas", dp_list=(1, 2)), ((4, 2), (2, 1))
    yield run(shows="four stages"), ((1, 2, 1, 2), (1, 1, 1, 2))
    yield run(shows="experts", training=_EXPERTS, is_sequence_parallel=True), _WIDE_LAST
    yield run(shows="distributed optimizer, overlapped", training=_ADAM, is_distributed=True, dp_list=(2, 2)), ((1, 2),)
    yield run(shows="bf16", training=_HALF), _WIDE
    yield run(shows="saved and loaded", saved_by=(1, 2)), ((2, 1),)
    yield run(shows="a rank dies", killed_rank=1), ((1, 2),)


def choose(num_ranks: int, *, is_short: bool, without: dict[str, str]) -> Choice:
    """Choose the runs for so many ranks: each with the widest stages that fit.

    Args:
        num_ranks: ranks that are there.
        is_short: a few runs only.
        without: what these machines cannot run, by what it would show, and why.

    Raises:
        ConfigError: so few ranks make no stages of different sizes.

    >>> choice = choose(3, is_short=True, without={})
    >>> [run.list_text for run in choice.runs], len(choice.references)
    (['1,2', '2,1', '1,2', '1,2', '1,2'], 3)
    >>> choose(3, is_short=False, without={}).left_out["unequal replicas"]
    'needs 4 ranks'
    """
    if num_ranks < LEAST_RANKS:
        raise ConfigError(
            f"{num_ranks} rank{'s'[: num_ranks != 1]}; stages of different sizes need {LEAST_RANKS}, as 1,2 does; "
            "start certify on more devices, or give --ranks"
        )
    runs: list[CertifiedRun] = []
    left_out = {"adapters": "certify has no run of them yet"}
    for row, lists in _rows():
        fitting = [each for sizes in lists if (each := replace(row, sizes=sizes)).num_ranks <= num_ranks]
        if row.shows in without:
            left_out[row.shows] = without[row.shows]
        elif is_short and row.shows not in _SHORT:
            left_out[row.shows] = "--short leaves it out"
        elif not fitting:
            left_out[row.shows] = f"needs {min(replace(row, sizes=sizes).num_ranks for sizes in lists)} ranks"
        else:
            runs.append(fitting[0])
    references = tuple(
        CertifiedRun(shows="reference", training=training, seed=seed)
        for training in dict.fromkeys(run.training for run in runs)
        for seed in (0, *SEEDS)
    )
    return Choice(references=references, runs=tuple(runs), left_out=left_out)
