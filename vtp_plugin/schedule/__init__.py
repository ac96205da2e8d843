"""When things happen: what each worker computes, sends and receives, in which order. Pure: no torch, no processes.

Every folder answers one question and imports only those before it: ``order`` (what is an order), ``proof`` (is it
right), ``cost`` (how long does it take), then ``make`` (how is it made) and ``pictures`` (what does it look like),
which do not import each other.
"""

from __future__ import annotations

from vtp_plugin.schedule.cost.bounds import lower_bound, need
from vtp_plugin.schedule.cost.chain import make_chain
from vtp_plugin.schedule.cost.costs import Costs, split_costs, u_costs, uniform_costs
from vtp_plugin.schedule.cost.simulate import Flight, Span, Timeline, choose_lookahead, simulate
from vtp_plugin.schedule.make.generate import (
    interleaved_one_f_one_b,
    one_f_one_b,
    one_f_one_b_limits,
    plain_forward_only,
)
from vtp_plugin.schedule.make.u_shape import UPlan, plan_u_shape, reference_u_shape
from vtp_plugin.schedule.order.actions import Action, Op, format_actions, parse_action, parse_actions
from vtp_plugin.schedule.order.lower import lower, peak_posted
from vtp_plugin.schedule.order.messages import (
    channel_label,
    channel_of,
    channels,
    peer_of,
    started_by,
    wait_for,
)
from vtp_plugin.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.schedule.order.schedule import Actions, Schedule
from vtp_plugin.schedule.pictures.draw import chrome_trace, draw_svg, draw_text, summarize
from vtp_plugin.schedule.proof.check import Mode, check, is_lowered, peak_activations, peak_in_flight, require_valid

__all__ = [
    "Action",
    "Actions",
    "Costs",
    "Flight",
    "Mode",
    "Op",
    "Placement",
    "Schedule",
    "Span",
    "Timeline",
    "UPlan",
    "channel_label",
    "channel_of",
    "channels",
    "check",
    "choose_lookahead",
    "chrome_trace",
    "draw_svg",
    "draw_text",
    "format_actions",
    "interleaved_placement",
    "interleaved_one_f_one_b",
    "is_lowered",
    "lower",
    "lower_bound",
    "make_chain",
    "need",
    "one_f_one_b",
    "one_f_one_b_limits",
    "parse_action",
    "parse_actions",
    "peak_activations",
    "peak_in_flight",
    "peak_posted",
    "peer_of",
    "plain_forward_only",
    "plain_placement",
    "plan_u_shape",
    "reference_u_shape",
    "require_valid",
    "simulate",
    "split_costs",
    "started_by",
    "summarize",
    "u_costs",
    "u_placement",
    "uniform_costs",
    "wait_for",
]
