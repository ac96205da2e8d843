"""`expert-optimizer`: the experts of all stages are summed, counted and stored in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.rule import EXPERT_RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces("megatron.core.transformer.moe.moe_layer:MoELayer.__init__", id="expert-optimizer", when=Moment.LIST)
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

    Why: it gives experts to the dense optimizer where a stage cuts them as the rest, and to one of their own elsewhere:
    optimizers would differ between the stages, and a checkpoint of one could not be read by another.

    Remove when: Megatron gives experts an optimizer of their own in every layout.

    On stages of different sizes the layer takes no padding mask.

    Raises:
        ConfigError: this family cannot train these experts on these stages.
    """
    if session.is_planned:
        # Without megatron.training nobody has seen these options before.
        refuse(host.refusals(EXPERT_RULES, config, session.planned.option_context))
    original(layer, config, *args, **kwargs)
    # With a uniform list Megatron decides for all stages alike.
    if not session.is_planned or session.planned.layout.is_uniform:
        return
    layer.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    if session.planned.layout.has_expert_groups:
        for parameter in layer.experts.parameters():
            # Megatron's mark of a weight whose copies are those of the expert groups.
            parameter.allreduce = False
        for module in layer.experts.modules() if host.sums_whole_experts else ():
            if hasattr(module, "explicit_expert_comm"):
                # As of an expert that is cut: its dispatcher alone communicates.
                module.explicit_expert_comm = True


def _refuse_padding(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a padding mask, which Megatron cuts for sequence parallelism on the first stage only.

    Losses per token and the z loss are divided by what counts of a rank's own tokens, so they depend on the sizes, too.

    Raises:
        ConfigError: the model was given one.
    """
    mask = args[2] if len(args) > 2 else kwargs.get("padding_mask")
    if mask is not None:
        rule = "routers leave out what a rank cuts for itself, so their losses would depend on the sizes"
        raise ConfigError(f"padding_mask with experts on stages of different sizes; {rule}; leave padding_mask out")
