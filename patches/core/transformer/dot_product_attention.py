"""`attention-sinks`: those of all heads are drawn at once, so what a stage starts with does not depend on its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack


@replaces(
    "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
    id="attention-sinks",
    when=Moment.STAGES,
    unneeded={"<0.15": "its attention has no sinks"},
)
def _init(session: Session, original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Run `DotProductAttention.__init__`; on unequal stages learnable sinks are drawn whole, and then cut.

    Why: each rank draws the sinks of its own heads from a generator that all ranks of a stage share, so heads of
    different ranks start alike; on CPUs the weights that are drawn after them depend on the size, too.

    Remove when: Megatron draws what a stage cuts as a whole, as it does matrices.
    """
    groups = kwargs.get("pg_collection")
    if getattr(config, "softmax_type", "vanilla") != "learnable" or not session.pipelines.are_unequal(groups):
        original(layer, config, *args, **kwargs)
        return
    draw: Callable[[torch.Tensor], torch.Tensor] = config.init_method

    def draw_whole(own: torch.nn.Parameter) -> torch.nn.Parameter:
        whole = draw(torch.empty(config.num_attention_heads, dtype=own.dtype, device=own.device))
        own.data.copy_(whole.chunk(layer.tp_group.size())[layer.tp_group.rank()])
        return own

    with UndoStack().during(Name(config, "init_method"), draw_whole):
        original(layer, config, *args, **kwargs)
