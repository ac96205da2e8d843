"""Nothing of a file runs, and no file is a trap: who reads what, by the syntax trees; and the reader of all others."""

from __future__ import annotations

import ast
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.import_rules import ROOT
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.typed_json import inside, open_file, parse_json, problem_of, read_bytes, read_json, read_toml

FOLDERS = ("vtp_plugin", "patches", "examples", "scripts", "benchmarks", "tests")
PRODUCT = ("vtp_plugin", "patches")
# Of these a test may do what it likes with files that it has written itself.
_OWN = {
    "tests/support/checkpoints.py": "a checkpoint that the test has made",
    "tests/multiproc/faults/kill_trial.py": "what a run of the test has saved",
    "tests/unit/checkpoint/test_reshard.py": "a checkpoint that the test has made",
    "tests/support/pool.py": "answers of the test's own workers",
    "tests/support/pool_worker.py": "calls of the test's own pool",
    "tests/support/hostile_files.py": "a checkpoint that the test has made",
    "tests/multiproc/jobs/script_job.py": "results of a process that the test has started",
    "tests/multiproc/hooks/leak_watch.py": "what a rank of the test hands to torch",
    "tests/unit/checkpoint/test_mm_trees.py": "trees and a checkpoint that the test has made",
    "tests/unit/checkpoint/test_traps.py": "an index that the test has made",
    "tests/unit/checkpoint/test_plain_values.py": "shows what torch makes of it",
    "tests/unit/checkpoint/test_show_and_verify.py": "an index that the test has made",
    "tests/multiproc/checkpoint/test_saved_names.py": "an index that the test has made",
    "tests/multiproc/sites/test_parts.py": "an index that the test has made",
}
# Texts that other ranks of the run have put into its store, and files that have readers of their own.
_STORE = ("runtime/health/", "elastic/", "runtime/step/", "trace/sums.py", "training/global_vars.py")
_MODELS = ("checkpoint/hf/", "checkpoint/tools/writer.py", "checkpoint/tools/export_hf.py", "checkpoint/save/saving.py")
_LOADERS = (
    *("pickle.load", "pickle.loads", "dill.load", "dill.loads", "joblib.load", "marshal.load", "marshal.loads"),
    *("yaml.load", "yaml.unsafe_load", "shelve.open", "torch.hub.load"),
)
_READERS = {"vtp_plugin/util/typed_json.py", "vtp_plugin/checkpoint/format/safe_pickle.py"}


def problems(source: str) -> Iterator[str]:
    """Yield what may run what a file holds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute) and _last(node) in ("Unpickler", "_Unpickler"):
            yield "Unpickler"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is(node.value, False):
            yield "allow_pickle"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {each.arg: each.value for each in node.keywords}
        if name in _LOADERS:
            yield name
        if name in ("torch.load", "torch.jit.load") and not _is(options.get("weights_only"), True):
            yield name


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _files(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith("vtp_plugin/patches/"):  # a link to the folder beside
                yield name, path.read_text()


def test_nothing_runs_what_a_file_holds() -> None:
    found = [
        f"{name}: {each}"
        for name, text in _files(*FOLDERS)
        if name not in (*_READERS, *_OWN)
        for each in problems(text)
    ]
    assert found == []


def test_files_that_are_excepted_need_it() -> None:
    texts = dict(_files(*FOLDERS))
    assert [
        name for name in (*_OWN, "vtp_plugin/checkpoint/format/safe_pickle.py") if not [*problems(texts[name])]
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=is_safe)",
        "pickle.load(file)",
        "np.load(file, allow_pickle=True)",
        "class A(pickle.Unpickler): pass",
        "yaml.load(text)",
    ],
)
def test_what_may_run_is_found(source: str) -> None:
    assert len([*problems(source)]) == 1


def test_one_reader_of_json_and_toml() -> None:
    """So that depth, size and kind of file are limited everywhere."""
    found: list[str] = []
    for name, text in _files(*PRODUCT):
        if name in _READERS or any(part in name for part in (*_STORE, *_MODELS)):
            continue
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        found += [f"{name}: {call}" for call in calls if call in ("json.load", "json.loads") or "tomllib" in call]
    assert found == []


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _socket(path: Path) -> None:
    # The name of a socket is at most 107 bytes long, and pytest's folders have longer ones.
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


TRAPS = {"FIFO": _fifo, "folder": Path.mkdir, "device": _device, "loop": _loop, "socket": _socket, "large": _large}


@pytest.fixture
def in_time() -> Iterator[None]:
    """End a test that waits for ever."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("read", [read_bytes, read_json, read_toml])
def test_what_is_no_file_is_an_error_of_the_system(tmp_path: Path, trap: str, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "a"
    TRAPS[trap](path)
    with pytest.raises(OSError):
        read(path)
    if trap not in ("large", "loop"):
        assert f"a {trap}" in str(problem_of(path))
        with pytest.raises(OSError):
            open_file(path)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 100_000, "1" * 100_000, "9" * 25, "1e999", "-Infinity", "{", ""]
)
def test_what_is_no_small_json_is_a_value_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "a").write_text(f"a = {text}")
    with pytest.raises(ValueError):
        read_toml(tmp_path / "a")


@settings(max_examples=60, deadline=None)
@given(st.text() | st.binary())
def test_any_text_is_read_or_a_value_error(text: str | bytes) -> None:
    try:
        parse_json(text)
    except ValueError as error:
        assert not isinstance(error, ConfigError)


PARTS = st.sampled_from(["..", ".", "", "a", "b.pt", "link", "\n", "\x1b[2J", "x" * 300])


@settings(max_examples=200, deadline=None)
@given(st.lists(PARTS, max_size=4).map("/".join))
def test_no_name_leads_out(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "named"
    folder.mkdir(exist_ok=True)
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to("/etc")
    try:
        found = inside(folder, name)
    except ValueError:
        return
    assert Path(os.path.realpath(found)).is_relative_to(os.path.realpath(folder)) and name.isprintable()
