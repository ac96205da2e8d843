"""H13: the experts of all stages are summed, counted and stored in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H13",
            target="megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            build=wrap_with(_init, session),
            why="it gives experts to the dense optimizer where a stage cuts them as the rest, and to one of their own "
            "elsewhere: optimizers would differ between the stages, and a checkpoint of one could not be read by "
            "another",
            remove_when="Megatron gives experts an optimizer of their own in every layout",
        ),
    )


def _init(session: Session, original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Run `MoELayer.__init__`; if any stage has expert groups of its own, all experts use theirs."""
    original(layer, *args, **kwargs)
    if session.is_planned and session.planned.layout.has_expert_groups:
        for parameter in layer.experts.parameters():
            # Megatron's mark of a weight whose copies are those of the expert groups.
            parameter.allreduce = False
