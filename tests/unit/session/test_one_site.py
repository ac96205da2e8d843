"""A run of one site pays nothing for figures of what crosses between sites: no count, no counter, no place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtp_plugin.config import VtpConfig
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm import work
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.health.store import ClockOffset
from vtp_plugin.session import Session
from vtp_plugin.session.planned_run import Start
from vtp_plugin.trace.stretches import Cause

PLAIN = VtpConfig(size_list=(1, 2), timing=True)
U_SHAPE = VtpConfig(size_list=(1, 2), timing=True, layerwise_disaggregated=True, num_layer_list=(1, 1, 2))
NUM_BYTES = 24


def one_rank(lines: list[dict[str, Any]]) -> Any:
    """What a start asks of the ranks, for rank 0 alone; its lines are added to a list."""

    def share(line: dict[str, Any], combine: Any, *, kind: Any) -> str:
        lines.append(line)
        return combine([line])

    offset = ClockOffset(at_s=0.0, offset_s=0.0, error_s=0.0)
    return SimpleNamespace(name_run=lambda: "run", compare_clocks=lambda: offset, share_reports=share)


def step_line(config: VtpConfig) -> tuple[dict[str, Any], bool]:
    """Give what rank 0 tells the others of a step with one message, and whether the message's size was asked for."""
    session, lines, asked = Session(config, platform=CpuPlatform("of the test")), list[dict[str, Any]](), list[int]()
    session.plan(world_size=3, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp")
    start, recorder = Start(), Recorder(CpuPlatform("of the test"))

    def message() -> Iterator[torch.Tensor]:
        asked.append(0)
        yield torch.zeros(NUM_BYTES // 4)

    start.open_records(session.planned, 0, one_rank(lines), recorder)
    start.begin_step()
    with recorder.span(Cause.SEND, "boundary 0->1, forward, microbatch 0"):
        recorder.add_bytes(message())
    if start.timing is None:
        return {}, bool(asked)
    assert start.timing.report().sites == ()  # one rank is at one site
    return lines[0], bool(asked)


@pytest.mark.parametrize("config", [PLAIN, U_SHAPE], ids=["plain", "u-shape"])
@pytest.mark.parametrize("sites", [None, ("here", "here")])
def test_one_site_records_nothing_of_sites(
    monkeypatch: pytest.MonkeyPatch, config: VtpConfig, sites: tuple[str, ...] | None
) -> None:
    # The kernel is not asked either: whoever reads these fails.
    monkeypatch.setattr(work, "_COUNTERS", None)
    monkeypatch.setattr(work, "_BOOT", None)
    line, is_asked = step_line(replace(config, sites=sites))
    assert not is_asked
    assert (line["site"], line["network"]) == ("", "") and "num_resent" not in line
    assert [len(entry) for entry in line["done"]] == [4]


@pytest.mark.parametrize("config", [PLAIN, U_SHAPE], ids=["plain", "u-shape"])
def test_two_sites_do(config: VtpConfig) -> None:
    line, is_asked = step_line(replace(config, sites=("edge", "cloud")))
    assert is_asked and line["site"] == "edge"
    assert [entry[4] for entry in line["done"]] == [NUM_BYTES]


def test_without_timing_or_trace_nobody_listens() -> None:
    assert step_line(replace(U_SHAPE, timing=False, sites=("edge", "cloud"))) == ({}, False)
