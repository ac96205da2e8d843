"""The lines of a rank that waits at start-up."""

from __future__ import annotations

import time

import pytest

from vtp_plugin.runtime.health import startup_waiting
from vtp_plugin.runtime.health.startup_waiting import WaitingLines, poll
from vtp_plugin.util import log


def test_a_line_after_ten_seconds_and_then_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(log, "warning", said.append)
    environment = {"MASTER_ADDR": "10.8.0.1", "MASTER_PORT": "29511", "LOCAL_RANK": "0"}
    lines = WaitingLines(600.0, lambda: "rank 3 at start", environment)
    when_s = []
    for second in range(200):
        now_s[0] = float(second)
        num = len(said)
        lines.say()
        when_s += [second] * (len(said) - num)
    assert when_s == [10, 70, 130, 190]
    assert said[1] == ("start-up: waiting for rank 3 at start; they meet at 10.8.0.1:29511; waited 70 s, 530 s left")


def test_one_rank_of_each_machine_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", said.append)
    for local_rank in ("0", "1", "2"):
        environment = {"LOCAL_RANK": local_rank, "VTP_FIRST_WAITING_LINE_S": "0"}
        poll(lambda: False, 0.05, lines=WaitingLines(600.0, lambda: "rank 3", environment))
    assert len(said) == 1


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a terminal: what two writes say, another rank may break."""
    writes: list[bytes] = []
    monkeypatch.setattr(startup_waiting.os, "write", lambda fd, text: writes.append(text))
    startup_waiting.report(3, "a reason\nwith two lines")
    assert writes == [b"[vtp rank 3] error: a reason with two lines\n"]
