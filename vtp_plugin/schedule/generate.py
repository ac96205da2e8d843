"""Orders of compute that follow a fixed rule: forward only, 1F1B and interleaved 1F1B.

A generator answers only which microbatch of which virtual stage a stage computes next;
:func:`~vtp_plugin.schedule.lower.lower` adds the communication. The U-shape has :mod:`vtp_plugin.schedule.u_shape`.
"""

from __future__ import annotations

from vtp_plugin.errors import ConfigError
from vtp_plugin.schedule.actions import Action, Op
from vtp_plugin.schedule.placement import interleaved_placement, plain_placement
from vtp_plugin.schedule.plan import Actions, Schedule


def require_counts(num_stages: int, num_microbatches: int) -> None:
    """Refuse a pipeline without stages and a step without microbatches.

    Raises:
        ConfigError: A count is below 1.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches on {num_stages} stages: both must be at least 1")


def plain_forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Run all microbatches forward through a plain pipeline, for evaluation.

    >>> print(plain_forward_only(2, 3).describe())
    stage 0: 0F0 0F1 0F2
    stage 1: 1F0 1F1 1F2
    """
    require_counts(num_stages, num_microbatches)
    return Schedule(
        name="forward-only",
        placement=plain_placement(num_stages),
        num_microbatches=num_microbatches,
        orders=tuple(tuple(_compute(Op.F, v, n) for n in range(num_microbatches)) for v in range(num_stages)),
        forward_only=True,
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Order a plain pipeline as 1F1B (PipeDream-Flush; Megatron's `forward_backward_pipelining_without_interleaving`).

    Stage s of P runs min(P - 1 - s, m) forwards, then one forward and one backward in turn, then what is left.

    >>> print(one_f_one_b(2, 3).describe())
    stage 0: 0F0 0F1 0B0 0F2 0B1 0B2
    stage 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    require_counts(num_stages, num_microbatches)
    orders = [
        _one_f_one_b_order(
            [_compute(Op.F, stage, n) for n in range(num_microbatches)],
            [_compute(Op.B, stage, n) for n in range(num_microbatches)],
            num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    ]
    placement = plain_placement(num_stages)
    return Schedule(name="1f1b", placement=placement, num_microbatches=num_microbatches, orders=tuple(orders))


def interleaved_one_f_one_b(
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Order an interleaved pipeline as Megatron's `forward_backward_pipelining_with_interleaving` does (0.19).

    Microbatches run in groups: a stage runs a group through its first chunk, then through its second, and so on, and
    gradients through the chunks in reverse.

    Args:
        num_stages: Pipeline stages, P.
        num_chunks: Model chunks on each stage, at least 2.
        num_microbatches: Microbatches of the step, m.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`, from P to m; P by default.
        forward_only: No backward pass.

    Raises:
        ConfigError: A count is too small, the group size does not lie between P and m, or the last group, m mod group
            size, is neither empty nor at least P microbatches.

    >>> print(interleaved_one_f_one_b(2, 2, 2).describe())
    stage 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    stage 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    require_counts(num_stages, num_microbatches)
    group_size = num_stages if group_size is None else group_size
    _check_groups(num_stages, num_chunks, num_microbatches, group_size)
    placement = interleaved_placement(num_stages, num_chunks)
    orders: list[Actions] = []
    for stage in range(num_stages):
        vstages = placement.vstages(stage)
        forwards = [_compute(Op.F, v, n) for v, n in _grouped(vstages, num_microbatches, group_size)]
        backwards = [_compute(Op.B, v, n) for v, n in _grouped(vstages[::-1], num_microbatches, group_size)]
        num_warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * group_size
        orders.append(tuple(forwards) if forward_only else _one_f_one_b_order(forwards, backwards, num_warmup))
    return Schedule(
        name="interleaved-forward-only" if forward_only else "interleaved-1f1b",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(orders),
        forward_only=forward_only,
    )


def _compute(op: Op, vstage: int, microbatch: int) -> Action:
    return Action(op=op, vstage=vstage, microbatch=microbatch)


def _one_f_one_b_order(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Actions:
    """Run `num_warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:num_warmup], *steady, *backwards[num_steady:])


def _grouped(vstages: tuple[int, ...], num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """List `(vstage, microbatch)`: every group of microbatches through all virtual stages before the next group."""
    return [
        (vstage, microbatch)
        for start in range(0, num_microbatches, group_size)
        for vstage in vstages
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def _check_groups(num_stages: int, num_chunks: int, num_microbatches: int, group_size: int) -> None:
    if num_chunks < 2:
        raise ConfigError(f"interleaving with {num_chunks} chunk on each stage: it needs at least 2; use 1F1B for 1")
    if not num_stages <= group_size <= num_microbatches:
        raise ConfigError(
            f"microbatch group size {group_size} with {num_stages} stages and {num_microbatches} microbatches: "
            "it must lie between the number of stages and the number of microbatches"
        )
    remainder = num_microbatches % group_size
    if 0 < remainder < num_stages:
        raise ConfigError(
            f"{num_microbatches} microbatches in groups of {group_size} leave {remainder} for the last group: "
            f"it must be empty or at least the number of stages, {num_stages}"
        )
