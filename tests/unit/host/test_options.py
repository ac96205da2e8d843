"""The option table against Megatron's real parser, and the sizes that every stage must share."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vtp_plugin
from tests.expected.of_megatron import megatron_parser
from tests.rules.import_rules import ROOT
from tests.support.hosts import is_older
from vtp_plugin.cli import main
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.run_flags import add_run_flags, known_flags, read_run
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import VTP_FLAGS, add_vtp_arguments, read_flags
from vtp_plugin.errors import ConfigError, LayoutError, refuse
from vtp_plugin.host.megatron_flags import MEGATRON_FLAGS
from vtp_plugin.host.rules.checks.batch import check_batches, check_packed, own_batches
from vtp_plugin.host.rules.checks.divisibility import check_sizes
from vtp_plugin.host.rules.checks.stage_layers import check_layer_file
from vtp_plugin.host.rules.rule import VERSION_RULES, OptionContext, OptionRule, Verdict
from vtp_plugin.host.rules.run_checks import check_run
from vtp_plugin.host.rules.table.rows import (
    CONFIG_RULES,
    RULES,
    STEP_RULES,
    check_config,
    check_options,
    check_step,
    documented,
    format_markdown,
    format_table,
    option_warnings,
    refusals,
)
from vtp_plugin.host.rules.table.rows_architecture import OLDER_RULES
from vtp_plugin.host.rules.table.rows_kernels import MINDSPEED_RULES
from vtp_plugin.host.versions.known_versions import between
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.model.lora import Lora
from vtp_plugin.util.text import nearest
from vtp_plugin.util.typed_json import read_json

UNEQUAL = OptionContext(tp_sizes=(1, 4))
LATENT = {"multi_latent_attention": True, "transformer_impl": "local"}
FORCED = OptionContext(tp_sizes=(2, 2), forced=True)
UNIFORM = OptionContext(tp_sizes=(2, 2))

REFUSED_RULES = [rule for rule in (*RULES, *(OLDER_RULES if is_older() else ())) if rule.verdict.is_refusal]
SUPPORTED_RULES = [rule for rule in documented() if rule.verdict is Verdict.SUPPORTED]
WARNED_RULES = [rule for rule in RULES if rule.verdict in (Verdict.WARNED, Verdict.WARNED_UNIFORM)]
_CAPACITY = ("--num-experts", "4", "--moe-expert-capacity-factor", "1")
# How a rule is switched on where its name is no command line by itself.
SPELLINGS = {
    "--heterogeneous-layers-config-encoded-json without a path": ["--heterogeneous-layers-config-encoded-json", "{}"],
    "--fp16 with experts that have groups of their own": [
        *("--fp16", "--num-experts", "4", "--expert-model-parallel-size", "2")
    ],
    "--qk-clip with --use-distributed-optimizer": ["--qk-clip", "--use-distributed-optimizer", "--bf16"],
    "--moe-router-enable-expert-bias": ["--moe-router-enable-expert-bias", "--num-experts", "4", "--bf16"],
    "--moe-token-drop-policy position": ["--moe-token-drop-policy", "position", *_CAPACITY],
    "--moe-pad-expert-input-to-capacity": ["--moe-pad-expert-input-to-capacity", *_CAPACITY],
    "without --untie-embeddings-and-output-weights": [],
    "--transformer-impl transformer_engine on the cpu platform": [],
    "--save or --load with --mtp-num-layers and a tied embedding": ["--save", "x", "--mtp-num-layers", "1"],
    "--recompute-num-layers above 1 with --recompute-method uniform and --mtp-num-layers": [
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "2", "--mtp-num-layers", "1"),
    ],
    "--moe-expert-capacity-factor without --num-experts": ["--moe-expert-capacity-factor", "1.5"],
    "--fp8-recipe delayed": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "--recompute-modules mlp without --disable-bias-linear": [
        *("--recompute-granularity", "selective"),
        *("--recompute-modules", "core_attn", "mlp"),
    ],
}
# Values for options that take any: most take a number or a path, and "8" is both. Then what they need beside them.
VALUES = {
    "--moe-expert-capacity-factor": ["8", "--num-experts", "4"],
    "--moe-input-jitter-eps": ["0.1", "--num-experts", "4"],
    "--moe-router-force-load-balancing": ["--num-experts", "4"],
    "--moe-router-force-biased": ["1.0", "--num-experts", "4"],
    "--moe-upcycling-granularity": ["2", "--moe-use-upcycling"],
    "--hidden-dropout": ["0.1"],
    "--attention-dropout": ["0.1"],
    "--recompute-granularity": ["full"],
    "--fp8-format": ["hybrid"],
    "--fp4-format": ["e2m1"],
    "--ckpt-convert-format": ["torch"],
    "--high-priority-stream-groups": ["dp_cp"],
    "--error-injection-rate": ["3"],
    "--hierarchical-context-parallel-sizes": ["2", "2"],
    "--timing-log-level": ["2"],
    "--step-batch-size-schedule": ["0:8 1K:16"],
    "--eval-micro-batch-size": ["4", "--micro-batch-size", "2"],
    "--rampup-batch-size": ["8", "8", "64"],
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_parser()


@pytest.fixture(scope="module")
def defaults(parser: argparse.ArgumentParser) -> argparse.Namespace:
    return parser.parse_args([])


def find_action(parser: argparse.ArgumentParser, rule: OptionRule) -> argparse.Action | None:
    """Find a rule's option in the parser; None where this Megatron lacks it, or the value that the rule is about."""
    flag, *value = rule.option.split()
    action = next((action for action in parser._actions if flag in action.option_strings), None)
    is_known = action is not None and not (value and action.choices is not None and value[0] not in action.choices)
    return action if is_known else None


