"""Every row of the option tables that refuses is refused by the path that a run takes, on every host.

Where the parser of this Megatron lacks an option, such as one of MindSpeed's, its value is put where a parser puts it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.expected.of_megatron import megatron_arguments
from tests.rules.import_rules import ROOT
from tests.support.hosts import host_name
from tests.unit.host.test_options import SPELLINGS, VALUES, find_action
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules import table
from vtp_plugin.host.rules.rule import (
    CALL_RULES,
    EXPERT_RULES,
    LAYER_RULES,
    RING_RULES,
    VERSION_RULES,
    OptionContext,
    OptionRule,
    ULayers,
    Verdict,
)
from vtp_plugin.host.rules.table.rows import CONFIG_RULES, RULES, STEP_RULES
from vtp_plugin.host.rules.table.rows_architecture import OLDER_RULES
from vtp_plugin.host.rules.table.rows_kernels import MINDSPEED_RULES
from vtp_plugin.host.versions import HOSTS
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import records_at
from vtp_plugin.session import Pipeline, Session

MODEL = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "8", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--micro-batch-size", "1", "--global-batch-size", "8"),
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Megatron's parser


def refusing(rules: Iterable[OptionRule]) -> list[OptionRule]:
    return [rule for rule in rules if rule.verdict.is_refusal]


OF_ARGUMENTS = refusing((*RULES, *OLDER_RULES, *MINDSPEED_RULES))
# What a run of MindSpeed has besides, in the rows that ask whether there is one.
MINDSPEED = {"attention_mask_type": "causal"}
CANDIDATES = (True, "8", 8, ["8"], 1, "on", 2.0)
PLATFORM: Any = SimpleNamespace(name="cpu", backend="gloo")


@pytest.fixture(scope="module")
def megatron() -> Any:
    return megatron_arguments()


@pytest.fixture(scope="module")
def parser(megatron: Any) -> argparse.ArgumentParser:
    return megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def start(
    monkeypatch: pytest.MonkeyPatch,
    megatron: Any,
    flags: list[str],
    sizes: tuple[str, int],
    put: dict[str, object] | None = None,
    host: str = "",
) -> None:
    """Parse and validate as one rank of a run does; the store that joins the ranks is left out."""
    from vtp_plugin.patches.training import arguments

    def agree(name: str, prepare: Any, **options: object) -> None:
        prepare()

    def validated(*args: object) -> None:
        raise AssertionError("Megatron's own checks were reached")

    def parsed(*args: Any, **options: Any) -> argparse.Namespace:
        found = megatron.parse_args(*args, **options)
        vars(found).update(put or {})
        return found

    lists, world_size = sizes
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(sys, "argv", ["script.py", "--vtp-size-list", "1,2", *lists.split(), *MODEL, *flags])
    session = Session(VtpConfig(device="cpu"), platform=PLATFORM)
    monkeypatch.setattr(session.ranks, "agree", agree)
    monkeypatch.setattr(arguments, "open_store", lambda *where: None)
    parse, validate = records_at(session, load_host(host or host_name()), Moment.COMMAND_LINE)[:2]
    try:
        validate.build(validated)(parse.build(parsed)())
    finally:
        session.close_log()


def family_for(rule: OptionRule) -> str:
    """Name a family that a rule is about: the one that is here, else the first."""
    names = [host.name for host in HOSTS if rule.is_about(host.first)]
    return host_name() if host_name() in names else names[0]


def asked_for(parser: argparse.ArgumentParser, rule: OptionRule) -> tuple[list[str], dict[str, object], object]:
    """Give the flags that ask for a rule's option, what stands among the arguments without flags, and the value."""
    if rule in MINDSPEED_RULES and rule.option == "--context-parallel-size":
        return ["--context-parallel-size", "2"], MINDSPEED, "2"
    if rule.option == "--swap-layer-input in an interleaved pipeline":
        return ["--num-layers-per-virtual-pipeline-stage", "1"], {**MINDSPEED, rule.attribute: True}, True
    if rule.option in SPELLINGS:
        return SPELLINGS[rule.option], {}, True
    flag, *value = rule.option.split()
    action = find_action(parser, rule)
    if action is None or rule in MINDSPEED_RULES:
        put = value_that_applies(rule, value[0] if value else None)
        return [], MINDSPEED | {rule.attribute: put}, put
    if action.nargs == 0:
        return [flag], {}, True
    words = value or VALUES.get(flag, ["8"])
    return [flag, *words], {}, True if action.type is bool else words[0]


