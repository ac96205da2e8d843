"""`expert-optimizer`: the experts of all stages are summed, counted and stored in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.errors import refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.table.versions import EXPERT_RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
    id="expert-optimizer",
    when=Moment.LIST,
    why="it gives experts to the dense optimizer where a stage cuts them as the rest, and to one of their own "
    "elsewhere: optimizers would differ between the stages, and a checkpoint of one could not be read by another",
    remove_when="Megatron gives experts an optimizer of their own in every layout",
)
def _init(
    session: Session,
    host: MegatronHost,
    original: Callable[..., None],
    layer: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run `MoELayer.__init__`; if any stage has expert groups of its own, all experts use theirs.

    Raises:
        ConfigError: this family cannot train these experts on these stages.
    """
    if session.is_planned:
        # Without megatron.training nobody has seen these options before.
        refuse(host.refusals(EXPERT_RULES, config, session.planned.option_context))
    original(layer, config, *args, **kwargs)
    # With a uniform list Megatron decides for all stages alike.
    if session.is_planned and session.planned.layout.has_expert_groups and not session.planned.layout.is_uniform:
        for parameter in layer.experts.parameters():
            # Megatron's mark of a weight whose copies are those of the expert groups.
            parameter.allreduce = False
        for module in layer.experts.modules() if host.sums_whole_experts else ():
            if hasattr(module, "explicit_expert_comm"):
                # As of an expert that is cut: its dispatcher alone communicates.
                module.explicit_expert_comm = True