def command_line(parser: argparse.ArgumentParser, rule: OptionRule) -> list[str]:
    """The flags that use a rule's option; the test is skipped where this Megatron has none."""
    if rule.option in SPELLINGS:
        return SPELLINGS[rule.option]
    flag, *value = rule.option.split()
    action = find_action(parser, rule)
    if action is None:
        pytest.skip(f"this Megatron has no {rule.option}")
    default = ["8"] if action.nargs != 0 else []
    return [flag, *(value or VALUES.get(flag, default))]


def context_of(rule: OptionRule, context: OptionContext) -> OptionContext:
    """The same run on the platform, and with the data-parallel sizes, that the rule is about."""
    on_cpu = "on the cpu platform" in rule.option
    is_meant = {verdict: rule.verdict is verdict and not context.is_uniform for verdict in Verdict}
    return replace(
        context,
        device="cpu" if on_cpu else "cuda",
        dp_sizes=(1, 2) if is_meant[Verdict.REFUSED_UNEQUAL_DP] else (),
        is_u_shaped=is_meant[Verdict.REFUSED_U_SHAPED],
        is_planned=is_meant[Verdict.REFUSED_PLANNED],
        has_split_backward=is_meant[Verdict.REFUSED_SPLIT],
        lora=Lora(rank=2, alpha=2, targets=("q_proj", "up_proj", "experts.down_proj"))
        if is_meant[Verdict.REFUSED_ADAPTERS]
        else None,
    )


def lines_of(rule: OptionRule, lines: tuple[str, ...]) -> list[str]:
    return [line for line in lines if line.startswith(rule.option)]


@pytest.mark.parametrize("rule", REFUSED_RULES, ids=lambda rule: rule.option)
def test_refused_option_gives_one_line_with_a_way_out(parser: argparse.ArgumentParser, rule: OptionRule) -> None:
    args = parser.parse_args(command_line(parser, rule))
    (line,) = lines_of(rule, check_options(args, context_of(rule, UNEQUAL)))
    assert "\n" not in line
    value, reason, way_out = line.split("; ")
    # An option that is refused for two reasons is named once, with the first.
    context = context_of(rule, UNEQUAL)
    first = next(other for other in REFUSED_RULES if other.option == rule.option and other.refuses(args, context))
    assert value.endswith(f" with {first.situation(context)}")
    assert reason == first.reason
    assert way_out == first.way_out != ""


@pytest.mark.parametrize("rule", REFUSED_RULES, ids=lambda rule: rule.option)
def test_forced_uniform_list_refuses_only_what_is_always_refused(
    parser: argparse.ArgumentParser, rule: OptionRule
) -> None:
    args = parser.parse_args(command_line(parser, rule))
    lines = lines_of(rule, check_options(args, context_of(rule, FORCED)))
    assert len(lines) == (1 if rule.verdict is Verdict.REFUSED else 0)
    assert check_options(args, context_of(rule, UNIFORM)) == ()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.option)
def test_rule_applies_to_what_its_option_parses_to(parser: argparse.ArgumentParser, rule: OptionRule) -> None:
    args = parser.parse_args(command_line(parser, rule))
    assert rule.applies(args, context_of(rule, UNEQUAL))


@pytest.mark.needs("fp4_param_gather", cases=("--fp4-param-gather",))
@pytest.mark.parametrize("rule", SUPPORTED_RULES, ids=lambda rule: rule.option)
def test_supported_option_is_not_refused(parser: argparse.ArgumentParser, rule: OptionRule) -> None:
    args = parser.parse_args(command_line(parser, rule))
    assert check_options(args, UNEQUAL) == ()


@pytest.mark.parametrize("rule", WARNED_RULES, ids=lambda rule: f"{rule.option}-{rule.verdict}")
def test_an_option_with_a_warning(parser: argparse.ArgumentParser, rule: OptionRule) -> None:
    """It is named where it is in use, on stages of any sizes or of one size, and nowhere else."""
    args = parser.parse_args(command_line(parser, rule))
    warned = {context: lines_with(rule, option_warnings(args, context)) for context in (UNEQUAL, FORCED, UNIFORM)}
    expected = 1 if rule.verdict is Verdict.WARNED else 0
    assert [len(lines) for lines in warned.values()] == [expected, expected, 1]
    (line,) = warned[UNIFORM]
    options, reason, way_out = line.split("; ")
    assert options.endswith(" with --vtp-size-list 2,2") and (reason, way_out) == (rule.reason, rule.way_out)
    assert check_options(args, UNIFORM) == ()
    plain = parser.parse_args(["--hidden-dropout", "0", "--attention-dropout", "0"])
    assert option_warnings(plain, UNEQUAL) == option_warnings(plain, UNIFORM) == ()


def lines_with(rule: OptionRule, lines: tuple[str, ...]) -> list[str]:
    return [line for line in lines if rule.option in line.split("; ")[0]]


@pytest.mark.parametrize(
    "words",
    [
        ["--moe-expert-capacity-factor", "-1", "--num-experts", "4", "--moe-token-drop-policy", "position"],
        ["--moe-input-jitter-eps", "0.1"],
        ["--moe-upcycling-granularity", "2"],
        ["--moe-router-enable-expert-bias", "--num-experts", "4"],
        ["--moe-router-enable-expert-bias", "--bf16"],
    ],
)
@pytest.mark.needs("flags_of_0_19")
def test_no_warning_of_what_has_no_effect(parser: argparse.ArgumentParser, words: list[str]) -> None:
    args = parser.parse_args(["--hidden-dropout", "0", "--attention-dropout", "0", *words])
    assert option_warnings(args, UNIFORM) == ()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
