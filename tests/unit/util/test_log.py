"""The plugin's log: one write a record, no line too wide, few ranks that speak, and nothing left behind."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from vtp_plugin.util import log

LOGGER = logging.getLogger("vtp_plugin")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    uninstall = log.install()
    yield
    uninstall()
    # pytest adds handlers of its own to a logger that does not propagate.
    assert not any(type(handler).__module__ == log.__name__ for handler in LOGGER.handlers)
    assert LOGGER.propagate and LOGGER.level == logging.NOTSET


def test_lines_are_cut_between_words_and_errors_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    text = "word " * 80
    log.warning(text)
    *lines, last = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("[vtp] warning: word") and all(line.startswith("[vtp]     word") for line in lines[1:])
    assert max(map(len, [*lines, last])) <= log.WIDTH
    assert sum(line.count("word") for line in [*lines, last]) == 80
    log.error(f"{text}\nand a second line")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("[vtp] error: word") and line.endswith("and a second line")


def test_a_record_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    monkeypatch.setattr(log.os, "write", lambda fd, data: written.append((fd, data)))
    log.info("one\ntwo")
    log.error("three")
    assert written == [(2, b"[vtp] one\n[vtp] two\n"), (2, b"[vtp] error: three\n")]


def test_a_collected_traceback_gets_the_line_of_its_own_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    collected = io.StringIO("traceback")
    collected.seek(0, io.SEEK_END)
    monkeypatch.setattr(sys, "stderr", collected)
    log.error("this rank")
    other = threading.Thread(target=log.error, args=("another thread",))
    other.start()
    other.join()
    assert collected.getvalue() == "traceback[vtp] error: this rank\n"
    assert capfd.readouterr().err == "[vtp] error: another thread\n"


def test_only_reporters_show_what_every_run_says(capfd: pytest.CaptureFixture[str]) -> None:
    log.set_reporter(rank=2, is_reporter=False)
    log.info("hidden")
    log.warning("shown")
    assert capfd.readouterr().err == "[vtp rank 2] warning: shown\n"
    log.set_reporter(rank=2, is_reporter=True)
    log.info("shown")
    log.debug("hidden")
    assert capfd.readouterr().err == "[vtp rank 2] shown\n"
    log.set_level("DEBUG")
    log.set_reporter(rank=3, is_reporter=False)
    log.info("a")
    log.debug("b")
    assert capfd.readouterr().err == "[vtp rank 3] a\n[vtp rank 3] b\n"


def test_a_run_that_shows_everything_has_no_lines_for_the_terminal_alone(capfd: pytest.CaptureFixture[str]) -> None:
    log.to_terminal("text")
    assert not log.is_brief() and capfd.readouterr() == ("", "")


def test_the_root_logger_does_not_repeat_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.StreamHandler()
    logging.getLogger().addHandler(root)
    try:
        log.warning("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert capfd.readouterr().err.count("once") == 1


def test_errors_come_out_before_the_log_is_set_up(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = list(LOGGER.handlers)
    LOGGER.handlers.clear()
    try:
        log.error("early")
    finally:
        LOGGER.handlers.extend(handlers)
    assert capfd.readouterr().err == "[vtp] error: early\n"


def test_a_users_own_configuration_stays(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = list(LOGGER.handlers)
    LOGGER.handlers.clear()
    own = logging.NullHandler()
    LOGGER.addHandler(own)
    try:
        log.install("ERROR")()
        log.set_level("ERROR")
        log.warning("for the user's handler only")
        assert LOGGER.handlers == [own]
    finally:
        LOGGER.handlers[:] = handlers
    assert "only" not in capfd.readouterr().err
