"""Objects between sites: what may cross comes back as it was, and nothing that a stranger writes does anything.

What is made of bytes has two bounds here: the sum that reader and writer count, and, as measured,
twice what is read and 256 bytes a part.
"""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import random
import traceback
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


DATA = PlainData(
    (Colour, Plan, Caller, Counts),
    lambda error: f"{type(error).__name__} at\nsite edge",
    {f"{__name__}.Counts": {"number": int}},
)
VALUES: list[Any] = [
    None,
    [
        *(True, 1, 127, 128, -1, -(1 << 200), (1 << 263) - 1, 1.5, float("inf"), "text", "text", "Größe \U0001f600"),
        *("x" * 65536, b"\x00\x1b", (), {"a": [1]}, {1, 2}, frozenset({3})),
    ],
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


@pytest.mark.parametrize(
    "dtype", [each for each in plain_data._TORCH.values() if isinstance(each, torch.dtype)], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_and_arrays_cross(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = DATA.read(DATA.write({"tensor": tensor}))["tensor"]
    assert found.dtype == dtype and found.tolist() == tensor.tolist() and found.shape == tensor.shape
    assert DATA.read(DATA.write(dtype)) is dtype
    name = str(dtype).removeprefix("torch.")
    array = numpy.ones(shape, name if name in plain_data._PLAIN_TYPES else "uint32")
    again, number = DATA.read(DATA.write([array, array.dtype.type(1)]))
    assert (
        again.dtype == array.dtype == number.dtype and (again == array).all() and again.shape == shape and number == 1
    )
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


UNKNOWN: list[Any] = [
    *(Stranger(), Stranger, os.system, len, range(3), lambda: None, 1j, bytearray(b"a")),
    *(torch.complex64, torch.qint8, torch.sparse_coo, torch.zeros(2, dtype=torch.complex64)),
    *(torch.eye(2).to_sparse(), torch.zeros(2, device="meta"), collections.defaultdict(list), collections.Counter("a")),
    *(numpy.array([None]), numpy.zeros(2, "complex64"), numpy.zeros(2, ">f4"), numpy.longdouble(1), numpy.array("a")),
    *(numpy.array(0, "datetime64[s]"), numpy.zeros(2, "i4,f4"), numpy.ma.masked_array([1])),
]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^an object of [\w.]+ would cross between sites; .*; .*--vtp-sites"):
        DATA.write([value])


def _deep(num_levels: int, *, is_doubled: bool = False) -> Any:
    value: list[Any] = []
    for _ in range(num_levels):
        value = [value, value] if is_doubled else [value]
    return value


def _without(name: str) -> Plan:
    plan = Plan("plan", [])
    object.__delattr__(plan, name)
    return plan


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        pytest.param("a\nb", "holds the text 'a b', with characters", id="lines"),
        pytest.param({"\x1b[2J": 1}, "with characters that a terminal may obey", id="escape"),
        pytest.param("\ud800", "with characters that a terminal may obey", id="surrogate"),
        pytest.param("x" * 65537, "holds a text of 65537 characters; 65536 at most", id="long text"),
        pytest.param(1 << 263, "holds an integer of 264 bits; 263 at most", id="long number"),
        pytest.param(_deep(65), "has a part below 64 others", id="deep"),
        pytest.param(_deep(60, is_doubled=True), "takes more than 1 MiB of memory", id="doubled"),
        pytest.param(bytes(plain_data.MOST_BYTES), "of memory with all its parts", id="long bytes"),
        pytest.param(torch.zeros(1).expand(1 << 40), "holds a tensor of (1099511627776,)", id="expanded"),
        pytest.param(torch.zeros([1] * 33), "of 33 dimensions; 32 at most", id="dimensions"),
        pytest.param(numpy.broadcast_to(numpy.zeros(1), 1 << 30), "holds a tensor of (1073741824,)", id="broadcast"),
        pytest.param({k * (2**61 - 1) for k in range(99)}, "keys that are found in one place", id="one hash"),
        pytest.param(Plan("plan", 7), "has 'int' as parts of Plan", id="another type"),  # pyright: ignore[reportArgumentType]
        pytest.param(_without("name"), "has 'Nothing' as name of Plan", id="no field"),
    ],
)
def test_what_the_other_site_refuses_is_not_sent(value: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MOST_MADE", 1 << 20)
    with pytest.raises(ConfigError, match=r"^an object that would cross between sites .*; the other site") as caught:
        DATA.write(value)
    assert problem in str(caught.value) and str(caught.value).isprintable() and caught.value.shared is None


def _raw(value: Any) -> bytes:
    """Write a value as the product does, whatever it holds; bytes stand as they are, so they can be anything."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        data = value.encode("ascii" if value.isascii() else "utf-32-le", "surrogatepass")
        return _part(plain_data._TEXT if value.isascii() else plain_data._WIDE, len(data)) + data
    if isinstance(value, int):
        length = value.bit_length() // 8 + 1
        return bytes([plain_data._INT + length]) + value.to_bytes(length, "little", signed=True)
    tag = {list: plain_data._LIST, tuple: plain_data._TUPLE, dict: plain_data._DICT}[type(value)]
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return _part(tag, len(value)) + b"".join(map(_raw, parts))


def _part(tag: int, number: int, *values: Any) -> bytes:
    """Begin a part whose number, such as its length, is anything."""
    low = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([tag, *(each | 128 for each in low[:-1]), low[-1]]) + b"".join(map(_raw, values))


def _entry(key: str, state: Any) -> bytes:
    return bytes([plain_data._ENTRY + plain_data._KEYS.index(key)]) + _raw(state)


def _bytes(data: bytes) -> bytes:
    return _part(plain_data._BYTES, len(data)) + data


def _record(name: str, names: Any, *values: Any) -> bytes:
    return _part(plain_data._RECORD, 0, name if "." in name else f"{__name__}.{name}", names, *values)


def _of(key: str, dtype: str, shape: Any, data: bytes) -> bytes:
    return _entry(key, (dtype, shape, _bytes(data)))


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


PICKLES = {
    "a function": pickle.dumps(_Calls(os.system, "true")),
    "eval": pickle.dumps(_Calls(eval, "1"), protocol=2),
    "a class of the table": pickle.dumps(Plan("plan", [])),
    "an old pickle": b"cos\nsystem\n(S'true'\ntR.",
    "a list that doubles": pickle.dumps(_deep(60, is_doubled=True)),
    "empty sets": b"\x80\x04(" + b"\x8f" * (1 << 20) + b"l.",
    "nothing": b"",
}
PLAN = ("name", "parts", "colour")
SIZE = (1 << 62,) * 20_000
HOSTILE: dict[str, tuple[bytes, str]] = {
    "no part": (b"", "cannot be read"),
    "a part that is unknown": (b"\x1f", "cannot be read"),
    "a kind that is unknown": (b"\x3f\x00", "cannot be read"),
    "more than one": (b"\x00\x00", "has 1 bytes behind its end"),
    "an array of 2**40": (_part(plain_data._BYTES, 1 << 40), "has 0 bytes for a part that says 1099511627776"),
    "a list of 2**62": (_part(plain_data._LIST, 1 << 62, 1), "for a part that says 4611686018427387904"),
    "a length of 1000 bits": (bytes([plain_data._LIST]) + b"\xff" * 1000, "has a length of more than 63 bits"),
    "a long number": (b"\x7f" + bytes(63), "holds an integer of 63 bytes; 33 at most"),
    "half a number": (b"\x44\x00", "ends before its last part"),
    "a text that is none": (_part(plain_data._WIDE, 3) + b"abc", "cannot be read"),
    "a text of later": (_part(plain_data._AGAIN, 0), "cannot be read"),
    "a text of before": (_part(plain_data._AGAIN, 1 << 62), "cannot be read"),
    "many parts": (_raw([_raw([])] * 12_000), "takes more than 1 MiB of memory with all its parts"),
    "many empty sets": (_raw([_part(plain_data._SET, 0)] * 12_000), "takes more than 1 MiB of memory"),
    "many tensors": (_raw([_of("tensor", "torch.bool", (), b"\1")] * 2_000), "takes more than 1 MiB of memory"),
    "a deep list": (b"".join([_part(plain_data._LIST, 1)] * 100_000) + b"\0", "has a part below 64 others"),
    "an escape": (_raw({"\x1b[2J": 1}), r"holds the text '\x1b[2J', with characters"),
    "a new line": (_raw(["a\nb"]), "holds the text 'a b', with characters"),
    "a long text": (_raw("x" * 70_000), "holds a text of 70000 characters; 65536 at most"),
    "a key that is a list": (_raw({b"\x08\x00": 1}), "cannot be read"),
    "a key twice": (_raw({b"\x81": 1, b"\x41\x01": 2}), "has a key twice"),
    "one hash": (_raw([{k * (2**61 - 1): 0 for k in range(99)}]), "has more than 16 keys that are found in one place"),
    "one hash of tuples": (_entry("frozenset", [(k * (2**61 - 1),) for k in range(99)]), "found in one place"),
    "one hash in order": (_entry("ordered", [(k * (2**61 - 1), 0) for k in range(99)]), "found in one place"),
    "a field of its own": (_record("Plan", ("__class__",), 1), "has other fields of Plan than name, parts, colour"),
    "a class of its own": (_record("Counts", ("__class__",), 1), "has other fields of Counts than number"),
    "no fields": (_record("Plan", ()), "has other fields of Plan"),
    "fields that are none": (_record("Plan", _raw([[]] * 9)), "has other fields of Plan"),
    "too few fields": (_record("Plan", ("name", "parts"), "a", []), "has other fields of Plan"),
    "a number for a list": (_record("Plan", PLAN, "a", 1, 2), "has 'int' as parts of Plan"),
    "a text for a colour": (_record("Plan", PLAN, "a", [], "RED"), "has 'str' as colour of Plan"),
    "a text for a number": (_record("Caller", ("message", "rank"), "a", "b"), "has 'str' as rank of Caller"),
    "no colour": (_record("Colour", ("name",), "GREEN"), "cannot be read"),
    "no kind": (_record("os.system", ("a",), "true"), "is of the kind 'os.system', which is unknown here"),
    "a kind that is a list": (_part(plain_data._RECORD, 0, [], ()), "cannot be read"),
    "a kind of later": (_part(plain_data._RECORD, 7), "cannot be read"),
    "no type": (_entry("torch", "save"), "cannot be read"),
    "a size of texts": (_entry("size", ("a",)), "cannot be read"),
    "a short tensor": (_of("tensor", "torch.float32", (1 << 20,), b"1234"), "holds 4 bytes for a tensor of (1048576,"),
    "a long tensor": (_of("tensor", "torch.float32", (1 << 40,), b"1234"), "holds a tensor of (1099511627776,)"),
    "a tensor of two minus": (_of("tensor", "torch.uint8", (-2, -2), b"1234"), "holds a tensor of (-2, -2)"),
    "an empty tensor": (_of("tensor", "torch.uint8", (0, 1 << 62), b""), "holds a tensor of (0, 4611686018427387904)"),
    "a tensor of texts": (_of("tensor", "torch.uint8", ("a",), b"1"), "holds a tensor of ('a',)"),
    "a tensor of many": (_of("tensor", "torch.uint8", SIZE[:33], b"1"), "holds a tensor of 33 dimensions; 32 at most"),
    "a tensor of long numbers": (_of("tensor", "torch.uint8", (1 << 250,) * 32, b"1"), "holds a tensor of (1809"),
    "an array of long numbers": (_of("array", "|u1", (1 << 250,) * 32, b"1"), "holds a tensor of (1809"),
    "neither true nor false": (_of("tensor", "torch.bool", (2,), b"\1\2"), "something else than true and false"),
    "an array of these": (_of("array", "|b1", (2,), b"\xff\0"), "something else than true and false"),
    "a number that is an array": (_entry("number", _raw(1)), "cannot be read"),
    **{
        f"a tensor of {name}": (_of("tensor", f"torch.{name}", (1,), bytes(16)), f"holds a tensor of 'torch.{name}'")
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype | torch.layout) and f"torch.{name}" not in plain_data._TORCH
        if str(value) == f"torch.{name}"
    },
    **{
        f"an array of {name}": (_of("array", name, (1,), bytes(16)), f"holds a tensor of '{name}'")
        for name in ("|O", "O", "object", "<c8", "|S4", "<U4", "<M8[s]", ">f4", "<f16", "|V8", "f4,O")
    },
}


@pytest.mark.parametrize("name", [*PICKLES, *HOSTILE])
def test_what_a_stranger_sends_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MOST_MADE", 1 << 20)
    data, problem = HOSTILE.get(name, (PICKLES.get(name, b""), "is "))
    with pytest.raises(ObjectError, match="^an object from another site ") as caught:
        DATA.read(data if name in PICKLES else plain_data._BEGIN + data)
    line = str(caught.value)
    assert problem in line and line.isprintable() and len(line) < 500
    assert caught.value.shared == line, "the other site may read it: it has written it"


def test_a_class_of_the_table_is_filled_and_not_called() -> None:
    value = Plan("plan", [])
    object.__setattr__(value, "name", "called")
    assert DATA.read(DATA.write([value])) == [value]


def test_a_plan_of_100000_tensors_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and memory grow with the parts alone, so a tenth of it is enough to see that."""
    name = "optimizer.state.exp_avg.decoder.layers.mlp.experts.local_experts.{}.linear_fc1.weight"
    sizes = [torch.Size([128, 4096, number]) for number in range(4)]
    parts = [Plan(name.format(number), [Plan("", sizes)]) for number in range(10_000)]
    monkeypatch.setattr(plain_data, "MOST_BYTES", plain_data.MOST_BYTES // 10)
    monkeypatch.setattr(plain_data, "MOST_MADE", plain_data.MOST_MADE // 10)
    assert DATA.read(DATA.write(parts)) == parts


def _read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int, int]:
    """Return what is read, or the error; how many parts were looked at; how many bytes were taken at most."""
    num_parts = 0
    require = plain_data._require_depth

    def count(depth: int) -> None:
        nonlocal num_parts
        num_parts += 1
        require(depth)

    with monkeypatch.context() as patch:
        patch.setattr(plain_data, "_require_depth", count)
        tracemalloc.start()
        try:
            found = DATA.read(data)
        except ObjectError as error:
            found = error
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found, num_parts, peak


SLACK = 1 << 16
ATOMS: list[Any] = [
    *(None, True, 0, 127, -1, 1 << 62, 1 - (1 << 262), 0.5, float("inf"), b"", bytes(99), "", "text", "x" * 999),
    "\U0001f600",
    *(torch.float32, torch.strided, torch.Size([2, 3]), Colour.BLUE, Caller("b", 1)),
]
BUFFERS: list[Any] = [
    *(numpy.ones((2, 0, 3), "int8"), numpy.float64(2), numpy.arange(4, dtype="uint16"), slice(1, None)),
    *(torch.ones(()), torch.zeros(3, 2, dtype=torch.bfloat16), torch.tensor([True, False]), torch.arange(500)),
]


def _key(draw: random.Random, depth: int) -> Any:
    if depth and draw.random() < 0.3:
        return draw.choice([tuple, frozenset])(_key(draw, depth - 1) for _ in range(draw.randrange(4)))
    return draw.choice([*ATOMS, draw.randrange(1 << 30), str(draw.random())])


def _value(draw: random.Random, known: list[Any], depth: int = 4) -> Any:
    """Make a value; what was made before may be in it again."""
    if known and draw.random() < 0.2:
        return draw.choice(known)
    if not depth or draw.random() < 0.2:
        return draw.choice([draw.choice(BUFFERS), _key(draw, 2)])
    parts = [_value(draw, known, depth - 1) for _ in range(draw.randrange(5))]
    keys = [_key(draw, 2) for _ in parts]
    pairs = dict(zip(keys, parts, strict=True))
    made = draw.choice(
        [parts, parts * draw.randrange(9), tuple(parts), pairs, set(keys), collections.OrderedDict(pairs)]
        + [Plan(str(keys)[:9], parts), Counts(len(parts)), io.BytesIO(bytes(draw.randrange(99)))]
    )
    known.append(made)
    return made


def _shown(value: Any) -> Any:
    """Return what of a value can be compared."""
    if isinstance(value, Plan):
        return value.name, _shown(value.parts), value.colour
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        return type(value), [_shown(each) for each in value]
    if isinstance(value, dict):
        return type(value), {key: _shown(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return type(value), value.dtype, value.shape, value.tolist()
    return type(value), value.getvalue() if isinstance(value, io.BytesIO) else value


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_is_written_is_read_within_the_bounds(seed: int) -> None:
    value = _value(random.Random(seed), [])
    data = DATA.write(value)
    with pytest.MonkeyPatch.context() as patch:
        found, num_parts, peak = _read(data, patch)
    assert _shown(found) == _shown(value)
    assert num_parts <= len(data) and peak <= SLACK + 2 * len(data) + 256 * num_parts
    reader = plain_data._Reader(DATA, data)
    reader.whole()
    writer = plain_data._Writer(DATA)
    writer.written(value)
    assert reader._left == writer._left and peak <= SLACK + plain_data.MOST_MADE - reader._left


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_bytes_are_read_or_refused_within_the_bounds(seed: int) -> None:
    """Bytes are cut out, put in from elsewhere, and changed."""
    draw = random.Random(seed)
    data = bytearray(DATA.write(_value(draw, [])))
    for _ in range(draw.randrange(1, 5)):
        at, other = (draw.randrange(len(plain_data._BEGIN), len(data) + 1) for _ in range(2))
        new = draw.choice([draw.randbytes(draw.randrange(5)), data[other : other + draw.randrange(50)]])
        data[at : at + draw.choice([0, 1, len(new)])] = new
    with pytest.MonkeyPatch.context() as patch:
        found, num_parts, peak = _read(bytes(data), patch)
    assert num_parts <= len(data) + 1 and peak <= SLACK + 2 * len(data) + 256 * num_parts
    assert not isinstance(found, ObjectError) or str(found).isprintable()


MANY = 2_000
ATOM = _raw(1000)
FLOODS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda number: _raw([]),
    "sets": lambda number: _part(plain_data._SET, 0),
    "sets of one": lambda number: _part(plain_data._SET, 1, ATOM),
    "sets of five": lambda number: _part(plain_data._SET, 5, *range(128, 133)),
    "dictionaries": lambda number: _raw({number: 1}),
    "numbers": _raw,
    "long numbers": lambda number: _raw(number << 240),
    "floats": lambda number: b"\x03" + bytes(8),
    "texts": lambda number: _raw(str(number)),
    "wide texts": lambda number: _raw(f"\U0001f600{number}"),
    "bytes": lambda number: _bytes(b""),
    "records": lambda number: _record("Counts", ("number",), 1) if not number else _part(plain_data._RECORD, 0, 1),
    "sizes": lambda number: _entry("size", ()),
    "slices": lambda number: _entry("slice", (b"\0", b"\0", b"\0")),
    "frozen sets": lambda number: _entry("frozenset", []),
    "ordered": lambda number: _entry("ordered", [(number, 1)]),
    "files": lambda number: _entry("bytes", _bytes(b"")),
    "stacks": lambda number: _entry("stack", b"\0"),
    "errors": lambda number: _entry("error", "a"),
    "tensors": lambda number: _of("tensor", "torch.uint8", (0,), b""),
    "arrays": lambda number: _of("array", "|u1", (0,), b""),
    "numbers of NumPy": lambda number: _of("number", "|u1", (), b"a"),
}


@pytest.mark.parametrize("kind", ["one set", "one dictionary", *FLOODS])
def test_many_parts_take_no_more_than_they_are_charged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in FLOODS:
        data = _part(plain_data._LIST, MANY, *(FLOODS[kind](number) for number in range(MANY)))
    else:
        tag = plain_data._SET if kind == "one set" else plain_data._DICT
        values = () if kind == "one set" else [0] * MANY
        data = _part(tag, MANY, *range(1000, 1000 + MANY), *values)
    found, num_parts, peak = _read(plain_data._BEGIN + data, monkeypatch)
    assert len(found) == MANY
    reader = plain_data._Reader(DATA, plain_data._BEGIN + data)
    reader.whole()
    assert peak <= SLACK + 2 * len(data) + 256 * num_parts
    assert peak <= SLACK + plain_data.MOST_MADE - reader._left
