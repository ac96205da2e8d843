"""Torch makes plain values of a checkpoint only, whatever it is asked for; and what a run may store still loads."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core import rerun_state_machine

from tests.support.checkpoints import by_name, make_model
from tests.support.hostile_files import NAME, Hostile
from vtp_plugin.checkpoint.format.index import INDEX, UntrustedError, read_index
from vtp_plugin.patches.core.dist_checkpointing.serialization import (
    common_of,
    plain_only,
    require_plain,
    require_plain_checkpoint,
)
from vtp_plugin.session import loading


class Kind(enum.Enum):
    """An enumeration of a script."""

    A = 1


class Own:
    """A class of a script, which torch does not know."""


def load(file: Path | io.BytesIO) -> Any:
    """Load as Megatron 0.12 does."""
    with plain_only(file, "it"):
        return torch.load(file, weights_only=False)


def test_what_a_run_stores_is_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "args": argparse.Namespace(kind=Kind.A, path=Path("a"), value=numpy.float64(3), more=types.SimpleNamespace()),
        "rng_state": [{"np_rng_state": numpy.random.get_state(), "random_rng_state": (3, (1, 2), None)}],
        "model": {"w": torch.arange(3.0)},
    }
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pt", weights_only=True)
    before, environment = torch.serialization.get_safe_globals(), dict(os.environ)
    found = load(tmp_path / "a.pt")
    assert found["args"] == state["args"] and torch.equal(found["model"]["w"], state["model"]["w"])
    numpy.testing.assert_array_equal(found["rng_state"][0]["np_rng_state"][1], state["rng_state"][0]["np_rng_state"][1])
    assert {*map(id, torch.serialization.get_safe_globals())} == {*map(id, before)} and dict(os.environ) == environment


@pytest.mark.parametrize("is_file", [True, False])
def test_what_may_run_does_not(tmp_path: Path, is_file: bool) -> None:
    written = io.BytesIO()
    torch.save([Hostile(tmp_path / "marker")], written)
    (tmp_path / "a.pt").write_bytes(written.getvalue())
    with pytest.raises(UntrustedError, match=f"it names {NAME}, which torch does not take for harmless"):
        load(tmp_path / "a.pt" if is_file else io.BytesIO(written.getvalue()))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"(S'{}'\niposix\nmkdir\n.",
        b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c{}\x85R.",
        b"cposix\nmkdir\n(S'{}'\ntR",  # without an end
    ],
)
def test_a_pickle_that_torch_does_not_follow_is_refused(tmp_path: Path, text: bytes) -> None:
    written = io.BytesIO()
    torch.save([], written)
    marker = str(tmp_path / "marker").encode()
    pickled = text.replace(b"{}", (bytes([len(marker)]) if b"\x93" in text else b"") + marker)
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(tmp_path / "a.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    with pytest.raises(UntrustedError):
        load(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickled)  # as torch wrote files before it had archives
    with pytest.raises(UntrustedError, match="not what torch.save writes"):
        load(tmp_path / "b.pt")
    assert not (tmp_path / "marker").exists()


def test_what_a_script_trusts_is_loaded(tmp_path: Path) -> None:
    """The ways out that the message, and torch, name."""
    torch.save(Own(), tmp_path / "a.pt")
    with pytest.raises(UntrustedError, match="allow what you trust with torch.serialization.add_safe_globals"):
        require_plain(tmp_path / "a.pt", "it")
    with torch.serialization.safe_globals([Own]):  # add_safe_globals, undone
        assert isinstance(load(tmp_path / "a.pt"), Own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert isinstance(load(tmp_path / "a.pt"), Own)


def test_named_tuples_of_megatron_are_loaded(tmp_path: Path) -> None:
    """Its machine that runs a step again stores them."""
    call = rerun_state_machine.Call(rerun_state_machine.Caller("loss", 0), 1)
    torch.save({call: 2}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == {call: 2} == load(io.BytesIO((tmp_path / "a.pt").read_bytes()))


@pytest.fixture
def mindspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module of a package whose classes may keep values."""
    module = types.ModuleType("mindspeed_mm.stored")

    class Config:
        def __init__(self, path: str = "") -> None:
            os.mkdir(path)

    class Filled:
        def __setstate__(self, state: dict[str, str]) -> None:
            os.mkdir(state["path"])

    @dataclass
    class Record:
        a: int = 0

    class Pair(tuple[str, ...]):
        __slots__ = ()

        def __new__(cls, path: str) -> Any:
            os.mkdir(path)
            return super().__new__(cls, (path,))

    for kind in (Config, Filled, Record, Pair):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "mindspeed_mm", types.ModuleType("mindspeed_mm"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module


def test_objects_that_only_keep_values(tmp_path: Path, mindspeed: Any) -> None:
    """MindSpeed-MM stores its configuration in the arguments."""
    config = object.__new__(mindspeed.Config)
    config.a = 3
    torch.save([config, mindspeed.Record(5)], tmp_path / "a.pt")
    found = load(tmp_path / "a.pt")
    assert (found[0].a, found[1].a) == (3, 5)


class Calling:
    """Stores a call."""

    def __init__(self, kind: Any, *args: Any) -> None:
        self._made = kind, args

    def __reduce__(self) -> Any:
        return self._made


def test_objects_that_do_something(tmp_path: Path, mindspeed: Any) -> None:
    """A constructor that is called, or a method that takes the state."""
    filled = object.__new__(mindspeed.Filled)
    filled.path = str(tmp_path / "marker")
    called = [Calling(kind, str(tmp_path / "marker")) for kind in (mindspeed.Config, mindspeed.Pair)]
    for number, value in enumerate([*called, filled]):
        torch.save(value, tmp_path / f"{number}.pt")
        with pytest.raises(UntrustedError, match=r"names mindspeed_mm\.stored\."):
            load(tmp_path / f"{number}.pt")
    assert not (tmp_path / "marker").exists()


def test_an_index_is_read_once_however_often_a_load_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be large, and the reader that runs nothing is slow; one that was written anew is another one."""
    checkpoint, read = by_name(tmp_path / "a", make_model()), []
    monkeypatch.setattr(loading, "read_index", lambda folder: read.append(folder) or read_index(folder))
    session: Any = types.SimpleNamespace(loading=loading.Loading())
    for _ in range(3):
        require_plain_checkpoint(session, checkpoint)
        assert common_of(session, checkpoint) is not None
    assert read == [checkpoint]
    os.utime(checkpoint / INDEX, (1, 1))
    require_plain_checkpoint(session, checkpoint)
    assert read == [checkpoint] * 2