@pytest.mark.parametrize(("size", "num_iterations"), [(1, 10), (2, 10), (1, 0), (None, 10)])
def test_microbatches_of_evaluation_are_named_where_stock_ends(
    sizes: tuple[int, ...], size: int | None, num_iterations: int
) -> None:
    args = SimpleNamespace(micro_batch_size=2, eval_micro_batch_size=size, eval_iters=num_iterations)
    is_named = option_warnings(args, OptionContext(tp_sizes=sizes)) != ()
    assert is_named == (sizes == (2, 2) and size == 1 and num_iterations > 0)
    assert option_warnings(args, OptionContext(tp_sizes=sizes, forced=True)) == ()


@pytest.mark.parametrize("version", ["0.12.3", "0.16.1", "0.19.2"])
@pytest.mark.parametrize(
    ("given", "sizes", "is_named"),
    [
        ({}, {"ep_sizes": (2, 2)}, True),
        ({"expert_model_parallel_size": 2}, {}, True),
        ({}, {"etp_sizes": (2, 2)}, False),
        ({"loss_scale": 1024.0}, {"ep_sizes": (2, 2)}, False),
        ({"fp16": False, "bf16": True}, {"ep_sizes": (2, 2)}, False),
        ({"num_experts": None}, {"ep_sizes": (2, 2)}, False),
    ],
)
def test_loss_scales_that_part_are_named(
    given: dict[str, Any], sizes: dict[str, Any], is_named: bool, version: str
) -> None:
    """With a constant scale, without experts, and where these share the groups of the rest, there is one."""
    args = SimpleNamespace(**{"fp16": True, "num_experts": 4, **given})
    context = OptionContext(tp_sizes=(2, 2), version=version, **sizes)
    lines = option_warnings(args, context)
    assert [line.split(" with experts")[0] for line in lines] == (["--fp16"] if is_named else [])
    assert not option_warnings(args, replace(context, tp_sizes=(1, 2)))
    # Other sizes alone make groups since Megatron 0.19.
    cut_otherwise = option_warnings(SimpleNamespace(fp16=True, num_experts=4), replace(context, etp_sizes=(1, 1)))
    assert bool(cut_otherwise) == (version == "0.19.2" or "ep_sizes" in sizes)


@pytest.mark.parametrize(
    ("given", "sizes", "is_named"),
    [
        (LATENT, {}, True),
        ({**LATENT, "transformer_impl": "transformer_engine"}, {}, True),
        ({**LATENT, "sequence_parallel": True}, {}, True),
        ({**LATENT, "transformer_impl": "transformer_engine", "sequence_parallel": True}, {"device": "cuda"}, False),
        ({"multi_latent_attention": True}, {"tp_sizes": (1, 1)}, False),
        ({"softmax_type": "learnable"}, {}, True),
        ({"softmax_type": "learnable"}, {"tp_sizes": (1, 1)}, False),
        ({"softmax_type": "off-by-one"}, {}, False),
        ({"moe_router_load_balancing_type": "sinkhorn"}, {}, True),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, {"tp_sizes": (1, 1), "cp_sizes": (2, 2)}, True),
        ({"moe_router_load_balancing_type": "sinkhorn"}, {"tp_sizes": (1, 1)}, False),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, {}, False),
    ],
)
def test_what_stock_computes_by_its_size_is_named(given: dict[str, Any], sizes: dict[str, Any], is_named: bool) -> None:
    """Only with a uniform list, and only where several ranks share what is concerned."""
    values: dict[str, Any] = {"tp_sizes": (2, 2), **sizes}
    args, context = SimpleNamespace(**given), OptionContext(**values)
    assert bool(option_warnings(args, context)) == is_named
    assert not option_warnings(args, replace(context, tp_sizes=(1, 2)))


def test_options_of_one_reason_share_a_line() -> None:
    """A model's configuration has the same names, but for the number of experts."""
    config = SimpleNamespace(hidden_dropout=0.1, attention_dropout=0.2, num_moe_experts=4, moe_input_jitter_eps=0.1)
    first, second = option_warnings(config, UNEQUAL)
    assert first.startswith("--hidden-dropout 0.1, --attention-dropout 0.2 with --vtp-size-list 1,4; every rank draws")
    assert second.startswith("--moe-input-jitter-eps 0.1 with --vtp-size-list 1,4; every rank draws")


@pytest.mark.parametrize("context", [UNEQUAL, FORCED, OptionContext(tp_sizes=(3, 1, 2), device="cuda")])
def test_defaults_of_megatron_are_not_refused(defaults: argparse.Namespace, context: OptionContext) -> None:
    assert defaults.transformer_impl == "transformer_engine"
    assert check_options(defaults, context) == ()
    assert check_sizes(defaults, context) == ()


@pytest.mark.needs("flags_of_0_19")
def test_every_attribute_that_is_read_exists_in_the_parser(defaults: argparse.Namespace) -> None:
    # Switches that lead to further reads are on. Everything else has the value of the parser.
    switches = {"group_query_attention": True, "sequence_parallel": True, "swiglu": True, "num_experts": 8}

    class Recorder:
        def __init__(self) -> None:
            self.names: set[str] = set()

        def __getattr__(self, name: str) -> object:
            self.names.add(name)
            return switches.get(name, getattr(defaults, name, None))

    recorder = Recorder()
    check_sizes(recorder, UNEQUAL)
    for rule in RULES:
        rule.applies(recorder, UNEQUAL)
        rule.applies(recorder, OptionContext(tp_sizes=(1, 4), device="cpu"))
    recorder.names.update(rule.attribute for rule in RULES)
    assert len(recorder.names) > 100
    assert sorted(name for name in recorder.names if not hasattr(defaults, name)) == []


