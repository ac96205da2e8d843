"""TOML tables that know which of their keys were read, so that unknown keys are rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.untrusted_files import read_toml

Read = TypeVar("Read")


def read_file(path: Path, read: Callable[[Table], Read]) -> Read:
    """Read a TOML file.

    Args:
        path: path of the file.
        read: turns the file's outermost table into the result.

    Raises:
        ConfigError: it cannot be read, is no TOML, or ``read`` rejects it.
    """
    try:
        top = Table(read_toml(path), TOP)
        found = read(top)
        top.done()
        return found
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


TOP = "the file"


class Table:
    """A table that knows which of its keys were read, so that unknown ones are rejected."""

    def __init__(self, data: object, name: str) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{name} must be a table, not {data!r}")
        self.data = dict(data)
        self.name = name
        self.left = set(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def path(self, key: str) -> str:
        """Give the full name of a key, with the tables around it."""
        return key if self.name == TOP else f"{self.name}.{key}"

    def table(self, key: str, *, is_optional: bool = False) -> Table:
        """Read a table; an optional one that is missing is empty."""
        if key not in self.data and not is_optional:
            raise ConfigError(f"the table {self.path(key)} is missing")
        self.left.discard(key)
        return Table(self.data.get(key, {}), self.path(key))

    def tables(self, key: str) -> list[Table]:
        """Read a list of tables; empty if it is missing."""
        self.left.discard(key)
        found = self.data.get(key, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.path(key)} must be a list of tables: write [[{self.path(key)}]]")
        return [Table(each, f"{self.path(key)}[{number}]") for number, each in enumerate(found)]

    def text(self, key: str, *default: str) -> str:
        """Read a text."""
        value = self._take(key, *default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path(key)} must be text, not {value!r}")
        return value

    def number(self, key: str, *default: float) -> float:
        """Read a number that is at least 0."""
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{self.path(key)} must be a number from 0 on, not {value!r}")
        return float(value)

    def known(self, key: str) -> float | None:
        """Read a number; None if it is missing."""
        return self.number(key) if key in self else None

    def count(self, key: str, *default: int) -> int:
        """Read a whole number that is at least 1."""
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path(key)} must be a whole number from 1 on, not {value!r}")
        return value

    def _take(self, key: str, *default: object) -> object:
        self.left.discard(key)
        if key not in self.data:
            if not default:
                raise ConfigError(f"{self.path(key)} is missing")
            return default[0]
        return self.data[key]

    def flag(self, key: str) -> bool:
        """Read true or false; false if it is missing."""
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path(key)} must be true or false, not {value!r}")
        return value

    def value(self, key: str) -> object:
        """Read a value of any type."""
        return self._take(key)

    def done(self) -> None:
        """Reject keys that were not read."""
        if self.left:
            raise ConfigError(
                f"unknown key {self.path(sorted(self.left)[0])}; use one of those in docs/guides/search.md"
            )