def value_that_applies(rule: OptionRule, wanted: str | None) -> object:
    """Give a value as a parser would leave it, with which the rule finds its option in use."""
    context = OptionContext(tp_sizes=(1, 2), cp_sizes=(2, 2))
    for value in (wanted,) if wanted else CANDIDATES:
        if rule.applies(SimpleNamespace(**MINDSPEED, **{rule.attribute: value}), context):
            return value
    raise AssertionError(f"no value switches {rule.option} on")


@pytest.mark.parametrize("rule", OF_ARGUMENTS, ids=lambda rule: rule.option)
def test_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, megatron: Any, parser: argparse.ArgumentParser, rule: OptionRule
) -> None:
    flags, put, given = asked_for(parser, rule)
    if rule.attribute != "transformer_impl":
        flags = [*flags, "--transformer-impl", "local"]
    sizes = ("--vtp-dp-list 1,2", 5) if rule.verdict is Verdict.REFUSED_UNEQUAL_DP else ("", 3)
    if "--context-parallel-size" in flags:
        sizes = ("", 6)
    if rule.verdict is Verdict.REFUSED_U_SHAPED:
        flags += ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,1", "--num-layers", "3"]
    if rule.verdict is Verdict.REFUSED_PLANNED:
        flags += ["--vtp-schedule", "planned"]
    if rule.verdict is Verdict.REFUSED_SPLIT:
        flags += ["--vtp-schedule", "planned", "--vtp-split-backward"]
    if rule.verdict is Verdict.REFUSED_ADAPTERS:
        flags += ["--vtp-lora-rank", "2"]
    with pytest.raises(ConfigError) as caught:
        start(monkeypatch, megatron, flags, sizes, put, family_for(rule))
    lines = str(caught.value).split(" | ")
    # An option that is refused for two reasons is named once, with the first that applies.
    ends = {f"; {other.reason}; {other.way_out}" for other in OF_ARGUMENTS if other.option == rule.option}
    (line,) = [line for line in lines if line.startswith(rule.option) and any(line.endswith(end) for end in ends)]
    value, _, _ = line.split("; ")
    assert isinstance(given, bool | list) or " " in rule.option or value.startswith(f"{rule.option} {given}")


def test_a_run_without_such_an_option_reaches_megatrons_checks(monkeypatch: pytest.MonkeyPatch, megatron: Any) -> None:
    with pytest.raises(AssertionError, match="Megatron's own checks were reached"):
        start(monkeypatch, megatron, ["--transformer-impl", "local"], ("", 3))


