"""A store as a rank sees one of torch's servers, without a server: what it waits for and is not there never comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# What std::stoll reads of a text.
_NUMBER = re.compile(rb"\s*([+-]?[0-9]+)")


class Served(dist.Store):
    """Keeps values; a counter that holds no number closes the connection, as torch's server does."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._is_closed = False

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._open()[key] = _encoded(value)

    def get(self, key: str) -> bytes:
        """Return a value."""
        self.wait([key])
        return self._values[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Change a value if it is the expected one; return what is there."""
        values, expected = self._open(), _encoded(expected)
        if values.get(key, b"") != expected:
            return values.get(key, expected)
        if key in values or not expected:
            values[key] = _encoded(desired)
        return values.get(key, expected)

    def add(self, key: str, number: int) -> int:
        """Count."""
        values = self._open()
        found = _NUMBER.match(values.get(key, b"0"))
        if found is None or not -(1 << 63) <= int(found[1][:40]) < 1 << 63:
            self._is_closed = True
            self._open()
            raise AssertionError
        now = (int(found[1]) + number + (1 << 63)) % (1 << 64) - (1 << 63)
        values[key] = str(now).encode()
        return now

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all are there."""
        return {*keys} <= {*self._open()}

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._open().pop(key, None) is not None

    deleteKey = delete_key

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return if all are there."""
        if not self.check(keys):
            raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {keys}")

    def _open(self) -> dict[str, bytes]:
        if self._is_closed:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")
        return self._values


def _encoded(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
