"""U3: the edge's chunks need what Megatron gives to the first stage and what it gives to the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the record of this module; it changes nothing where there is no U-shaped pipeline."""
    return (
        PatchRecord(
            id="U3",
            target="megatron.core.utils:get_batch_on_this_tp_rank",
            build=functools.partial(_share, session),
            why="it gives a first stage no labels and no loss mask, whatever chunk asks; scripts import its name, so "
            "it is replaced before they do, and does as before where there is no U",
            versions=">=0.19,<0.20",
            remove_when="it asks for the chunk",
            aliases=("megatron.training.training:get_batch_on_this_tp_rank",),
        ),
    )


def _share(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        is_edge = kwargs.get("is_pipeline_first_stage") and kwargs.get("is_pipeline_last_stage")
        if session.config.layerwise_disaggregated and is_edge:
            # A pipeline of one stage gets all.
            kwargs["pipeline_model_parallel_size"] = 1
        return original(*args, **kwargs)

    return get_batch_on_this_tp_rank