def test_only_flat_master_weights_are_too_little_for_qk_clip() -> None:
    """In fp32 a weight is its own master weight, and whole on every rank."""
    for bf16, is_flat, problems in ((True, True, 1), (False, True, 0), (True, False, 0)):
        args = SimpleNamespace(qk_clip=True, bf16=bf16, fp16=False, use_distributed_optimizer=is_flat)
        assert len(check_options(args, UNEQUAL)) == problems


def test_older_megatron_without_the_attributes_is_not_refused() -> None:
    """What it lacks it cannot use."""
    empty = SimpleNamespace()
    assert check_options(empty, UNEQUAL) == ()
    assert check_config(empty, UNEQUAL) == ()
    assert check_sizes(empty, UNEQUAL) == ()


@pytest.mark.parametrize("rule", OLDER_RULES, ids=lambda rule: rule.option)
def test_what_only_an_older_megatron_has_is_refused_there(rule: OptionRule) -> None:
    args = SimpleNamespace(**{rule.attribute: rule.option.partition(" ")[2] or 2})
    (line,) = check_options(args, UNEQUAL)
    assert line.startswith(rule.option) and line.endswith(rule.way_out)
    assert check_options(args, UNIFORM) == ()


@pytest.mark.needs("flags_of_0_19")
def test_line_names_the_value(parser: argparse.ArgumentParser) -> None:
    words = "--num-distributed-optimizer-instances 8 --hierarchical-context-parallel-sizes 2 4 --use-sharp"
    lines = check_options(parser.parse_args(words.split()), UNEQUAL)
    named = ("--hierarchical-context-parallel-sizes 2 4", "--num-distributed-optimizer-instances 8", "--use-sharp")
    assert [line.split(";")[0] for line in lines] == [f"{given} with --vtp-size-list 1,4" for given in named]


def test_transformer_engine_is_refused_on_cpu_only(defaults: argparse.Namespace) -> None:
    (line,) = check_options(defaults, OptionContext(tp_sizes=(1, 2), device="cpu"))
    assert line.endswith("use --transformer-impl local")
    assert check_options(defaults, OptionContext(tp_sizes=(1, 2), device="npu")) == ()


@pytest.mark.parametrize("name", ["has_cond_embedder", "flextron"])
def test_switches_of_the_configuration(name: str) -> None:
    (line,) = check_config(SimpleNamespace(**{name: True}), UNEQUAL)
    assert line.startswith(f"config.{name} with --vtp-size-list 1,4; ")
    assert check_config(SimpleNamespace(**{name: True}), FORCED) == ()


PLANNED_RULES = [rule for rule in (*CONFIG_RULES, *STEP_RULES) if rule.verdict is Verdict.REFUSED_PLANNED]


@pytest.mark.parametrize("rule", PLANNED_RULES, ids=lambda rule: rule.option)
def test_what_the_executor_leaves_out_is_refused_with_a_planned_schedule_only(rule: OptionRule) -> None:
    check = check_step if rule in STEP_RULES else check_config
    asked = SimpleNamespace(**{rule.attribute: rule.option.partition(" ")[2] or object()})
    (line,) = check(asked, replace(FORCED, is_planned=True))
    assert line == f"{rule.option} with a planned schedule; {rule.reason}; {rule.way_out}"
    assert check(asked, UNEQUAL) == check(SimpleNamespace(), replace(FORCED, is_planned=True)) == ()


def test_all_problems_are_one_error() -> None:
    refuse(())
    with pytest.raises(LayoutError, match=r"^a; b; c \| d; e; f$"):
        refuse(("a; b; c", "d; e; f"), LayoutError)


@pytest.mark.needs("flags_of_0_19")
def test_equal_data_parallel_sizes_refuse_nothing_of_their_own(parser: argparse.ArgumentParser) -> None:
    rules = [rule for rule in RULES if rule.verdict is Verdict.REFUSED_UNEQUAL_DP]
    args = parser.parse_args([word for rule in rules for word in command_line(parser, rule)])
    assert len(rules) == len(check_options(args, OptionContext(tp_sizes=(1, 1), dp_sizes=(1, 2)))) == 9
    assert check_options(args, OptionContext(tp_sizes=(1, 4), dp_sizes=(2, 2))) == ()
    assert not OptionContext(tp_sizes=(1, 1), dp_sizes=(1, 2)).is_uniform


def test_a_batch_of_equal_replicas_is_refused_in_the_words_of_a_plan() -> None:
    """Megatron's own line speaks of evaluation, and comes much later."""
    args, context = SimpleNamespace(micro_batch_size=2, global_batch_size=7), OptionContext(tp_sizes=(1, 2))
    line = "--global-batch-size 7 is no multiple of --micro-batch-size 2 times the data-parallel size {}; use 8"
    assert check_run(args, context, ReplicaMap(dp_sizes=(1, 1))) == (line.format(1),)
    assert check_batches(args, ReplicaMap(dp_sizes=(2, 2))) == (line.format(2),)
    assert check_batches(SimpleNamespace(micro_batch_size=2, global_batch_size=8), ReplicaMap(dp_sizes=(2, 2))) == ()


def test_batches_of_all_stages() -> None:
    replicas = ReplicaMap(dp_sizes=(1, 2))
    good = {"micro_batch_size": 2, "global_batch_size": 8, "rampup_batch_size": ["4", "4", "64"]}
    assert check_batches(SimpleNamespace(**good), replicas) == ()
    for change, flag in (
        ({"global_batch_size": 6}, "--global-batch-size 6"),
        ({"rampup_batch_size": ["4", "2", "64"]}, "--rampup-batch-size 2"),
        ({"step_batch_size_schedule": "0:4 1K:6,2K:0.008K"}, "--step-batch-size-schedule 6"),
        ({"eval_global_batch_size": 6}, "--eval-global-batch-size 6"),
        ({"eval_micro_batch_size": 3}, "--eval-global-batch-size 8"),
    ):
        args = SimpleNamespace(**{**good, **change})
        (line,) = check_batches(args, replicas)
        assert line.startswith(f"{flag} cannot be shared")
        is_ignored = "rampup_batch_size" in change
        assert check_batches(args, replicas, "0.17.1") == (line,)
        assert check_batches(args, replicas, "0.19.2") == (() if is_ignored else (line,))


