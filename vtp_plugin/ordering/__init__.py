"""In which order ranks issue communication, and whether that order is safe on every backend. Pure: no torch."""

from __future__ import annotations

from vtp_plugin.ordering.check import check
from vtp_plugin.ordering.models import BUFFERED, HCCL, HCCL_SHARED, MODELS, NCCL, ONE_QUEUE, RENDEZVOUS, Model
from vtp_plugin.ordering.overlap import blocking_sends, exposed_receives, steady_state
from vtp_plugin.ordering.trace import END_OF_STEP, Event, Group, Kind, Trace, format_trace, parse_trace

__all__ = [
    "BUFFERED",
    "END_OF_STEP",
    "HCCL",
    "HCCL_SHARED",
    "MODELS",
    "NCCL",
    "ONE_QUEUE",
    "RENDEZVOUS",
    "Event",
    "Group",
    "Kind",
    "Model",
    "Trace",
    "blocking_sends",
    "check",
    "exposed_receives",
    "format_trace",
    "parse_trace",
    "steady_state",
]