def planned_session(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Session:
    """Give a session as before its first step, with no other rank to compare with."""
    session = Session(VtpConfig(size_list=(1, 2), device="cpu", **options), platform=PLATFORM)
    session.plan(world_size=3, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    plan = session.planned.pipeline(num_chunks=1)
    pipeline = Pipeline(plan=plan, stage_group=None, pipeline_groups=(), agree=lambda state: None)
    monkeypatch.setattr(Pipeline, "stage", 0)
    monkeypatch.setattr(pipeline, "agree_on_formats", lambda read: read())
    session.pipelines.add(pipeline)
    return session


def model_config(**fields: object) -> SimpleNamespace:
    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    return SimpleNamespace(finalize_model_grads_func=None, **sizes, **fields)


def in_use(rule: OptionRule) -> dict[str, object]:
    return {rule.attribute: rule.option.partition(" ")[2] or True}


@pytest.mark.parametrize("rule", refusing(CONFIG_RULES), ids=lambda rule: rule.option)
def test_a_first_step_is_refused(monkeypatch: pytest.MonkeyPatch, rule: OptionRule) -> None:
    from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format

    options, situation = {
        Verdict.REFUSED_PLANNED: ({"schedule": "planned"}, "a planned schedule"),
        Verdict.REFUSED_SPLIT: ({"schedule": "planned", "split_backward": True}, "--vtp-split-backward"),
    }.get(rule.verdict, ({}, "--vtp-size-list 1,2"))
    session = planned_session(monkeypatch, **options)
    with pytest.raises(ConfigError) as caught:
        tensor_format(session, session.running, model_config(**in_use(rule)))
    assert str(caught.value) == f"{rule.option} with {situation}; {rule.reason}; {rule.way_out}"


@pytest.mark.parametrize("rule", refusing(STEP_RULES), ids=lambda rule: rule.option)
def test_a_planned_step_is_refused(monkeypatch: pytest.MonkeyPatch, rule: OptionRule) -> None:
    from vtp_plugin.patches.core.pipeline_parallel.planned_step import run_step
    from vtp_plugin.patches.core.pipeline_parallel.schedules import PipelineBackend

    session = planned_session(monkeypatch, schedule="planned")
    backend = PipelineBackend(session=session, host=load_host(host_name()))
    step = {"forward_step_func": print, "data_iterator": None, "num_microbatches": 2, "seq_length": 8}
    chunk = SimpleNamespace(config=model_config())
    with pytest.raises(ConfigError) as caught:
        run_step(backend, model=[chunk], micro_batch_size=1, **step, **in_use(rule))
    assert str(caught.value) == f"{rule.option} with a planned schedule; {rule.reason}; {rule.way_out}"


def refuse_experts(monkeypatch: pytest.MonkeyPatch, megatron: Any, rule: OptionRule) -> None:
    flags = ["--num-experts", "4", "--transformer-impl", "local", "--moe-z-loss-coeff", "1e-3"]
    flags += ["--calculate-per-token-loss"] if rule.attribute == "calculate_per_token_loss" else []
    sizes = ("--vtp-cp-list 1,2", 5) if "context-parallel" in rule.option else ("", 3)
    start(monkeypatch, megatron, flags, sizes, host=family_for(rule))


def refuse_rings(monkeypatch: pytest.MonkeyPatch, megatron: Any, rule: OptionRule) -> None:
    flags = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,1", "--num-layers", "3"]
    start(monkeypatch, megatron, [*flags, rule.option, "1,1,1"], ("", 3), host=family_for(rule))


def refuse_a_call(monkeypatch: pytest.MonkeyPatch, megatron: Any, rule: OptionRule) -> None:
    from vtp_plugin.patches.core import parallel_state

    session = Session(VtpConfig(size_list=(1, 2), device="cpu"))
    parallel_state._plan(session, load_host(family_for(rule)), {rule.option: 2}, 3)


def refuse_layers(monkeypatch: pytest.MonkeyPatch, megatron: Any, rule: OptionRule) -> None:
    from vtp_plugin.patches.core.models.common.language_module import language_module

    told = None if rule.option == "a U without num_layer_list" else (1, 1, 1)
    session = Session(VtpConfig(size_list=(1, 2), layerwise_disaggregated=True, num_layer_list=told))
    is_other = rule.option == "config.pipeline_model_parallel_layout of another model"
    found = SimpleNamespace(layout=[]) if is_other else None
    config = SimpleNamespace(num_layers=4, pipeline_model_parallel_layout=found)
    language_module._setup(session, load_host(family_for(rule)), print, SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("refuse", "rule"),
    [
        *((refuse_experts, rule) for rule in EXPERT_RULES),
        *((refuse_rings, rule) for rule in RING_RULES),
        *((refuse_a_call, rule) for rule in CALL_RULES),
        *((refuse_layers, rule) for rule in LAYER_RULES),
    ],
    ids=lambda value: value.option if isinstance(value, OptionRule) else value.__name__,
)
def test_a_family_refuses(
    monkeypatch: pytest.MonkeyPatch, megatron: Any, refuse: Callable[..., None], rule: OptionRule
) -> None:
    """Where only some versions refuse, a run with such a version goes through the same place."""
    seen: list[OptionRule] = []
    say = OptionRule.say
    monkeypatch.setattr(OptionRule, "say", lambda self, *rest: seen.append(self) or say(self, *rest))
    with pytest.raises(ConfigError) as caught:
        refuse(monkeypatch, megatron, rule)
    assert rule in seen and "{" not in str(caught.value)
    assert rule.way_out.replace("that of the list", "'Et|t|tL|'") in str(caught.value)


@pytest.mark.parametrize("rule", [rule for rule in VERSION_RULES if rule.versions], ids=lambda rule: rule.option)
def test_no_other_family_refuses(rule: OptionRule) -> None:
    about = {host.name for host in HOSTS if rule.is_about(host.first)}
    assert about and about < {host.name for host in HOSTS}
    context = OptionContext(tp_sizes=(1, 2), cp_sizes=(1, 2), num_rings=2, forced=True)
    given = SimpleNamespace(**{"moe_z_loss_coeff": 1e-3, "calculate_per_token_loss": True, rule.attribute: 2})
    args = ULayers(layers=None) if rule in LAYER_RULES else given
    for host in HOSTS:
        refused = rule.refuses(args, replace(context, version=host.first))
        assert refused <= (host.name in about)


def test_ring_exchange_of_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts on megatron.core alone have no flag."""
    from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format

    session = planned_session(monkeypatch)
    with pytest.raises(ConfigError, match=r"^config\.use_ring_exchange_p2p; .* no ring exchange; leave it out$"):
        tensor_format(session, session.running, model_config(use_ring_exchange_p2p=True))


def rules_of(test: Callable[..., None]) -> list[OptionRule]:
    """Give the rows that a test here is run with."""
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
    return [value[-1] if isinstance(value, tuple) else value for value in values]


def all_refusals() -> dict[tuple[str, str], OptionRule]:
    """Give all rows that refuse, in whatever module of the table they stand, by what the documents print of them."""
    modules = [
        importlib.import_module(f"{table.__name__}.{info.name}") for info in pkgutil.iter_modules(table.__path__)
    ]
    tuples = [value for module in modules for value in vars(module).values() if isinstance(value, tuple)]
    rules = refusing(rule for rows in tuples for rule in rows if isinstance(rule, OptionRule))
    return {(rule.option, rule.verdict.value): rule for rule in rules}


def without_test(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    tests = (test_a_run_is_refused, test_a_first_step_is_refused, test_a_planned_step_is_refused, test_a_family_refuses)
    seen = {(rule.option, rule.verdict.value) for test in tests for rule in rules_of(test)}
    return sorted(set(rows) - seen)


def test_every_row_that_refuses_has_a_test_that_sees_it() -> None:
    rows = all_refusals()
    assert len(rows) > 100 and without_test(rows) == []
    another = replace(next(iter(rows.values())), option="--added-without-a-test")
    assert without_test([(another.option, another.verdict.value)]) == [(another.option, another.verdict.value)]


@pytest.mark.parametrize("name", ["megatron-options.md", "ascend-options.md"])
def test_every_line_of_the_documents_that_refuses_has_a_test_that_sees_it(name: str) -> None:
    text = (ROOT / "docs/reference" / name).read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (not supported[^|]*?) \|", text, flags=re.MULTILINE)
    assert rows and without_test(rows) == []
