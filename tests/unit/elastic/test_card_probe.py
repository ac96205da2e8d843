"""A card is tried: what is slow is said to be slow, and only what the card itself does counts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pace import pace
from vtp_plugin.elastic.cards import RankCard, try_card
from vtp_plugin.elastic.failed_cards import MEMORY, forget_error, leave_out, note_error, reported_error
from vtp_plugin.elastic.progress import RUN_FOLDER_VARIABLE

# Found before the real ones; the name of the node says what happens.
SLOW_INTERPRETER = """
import sys, time
if "slow interpreter" in sys.orig_argv:
    time.sleep({delay_s})
"""
TORCH = """
import os, signal, subprocess, sys, time, types
what = sys.argv[2]
print("a banner of a library")
print("a banner of a library", file=sys.stderr)
if what == "slow import":
    time.sleep({delay_s})
if what == "broken import":
    raise ImportError("libtorch.so: cannot allocate memory")
def is_available():
    if what == "hangs":
        time.sleep(600)
    if what == "talks and hangs":
        print("x" * 200000, flush=True)
        time.sleep(600)
    if what == "reports":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if what == "memory is taken":
        raise RuntimeError("CUDA error: out of memory")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leaves a child":
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep({delay_s})"])
    return False
cuda = types.SimpleNamespace(is_available=is_available)
"""


@pytest.fixture
def delay_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Seconds that a process takes to start; the limit of a test of a card is half of them."""
    seconds = 2.0 * pace()
    (tmp_path / "sitecustomize.py").write_text(SLOW_INTERPRETER.format(delay_s=seconds))
    (tmp_path / "torch.py").write_text(TORCH.format(delay_s=seconds))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield seconds


def test_the_clock_measures_the_card(delay_s: float) -> None:
    """Each is tried twice, as in two starts, all at once."""
    limit_s = delay_s / 2
    starved = "untested: its test ended with {}, which says nothing of the device"
    ecc = "CUDA error: uncorrectable ECC error encountered"
    expected = {
        **dict.fromkeys(("slow interpreter", "slow import", "leaves a child"), ("cpu", "")),
        "broken import": ("", starved.format("1 (ImportError: libtorch.so: cannot allocate memory)")),
        "killed": ("", starved.format("-9 (a banner of a library)")),
        "memory is taken": ("", starved.format("1 (RuntimeError: CUDA error: out of memory)")),
        "reports": ("", f"erring: its test ended with 1 (RuntimeError: {ecc})"),
        **dict.fromkeys(("hangs", "talks and hangs"), ("", f"hanging: no answer within {limit_s:g} s")),
    }
    with ThreadPoolExecutor(2 * len(expected)) as threads:
        names = [*expected, *expected]
        found = threads.map(lambda name: try_card("auto", name, 0, limit_s, 30 * delay_s), names)
        for name, result in zip(names, found, strict=True):
            assert result == expected[name], name


def test_a_test_that_does_not_start_is_said_to_be_slow(delay_s: float) -> None:
    begin_s = time.monotonic()
    for _ in range(2):
        why = "slow: its test did not start within 0.2 s (a busy machine or a slow disk)"
        assert try_card("cpu", "slow interpreter", 0, 60.0, 0.2) == ("", why)
    assert time.monotonic() - begin_s < 2 * delay_s


