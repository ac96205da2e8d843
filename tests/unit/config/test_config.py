"""The options: reading a list, checking values, merging keyword arguments with flags."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.config.flag import parse_bytes, parse_cp_list, parse_dp_list, parse_size_list
from vtp_plugin.config.resolve import choose_cp_sizes, merge, read_schedule_options
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.plan.schedule.order.placement import plain_placement

SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=8)


@given(SIZES)
def test_text_and_sequence_give_the_same(sizes: list[int]) -> None:
    text = " , ".join(str(size) for size in sizes)
    assert parse_size_list(text) == parse_size_list(sizes) == tuple(sizes)


def test_the_flag_offers_the_strategies_that_say_what_they_do() -> None:
    (flag,) = (flag for flag in flags_of_fields() if flag.field == "transport")
    helps = {name: strategy.help for name, strategy in STRATEGIES.items() if strategy.help is not None}
    assert flag.choices == ("auto", *helps)
    assert flag.metavar == "|".join(flag.choices)
    assert all(f"{name} {what}" in flag.help for name, what in helps.items())


def test_auto_stays() -> None:
    assert parse_size_list("auto") == "auto"


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ("1,0", "0"),
        ("1,-2", "-2"),
        ("1,x", "x"),
        ("1,,2", ""),
        ("", ""),
        ("1,2,", ""),
        ("1.5,2", "1.5"),
        ("1;2", "1;2"),
        ([1, 0], "0"),
        ([1, True], "True"),
        ([1, 2.0], "2.0"),
        ([1, None], "None"),
        (["auto", 1], "auto"),
    ],
)
def test_the_wrong_entry_is_named(value: object, entry: str) -> None:
    with pytest.raises(ConfigError, match="not a positive whole number; write one tensor-parallel size per") as caught:
        parse_size_list(value)  # type: ignore[arg-type]
    assert f"entry {entry!r}," in str(caught.value)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="is empty; give one"):
        parse_size_list([])


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"device": "tpu"}, "'tpu' is unknown; use one of auto, cuda, npu, cpu"),
        ({"transport": "tcp"}, "'tcp' is unknown; use one of auto, rank0, sliced"),
        ({"timeout_s": 0.0}, "0.0 s must be positive"),
        ({"timeout_s": -1.0}, "-1.0 s must be positive"),
        ({"timeout_s": float("nan")}, "nan s must be positive"),
        ({"timeout_s": float("inf")}, "inf s must be positive and finite"),
        ({"data_parallel_size": 0}, "size 0 must be at least 1"),
    ],
)
def test_values_out_of_range(values: dict[str, object], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        VtpConfig(**values)  # type: ignore[arg-type]


def test_flags_that_were_not_given_change_nothing() -> None:
    base = VtpConfig(size_list=(1, 2), device="cpu", timeout_s=5.0, force=True, data_parallel_size=2)
    assert merge(base, dict.fromkeys(["size_list", "device", "transport", "timeout_s", "force"])) == base


@given(st.none() | SIZES.map(tuple), st.none() | SIZES.map(tuple))
def test_one_place_wins_two_must_agree(told: tuple[int, ...] | None, flag: tuple[int, ...] | None) -> None:
    base = VtpConfig(size_list=told)
    if told is not None and flag is not None and told != flag:
        with pytest.raises(ConfigError, match="apply\\(\\) was given size_list=.*; give it in one place"):
            merge(base, {"size_list": flag})
    else:
        assert merge(base, {"size_list": flag}).size_list == (told if flag is None else flag)


def test_the_contradiction_names_both_values() -> None:
    with pytest.raises(ConfigError, match="given timeout_s=5.0, the command line says 6.0"):
        merge(VtpConfig(timeout_s=5.0), {"timeout_s": 6.0})


def test_merged_flags_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="unknown; use one of"):
        merge(VtpConfig(), {"device": "tpu"})


def test_cp_list() -> None:
    assert parse_cp_list("1,2") == parse_cp_list([1, 2]) == (1, 2)
    assert VtpConfig(size_list=(1, 4), cp_list=(2, 1)).cp_list == (2, 1)
    assert choose_cp_sizes((1, 2), 1, num_stages=2) == choose_cp_sizes((1, 2), 2, num_stages=2) == (1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_cp_list("1,0"), "vtp_cp_list '1,0' has the entry '0', .* one context-parallel size per"),
        (lambda: parse_cp_list([]), "vtp_cp_list is empty"),
        (lambda: VtpConfig(size_list=(1, 4), cp_list=(1,)), "vtp_cp_list 1 has 1 entries, the size list has 2 stages"),
        (
            lambda: VtpConfig(size_list="auto", cp_list=(1, 2)),
            "vtp_cp_list 1,2 with vtp_size_list 'auto'; write the TP size",
        ),
        (
            lambda: choose_cp_sizes((1, 2), 4, num_stages=2),
            "--context-parallel-size 4 contradicts --vtp-cp-list 1,2; .* the largest size of the list, 2",
        ),
        (lambda: parse_dp_list("1,x"), "vtp_dp_list '1,x' has the entry 'x', .* one data-parallel size per"),
        (lambda: VtpConfig(size_list=(1, 4), dp_list=(1,)), "vtp_dp_list 1 has 1 entries, .* one data-parallel size"),
        (lambda: VtpConfig(size_list="auto", dp_list=(1, 2)), "vtp_dp_list 1,2 with vtp_size_list 'auto'"),
        (lambda: VtpConfig(dp_list=(1, 2), data_parallel_size=2), "data-parallel size 2 and vtp_dp_list 1,2 say the"),
        (lambda: VtpConfig(dp_mode="both"), "dp mode 'both' is unknown; use one of multiplex, split"),  # type: ignore[arg-type]
    ],
)
def test_bad_lists(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_dp_list() -> None:
    assert parse_dp_list("1,2") == parse_dp_list([1, 2]) == (1, 2)
    config = VtpConfig(size_list=(1, 4), dp_list=(1, 2))
    assert config.has_unequal_dp and config.has_planned_schedule
    equal = VtpConfig(size_list=(1, 4), dp_list=(2, 2), dp_mode="split")
    assert not equal.has_unequal_dp and not equal.has_planned_schedule


def test_a_threshold_is_for_auto() -> None:
    with pytest.raises(ConfigError, match="--vtp-transport-threshold 1000 with --vtp-transport "):
        VtpConfig(transport="sliced", transport_threshold_bytes=1000)
    with pytest.raises(ConfigError, match="'1 kB' is not a number of bytes; write 262144, 256KiB or 4MiB"):
        parse_bytes("1 kB")


def test_costs_of_a_pipeline_that_is_no_u_are_for_split_backwards() -> None:
    """They are read once it is known how many chunks a stage has; before that a run may start."""
    split = VtpConfig(size_list=(1, 2), schedule="planned", split_backward=True, costs=("forward_ms=1,3",))
    assert read_schedule_options(split, 2, None).costs is None
    costs = read_schedule_options(split, 2, None, fixed=plain_placement(2)).costs
    assert costs is not None and costs.forward == (1.0, 3.0)
    with pytest.raises(ConfigError, match="forward_ms has 2 entries"):
        read_schedule_options(split, 3, None, fixed=plain_placement(3))
    whole = VtpConfig(size_list=(1, 2), schedule="planned", costs=("forward_ms=1,3",))
    with pytest.raises(ConfigError, match="is for a U or split backwards"):
        read_schedule_options(whole, 2, None)
