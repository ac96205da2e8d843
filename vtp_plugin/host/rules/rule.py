"""A row of the table of options: its rule, its evidence, the versions that it holds for.

The rows for what only some versions of Megatron cannot do: experts, rings, layers of a U, calls of its functions.

Each tuple is asked where a run knows the values: ``MegatronHost.refusals`` in
``vtp_plugin.patches.hosts.megatron_host``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.host.versions import capability, family_of, is_in
from vtp_plugin.plan.model.lora import Lora
from vtp_plugin.util.text import TextEnum, argument_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionContext:
    """The run that Megatron's options are checked against.

    Attributes:
        tp_sizes: Tensor-parallel size of every stage, in pipeline order, all positive; empty before there are stages.
        cp_sizes: Context-parallel size of every stage; empty for 1 on all stages.
        dp_sizes: Data-parallel size of every stage; empty for one size on all stages.
        ep_sizes: Expert-parallel size of every stage; empty for 1 on all stages.
        etp_sizes: Tensor-parallel size of the experts of every stage; empty for the stages' own ``tp_sizes``.
        is_split: Replicas of stages with unequal data-parallel sizes share microbatches (``--vtp-dp-mode split``).
        forced: The plugin's groups and communicator are used even for a uniform list.
        is_planned: The plugin's executor runs the steps, not Megatron's schedules.
        has_split_backward: Gradients of weights are computed later than those of inputs (``--vtp-split-backward``).
        lora: The plugin's adapters (``--vtp-lora-rank``); None without any.
        is_u_shaped: The first stage holds both ends of the model.
        num_rings: How often a microbatch passes the cloud of a U; 0 without one.
        device: The platform: ``"cuda"``, ``"npu"`` or ``"cpu"``, or ``"auto"`` while it is not known.
        version: Version of the Megatron that runs; empty if none does, as for plans on a laptop.
    """

    tp_sizes: tuple[int, ...]
    cp_sizes: tuple[int, ...] = ()
    dp_sizes: tuple[int, ...] = ()
    ep_sizes: tuple[int, ...] = ()
    etp_sizes: tuple[int, ...] = ()
    is_split: bool = False
    forced: bool = False
    is_planned: bool = False
    has_split_backward: bool = False
    lora: Lora | None = None
    is_u_shaped: bool = False
    num_rings: int = 0
    device: str = "auto"
    version: str = ""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.tp_sizes)

    @property
    def megatron(self) -> str:
        """The family of the Megatron that runs.

        >>> OptionContext(tp_sizes=(1, 2), version="0.15.3").megatron
        '0.16'
        """
        family = family_of(self.version) if self.version else None
        return self.version if family is None else family.name

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have the same sizes."""
        lists = (self.tp_sizes, self.cp_sizes, self.dp_sizes, self.ep_sizes, self.etp_sizes)
        return all(len(set(sizes)) <= 1 for sizes in lists)

    @property
    def has_unequal_cp(self) -> bool:
        """Whether the stages have different context-parallel sizes."""
        return len(set(self.cp_sizes)) > 1

    @property
    def has_unequal_dp(self) -> bool:
        """Whether the stages have different data-parallel sizes."""
        return len(set(self.dp_sizes)) > 1

    @property
    def layout_text(self) -> str:
        """The lists of sizes as flags; those of equal cp, dp or ep sizes are left out.

        >>> OptionContext(tp_sizes=(1, 4, 4)).layout_text
        '--vtp-size-list 1,4,4'
        >>> OptionContext(tp_sizes=(1, 1), cp_sizes=(1, 2)).layout_text
        '--vtp-size-list 1,1 --vtp-cp-list 1,2'
        """
        lists = [("--vtp-size-list", self.tp_sizes)]
        lists += [("--vtp-cp-list", self.cp_sizes)] if self.has_unequal_cp else []
        lists += [("--vtp-dp-list", self.dp_sizes)] if self.has_unequal_dp else []
        lists += [("--vtp-ep-list", self.ep_sizes)] if len(set(self.ep_sizes)) > 1 else []
        return " ".join(f"{flag} {','.join(map(str, sizes))}" for flag, sizes in lists)


Test = Callable[[object], bool]
"""Takes the parsed value of an option and tells whether the option is in use."""