def test_a_process_that_cannot_be_ended_is_left(delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in the driver of a bad card."""
    killed: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("subprocess.Popen.kill", lambda test: killed.append(test))
    begin_s = time.monotonic()
    assert try_card("auto", "hangs", 0, 0.2, 60 * pace()) == ("", "hanging: no answer within 0.2 s")
    assert time.monotonic() - begin_s < 30.0 * pace()
    (test,) = killed
    monkeypatch.undo()
    test.kill()
    test.wait()


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", fails)
    why = "untested: its test could not be started (Resource temporarily unavailable)"
    assert try_card("cpu", "a", 0, 1.0) == ("", why)


HANGS, SLOW, ABSENT = "hanging: no answer within 18 s", "slow: its test did not start within 42 s", "absent: by a test"
UNTESTED, ECC = "untested: its test ended with -9", "erring: uncorrectable ECC error"


class TestMemory:
    """Letters stand for what a node's devices are in a start: good, hanging, slow, untested, absent, erring."""

    WHY = {"g": "", "h": HANGS, "s": SLOW, "u": UNTESTED, "a": ABSENT, "e": ECC, "H": "hanging (why stays at its site)"}

    def cards(self, start: str) -> list[RankCard]:
        return [
            RankCard(node="n", local_rank=number, site="", kind="", why=self.WHY[letter], versions="1")
            for number, letter in enumerate(start)
        ]

    @pytest.mark.parametrize(
        ("starts", "excluded"),
        [
            # All of a node: the node, not its devices.
            (["hhhh", "gggg", "hhhh", "gggg"], []),
            (["ssss", "gggg", "ssss", "gggg"], []),
            (["hhhh", "gggg"] * 5, []),
            (["h", "g", "h", "g"], []),
            # What did not get so far as to be tried counts as no answer; neither does what is not there.
            (["hshu", "gggg", "hhhs", "gggg"], []),
            (["hhha", "ggga", "hhha", "ggga"], []),
            # Slow ones beside good ones.
            (["ssgg", "gggg"] * 3, []),
            (["uggg", "gggg"] * 3, []),
            # One that hangs beside good ones is remembered, and forgiven after two healthy starts in a row.
            (["hggg", "gggg", "hggg", "gggg"], [0]),
            (["Hggg", "gggg", "Hggg", "gggg"], [0]),
            (["hggg", "hggg", "gggg"], []),
            (["hggg", "gggg", "hggg", "gggg", "gggg"], []),
            (["hggg", "gggg", "gggg", "hggg", "gggg"], []),
            (["hggg", "gggg", "sggg", "gggg", "hggg", "gggg"], []),
            (["hhgg", "gggg", "hhgg", "gggg"], [0, 1]),
            # What a device has reported, or that it was not there, is not forgiven.
            (["eggg", "gggg", "gggg", "gggg", "eggg", "gggg", "gggg", "gggg"], [0]),
            (["aggg", "gggg", "gggg", "aggg", "gggg", "gggg", "gggg"], [0]),
            (["eggg", "gggg", "hggg", "gggg"], [0]),
            (["eggg", "gggg", "hggg", "gggg", "gggg"], []),
            (["eggg", "gggg", "hggg", "gggg", "gggg", "eggg", "gggg", "gggg"], [0]),
            # It hung, and reported in the end.
            (["hggg", "eggg", "gggg", "gggg", "eggg", "gggg", "gggg"], [0]),
            (["eggg", "hggg", "gggg", "gggg", "eggg", "gggg", "gggg"], [0]),
            (["eeee", "gggg", "eeee", "gggg", "gggg"], [0, 1, 2, 3]),
        ],
    )
    def test_sequences(self, tmp_path: Path, starts: list[str], excluded: list[int]) -> None:
        for start in starts:
            found = leave_out(self.cards(start), tmp_path)
            # What is bad now is left out with its own reason.
            assert [card.why for card in found if start[card.local_rank] != "g"] == [
                self.WHY[letter] for letter in start if letter != "g"
            ]
        assert [card.local_rank for card in found if card.why.startswith("excluded: ")] == [
            number for number in excluded if starts[-1][number] == "g"
        ]

    def test_an_excluded_device_says_why(self, tmp_path: Path) -> None:
        for start in ("eggg", "gggg", "eggg", "gggg", "hggg", "gggg", "gggg"):
            found = leave_out(self.cards(start), tmp_path)
        said = f"excluded: it failed 2 times, the last time as {ECC}; --vtp-forgive uses it again"
        assert [card.why for card in found] == [said, "", "", ""]

    def test_an_error_in_training_is_not_forgiven(self, tmp_path: Path) -> None:
        environment = {RUN_FOLDER_VARIABLE: str(tmp_path), "VTP_CARD": "n local rank 0"}
        for _ in range(2):
            note_error(RuntimeError("CUDA error: uncorrectable ECC error encountered"), environment)
            for start in ("hh", "gg", "gg", "gg"):  # noted, though the machine is busy just then
                first, *rest = self.cards(start)
                reported = reported_error(tmp_path, "n local rank 0")
                forget_error(tmp_path, "n local rank 0")
                found = leave_out([replace(first, reported=reported), *rest], tmp_path)
        assert [bool(card.why) for card in found] == [True, False]

    @pytest.mark.parametrize(
        ("failures", "why", "starts", "is_used"),
        [
            (2, HANGS, ["gggg"], False),
            (2, HANGS, ["gggg", "gggg"], True),
            (1, HANGS, ["gggg", "gggg", "hggg", "gggg"], True),
            (2, ECC, ["gggg"] * 4, False),
            # Two failures before the last one, of which the file tells nothing: they may have been reported.
            (3, HANGS, ["gggg"] * 4, False),
        ],
    )
    def test_files_of_older_versions(
        self, tmp_path: Path, failures: int, why: str, starts: list[str], is_used: bool
    ) -> None:
        entry = {"failures": failures, "is bad": True, "why": why}
        (tmp_path / MEMORY).write_text(json.dumps({"cards": {"n local rank 0": entry}}))
        for start in starts:
            found = leave_out(self.cards(start), tmp_path)
        assert [bool(card.why) for card in found] == [not is_used, False, False, False]

    def test_nodes_are_judged_apart(self, tmp_path: Path) -> None:
        """A busy node beside one that is well; the single device that hangs there is remembered."""
        other = [replace(card, node="m") for card in self.cards("gh")]
        for start, beside in (("hh", other), ("gg", [replace(card, why="") for card in other])) * 2:
            found = leave_out([*self.cards(start), *beside], tmp_path)
        assert [f"{card.node}{card.local_rank}" for card in found if card.why] == ["m1"]
