"""Every row of the option table that refuses is refused by the path that a run takes."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hosts import host_name
from tests.oracles import megatron_arguments
from tests.unit.test_options import REFUSED_RULES, command_line
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.options.table.rows import CONFIG_RULES
from vtp_plugin.options.table.rule import OptionRule, Verdict
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.session import PlannedRun, Session

MODEL = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "8", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--micro-batch-size", "1", "--global-batch-size", "8"),
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Megatron's parser


@pytest.fixture(scope="module")
def megatron() -> Any:
    return megatron_arguments()


@pytest.fixture(scope="module")
def parser(megatron: Any) -> argparse.ArgumentParser:
    return megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def start(monkeypatch: pytest.MonkeyPatch, megatron: Any, flags: list[str], sizes: tuple[str, int]) -> None:
    """Parse and validate as one rank of a run does; the store that joins the ranks is left out."""
    from vtp_plugin.patches.training import arguments

    def agree(name: str, prepare: Any, **options: object) -> None:
        prepare()

    def validated(*args: object) -> None:
        raise AssertionError("Megatron's own checks were reached")

    lists, world_size = sizes
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(sys, "argv", ["script.py", "--vtp-size-list", "1,2", *lists.split(), *MODEL, *flags])
    session = Session(VtpConfig(device="cpu"))
    session.platform = SimpleNamespace(name="cpu", backend="gloo")  # type: ignore[assignment]
    monkeypatch.setattr(session.ranks, "agree", agree)
    monkeypatch.setattr(arguments, "open_store", lambda *where: None)
    parse, validate = arguments.records(session, load_host(host_name()), lambda: None)
    try:
        validate.build(validated)(parse.build(megatron.parse_args)())
    finally:
        if session.close_log is not None:
            session.close_log()


@pytest.mark.parametrize("rule", REFUSED_RULES, ids=lambda rule: rule.option)
def test_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, megatron: Any, parser: argparse.ArgumentParser, rule: OptionRule
) -> None:
    flags = command_line(parser, rule)
    if rule.attribute != "transformer_impl":
        flags += ["--transformer-impl", "local"]
    sizes = ("--vtp-dp-list 1,2", 5) if rule.verdict is Verdict.REFUSED_UNEQUAL_DP else ("", 3)
    if rule.verdict is Verdict.REFUSED_U_SHAPED:
        flags += ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,1", "--num-layers", "3"]
    with pytest.raises(ConfigError) as caught:
        start(monkeypatch, megatron, flags, sizes)
    lines = str(caught.value).split(" | ")
    ways_out = tuple(f"; {other.way_out}" for other in REFUSED_RULES if other.option == rule.option)
    assert any(line.startswith(rule.option) and line.endswith(ways_out) for line in lines), lines


def test_a_run_without_such_an_option_reaches_megatrons_checks(monkeypatch: pytest.MonkeyPatch, megatron: Any) -> None:
    with pytest.raises(AssertionError, match="Megatron's own checks were reached"):
        start(monkeypatch, megatron, ["--transformer-impl", "local"], ("", 3))


UNEQUAL_CONFIG_RULES = [rule for rule in CONFIG_RULES if rule.verdict is Verdict.REFUSED_UNEQUAL]


@pytest.mark.parametrize("rule", UNEQUAL_CONFIG_RULES, ids=lambda rule: rule.option)
def test_a_first_step_is_refused(monkeypatch: pytest.MonkeyPatch, rule: OptionRule) -> None:
    from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format

    session = Session(VtpConfig(size_list=(1, 2), device="cpu"))
    session.platform = SimpleNamespace(name="cpu", backend="gloo")  # type: ignore[assignment]
    session.plan(world_size=3, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    monkeypatch.setattr(PlannedRun, "check_model_config", lambda *arguments: None)
    monkeypatch.setattr(session, "agree_on_formats", lambda read: read())
    names = ("virtual_pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    config = SimpleNamespace(finalize_model_grads_func=None, **dict.fromkeys(names), **{rule.attribute: True})
    with pytest.raises(ConfigError, match=f"{rule.option} with --vtp-size-list 1,2; .*{rule.way_out}"):
        tensor_format(session, config)
