"""Commands on a terminal: colour, tables and bars where rich is installed; plain bytes wherever there is none."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from tests.rules.import_rules import ROOT, sources
from tests.support.checkpoints import by_name, make_model
from tests.support.hosts import PYTHON_PATH
from tests.support.pool import forked_python
from vtp_plugin.cli import main
from vtp_plugin.cli.terminal import TextTable, on_standard_output, progress, show

MARKUP = "[bold red]x[/bold red] [link=file:///etc]y[/link] :smile:"
EVIL = f"{MARKUP} \x1b[31m"
PLAIN = EVIL.replace("\x1b", "\\x1b")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*[39][0-7](?:;\d+)*m")
# Every command that writes text and needs no run; with the words of a user's mistake, too.
COMMANDS = (
    "plan --vtp-size-list 1,4,4",
    "plan --vtp-size-list 1,2 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 5 "
    "--max-position-embeddings 8 --seq-length 4 --micro-batch-size 1",
    "plan --have 8,6,8 --num-layers 32 --num-attention-heads 32",
    "plan --vtp-size-list 1,4,4 --json",
    "plan --vtp-size-list 1;2",
    "draw --vtp-size-list 1,2",
    "simulate --vtp-size-list 1,4,4",
    "simulate --vtp-size-list 1,4,4 --num-microbatches 64 --json",
    "simulate --bridge vision=1,1,2 language=1,2,2",
    f"search --cluster {ROOT}/examples/clusters/unequal.toml --num-layers 8 --hidden-size 1024 --num-attention-heads 8 "
    "--vocab-size 1000 --max-position-embeddings 512 --seq-length 512 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16",
    "checkpoint show a",
    "checkpoint show a --verbose",
    "checkpoint verify a",
    "checkpoint verify a --json",
    "checkpoint diff a b",
    "checkpoint reshard --from a --to c",
    "trace none",
    "profile --help",
)
PIPED = """\
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
commands, is_hidden = json.loads(sys.argv[1]), sys.argv[2] == "hidden"
if is_hidden:
    sys.meta_path.insert(0, Blocked())
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        del sys.modules[name]
else:
    import rich
from vtp_plugin.cli import main
for words in commands:
    try:
        main(words)
    except SystemExit as left:
        print(left.code)
    print("-" * 9, flush=True)
"""


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with colours, to be put in the place of standard output."""
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "240")
    return Terminal()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)


def make_checkpoints(folder: Path) -> None:
    """Write two that differ in a tensor whose name is what rich would obey."""
    shapes = {"embedding.weight": (8, 4), MARKUP: (2, 4)}
    by_name(folder / "a", make_model(shapes=shapes))
    other = make_model(shapes=shapes)
    other.weights[MARKUP] += 1.0
    by_name(folder / "b", other)


