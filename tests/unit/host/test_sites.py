"""What may differ between ranks and between sites: the list against Megatron's parser, and what the ranks compare."""

from __future__ import annotations

import argparse

import pytest

from tests.expected.of_megatron import megatron_parser
from vtp_plugin.host.rules.checks.batch import EDGE_ARGUMENTS, LOCAL_ARGUMENTS, shared_arguments

# The last is the folder in which a rank was started, if it is not given.
OF_MINDSPEED = {"mm_data", "mm_model", "mm_tool", "tokenizer_name_or_path", "auto_settings_work_dir"}
LOCAL = {name for names in LOCAL_ARGUMENTS.values() for name in names} - OF_MINDSPEED
EDGE = {name for names in EDGE_ARGUMENTS.values() for name in names}

# What only a Megatron before 0.19 declares.
OLDER = {
    *("tokenizer_metadata", "s3_cache_path", "tiktoken_special_tokens", "tokenizer_special_tokens"),
    *("tokenizer_hf_use_fast", "tokenizer_hf_include_special_tokens", "legacy_tokenizer"),
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_parser()


@pytest.mark.needs("flags_of_0_19")
def test_every_name_is_an_argument_of_megatron(parser: argparse.ArgumentParser) -> None:
    known = {action.dest for action in parser._actions} | {"rank"}
    assert known >= (LOCAL | EDGE) - OLDER
    assert not LOCAL & EDGE


def test_all_tokenizer_options_are_the_edges(parser: argparse.ArgumentParser) -> None:
    (group,) = [group for group in parser._action_groups if group.title == "tokenizer"]
    assert {action.dest for action in group._group_actions} <= LOCAL | EDGE


@pytest.mark.parametrize(
    "name",
    # Names that look like folders or logging, but decide what is computed or which collective operations there are.
    ["no_load_optim", "no_save_rng", "log_interval", "log_params_norm", "kv_lora_rank", "profile", "save_interval"],
)
def test_what_decides_about_computation_is_compared(parser: argparse.ArgumentParser, name: str) -> None:
    assert name in vars(parser.parse_args([]))
    for has_edge in (False, True):
        assert "--" + name.replace("_", "-") in shared_arguments({name: 1}, has_edge=has_edge)


def test_only_a_pipeline_with_an_edge_leaves_out_the_tokenizer() -> None:
    told = {"tokenizer_type": "NullTokenizer", "lr": 0.1, "vtp_size_list": "1,2", "data_path": ["x"]}
    assert shared_arguments(told, has_edge=False) == {"--tokenizer-type": "NullTokenizer", "--lr": 0.1}
    assert shared_arguments(told, has_edge=True) == {"--lr": 0.1}


@pytest.mark.parametrize(("folder", "is_given"), [(None, False), ("anywhere", True)])
def test_whether_a_rank_saves_is_compared(folder: str | None, is_given: bool) -> None:
    """Saving is collective: a rank that does not take part would leave the others waiting."""
    assert shared_arguments({"save": folder}, has_edge=True) == {"whether --save is given": is_given}
    name = "dump-param-to-param-group-map"
    stated = shared_arguments({name.replace("-", "_"): folder}, has_edge=True)
    assert stated == {f"whether --{name} is given": is_given}