@pytest.mark.parametrize(("mode", "own"), [(DpMode.MULTIPLEX, (2, 3)), (DpMode.SPLIT, (4, 6))])
def test_own_batches_of_the_narrow_stage(mode: DpMode, own: tuple[int, int]) -> None:
    args = SimpleNamespace(micro_batch_size=2, eval_micro_batch_size=3, global_batch_size=12)
    replicas = ReplicaMap(dp_sizes=(1, 2), mode=mode)
    assert own_batches(args, replicas, 0) == {"micro_batch_size": own[0], "eval_micro_batch_size": own[1]}
    assert own_batches(args, replicas, 1) == {"micro_batch_size": 2, "eval_micro_batch_size": 3}


def test_rows_are_complete_and_distinct() -> None:
    rules = [rule for rule in documented() if rule not in VERSION_RULES]
    assert {*rules} >= {*RULES, *OLDER_RULES, *CONFIG_RULES, *STEP_RULES}
    told = read_json(ROOT / "vtp_plugin/host/rules/table/supported.json")
    for table, groups in told.items():
        shown = [rule for rule in documented(table) if rule.verdict is Verdict.SUPPORTED]
        assert len(shown) == sum(len(group["options"]) for group in groups), "a row names none that it stands before"
    assert len({(rule.option, rule.verdict) for rule in rules}) == len(rules)
    for rule in rules:
        text = rule.reason + rule.way_out
        assert rule.reason and not re.search(r"[;\n]", text) and not rule.reason.endswith("."), rule
        form = r"tests/(\w+/)+test_\w+\.py::test_\w+|not run: .+"
        assert (re.fullmatch(form, rule.evidence) is None) == rule.verdict.is_refusal == (not rule.evidence), rule
        assert bool(rule.way_out) == (rule.verdict is not Verdict.SUPPORTED), rule


def test_printed_tables_hold_every_row() -> None:
    blocks = [block.splitlines() for block in format_table().split("\n\n")]
    markdown = format_markdown().splitlines()
    for rule in documented():
        shown_by = rule.evidence or f"way out: {rule.way_out}"
        if rule.evidence and rule.way_out:
            shown_by = f"{rule.evidence}. Way out: {rule.way_out}"
        versions = "all but " + " and ".join(between(rule.versions)) if rule.versions[1:] else "".join(rule.versions)
        title = f"{rule.verdict} (Megatron: {versions}):" if versions else f"{rule.verdict}:"
        (block,) = [block for block in blocks if block[0] == title and f"    {rule.option}" in block]
        assert " ".join(" ".join(block).split()).endswith(f"{rule.reason} {shown_by}")
        cells = (f"`{rule.option}`", str(rule.verdict), versions or "all", rule.reason, shown_by.replace("|", r"\|"))
        assert f"| {' | '.join(cells)} |" in markdown
    # The name of a test is never broken.
    assert all(len(line) <= 100 or len(line.split()) == 1 for block in blocks for line in block)


# Sizes


def model(**sizes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 96, "ffn_hidden_size": 384, "num_attention_heads": 12, **sizes})


GATED = {"ffn_hidden_size": None, "swiglu": True, "hidden_size": 100}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 30, "sequence_parallel": True}
RANKS = {**LATENT, "q_lora_rank": 36, "kv_lora_rank": 20, "qk_pos_emb_head_dim": 4}
UNPADDED = {"vocab_size": 257, "pad_vocab_size": False}


@pytest.mark.parametrize(
    ("tp_sizes", "sizes", "value", "stage", "shared"),
    [
        ((1, 8), {}, "--num-attention-heads 12", 1, "1, 2, 3, 4, 6, 12"),
        ((3, 1), {"ffn_hidden_size": 100}, "--ffn-hidden-size 100", 0, "1, 2, 4"),
        ((3, 1), GATED, "--ffn-hidden-size 256 (from --hidden-size 100)", 0, "1, 2, 4"),
        ((4, 2), EXPERTS, "--moe-ffn-hidden-size 30", 0, "1, 2, 3, 6"),
        ((4, 2), {"sequence_parallel": True, "seq_length": 50}, "--seq-length 50 with --sequence-parallel", 0, "1, 2"),
        ((1, 3), {"padded_vocab_size": 256}, "--padded-vocab-size 256", 1, "1, 2, 4"),
        ((1, 3), {**RANKS, "qk_pos_emb_head_dim": 5}, "--kv-lora-rank 20 + --qk-pos-emb-head-dim 5 = 25", 1, "1"),
        ((2, 1), {**RANKS, "q_lora_rank": 35}, "--q-lora-rank 35", 0, "1"),
        ((2, 3), {"hidden_size": 64, "mtp_num_layers": 1}, "--hidden-size 64 with --mtp-num-layers", 1, "1, 2, 4"),
        ((1, 2), UNPADDED, "--vocab-size 257 with --no-pad-vocab-size", 1, "1"),
    ],
)
def test_size_that_a_stage_cannot_cut(
    tp_sizes: tuple[int, ...], sizes: dict[str, object], value: str, stage: int, shared: str
) -> None:
    line = f"{value}: stage {stage} has TP {tp_sizes[stage]}, which does not divide it"
    assert f"{line}; TP sizes that divide this model: {shared}" in check_sizes(
        model(**sizes), OptionContext(tp_sizes=tp_sizes)
    )


