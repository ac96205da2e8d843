"""What ranks compare follows from the options: each says whether ranks may differ in it, and none is forgotten."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.config.flag import ComparisonRule, Flag, FlagGroup, declare
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.runtime.health.startup import find_difference
from vtp_plugin.session.ranks import state_request, state_run

LAYOUT = PipelineLayout.from_sizes((1, 2), world_size=3)
U_SHAPED: dict[str, Any] = {"layerwise_disaggregated": True}
# For every option another value than its default, in the options that it needs.
CHANGES: dict[str, dict[str, Any]] = {
    "size_list": {"size_list": (1, 2)},
    "stages": {"size_list": "auto", "stages": (1, 2)},
    "cp_list": {"cp_list": (1, 2)},
    "dp_list": {"dp_list": (1, 2)},
    "ep_list": {"ep_list": (1, 2)},
    "etp_list": {"etp_list": (1, 2)},
    "data_parallel_size": {"data_parallel_size": 2},
    "device": {"device": "cpu"},
    "force": {"force": True},
    "layerwise_disaggregated": U_SHAPED,
    "num_layer_list": {**U_SHAPED, "num_layer_list": (1, 2, 1)},
    "encoder_layer_list": {**U_SHAPED, "encoder_layer_list": (1, 2, 1)},
    "transport": {"transport": "sliced"},
    "transport_threshold_bytes": {"transport_threshold_bytes": 1024},
    "dp_mode": {"dp_mode": "split"},
    "bridges": {"bridges": "extended"},
    "schedule": {"schedule": "planned"},
    "split_backward": {"split_backward": True, "schedule": "planned"},
    "in_flight": {"in_flight": (3, 2)},
    "costs": {"costs": ("latency_ms=20", "mbit=5")},
    "replan_share": {"replan_share": 0.5},
    "load_newest_valid": {"load_newest_valid": True},
    "keep_checkpoints": {"keep_checkpoints": 2},
    "lora_rank": {"lora_rank": 4},
    "lora_alpha": {"lora_rank": 4, "lora_alpha": 8.0},
    "lora_dropout": {"lora_rank": 4, "lora_dropout": 0.1},
    "lora_targets": {"lora_rank": 4, "lora_targets": ("q_proj",)},
    "lora_layers": {"lora_rank": 4, "lora_layers": ("0:1",)},
    "lora_save_base": {"lora_rank": 4, "lora_save_base": True},
    "sites": {"sites": ("edge", "cloud")},
    "share_errors": {"share_errors": True},
    "link_is_protected": {"link_is_protected": True},
    "edge_seed": {"edge_seed": "shared"},
    "audit": {"audit": "audit.jsonl"},
    "record_crossing": {"record_crossing": "crossed"},
    "timeout_s": {"timeout_s": 5.0},
    "log_level": {"log_level": "DEBUG"},
    "trace": {"trace": "logs"},
    "trace_steps": {"trace_steps": (4, 5)},
    "timing": {"timing": True},
}
STATED = {
    "size_list": "None on rank 0 and 1,2 on rank 1",
    "in_flight": " on rank 0 and 3,2 on rank 1",
    "costs": " on rank 0 and latency_ms=20 mbit=5 on rank 1",
    "transport": "auto on rank 0 and sliced on rank 1",
    "trace": "False on rank 0 and True on rank 1",
    "trace_steps": "2-21 on rank 0 and 4-5 on rank 1",
    "timeout_s": "600.0 on rank 0 and 5.0 on rank 1",
}
FROM_LAYOUT = {"size_list", "cp_list", "dp_list", "ep_list", "etp_list"}


def statements(field: str, *, at_start: bool) -> tuple[dict[str, object], dict[str, object]]:
    """What one rank states that has the other value of an option, beside one that has its default."""
    changed = VtpConfig(**CHANGES[field])
    without = dataclasses.replace(changed, **{field: getattr(VtpConfig(), field)})
    if at_start:
        return state_request(without), state_request(changed)
    return state_run(without, LAYOUT, "cpu"), state_run(changed, LAYOUT, "cpu")


def test_every_option_says_whether_ranks_may_differ() -> None:
    fields = [field.name for field in dataclasses.fields(VtpConfig)]
    assert sorted(fields) == sorted(CHANGES), "give every option a value here"
    for flag in flags_of_fields():
        assert isinstance(flag.compared, ComparisonRule) and (flag.compared.name is None) == bool(
            flag.compared.reason
        ), flag
    assert all(flag.help for flag in flags_of_fields())
    names = [flag.compared.name for flag in flags_of_fields() if flag.compared and flag.compared.name]
    assert len(set(names)) == len(names)
    with pytest.raises(TypeError):
        declare(FlagGroup.WHERE, "auto", metavar="a field whose first argument is forgotten")  # type: ignore[call-arg]


def test_what_ranks_may_differ_in() -> None:
    own = {flag.field for flag in flags_of_fields() if flag.compared and flag.compared.name is None}
    assert own == {"data_parallel_size", "device", "share_errors", "edge_seed", "audit", "record_crossing", "log_level"}


@pytest.mark.parametrize("flag", flags_of_fields(), ids=lambda flag: flag.field)
def test_a_difference_is_named_or_allowed(flag: Flag) -> None:
    assert flag.field is not None and flag.compared is not None
    name = flag.compared.name
    for at_start in (True, False):
        here, there = statements(flag.field, at_start=at_start)
        is_seen = name is not None and (flag.compared.at_start if at_start else flag.field not in FROM_LAYOUT)
        assert [key for key in here if here[key] != there[key]] == ([name] if is_seen else [])
        found, text = find_difference({0: here, 1: there})
        assert found == (name if is_seen else None)
        if is_seen and flag.field in STATED:
            assert text.startswith(f"ranks disagree: {name} is {STATED[flag.field]}; ")


def test_sizes_are_stated_as_the_layout_has_them() -> None:
    other = PipelineLayout.from_sizes((2, 1), world_size=3)
    here, there = state_run(VtpConfig(), LAYOUT, "cpu"), state_run(VtpConfig(), other, "cpu")
    assert (here["vtp_size_list"], there["vtp_size_list"]) == ("1,2", "2,1")
    assert {flag.compared.name for flag in flags_of_fields() if flag.field in FROM_LAYOUT and flag.compared} <= {*here}