class Verdict(TextEnum):
    """What happens to a run that uses an option."""

    SUPPORTED = "supported"
    WARNED = "accepted, with a warning"
    WARNED_UNIFORM = "accepted, with a warning when sizes are equal"
    REFUSED_UNEQUAL_DP = "not supported when data-parallel sizes differ"
    REFUSED_UNEQUAL = "not supported when sizes differ"
    REFUSED_PLANNED = "not supported with a planned schedule"
    REFUSED_SPLIT = "not supported with split backwards"
    REFUSED_ADAPTERS = "not supported with adapters"
    REFUSED_U_SHAPED = "not supported in a U-shape"
    REFUSED = "not supported"

    @property
    def is_refusal(self) -> bool:
        """Whether a run may end with it."""
        return self.value.startswith("not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """One row of the table.

    Attributes:
        option: The flag as users know it, with a value if only that value is meant (``--ckpt-format torch_dcp``).
        attribute: The name of the option in Megatron's parsed arguments.
        applies: Tells whether a run with these arguments uses the option.
        verdict: What happens then.
        versions: The versions of Megatron that the row is about, by ranges; empty for all. Where the version is not
            known the row holds.
        reason: Why: one clause without a final stop, and without a semicolon, which separates the parts of an error.
        way_out: What to do instead; empty for a supported option.
        evidence: The test that shows a supported option, or ``not run: ...``; empty for one that is not supported.
        line: How the error reads where it is not put together from option, situation, reason and way out. Fields as of
            ``str.format``: ``option``, its ``value``, ``reason``, ``way_out``, the family ``megatron``, and ``args``.
    """

    option: str
    attribute: str
    applies: Callable[[object, OptionContext], bool]
    verdict: Verdict = Verdict.SUPPORTED
    versions: tuple[str, ...] = ()
    reason: str = ""
    way_out: str = ""
    evidence: str = ""
    line: str = ""

    def is_about(self, version: str) -> bool:
        """Tell whether the row is about a version of Megatron, which may be unknown."""
        return not (self.versions and version) or is_in(version, *self.versions)

    def refuses(self, args: object, context: OptionContext) -> bool:
        """Tell whether this row stops the run.

        :attr:`Verdict.REFUSED` stops every run that uses the plugin's groups: one with unequal TP sizes, or with equal
        ones and ``--vtp-force``. With equal ones otherwise, Megatron runs untouched.

        Args:
            args: Megatron's parsed arguments.
            context: The run.
        """
        is_met = {
            Verdict.REFUSED_UNEQUAL_DP: context.has_unequal_dp,
            Verdict.REFUSED_UNEQUAL: not context.is_uniform,
            Verdict.REFUSED_PLANNED: context.is_planned,
            Verdict.REFUSED_SPLIT: context.has_split_backward,
            Verdict.REFUSED_ADAPTERS: context.lora is not None,
            Verdict.REFUSED_U_SHAPED: context.is_u_shaped,
            Verdict.REFUSED: context.forced or not context.is_uniform,
        }
        is_met_here = self.verdict.is_refusal and is_met[self.verdict]
        return is_met_here and self.is_about(context.version) and self.applies(args, context)

    def warns(self, args: object, context: OptionContext) -> bool:
        """Tell whether a run says of this row at its start.

        What Megatron itself computes with a uniform list is left as it is, so :attr:`Verdict.WARNED_UNIFORM` is about
        what the plugin does right only where its groups are in use.

        Args:
            args: Megatron's parsed arguments.
            context: The run.
        """
        is_met = {Verdict.WARNED: True, Verdict.WARNED_UNIFORM: context.is_uniform and not context.forced}
        return is_met.get(self.verdict, False) and self.is_about(context.version) and self.applies(args, context)

    def say(self, args: object, context: OptionContext) -> str:
        """Say that the option is not supported, or warn of it: one line."""
        if not self.line:
            return f"{self.as_given(args)} with {self.situation(context)}; {self.reason}; {self.way_out}"
        return self.line.format(
            option=self.option,
            value=getattr(args, self.attribute, None),
            reason=self.reason,
            way_out=self.way_out,
            megatron=context.megatron,
            args=args,
        )

    def as_given(self, args: object) -> str:
        """Write the option with the value that the user gave, unless the option's name says it already."""
        value = getattr(args, self.attribute)
        if isinstance(value, bool) or " " in self.option or self.verdict is Verdict.REFUSED_PLANNED:
            return self.option
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return " ".join(f"{self.option} {text}".split())

    def situation(self, context: OptionContext) -> str:
        """Name, in the user's words, what the option cannot be combined with."""
        if self.verdict is Verdict.REFUSED_U_SHAPED:
            return "--layerwise-disaggregated-training"
        if self.verdict is Verdict.REFUSED_SPLIT:
            return "--vtp-split-backward"
        if self.verdict is Verdict.REFUSED_ADAPTERS:
            return "--vtp-lora-rank"
        return "a planned schedule" if self.verdict is Verdict.REFUSED_PLANNED else context.layout_text


def on(value: object) -> bool:
    """Tell whether a flag is set, or its value is neither empty nor zero."""
    return bool(value)


def off(value: object) -> bool:
    """Tell whether a switch that is on by default was turned off."""
    return value is False


def given(value: object) -> bool:
    """Tell whether an option with the default None was given."""
    return value is not None


def above(limit: float) -> Test:
    """Make a test for values larger than a limit.

    >>> above(1)(2), above(1)(1), above(1)(None)
    (True, False, False)
    """
    return lambda value: isinstance(value, (int, float)) and value > limit


def case(option: str, test: Test | None = None, attribute: str = "") -> OptionRule:
    """Start a row: say when an option is in use. A function below adds the verdict.

    Args:
        option: The flag, or flag and value if only that value is meant.
        test: Applied to the parsed value. Default: it equals the value that ``option`` names, or is ``on``.
        attribute: The name among the parsed arguments. Default: made from the flag.

    >>> case("--use-sharp").attribute
    'use_sharp'
    >>> from types import SimpleNamespace
    >>> args, context = SimpleNamespace(ckpt_format="torch_dist"), OptionContext(tp_sizes=(1, 2))
    >>> case("--ckpt-format torch_dcp").applies(args, context)
    False
    """
    flag, _, wanted = option.partition(" ")
    name = attribute or argument_of(flag)
    is_used = test or ((lambda value: value == wanted) if wanted else on)
    # An older Megatron that has no such attribute cannot be using the option: every test says no to None.
    return OptionRule(option=option, attribute=name, applies=lambda args, _context: is_used(getattr(args, name, None)))


def only(option: str, test: Callable[[object, OptionContext], bool], is_used: Test | None = None) -> OptionRule:
    """Start a row of an option that has an effect only in some runs."""
    rule = case(option, is_used)
    return replace(rule, applies=lambda args, context: rule.applies(args, context) and test(args, context))


def warned(reason: str, evidence: str, way_out: str, *cases: OptionRule | str) -> tuple[OptionRule, ...]:
    """Make rows for options that a run names at its start: the sizes decide what they compute, or nothing does.

    Here and below, a string stands for ``case(string)``.
    """
    return _rules(Verdict.WARNED, reason, cases, way_out, evidence)


def warned_uniform(reason: str, evidence: str, way_out: str, *cases: OptionRule | str) -> tuple[OptionRule, ...]:
    """Make rows for options of which a run with a uniform list says what stock Megatron does with them."""
    return _rules(Verdict.WARNED_UNIFORM, reason, cases, way_out, evidence)


def refused_unequal(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it out or give every stage the same size"
) -> tuple[OptionRule, ...]:
    """Make rows for options that are refused when sizes differ."""
    return _rules(Verdict.REFUSED_UNEQUAL, reason, cases, way_out)


def refused_unequal_dp(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it out or give every stage the same data-parallel size"
) -> tuple[OptionRule, ...]:
    """Make rows for options that are refused when data-parallel sizes differ."""
    return _rules(Verdict.REFUSED_UNEQUAL_DP, reason, cases, way_out)


def refused_u_shaped(reason: str, *cases: OptionRule | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Make rows for options that do not work in a U-shape."""
    return _rules(Verdict.REFUSED_U_SHAPED, reason, cases, way_out)


def refused_planned(reason: str, *names: str) -> tuple[OptionRule, ...]:
    """Make rows for what planned schedules leave out: flags, fields of the configuration, or arguments of the step."""
    way_out = "leave it out, or use --vtp-schedule stock where all layers of a stage lie in a row"
    cases = [replace(case(name.removeprefix("config.")), option=name) for name in names]
    return _rules(Verdict.REFUSED_PLANNED, reason, cases, way_out)


def refused_split(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it, or --vtp-split-backward, out"
) -> tuple[OptionRule, ...]:
    """Make rows for options that do not work where backwards are split."""
    return _rules(Verdict.REFUSED_SPLIT, reason, cases, way_out)


def refused_adapters(
    reason: str, *cases: OptionRule | str, way_out: str = "leave it, or --vtp-lora-rank, out"
) -> tuple[OptionRule, ...]:
    """Make rows for options that do not work with the plugin's adapters, whatever the sizes."""
    return _rules(Verdict.REFUSED_ADAPTERS, reason, cases, way_out)


def refused(reason: str, *cases: OptionRule | str, way_out: str = "leave it out") -> tuple[OptionRule, ...]:
    """Make rows for options that the plugin's groups and channels never support."""
    return _rules(Verdict.REFUSED, reason, cases, way_out)


def _rules(
    verdict: Verdict, reason: str, cases: Sequence[OptionRule | str], way_out: str = "", evidence: str = ""
) -> tuple[OptionRule, ...]:
    """Complete the rows that share a verdict."""
    rows = (case(item) if isinstance(item, str) else item for item in cases)
    return tuple(replace(row, verdict=verdict, reason=reason, way_out=way_out, evidence=evidence) for row in rows)


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
