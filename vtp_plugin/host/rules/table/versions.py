"""The rows for what only some versions of Megatron cannot do: experts, rings, layers of a U, calls of its functions.

Each tuple is asked where a run knows the values: ``MegatronHost.refusals`` in
``vtp_plugin.patches.hosts.megatron_host``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.rule import OptionRule, Verdict
from vtp_plugin.host.versions import capability

_BEFORE_LAYOUTS = ("<0.13",)
_WITH_LAYOUTS = capability("layouts").versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ULayers:
    """What a model says of the layers of a U-shaped pipeline, beside what the plugin was told.

    Attributes:
        layers: Layers of the edge's first part, of every cloud stage, of the edge's last part; None if nobody gave
            them.
        num_layers: Number of layers of the model.
        text: The layout that the layers make, in Megatron's notation; empty where it knows no layouts.
        wanted: The layers in the form in which Megatron reads them.
        found: The layout in the model's configuration, in the same form; None if there is none.
    """

    layers: tuple[int, ...] | None
    num_layers: int | None = None
    text: str = ""
    wanted: object = None
    found: object = None

    @property
    def shown(self) -> str:
        """The layers as they are given.

        >>> ULayers(layers=(1, 3, 1)).shown
        '1,3,1'
        """
        return ",".join(map(str, self.layers or ()))

    @property
    def total(self) -> int:
        """How many layers the parts have."""
        return sum(self.layers or ())


def has_router_losses(options: object) -> bool:
    """Tell whether routers add losses to that of the model, by Megatron's arguments or a model's configuration.

    >>> from types import SimpleNamespace
    >>> has_router_losses(SimpleNamespace(moe_aux_loss_coeff=[0.0, 0.1], moe_z_loss_coeff=None))
    True
    """
    found = (getattr(options, name, None) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))
    return any(any(value) if isinstance(value, list) else bool(value) for value in found)


def _counts_tokens_of_a_rank(options: object, context: OptionContext) -> bool:
    cp_sizes = context.cp_sizes or (1,) * context.num_stages
    shares = {tp * cp for tp, cp in zip(context.tp_sizes, cp_sizes, strict=True)}
    return len(shares) > 1 and has_router_losses(options) and bool(getattr(options, "calculate_per_token_loss", False))


def _has_layers(test: Callable[[ULayers], bool]) -> Callable[[object, OptionContext], bool]:
    return lambda args, _context: isinstance(args, ULayers) and test(args)


EXPERT_RULES: tuple[OptionRule, ...] = (
    OptionRule(
        option="experts",
        attribute="num_experts",
        applies=lambda _args, _context: True,  # only models that have some come here
        versions=capability("experts").missing,
        verdict=Verdict.REFUSED_UNEQUAL,
        reason="on stages of different sizes they were run with Megatron 0.12, 0.16 and 0.19 only",
        way_out="use one of these, or give every stage the same sizes",
        line="experts with Megatron {megatron}; {reason}; {way_out}",
    ),
    OptionRule(
        option="--calculate-per-token-loss with losses of routers",
        attribute="calculate_per_token_loss",
        applies=_counts_tokens_of_a_rank,
        versions=capability("router_losses_per_token").missing,
        verdict=Verdict.REFUSED_UNEQUAL,
        reason="counts these by the tokens of one rank, so stages of another size would train with other losses",
        way_out="leave it out, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
        line="{option}; Megatron {megatron} {reason}; {way_out}",
    ),
    OptionRule(
        option="losses of routers with stages of different context-parallel sizes",
        attribute="moe_aux_loss_coeff",
        applies=lambda options, context: context.has_unequal_cp and has_router_losses(options),
        versions=("<0.13",),
        verdict=Verdict.REFUSED_UNEQUAL,
        reason="divides these losses by the stage's size",
        way_out="give every stage the same one, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
        line="{option}; Megatron {megatron} {reason}; {way_out}",
    ),
)
"""Of a model with experts: Megatron's arguments, or the model's configuration."""

RING_RULES: tuple[OptionRule, ...] = (
    OptionRule(
        option="--vtp-encoder-layer-list",
        attribute="vtp_encoder_layer_list",
        applies=lambda _args, context: context.num_rings > 1,
        versions=capability("two_rings").missing,
        verdict=Verdict.REFUSED,
        reason="two rings were run with 0.19 only",
        way_out="use that",
        line="{option} with Megatron {megatron}: {reason}; {way_out}",
    ),
)
"""Of a U-shaped pipeline."""


def _not_in_a_call(name: str, versions: str, way_out: str) -> OptionRule:
    """Make a row for an argument of `initialize_model_parallel`."""
    return OptionRule(
        option=name,
        attribute=name,
        applies=lambda args, _context: bool(getattr(args, name, None)),
        versions=(versions,),
        verdict=Verdict.REFUSED,
        reason="it is not supported with vtp_size_list",
        way_out=way_out,
        line="{option}={value} is not supported with vtp_size_list; {way_out}",
    )


CALL_RULES: tuple[OptionRule, ...] = (
    _not_in_a_call("encoder_tensor_model_parallel_size", "<0.13", "leave it out"),
    _not_in_a_call("encoder_pipeline_model_parallel_size", "<0.13", "leave it out"),
    _not_in_a_call("pipeline_model_parallel_split_rank", "<0.13", "leave it out"),
    _not_in_a_call("rank_offset", ">=0.15", "leave it at 0"),
)
"""Of a call of `initialize_model_parallel`."""

LAYER_RULES: tuple[OptionRule, ...] = (
    OptionRule(
        option="a U without num_layer_list",
        attribute="layers",
        applies=_has_layers(lambda told: told.layers is None),
        versions=_BEFORE_LAYOUTS,
        verdict=Verdict.REFUSED,
        reason="Megatron 0.12 has no layouts of the pipeline, so the plugin must know the layers of a U",
        way_out="give num_layer_list to apply(), such as [1, 3, 3, 1]",
        line="{reason}; {way_out}",
    ),
    OptionRule(
        option="num_layer_list of another model",
        attribute="layers",
        applies=_has_layers(lambda told: told.layers is not None and told.total != told.num_layers),
        versions=_BEFORE_LAYOUTS,
        verdict=Verdict.REFUSED,
        reason="its layers are not as many as those of the model's config",
        way_out="make both equal",
        line="num_layer_list {args.shown} has {args.total} layers, the model's config num_layers={args.num_layers}; "
        "{way_out}",
    ),
    OptionRule(
        option="a U without config.pipeline_model_parallel_layout",
        attribute="found",
        applies=_has_layers(lambda told: told.found is None),
        versions=_WITH_LAYOUTS,
        verdict=Verdict.REFUSED,
        reason="the model's config has no pipeline_model_parallel_layout, so Megatron would share out the layers as in "
        "an interleaved pipeline",
        way_out="set it, such as 'Et|ttt|ttt|tL||'",
        line="{reason}; {way_out}",
    ),
    OptionRule(
        option="config.pipeline_model_parallel_layout of another model",
        attribute="found",
        applies=_has_layers(
            lambda told: told.found is not None and told.layers is not None and told.found != told.wanted
        ),
        versions=_WITH_LAYOUTS,
        verdict=Verdict.REFUSED,
        reason="the model's config has another pipeline_model_parallel_layout",
        way_out="set that of the list",
        line="{reason}; set {args.text!r}",
    ),
)
"""Of a model in a U-shaped pipeline: :class:`ULayers`."""

VERSION_RULES = (*EXPERT_RULES, *RING_RULES, *CALL_RULES, *LAYER_RULES)
"""All of them, as the documents show them."""
