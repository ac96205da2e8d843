"""Objects between sites: what may cross comes back as it was, and nothing that a stranger writes does anything."""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import struct
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.comm import plain_data
from vtp_plugin.runtime.comm.plain_data import ObjectError, PlainData


class Colour(enum.Enum):
    """An enumeration of the table."""

    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Plan:
    """A data class of the table, which would act if it were called."""

    name: str
    parts: list[Any]
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.name == "called":
            raise AssertionError


class Caller(NamedTuple):
    """A named tuple of the table."""

    message: str
    rank: int


class Counts:
    """A class of the table whose objects have attributes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass
class Stranger:
    """One that is not in it."""

    value: int = 0


DATA = PlainData((Colour, Plan, Caller, Counts), lambda error: f"{type(error).__name__} at site edge")
VALUES: list[Any] = [
    None,
    [True, 1, -(1 << 200), 1.5, float("inf"), "text", b"\x00\x1b", (), {"a": [1]}, {1, 2}, frozenset({3})],
    {("key", (0, 1)): (torch.Size([2, 3]), slice(None, 3))},
    [torch.float32, torch.bfloat16, torch.strided, torch.contiguous_format],
    collections.OrderedDict([("b", 1), ("a", 2)]),
    {Caller("here", 1): Counts(3)},
    Plan("plan", [Plan("inner", [slice(1, 2)], Colour.BLUE)]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_and_entries_of_the_table_cross(value: Any) -> None:
    found = DATA.read(DATA.write(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_and_arrays_cross(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    found = DATA.read(DATA.write({"tensor": tensor}))["tensor"]
    assert found.dtype == dtype and torch.equal(found, tensor)
    array = numpy.full(shape, 7, dtype="uint32")
    again, number = DATA.read(DATA.write([array, array.dtype.type(7)]))
    assert again.dtype == array.dtype and (again == array).all() and number == 7
    assert DATA.read(DATA.write(io.BytesIO(b"state"))).read() == b"state"


def test_of_an_error_the_type_crosses() -> None:
    """Torch tells all ranks of a checkpoint about an error of one; the text and the lines stay at their site."""
    try:
        raise ValueError("sample 4711")
    except ValueError as error:
        data = DATA.write((error, traceback.extract_tb(error.__traceback__)))
    assert b"4711" not in data and b"test_plain_data" not in data
    error, lines = DATA.read(data)
    assert (
        isinstance(error, PeerError) and str(error) == "ValueError at site edge" and lines == traceback.StackSummary()
    )


@pytest.mark.parametrize("value", [Stranger(), Stranger, os.system, len, numpy.array([None]), range(3), lambda: None])
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^an object of [\w.]+ would cross between sites; .*; .*--vtp-sites"):
        DATA.write([value])


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def _entry(key: Any, state: Any) -> bytes:
    """Write an entry as :class:`PlainData` does, with any content."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return (key, state) if obj is marker else None

    marker = object()
    file = io.BytesIO()
    Pickler(file, protocol=4).dump([marker])
    return file.getvalue()


def _nested(num_levels: int, *, is_doubled: bool) -> bytes:
    value: list[Any] = []
    for _ in range(num_levels):
        value = [value, value] if is_doubled else [value]
    return pickle.dumps(value)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a function": (pickle.dumps(_Calls(os.system, "true")), "names posix.system"),
    "eval": (pickle.dumps(_Calls(eval, "1")), "names builtins.eval"),
    "a class": (pickle.dumps(Stranger()), "names tests.unit.runtime.test_plain_data.Stranger"),
    "a class of the table": (pickle.dumps(Plan("plan", [])), "names tests.unit.runtime.test_plain_data.Plan"),
    "an old pickle": (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
    "an extension": (pickle.EXT1 + b"\x01.", "cannot be read"),
    "a memo of 64 GiB": (b"\x80\x02K\x01r" + struct.pack("<I", 2**32 - 1) + b"a.", "cannot be read"),
    "an array of 2**40": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "cannot be read"),
    "bytes of 2**40": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", "cannot be read"),
    "a long number": (pickle.dumps(1 << 4096), "cannot be read"),
    "a few bytes, many parts": (_nested(60, is_doubled=True), "has more than 1000 parts"),
    "a deep list": (_nested(100, is_doubled=False), "or a part below 64 others"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "or a part below 64 others"),
    "an escape": (pickle.dumps({"\x1b[2J": 1}), r"holds the text '\x1b[2J', with characters"),
    "a new line": (pickle.dumps(["a\nb"]), "holds the text 'a b', with characters"),
    "a long text": (pickle.dumps("x" * 70000), "holds a text of 70000 characters; 65536 at most"),
    "a field of its own": (_entry(f"{__name__}.Plan", {"__class__": 1}), "has '__class__', which is no field of Plan"),
    "a class of its own": (_entry(f"{__name__}.Counts", {"__class__": 1}), "has '__class__', which is no field"),
    "no fields": (_entry(f"{__name__}.Plan", [1]), "cannot be read"),
    "no colour": (_entry(f"{__name__}.Colour", "GREEN"), "cannot be read"),
    "no kind": (_entry("os.system", "true"), "is of the kind 'os.system', which is unknown here"),
    "a kind that is a list": (_entry(["x"], 1), "cannot be read"),
    "a short tensor": (_entry("tensor", ("torch.float32", (1 << 40,), b"1234")), "holds 4 bytes for a tensor of (1099"),
    "a tensor of two minus": (_entry("tensor", ("torch.uint8", (-2, -2), b"1234")), "holds 4 bytes for a tensor"),
    "a tensor of no type": (_entry("tensor", ("torch.strided", (1,), b"1")), "cannot be read"),
    "an array of objects": (_entry("array", ("|O", (1,), bytes(8))), "holds an array of '|O'"),
    "a persistent id": (b"Ptext\n.", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "the end of it": (b"\x80\x04", "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_stranger_sends_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "_MOST_PARTS", 1000)
    data, problem = HOSTILE[name]
    with pytest.raises(ObjectError, match="^an object from another site ") as caught:
        DATA.read(data)
    line = str(caught.value)
    assert problem in line and line.isprintable() and len(line) < 500
    assert caught.value.shared == line, "the other site may read it: it has written it"


def test_a_class_of_the_table_is_filled_and_not_called() -> None:
    (found,) = DATA.read(_entry(f"{__name__}.Plan", {"name": "called", "parts": []}))
    assert found.name == "called"


def test_the_longest_object_is_far_from_what_runs_send() -> None:
    """A checkpoint of a stage with 10,000 tensors is the longest that ranks tell each other of."""
    parts = [Plan(f"decoder.layers.{number}.mlp.linear_fc1.weight", [slice(0, 4096)]) for number in range(10_000)]
    assert len(DATA.write(parts)) * 8 < plain_data.MOST_BYTES
