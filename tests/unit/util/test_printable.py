"""No text of others, and no name of a file, gives a terminal an order: in the log, in errors, on standard output."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtp_plugin.cli.main import main
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.message_kind import Bound, BridgeHeaderCodec, Expected
from vtp_plugin.runtime.health.redaction import write_error_file
from vtp_plugin.runtime.health.startup_waiting import report
from vtp_plugin.util import log
from vtp_plugin.util.text import MOST_CHARACTERS, one_line, plain
from vtp_plugin.util.typed_json import ShapeError, read_typed

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\x00\u2028c"


def is_plain(text: str) -> bool:
    return all(character.isprintable() or character in "\n\t" for character in text)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_lines_of_the_log_are_plain(level: int) -> None:
    line = log.format_record(level, f"file {EVIL} is missing", rank=1)
    assert is_plain(line) and "a\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202eb\\x00" in line


@pytest.mark.parametrize("say", [log.info, log.warning, log.error])
def test_a_handler_of_the_script_gets_plain_texts(say: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    logger, handler = logging.getLogger("vtp_plugin"), caplog.handler
    before = [*logger.handlers]
    logger.handlers[:] = [handler]
    try:
        with caplog.at_level(logging.DEBUG, "vtp_plugin"):
            say(EVIL)
    finally:
        logger.handlers[:] = before
    assert caplog.records and all(is_plain(record.getMessage()) for record in caplog.records)


def test_what_ends_a_rank_is_plain(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report(0, EVIL)
    assert is_plain(capfd.readouterr().err)
    path = tmp_path / "error.json"
    write_error_file(EVIL, is_consequence=False, environment={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert is_plain(json.loads(path.read_text())["message"]["message"])


def test_tools_print_names_of_files_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x\x1b[2Jy").mkdir()
    with pytest.raises(SystemExit):
        main(["checkpoint", "show", "x\x1b[2Jy"])
    main(["draw", "--vtp-size-list", "1,2", "--output", "x\x1b[2Jy/z.svg"])
    said = capsys.readouterr()
    assert "x\\x1b[2Jy" in said.err and "x\\x1b[2Jy/z.svg" in said.out
    assert is_plain(said.err) and is_plain(said.out)


def test_a_text_is_cut_before_it_is_copied() -> None:
    assert len(one_line("\x1b" * (8 << 20))) == MOST_CHARACTERS
    assert plain("größer, 大きい\n\t") == "größer, 大きい\n\t"


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (int, "true", "has true, which is no int"),
        (int, "1.0", "has 1.0, which is no int"),
        (int, "9007199254740993", "has 9007199254740993, which is no int"),
        (float, '"1"', 'has "1", which is no float'),
        (bool, "1", "has 1, which is no bool"),
        (str, "null", "has null, which is no str"),
        (tuple[int, int], "[1]", "has 1 entries, not 2"),
        (tuple[int, ...], '{"a": 1}', 'has {"a": 1}, which is no'),
        (dict[int, int], '{"-1": 1}', "has the key '-1', which is no number"),
        (dict[str, dict[str, float]], '{"a": {"b": []}}', "has [] at [a][b], which is no float"),
        (Bound, '{"most": 1}', "has no 'why'"),
        (Bound, '{"most": 1, "why": "x", "__class__": 1}', "has '__class__', which is unknown"),
        (Bound, '{"most": null, "why": "x"}', "has null at [most], which is no int"),
        (str, "x" * 200, "which is no JSON"),
        (str, "[" * 10_000, "which is no JSON (it is nested too deep)"),
    ],
)
def test_json_of_another_shape_is_named(kind: type, text: str, problem: str) -> None:
    with pytest.raises(ShapeError) as caught:
        read_typed(kind, text)
    assert problem in str(caught.value) and len(str(caught.value)) < 300


def test_headers_of_a_bridge_are_bounded() -> None:
    codec = BridgeHeaderCodec(num_units=2, units_a_share=2, own_units=range(2))
    bounds = (Bound(most=100, why="the device"),)
    expected = Expected(dtype="torch.float32", width=None, position="here", sources="rank 0", bounds=bounds)
    assert codec.decode([(5, 4, 2, 3, 0)], expected) == (5, 4, 2, 3)
    for line, problem in {
        (5, 4, 2, 4, 0): r"would send torch.float32 \[5, 4, 2, 4\], 120 elements; 100 at most: the device",
        (5, 4, 1 << 40, 3, 0): "at most: the device",
        (5, 4, -2, 3, 0): r"units of the lengths \[-2, 3\]; none is below 0",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            codec.decode([line], expected)


def test_lengths_of_the_arguments_bound_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them is the way out that the message names."""
    training = pytest.importorskip("megatron.training")
    from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import _most_tokens

    args = SimpleNamespace(seq_length=64, max_position_embeddings=128, micro_batch_size=2, eval_micro_batch_size=3)
    monkeypatch.setattr(training, "get_args", lambda: args)
    assert _most_tokens() == 16 * 128 * 3
    args.max_position_embeddings = 256
    assert _most_tokens() == 16 * 256 * 3
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(micro_batch_size=2))  # as of a file of YAML
    assert _most_tokens() is None