@pytest.mark.parametrize(
    ("tp_sizes", "sizes", "line"),
    [
        (
            (2, 5, 2),
            {"num_attention_heads": 3, "ffn_hidden_size": 21},
            "--num-attention-heads 3, --ffn-hidden-size 21: stages 0, 2 have TP 2, which does not divide them; "
            "TP sizes that divide this model: 1, 3",
        ),
        (
            (1, 4),
            {"group_query_attention": True, "num_query_groups": 3},
            "--num-query-groups 3: stage 1 has TP 4, which is neither a divisor nor a multiple of it; TP sizes that "
            "divide this model: 1, 3, 6, 12",
        ),
    ],
)
def test_sizes_that_a_stage_cannot_cut(tp_sizes: tuple[int, ...], sizes: dict[str, object], line: str) -> None:
    assert line in check_sizes(model(**sizes), OptionContext(tp_sizes=tp_sizes))


@pytest.mark.parametrize(
    ("tp_sizes", "sizes"),
    [
        ((3, 1, 2), {}),
        # Without the switch the number of query groups, 1 by default, has no meaning.
        ((1, 4), {"num_query_groups": 3}),
        # One group is a divisor of every size, and 2 groups are spread over 4 ranks.
        ((2, 4), {"group_query_attention": True, "num_query_groups": 2}),
        # Only the ends hold a vocabulary.
        ((2, 3, 2), {"padded_vocab_size": 256}),
        ((1, 4), {"seq_length": 50}),
    ],
)
def test_sizes_that_every_stage_can_cut(tp_sizes: tuple[int, ...], sizes: dict[str, object]) -> None:
    assert check_sizes(model(**sizes), OptionContext(tp_sizes=tp_sizes)) == ()


def test_experts_are_cut_by_sizes_of_their_own() -> None:
    """Experts that are not cut do not ask for a size that stages share."""
    sizes = model(num_experts=4, moe_ffn_hidden_size=30, sequence_parallel=True, seq_length=8)
    assert check_sizes(sizes, OptionContext(tp_sizes=(4, 2), etp_sizes=(1, 1), ep_sizes=(4, 2))) == ()
    (line,) = check_sizes(sizes, OptionContext(tp_sizes=(4, 2), etp_sizes=(1, 1), ep_sizes=(1, 3)))
    said = "--num-experts 4: stage 1 has EP 3, which does not divide it; EP sizes that divide this model: 1, 2, 4"
    assert line == said
    (line,) = check_sizes(model(num_experts=None), OptionContext(tp_sizes=(4, 2), ep_sizes=(1, 2)))
    assert "the model has no experts" in line
    (line,) = check_sizes(sizes, OptionContext(tp_sizes=(1, 1), dp_sizes=(1, 2), is_split=True))
    assert line.endswith("use --vtp-dp-mode multiplex")


def test_sequence_is_cut_by_context_parallelism_too() -> None:
    context = OptionContext(tp_sizes=(2, 2), cp_sizes=(2, 2))
    (first, second) = check_sizes(model(sequence_parallel=True, seq_length=50), context)
    assert "stage 0" in first and "stage 1" in second
    assert first.endswith("stage 0 has CP 2, so 4 must divide it; use 48 or 52")
    assert check_sizes(model(sequence_parallel=True, seq_length=52), context) == ()


def test_sequence_is_checked_against_every_stages_context_parallelism() -> None:
    context = OptionContext(tp_sizes=(2, 1, 1), cp_sizes=(1, 2, 3))
    (line,) = check_sizes(model(seq_length=52), context)
    assert line == "--seq-length 52: stage 2 has CP 3, so 6 must divide it; use 48 or 60"
    assert check_sizes(model(seq_length=60), context) == ()
    assert not OptionContext(tp_sizes=(1, 1), cp_sizes=(1, 2)).is_uniform


tp_lists = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple)


@settings(max_examples=200)
@given(tp_sizes=tp_lists, value=st.integers(1, 400))
@pytest.mark.parametrize("attribute", ["num_attention_heads", "ffn_hidden_size"])
def test_accepted_exactly_when_every_stage_divides(attribute: str, tp_sizes: tuple[int, ...], value: int) -> None:
    context = OptionContext(tp_sizes=tp_sizes)
    lines = check_sizes(SimpleNamespace(**{attribute: value}), context)
    assert stages_in(lines) == [stage for stage, size in enumerate(tp_sizes) if value % size]
    for line in lines:
        assert sizes_in(line) == [size for size in range(1, 65) if value % size == 0]


@settings(max_examples=200)
@given(tp_sizes=tp_lists, groups=st.integers(1, 24), per_group=st.integers(1, 6))
def test_query_groups_accepted_exactly_as_megatron_does(tp_sizes: tuple[int, ...], groups: int, per_group: int) -> None:
    context, heads = OptionContext(tp_sizes=tp_sizes), groups * per_group
    args = SimpleNamespace(group_query_attention=True, num_query_groups=groups, num_attention_heads=heads)

    def is_shared(size: int) -> bool:
        return groups % size == 0 or size % groups == 0

    lines = check_sizes(args, context)
    of_groups = [line for line in lines if f"--num-query-groups {groups}:" in line]
    assert stages_in(of_groups) == [stage for stage, size in enumerate(tp_sizes) if not is_shared(size)]
    for line in lines:
        assert sizes_in(line) == [size for size in range(1, 65) if heads % size == 0 and is_shared(size)]
        for size in sizes_in(line):
            assert check_sizes(args, OptionContext(tp_sizes=(size,))) == ()


def stages_in(lines: Sequence[str]) -> list[int]:
    """The stages that the lines name, ascending."""
    found = [re.search(r"stages? ([\d, ]+) ha(?:s|ve) ", line) for line in lines]
    return sorted(int(number) for one in found if one for number in one[1].split(", "))


