"""Parallel sizes of one stage, and coordinates of one rank in them."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.plan.layout.size_checks import check_positive
from vtp_plugin.util.text_enum import TextEnum


class RankOrder(TextEnum):
    """Order of the axes in the numbering of the ranks, the first axis changing fastest.

    ``STAGE_MAJOR`` is Megatron's default: a stage is one contiguous block of ranks. ``REPLICA_MAJOR`` is Megatron's
    ``--use-tp-pp-dp-mapping``: a data-parallel replica, with all its stages, is one contiguous block.
    """

    STAGE_MAJOR = "tp-cp-dp-pp"
    REPLICA_MAJOR = "tp-cp-pp-dp"


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Parallel sizes of one pipeline stage.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.

    Raises:
        ConfigError: a size is not a positive integer.
    """

    tp: int
    cp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp)):
            check_positive(f"the {name} size of a stage", value)

    @property
    def size(self) -> int:
        """Number of ranks of the stage: ``tp * cp * dp``."""
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class ExpertGrid:
    """How the ranks of one stage share the experts of its layers: ``tp * ep * dp`` ranks, tp changing fastest.

    Attributes:
        tp: tensor-parallel size of an expert (Megatron's etp).
        ep: expert-parallel size: ranks that have different experts.
        dp: expert-data-parallel size (edp): copies of every expert.
    """

    tp: int
    ep: int
    dp: int


@dataclass(frozen=True, slots=True)
class ExpertCoord:
    """Coordinates of one rank in the expert grid of its stage, all counted from 0."""

    stage: int
    tp_rank: int
    ep_rank: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Coord:
    """Coordinates of one rank: its stage, and its rank along each axis of that stage's grid, all counted from 0."""

    stage: int
    tp_rank: int
    cp_rank: int
    dp_rank: int
