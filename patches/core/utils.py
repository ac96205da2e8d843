"""`batch-on-edge`: the edge's chunks need what Megatron gives to the first stage and what it gives to the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    targets={
        ">=0.15,<0.18": "megatron.training.utils:get_batch_on_this_tp_rank",
        ">=0.18": "megatron.core.utils:get_batch_on_this_tp_rank",
    },
    id="batch-on-edge",
    when=Moment.COMMAND_LINE,
    unneeded={"<0.13": "the caller's chunk is known: the first one gets tokens, the last one labels and mask"},
    aliases=("megatron.training.training:get_batch_on_this_tp_rank",),
)
def _share_batch(session: Session, host: MegatronHost, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `get_batch_on_this_tp_rank`; the edge is first and last stage at once, and gets the whole batch.

    Why: it gives a first stage no labels and no loss mask, whichever chunk asks; scripts import its name, so it is
    replaced before they do, and acts as before where there is no U.

    Remove when: it asks for the chunk.
    """
    if not session.config.layerwise_disaggregated:
        return original(*args, **kwargs)
    # Megatron shares tokens, labels and mask only in a pipeline of one stage.
    with host.seen_single_stage(kwargs):
        return original(*args, **kwargs)