def sizes_in(line: str) -> list[int]:
    """The sizes that a line names as a way out."""
    return [int(number) for number in line.rsplit(": ", 1)[1].split(", ")]


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        ({"attention": {"n_heads_in_group": 4}}, ["layer 1: query groups 3"]),
        ({"attention": {"num_query_groups": 8}, "mlp": {"ffn_hidden_size": 10}}, ["layer 1: feed-forward size 10"]),
        ({"attention": {"replace_with_linear": True}}, []),
        ({"ffn": {"ffn_mult": 1.5}}, []),
    ],
)
def test_layers_of_a_file_on_all_stages(block: dict[str, object], lines: list[str]) -> None:
    text = json.dumps({"hidden_size": 64, "num_attention_heads": 12, "block_configs": [block]})
    args = SimpleNamespace(heterogeneous_layers_config_encoded_json=text)
    assert check_layer_file(args, UNEQUAL) == (), "Megatron ignores it"
    args.heterogeneous_layers_config_path = "/no/such/file"
    found = check_layer_file(args, UNEQUAL)
    assert [line.split("; ")[0] for line in found] == [f"--heterogeneous-layers-config-path, {line}" for line in lines]


def test_layer_file_that_cannot_be_read() -> None:
    args = SimpleNamespace(heterogeneous_layers_config_path="/no/such/file")
    (line,) = check_layer_file(args, UNEQUAL)
    assert line.count("; ") == 2 and "/no/such/file" in line
    assert check_layer_file(args, UNIFORM) == ()


def test_evidence_names_tests_that_exist() -> None:
    """A row that refuses nothing names a test function, or says that it was not run."""
    for rule in RULES:
        if rule.verdict.is_refusal or rule.evidence.startswith("not run: "):
            continue
        file, _, function = rule.evidence.partition("::")
        source = (ROOT / file).read_text()
        assert f"def {function}(" in source, f"{rule.option}: {rule.evidence} does not exist"


def test_every_flag_is_declared_once_and_reaches_the_config() -> None:
    """A field of the configuration has one flag and one keyword of apply()."""
    fields = [flag.field for flag in VTP_FLAGS if flag.field is not None]
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(VtpConfig))
    defaults = {flag.keyword: getattr(VtpConfig(), flag.field) for flag in VTP_FLAGS if flag.field is not None}
    signature = inspect.signature(vtp_plugin.apply)
    assert defaults == {name: parameter.default for name, parameter in signature.parameters.items()}
    own = {flag.name for flag in VTP_FLAGS if flag.field is None}
    assert own == {"--vtp-forgive", "--vtp-node", "--vtp-on-loss", "--vtp-site"}
    parser = add_vtp_arguments(argparse.ArgumentParser(add_help=False))
    names = sorted(name for action in parser._actions for name in action.option_strings)
    assert names == sorted(flag.name for flag in VTP_FLAGS)
    assert read_flags(parser.parse_args([]), VtpConfig()) == VtpConfig(), "what is not given changes nothing"


def test_flags_that_do_not_collide_with_megatrons(parser: argparse.ArgumentParser) -> None:
    theirs = {name for action in parser._actions for name in action.option_strings}
    assert not theirs & {flag.name for flag in VTP_FLAGS}


@pytest.mark.needs("flags_of_0_19")
def test_no_flag_of_megatron_is_taken_for_a_misspelt_one(parser: argparse.ArgumentParser) -> None:
    """Plan, draw and simulate take those that matter, refuse words near them, and leave out the others."""
    theirs = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    others = theirs - set(known_flags())
    assert len(others) > 400 and "--adam-beta1" in others
    assert not [(word, near) for word in others if (near := nearest(word, known_flags()))]
    own = {"--world-size", "--json", "--output", "--num-microbatches", "--bridge", "--card-memory", "--nodes"}
    own |= {"--slurm", *(flag.name for flag in VTP_FLAGS)}
    assert set(known_flags()) - own < theirs, "no flag is declared that Megatron does not have"


