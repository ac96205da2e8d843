"""Generated inputs: valid ones that were changed, and what no rank would write. One seed gives the same ones again."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from random import Random
from typing import Any

_LARGE_SHARE = 1 / 500  # of inputs: they take a second each
_LARGE_BYTES = 7 << 20  # torch's store takes 8 MiB
_NUMBERS = [0, 1, -1, 2, 3, 7, 64, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 53) - 1, 1 << 53, 1 << 63]
_NUMBERS += [-(1 << 63), (1 << 64) - 1, 1 << 200]
_FLOATS = [0.5, -0.0, 1e-320, 1e-9, 1e15, 1.7e308, -1.7e308]
_WORDS = [
    *("", "0", "-1", "01", "edge", "yes", "None"),
    *("../x", "/etc/passwd", "C:\\x", "a\nb", "\x1b[2J", "\x00", "\u202e"),
]
_WORDS += ["\ud800", "\x9b2J", "\r", "%s%n", "{0}", "$(true)", "__class__", "é" * 9, "𝔸", "\u2028", "1e999", "٣", "²"]


class Raw(str):
    """A word of JSON that stands as it is."""

    __slots__ = ()


_RAW = [
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 5000, "1" * 1_000_000, "0x7", "tru", "1.", "+1"))
]
_TOKENS = [
    b"null",
    b"{}",
    b"[]",
    b"\xff",
    b"\x00",
    b"\\",
    b"\\\xff",
    b"\\u0000",
    b"\\ud800",
    b'"',
    b"9" * 40,
    b"-",
    b"e9",
    b"NaN",
]


class Inputs:
    """Makes inputs.

    Args:
        random: the same one gives the same inputs.
    """

    def __init__(self, random: Random) -> None:
        self.random = random

    def chance(self, share: float) -> bool:
        """Return True in a share of the calls."""
        return self.random.random() < share

    def number(self) -> Any:
        """Return a number, of a kind that is often not thought of."""
        if self.chance(0.1):
            return self.random.choice(_RAW)
        if self.chance(0.3):
            return self.random.choice(_FLOATS)
        if self.chance(0.3):
            return self.random.getrandbits(self.random.choice([3, 8, 31, 53, 63])) * self.random.choice([1, 1, 1, -1])
        return self.random.choice(_NUMBERS)

    def whole(self) -> int:
        """Return a number of 64 bits with a sign."""
        found = self.number()
        return found if isinstance(found, int) and -(1 << 63) <= found < 1 << 63 else self.random.randrange(-9, 99)

    def text(self) -> str:
        """Return a text."""
        if self.chance(0.1):
            return "".join(self.random.choices(string.printable + "\x00\x1b\u202e\ud800é", k=self.random.randrange(60)))
        if self.chance(0.05):
            return self.random.choice(["x", "\x1b", " ", "é", "\\"]) * self.random.choice([1999, 2001, 70_000])
        return self.random.choice(_WORDS)

    def value(self, depth: int = 0) -> Any:
        """Return any value of JSON."""
        kind = self.random.randrange(8 if depth < 4 else 5)
        if kind < 2:
            return self.number()
        if kind < 4:
            return self.text()
        if kind == 4:
            return self.random.choice([None, True, False])
        number = self.random.randrange(4)
        if kind == 5:
            return {self.text(): self.value(depth + 1) for _ in range(number)}
        return [self.value(depth + 1) for _ in range(number)]

    def changed(self, value: Any) -> Any:
        """Return a valid value with a change somewhere: another type or size, a part that is missing, new or twice."""
        if isinstance(value, dict) and value and self.chance(0.85):
            return self._changed_dict(value)
        if isinstance(value, list) and value and self.chance(0.8):
            return self._changed_list(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and self.chance(0.8):
            return self.number()
        if isinstance(value, str) and self.chance(0.7):
            return self.text() if self.chance(0.7) else value + self.text()
        return self.value(1)

    def replaced(self, value: Any, new: Any) -> Any:
        """Return a value with another one somewhere in it."""
        if isinstance(value, dict) and value:
            key = self.random.choice([*value])
            return {**value, key: self.replaced(value[key], new)}
        if isinstance(value, list) and value and self.chance(0.5):
            at = self.random.randrange(len(value))
            return [*value[:at], self.replaced(value[at], new), *value[at + 1 :]]
        return new

    def _changed_dict(self, value: dict[Any, Any]) -> Any:
        key = self.random.choice([*value])
        kind = self.random.randrange(10)
        if kind == 0:
            return {name: each for name, each in value.items() if name != key}
        if kind == 1:
            return {**value, self.text(): self.value(1)}
        if kind == 2:
            return {**{name: each for name, each in value.items() if name != key}, self.text(): value[key]}
        if kind == 3:
            return Pairs([*value.items(), (key, self.changed(value[key]))])
        return {**value, key: self.changed(value[key])}

    def _changed_list(self, value: list[Any]) -> Any:
        at = self.random.randrange(len(value))
        kind = self.random.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value[:at], self.value(1), *value[at:]]
        if kind == 2:
            fits = _LARGE_BYTES // (len(_written(value)) + 1)  # a word may have a million digits
            return (value * min(self.random.choice([0, 2, 1000]), fits))[:4000]
        if kind == 3:
            return self.random.sample(value, len(value))
        return [*value[:at], self.changed(value[at]), *value[at + 1 :]]

    def post(self, *valid: Any) -> bytes:
        """Return a post of JSON: one of some valid ones with changes, or none at all.

        Args:
            valid: posts that ranks write, as values of JSON.
        """
        if self.chance(_LARGE_SHARE):
            large = self.large()
            return (
                large
                if self.chance(0.4)
                else written(self.replaced(self.random.choice(valid), Raw(large.decode("latin-1"))))
            )
        kind = self.random.randrange(10)
        if kind == 0:
            return self.garbage()
        if kind == 1:
            return written(self.value())
        value = self.random.choice(valid)
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3])):
            value = self.changed(value)
        data = written(value)
        return self.damaged(data) if kind < 4 else data

    def garbage(self) -> bytes:
        """Return a few bytes."""
        return self.random.randbytes(self.random.choice([0, 1, 2, 8, 60, 600]))

    def damaged(self, data: bytes) -> bytes:
        """Return bytes of which some are changed, missing, added or repeated."""
        for _ in range(self.random.choice([1, 1, 2, 5])):
            at, end = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
            kind = self.random.randrange(5)
            if kind == 0 and data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ 1 << self.random.randrange(8)]) + data[at + 1 :]
            elif kind == 1:
                data = data[:at] if self.chance(0.5) else data[:at] + data[end:]
            elif kind == 2:
                data = data[:at] + self.garbage()[:4] + data[at:]
            elif kind == 3:
                data = data[:at] + self.random.choice(_TOKENS) + data[at:]
            else:
                data = (data[:end] + data[at:])[: 1 << 20]
        return data

    def large(self) -> bytes:
        """Return a post as long as torch's store takes it, of a form that takes much memory or time to read."""
        begin, part, end = self.random.choice(
            [
                *((b"[", b"[],", b"0]"), (b"[", b"{},", b"0]"), (b"[", b"0,", b"0]"), (b"[", b"", b"")),
                *((b'{"a":', b"", b""), (b'"', b"x", b'"'), (b'"', b"\\u001b", b'"'), (b'"', b"\\ud83d", b'"')),
                *((b"", b"7", b""), (b"-1.", b"0", b"e9"), (b"", b" ", b"7"), (b"\xff", b"\xff", b"")),
            ]
        )
        return begin * 100_000 if not part else begin + part * (_LARGE_BYTES // len(part)) + end

    def counter(self) -> bytes:
        """Return what may stand where ranks count."""
        kind = self.random.randrange(4)
        if kind == 0:
            return self.damaged(str(self.whole()).encode())
        return str(self.number()).encode() if kind > 1 else self.garbage()

    def word(self, *valid: str) -> bytes:
        """Return a word: one of some valid ones with changes, or another one."""
        kind = self.random.randrange(4)
        if kind == 0:
            return self.garbage()
        if kind == 1:
            return self.text().encode(errors="surrogatepass")
        return self.damaged(self.random.choice(valid).encode()) if kind == 2 else self.random.choice(valid).encode()

    def wholes(self, length: int, valid: Sequence[int]) -> list[int]:
        """Return numbers of 64 bits: some valid ones with changes, or others.

        Args:
            length: how many.
            valid: as ranks write them.
        """
        if self.chance(0.2):
            return [self.whole() for _ in range(length)]
        found = [*valid]
        for _ in range(self.random.choice([1, 1, 2])):
            at = self.random.randrange(length)
            found[at] = self.random.choice([self.whole(), self.random.randrange(-2, 40), valid[at] + 1, -valid[at]])
        return found


class Pairs(list[tuple[str, Any]]):
    """An object of JSON in which a key may come twice."""


def written(value: Any) -> bytes:
    """Write JSON, or what looks like it."""
    return _written(value).encode(errors="surrogatepass")


def _written(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ",".join(f"{json.dumps(key)}:{_written(each)}" for key, each in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)