def test_what_is_piped_is_the_same_without_rich(tmp_path: Path) -> None:
    """To the byte, whatever the environment says of colours; --json, too."""
    pytest.importorskip("rich")
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    script = tmp_path / "piped.py"
    script.write_text(PIPED)
    said: list[tuple[str, str]] = []
    for kind in ("shown", "hidden"):
        folder = tmp_path / kind / "work"
        folder.mkdir(parents=True)
        make_checkpoints(folder)
        words = json.dumps([command.split() for command in COMMANDS])
        done = forked_python(str(script), words, kind, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        said.append((done.stdout, done.stderr))
    assert said[0] == said[1]
    assert said[0][0].count("-" * 9) == len(COMMANDS) and "\x1b" not in "".join(said[0])


def on_pty(*words: str, cwd: Path, **environment: str) -> str:
    """Run a command on a terminal of its own, and return what it shows."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    own, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "vtp_plugin", *words],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": PYTHON_PATH, "TERM": "xterm-256color", "COLUMNS": "120", **environment},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(own, 1 << 16):
                shown += part
        except OSError:  # how Linux says that nobody writes any more
            pass
    os.close(own)
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_has_colours_unless_told_otherwise(tmp_path: Path) -> None:
    """The busiest stage of a step; an error."""
    pytest.importorskip("rich")
    step = ("simulate", "--vtp-size-list", "1,4,4", "--vtp-costs", "forward_ms=1,2,1")
    shown = on_pty(*step, cwd=tmp_path)
    (busiest,) = [line for line in shown.splitlines() if COLOUR.search(line)]
    assert without_escapes(busiest).split()[0] == "1"
    assert "microbatches in flight" in without_escapes(shown)
    error = on_pty("plan", "--vtp-size-list", "1,x", cwd=tmp_path)
    assert COLOUR.search(error) and without_escapes(error).startswith("vtp_plugin: error: ")
    for told in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert not COLOUR.search(on_pty(*step, cwd=tmp_path, **told))
    assert "\x1b" not in on_pty("plan", "--vtp-size-list", "1,x", cwd=tmp_path, TERM="dumb")


def test_texts_of_others_stay_literal(terminal: Terminal, tmp_path: Path) -> None:
    """No markup, no links, no emoji, no characters that a terminal obeys: in lines, tables and bars."""
    make_checkpoints(tmp_path)
    with redirect_stdout(terminal):
        main(["checkpoint", "show", str(tmp_path / "a"), "--verbose"])
        with pytest.raises(SystemExit):
            main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    shown = without_escapes(terminal.getvalue())
    assert f"  {MARKUP}: float32 [2, 4]" in shown and f"  {MARKUP}: at most " in shown
    with redirect_stdout(terminal), on_standard_output():
        show([EVIL, TextTable(lines=[], header=["name", EVIL], rows=[["a", EVIL]], marked=0)])
        with progress(2, EVIL) as tell:
            tell(2, EVIL)
    new = terminal.getvalue()
    assert EVIL not in new and "\x1b[31m\x1b" not in new and "\x1b]8" not in new
    folded = re.sub(r"\s+", "", without_escapes(new))
    assert folded.count(re.sub(r"\s+", "", PLAIN)) >= 4


def test_a_bar_is_shown_and_goes_away(terminal: Terminal, tmp_path: Path) -> None:
    """Of all that reads or writes a whole checkpoint; a problem that is found on the way stands above it."""
    make_checkpoints(tmp_path)
    a, b, c = (str(tmp_path / name) for name in "abc")
    for words, line in {
        ("verify", a): f"{a} is intact: ",
        ("diff", a, b): "weight: 2 tensors, 1 differ",
        ("reshard", "--from", a, "--to", c): f"wrote {c}",
    }.items():
        before = len(terminal.getvalue())
        with redirect_stdout(terminal), suppress(SystemExit):
            main(["checkpoint", *words])
        shown = terminal.getvalue()[before:]
        assert f"{words[0]} " in without_escapes(shown) and "━" in shown, shown
        assert without_escapes(shown.rpartition("\x1b[2K")[2]).strip().startswith(line), shown
        assert f"\x1b[3{3 if words[0] == 'diff' else 2}m{line}" in shown, "its style"


def test_lines_have_the_style_of_what_they_say(terminal: Terminal) -> None:
    with redirect_stdout(terminal), on_standard_output():
        print("verdict: fine", "verdict: 1 problem, see above", "warning: odd", "  verdict: fine", sep="\n")
        print("stage 0 does not fit: 3 GiB\nx")
        print("no end of a line", end="")
    good, bad, odd, inside, large, other, last = terminal.getvalue().split("\n")
    assert (good, bad) == ("\x1b[32mverdict: fine\x1b[0m", "\x1b[1;31mverdict: 1 problem, see above\x1b[0m")
    assert odd.startswith("\x1b[33m") and large.startswith("\x1b[1;31m")
    assert (inside, other, last) == ("  verdict: fine", "x", "no end of a line")


def test_only_one_module_knows_rich() -> None:
    names = [name for name, source in sources() if re.search(r"^\s*(from|import) rich\b", source, re.MULTILINE)]
    assert names == ["vtp_plugin.cli.terminal"]
