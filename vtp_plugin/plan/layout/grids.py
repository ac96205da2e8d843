"""Grids of ranks, and the sizes that they may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.errors import LayoutError
from vtp_plugin.util.text import TextEnum


def check_positive(what: str, value: object) -> None:
    """Refuse a value that is not a whole number of at least 1.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{what} must be a positive integer, got {value!r}: give a number of at least 1")


def check_list(what: str, sizes: Sequence[int], tp_sizes: Sequence[int]) -> None:
    """Refuse a list that does not give every stage one size.

    Args:
        what: kind of the sizes, such as `data-parallel`.
        sizes: the list.
        tp_sizes: tensor-parallel size of every stage.

    Raises:
        ConfigError: the list has another length, or an entry is not a positive integer.
    """
    if len(sizes) != len(tp_sizes):
        raise LayoutError(
            f"{len(sizes)} {what} sizes {','.join(map(str, sizes))}; there are {len(tp_sizes)} stages (TP sizes "
            f"{','.join(map(str, tp_sizes))}); give one size per stage"
        )
    for index, size in enumerate(sizes):
        check_positive(f"the {what} size of stage {index}", size)


def equal_dp(tp_sizes: Sequence[int], cp_sizes: Sequence[int], world_size: int) -> int:
    """Return the data-parallel size that fills the world if all stages have the same one.

    Raises:
        ConfigError: one replica's ranks do not divide the world; the text names the nearest worlds that fit.

    >>> equal_dp((1, 2), (1, 1), 6)
    2
    """
    size = sum(tp * cp for tp, cp in zip(tp_sizes, cp_sizes, strict=True))
    if world_size % size == 0:
        return world_size // size
    asked = f"--vtp-size-list {','.join(map(str, tp_sizes))}"
    if len(set(cp_sizes)) > 1:
        asked += f" with --vtp-cp-list {','.join(map(str, cp_sizes))}"
    elif cp_sizes[0] > 1:
        asked += f" with --context-parallel-size {cp_sizes[0]}"
    below = world_size // size * size
    worlds = f"{below} or {below + size}" if below else f"{size}"
    raise LayoutError(
        f"{asked} needs {size} processes, or a multiple of {size}; this run has {world_size}; start {worlds}, or "
        "change the sizes"
    )


def check_world(stages: Sequence[tuple[int, int, int]], world_size: int) -> None:
    """Refuse a world whose size is not the sum of the stages' sizes.

    Args:
        stages: tp, cp and dp size of every stage.
        world_size: number of ranks.

    Raises:
        ConfigError: they differ.
    """
    size = sum(tp * cp * dp for tp, cp, dp in stages)
    if size != world_size:
        products = " + ".join(f"{tp} * {cp} * {dp}" for tp, cp, dp in stages)
        raise LayoutError(
            f"these stages need {size} processes (tp * cp * dp of each: {products}); this run has {world_size}; start "
            f"{size}, or change the sizes"
        )


def expert_copies(
    etp_sizes: Sequence[int], ep_sizes: Sequence[int], stages: Sequence[tuple[int, int, int]]
) -> tuple[int, ...]:
    """Return how many copies of its experts every stage has.

    Args:
        etp_sizes: tensor-parallel size of the experts of every stage.
        ep_sizes: expert-parallel size of every stage.
        stages: tp, cp and dp size of every stage.

    Raises:
        ConfigError: the expert sizes do not divide a stage's ranks.

    >>> expert_copies((1, 1), (1, 2), ((1, 1, 2), (2, 1, 2)))
    (2, 2)
    """
    copies = []
    for stage, (etp, ep, (tp, cp, dp)) in enumerate(zip(etp_sizes, ep_sizes, stages, strict=True)):
        size = tp * cp * dp
        if size % (etp * ep):
            way_out = f"an ep size that divides {cp * dp}" if etp == tp else f"sizes whose product divides {size}"
            if smaller := _smaller_etp(etp_sizes, ep_sizes, stages):
                way_out += f", or --vtp-etp-list {','.join(map(str, smaller))}"
            raise LayoutError(
                f"expert sizes tp {etp} * ep {ep} = {etp * ep} do not divide the tp * cp * dp = {tp} * {cp} * {dp} = "
                f"{size} ranks of stage {stage}: choose {way_out}"
            )
        copies.append(size // (etp * ep))
    return tuple(copies)


def _smaller_etp(
    etp_sizes: Sequence[int], ep_sizes: Sequence[int], stages: Sequence[tuple[int, int, int]]
) -> tuple[int, ...]:
    """Give the largest tensor-parallel sizes of experts that fit the given expert-parallel ones; empty without any.

    >>> _smaller_etp((1, 2), (1, 2), ((1, 1, 1), (2, 1, 1)))
    (1, 1)
    """
    found = []
    for etp, ep, (tp, cp, dp) in zip(etp_sizes, ep_sizes, stages, strict=True):
        fitting = [size for size in range(1, etp + 1) if etp % size == 0 and (tp * cp * dp) % (size * ep) == 0]
        if not fitting:
            return ()
        found.append(max(fitting))
    return tuple(found)


def check_experts(experts: Sequence[tuple[int, int, int]], stages: Sequence[tuple[int, int, int]]) -> None:
    """Refuse expert sizes that do not fill the stages.

    Args:
        experts: tensor-parallel, expert-parallel and expert-data-parallel size of every stage.
        stages: tp, cp and dp size of every stage.

    Raises:
        ConfigError: the sizes do not fill a stage.
    """
    for stage, (expert, dense) in enumerate(zip(experts, stages, strict=True)):
        if math.prod(expert) != math.prod(dense):
            shown = " * ".join(map(str, expert))
            raise LayoutError(
                f"stage {stage} has {math.prod(dense)} ranks; its experts' sizes tp * ep * dp = {shown} must have that "
                "product; change one of them"
            )


def cuts_experts_apart(tp_sizes: Sequence[int], ep_sizes: Sequence[int], etp_sizes: Sequence[int]) -> bool:
    """Tell whether any stage cuts its experts in another way than the rest of its layers.

    Args:
        tp_sizes: tensor-parallel size of every stage.
        ep_sizes: expert-parallel size of every stage.
        etp_sizes: tensor-parallel size of the experts of every stage.

    >>> cuts_experts_apart((1, 2), (1, 1), (1, 2)), cuts_experts_apart((1, 2), (1, 2), (1, 1))
    (False, True)
    """
    sizes = zip(tp_sizes, ep_sizes, etp_sizes, strict=True)
    return any((etp, ep) != (tp, 1) for tp, ep, etp in sizes)


def check_replica_major(experts: Sequence[tuple[int, int, int]], stages: Sequence[tuple[int, int, int]]) -> None:
    """Refuse, in a replica-major order, other numbers of copies of the experts than of replicas, as Megatron does.

    Arguments are those of :func:`check_experts`.

    Raises:
        ConfigError: a stage has other copies than replicas.
    """
    for stage, ((etp, ep, expert_dp), (tp, cp, dp)) in enumerate(zip(experts, stages, strict=True)):
        if expert_dp != dp:
            raise LayoutError(
                f"stage {stage} has {expert_dp} copies of its experts ({tp * cp * dp} ranks / (etp * ep = {etp * ep})) "
                f"and {dp} replicas; with the rank order tp-cp-pp-dp Megatron needs equally many; set etp * ep to "
                f"{tp * cp} there, or use the order tp-cp-dp-pp"
            )


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
