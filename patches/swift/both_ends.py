"""ms-swift on a U-shaped pipeline: the rank with the losses writes the log; the cloud's second chunk is empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.session import Session


@replaces(known_swift.WRITER, id="swift-writer", when=Moment.SWIFT)
def _is_writer(session: Session, original: Callable[[], bool]) -> bool:
    """Run `is_last_rank`; in a U tell whether this is the edge's leader.

    Why: it takes the world's last rank for the one that writes the log and keeps the best checkpoint; in a U the edge
    has the losses.

    Remove when: ms-swift asks for the stage with the losses.
    """
    if session.is_planned and session.config.layerwise_disaggregated:
        return dist.get_rank() == session.planned.writer_rank
    return original()


@replaces(known_swift.NUMBERS, id="swift-empty-chunk", when=Moment.SWIFT)
def _describe(original: Callable[..., str], model: torch.nn.Module, *args: Any, **kwargs: Any) -> str:
    """Run `get_model_parameter_info`, but for a chunk without parameters.

    Why: it divides by the number of parameters.

    Remove when: ms-swift describes a model without parameters.
    """
    if next(model.parameters(), None) is None:
        return f"{type(model).__name__}: no parameters"
    return original(model, *args, **kwargs)
