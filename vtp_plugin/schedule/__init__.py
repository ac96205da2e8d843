"""When things happen: what each worker computes, sends and receives, in which order. Pure: no torch, no processes."""

from __future__ import annotations

from vtp_plugin.schedule.actions import Action, Op, format_actions, parse_action, parse_actions
from vtp_plugin.schedule.bounds import lower_bound, need
from vtp_plugin.schedule.chain import make_chain
from vtp_plugin.schedule.channels import Channel, channel_label, channel_of, channels, peer_of, started_by, wait_for
from vtp_plugin.schedule.check import Mode, check, is_lowered, peak_activations, peak_in_flight, require_valid
from vtp_plugin.schedule.costs import Costs, split_costs, u_costs, uniform_costs
from vtp_plugin.schedule.draw import chrome_trace, draw_svg, draw_text, summarize
from vtp_plugin.schedule.generate import interleaved_one_f_one_b, one_f_one_b, one_f_one_b_limits, plain_forward_only
from vtp_plugin.schedule.lower import lower, peak_posted
from vtp_plugin.schedule.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.schedule.plan import Actions, Schedule
from vtp_plugin.schedule.simulate import Flight, Span, Timeline, choose_lookahead, simulate
from vtp_plugin.schedule.u_shape import UPlan, plan_u_shape, reference_u_shape

__all__ = [
    "Action",
    "Actions",
    "Channel",
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
