"""Which schedule a step runs: chosen by the placement, lowered, and proved before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.errors import ConfigError
from vtp_plugin.schedule.check import require_valid
from vtp_plugin.schedule.costs import u_costs
from vtp_plugin.schedule.generate import interleaved_one_f_one_b, one_f_one_b, plain_forward_only
from vtp_plugin.schedule.lower import lower
from vtp_plugin.schedule.placement import Placement, interleaved_placement, u_placement
from vtp_plugin.schedule.plan import Schedule
from vtp_plugin.schedule.simulate import choose_lookahead
from vtp_plugin.schedule.u_shape import plan_u_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is the same for all steps that run one schedule.

    Attributes:
        placement: Which stage holds which virtual stage: plain, interleaved or U-shaped.
        num_microbatches: Microbatches of the step.
        forward_only: No backward pass.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`, of interleaved orders only; None for its default.
    """

    placement: Placement
    num_microbatches: int
    forward_only: bool = False
    group_size: int | None = None


def plan_step(step: Step) -> tuple[Schedule, str]:
    """Return the lowered schedule of a step, and in one line what was chosen; a function of the step alone.

    Raises:
        ConfigError: The placement is none of the three, or the interleaved order does not exist for these counts.

    >>> from vtp_plugin.schedule.placement import plain_placement
    >>> schedule, reason = plan_step(Step(placement=plain_placement(2), num_microbatches=1))
    >>> print(schedule.describe())
    stage 0: 0RECV_B0 0F0 0SEND_F0 0WAIT_RECV_B0 0WAIT_SEND_F0 0B0
    stage 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0
    >>> reason == f"schedule {schedule.digest}: 1f1b, microbatches: 1, lookahead: 1"
    True
    """
    schedule, lookahead, reason = _order(step)
    lowered = lower(schedule, lookahead=lookahead)
    require_valid(lowered)
    about = f"{schedule.name}, microbatches: {step.num_microbatches}, lookahead: {lookahead}"
    return lowered, f"schedule {lowered.digest}: {about}{reason}"


def _order(step: Step) -> tuple[Schedule, int, str]:
    """Return the order of compute, how many computes ahead receives are posted, and why."""
    placement, num_microbatches = step.placement, step.num_microbatches
    num_stages = placement.num_stages
    num_chunks = placement.num_vstages // num_stages
    if num_stages > 1 and placement == u_placement(num_stages):
        costs = u_costs(num_stages)
        plan = plan_u_shape(num_stages, num_microbatches, costs, forward_only=step.forward_only)
        return plan.schedule, choose_lookahead(plan.schedule, costs), f"; {plan.reason}"
    if placement != interleaved_placement(num_stages, num_chunks):
        raise ConfigError(f"no order is known for the placement {placement.stages}")
    if num_chunks > 1:
        schedule = interleaved_one_f_one_b(
            num_stages, num_chunks, num_microbatches, group_size=step.group_size, forward_only=step.forward_only
        )
        return schedule, 1, ""
    generate = plain_forward_only if step.forward_only else one_f_one_b
    return generate(num_stages, num_microbatches), 1, ""
