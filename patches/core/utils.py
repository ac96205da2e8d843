"""U3: the edge's chunks need what Megatron gives to the first stage and what it gives to the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the record of this module; it changes nothing where there is no U-shaped pipeline."""
    return (
        PatchRecord(
            id="U3",
            target="megatron.core.utils:get_batch_on_this_tp_rank",
            build=wrap_with(_share_batch, session),
            why="it gives a first stage no labels and no loss mask, whichever chunk asks; scripts import its name, so "
            "it is replaced before they do, and acts as before where there is no U",
            remove_when="it asks for the chunk",
            aliases=("megatron.training.training:get_batch_on_this_tp_rank",),
        ),
    )


def _share_batch(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `get_batch_on_this_tp_rank`; the edge is first and last stage at once, and gets the whole batch."""
    is_edge = kwargs.get("is_pipeline_first_stage") and kwargs.get("is_pipeline_last_stage")
    if session.config.layerwise_disaggregated and is_edge:
        # Megatron shares tokens, labels and mask only in a pipeline of one stage.
        kwargs["pipeline_model_parallel_size"] = 1
    return original(*args, **kwargs)