@pytest.mark.needs("flags_of_0_19")
def test_every_row_of_megatrons_flags_says_what_its_parser_does(parser: argparse.ArgumentParser) -> None:
    """Whether a flag takes a value, the argument that it comes to, and the default that commands take for granted."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    assert len({flag.name for flag in MEGATRON_FLAGS}) == len(MEGATRON_FLAGS)
    for flag in MEGATRON_FLAGS:
        action = actions[flag.name]
        assert action.dest == (flag.renamed or flag.argument), flag.name
        assert (action.nargs == 0) == flag.is_switch, flag.name
        # Megatron sets some only when it validates the arguments.
        if None not in (flag.default, action.default) and flag.default != argparse.SUPPRESS:
            theirs = [action.default] if flag.nargs and not isinstance(action.default, list) else action.default
            assert str(theirs) == str([*flag.default] if flag.nargs else flag.default), flag.name


MASKING = "dataloader_inter_document_masking"


@pytest.mark.parametrize(
    ("flag", "size", "sizes", "words"),
    [
        ("sft", 2, {"tp_sizes": (1, 4)}, "--micro-batch-size 2 with --sft; "),
        (MASKING, 2, {"tp_sizes": (4,)}, ""),
        (MASKING, 1, {"tp_sizes": (1, 4)}, ""),
        (
            MASKING,
            1,
            {"cp_sizes": (1, 2)},
            "--dataloader-inter-document-masking with --vtp-size-list 1,1 --vtp-cp-list 1,2; ",
        ),
        ("sft", None, {"dp_sizes": (1, 2), "is_split": True}, "--sft with --vtp-dp-mode split; "),
        ("sft", None, {"tp_sizes": (1, 2), "is_u_shaped": True}, ""),
        (
            "sft",
            None,
            {"tp_sizes": (1, 2), "is_u_shaped": True, "num_rings": 2},
            "--sft with --vtp-encoder-layer-list; ",
        ),
        ("sft", None, {"cp_sizes": (2, 2), "is_u_shaped": True}, "--sft in a U-shape with context-parallel size 2; "),
    ],
)
def test_packed_samples_are_single_rows_with_one_cp_size(
    flag: str, size: int | None, sizes: dict[str, Any], words: str
) -> None:
    batch: dict[str, Any] = {} if size is None else {"micro_batch_size": size}
    context = OptionContext(**{"tp_sizes": (1, 1), "num_rings": 1, **sizes})
    problems = check_packed(SimpleNamespace(**{flag: True}, **batch), context)
    assert [problem.startswith(words) for problem in problems] == [True] * bool(words)
    assert not check_packed(SimpleNamespace(**batch), context)


MINDSPEED_LORA = {  # as MindSpeed-LLM 26.1.0 parses a command line without any of these flags
    "lora_target_modules": [],
    "lora_load": None,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_modules_to_save": None,
    "lora_register_forward_hook": ["word_embeddings", "input_layernorm"],
    "lora_fusion": False,
    "lora_ckpt_filter": False,
}


@pytest.mark.parametrize(
    ("given_flag", "words"),
    [
        (
            {"lora_target_modules": ["linear_qkv"]},
            "leave it out, or use the plugin's adapters (Megatron 0.19), with --vtp-lora-targets",
        ),
        ({"lora_r": 4}, "--vtp-lora-rank in its place"),
        ({"lora_alpha": 8}, "--vtp-lora-alpha in its place"),
        ({"lora_load": "there"}, "--load in its place"),
        ({"lora_ckpt_filter": True}, "nothing like it is needed"),
        ({"lora_fusion": True}, "nothing like it is needed"),
        ({"lora_register_forward_hook": ["word_embeddings"]}, "nothing like it is needed"),
        ({"lora_modules_to_save": ["output_layer"]}, "leave all else frozen"),
        ({"lora_mixed_training": True}, "PEFT's layers for Megatron"),
        ({}, ""),
    ],
)
def test_adapters_of_mindspeed_are_not_supported_by_name(given_flag: dict[str, object], words: str) -> None:
    """Also beside the plugin's own adapters; a default, which everybody has, says nothing."""
    args = SimpleNamespace(**{**MINDSPEED_LORA, **given_flag})
    for lora in (None, Lora(rank=2, alpha=2, targets=("q_proj",))):
        lines = list(refusals(MINDSPEED_RULES, args, OptionContext(tp_sizes=(1, 2), lora=lora)))
        assert len(lines) == len(given_flag) and all(words in line for line in lines)
        assert all(line.startswith("--" + name.replace("_", "-")) for line, name in zip(lines, given_flag, strict=True))


_PLANNED = ["--vtp-size-list", "1,2", "--vtp-schedule", "planned"]
_LOCAL = ["--transformer-impl", "local"]
PLANS = {
    Verdict.REFUSED_UNEQUAL_DP: ["--vtp-size-list", "1,2", "--vtp-dp-list", "2,1"],
    Verdict.REFUSED_PLANNED: _PLANNED,
    Verdict.REFUSED_SPLIT: [*_PLANNED, "--vtp-split-backward", *_LOCAL],
    Verdict.REFUSED_ADAPTERS: ["--vtp-size-list", "1,2", "--vtp-lora-rank", "2", *_LOCAL],
    Verdict.REFUSED_U_SHAPED: ["--vtp-size-list", "1,2", "--layerwise-disaggregated-training"],
}
"""Flags of a run in which a row of that verdict stops it."""


@pytest.fixture(scope="module")
def plan_parser() -> argparse.ArgumentParser:
    """What ``plan``, ``simulate`` and ``draw`` parse a run's flags by."""
    parser = Parser()
    add_run_flags(parser)
    return parser


@pytest.mark.parametrize("rule", REFUSED_RULES, ids=lambda rule: rule.option)
def test_a_plan_says_no_where_a_run_does(
    parser: argparse.ArgumentParser,
    plan_parser: argparse.ArgumentParser,
    rule: OptionRule,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the line of the run, and without a note that the flag changes nothing."""
    words = [*PLANS.get(rule.verdict, PLANS[Verdict.REFUSED_SPLIT][:2]), *command_line(parser, rule)]
    if "on the cpu platform" in rule.option or rule.versions:
        pytest.skip("a plan knows neither the platform nor the Megatron of the run")
    options, unknown = plan_parser.parse_known_args(words)
    options.argv, options.unknown = words, unknown
    with pytest.raises(ConfigError) as refused:
        read_run(options)
    flag = rule.option.split()[0]
    reasons = [other.reason for other in REFUSED_RULES if other.option == rule.option]
    said = str(refused.value).splitlines()
    assert any(line.startswith(flag) and reason in line for line in said for reason in reasons)
    assert flag not in capsys.readouterr().err


_MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "8", "--vocab-size", "64"]
_MODEL += ["--max-position-embeddings", "8", "--seq-length", "8", "--micro-batch-size", "1", "--global-batch-size", "4"]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--vtp-size-list", "1,2"],
        ["plan", "--have", "2,1"],
        ["simulate", "--vtp-size-list", "1,2"],
        ["search", "--cluster", str(ROOT / "examples/clusters/unequal.toml")],
    ],
    ids=["plan", "have", "simulate", "search"],
)
def test_every_command_for_layouts_says_no(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, *_MODEL, "--use-torch-fsdp2"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("vtp_plugin: error: --use-torch-fsdp2 with --vtp-size-list ")
