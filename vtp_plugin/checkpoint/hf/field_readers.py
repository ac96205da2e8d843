"""Typed readers of the fields of a ``config.json``: a value of another type is an error that names the right one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.hf.rope import HIGH, LOW, ORIGINAL
from vtp_plugin.errors import ConfigError

_LLAMA3: Final = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": ORIGINAL}
_MAX_SHOWN: Final = 60


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number; Python takes True for one, and JSON's reader takes Infinity."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def short(value: Any) -> str:
    """Write a value as JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class Fields:
    """Reads fields of a config.

    Args:
        config: the config.
        defaults: values of the fields that it leaves out.
        file: path of the config, for errors.
        has_sections: whether positions are times, heights and widths, each with a section of the channels.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], file: Path, *, has_sections: bool = False
    ) -> None:
        # The base of positions stands in one of three places, so its default comes last.
        self._rope_theta: Any = defaults.get("rope_theta")
        self._has_sections = has_sections
        self._fields = {**{name: value for name, value in defaults.items() if name != "rope_theta"}, **config}
        self._file = file

    def __repr__(self) -> str:
        return f"<{len(self._fields)} fields of {self._file}>"

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of several names that is there."""
        return next((name for name in names if name in self._fields), names[0])

    def number(self, name: str, default: int | None = None) -> int:
        """Read a whole number above 0."""
        return self._read(name, default, "a whole number above 0", lambda value: type(value) is int and value > 0)

    def real(self, name: str, default: float | None = None) -> float:
        """Read a number that is not below 0."""
        return float(self._read(name, default, "a number", lambda value: is_number(value) and value >= 0))

    def truth(self, name: str) -> bool:
        """Read true or false."""
        return self._read(name, False, "true or false", lambda value: type(value) is bool)

    def mapping(self, name: str) -> dict[str, Any]:
        """Read an object; empty where there is none."""
        return self._read(name, {}, "an object or null", lambda value: isinstance(value, dict))

    def texts(self, name: str, default: list[str]) -> list[str]:
        """Read a list of texts."""
        return self._read(
            name,
            default,
            "a list of texts",
            lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        )

    def numbers(self, name: str) -> tuple[int, ...]:
        """Read a list of whole numbers that are not negative."""
        kind = "a list of whole numbers"
        found = self._read(name, None, kind, lambda value: isinstance(value, list | tuple))
        if not all(type(each) is int and each >= 0 for each in found):
            raise self._wrong(name, found, kind)
        return tuple(found)

    def sections(self, channels: int) -> tuple[int, ...]:
        """Read the sections of a head's channels whose positions are times, heights and widths.

        Args:
            channels: number of a head's channels.
        """
        places = (self.mapping(name) for name in ("rope_parameters", "rope_scaling"))
        found: Any = next((each["mrope_section"] for each in places if "mrope_section" in each), None)
        is_right = isinstance(found, list) and len(found) == 3 and all(type(each) is int and each > 0 for each in found)
        if not is_right or 2 * sum(found) != channels:
            raise self._wrong("mrope_section", found, f"three whole numbers above 0, {channels // 2} together")
        return tuple(found)

    def _read(self, name: str, default: Any, kind: str, is_right: Callable[[Any], bool]) -> Any:
        value = self._fields.get(name)
        value = default if value is None else value
        if not is_right(value):
            raise self._wrong(name, value, kind)
        return value

    def _wrong(self, name: str, value: Any, kind: str) -> ConfigError:
        found = "missing" if value is None else short(value)
        return ConfigError(f"{self._file}: {name} is {found}; it must be {kind}; download it again")

    def positions(self) -> tuple[int, float | None]:
        """Return the base of the rotary positions, and the factor of their scaling, from old fields or new ones."""
        scalings = {name: found for name in ("rope_parameters", "rope_scaling") if (found := self.mapping(name))}
        places = [("rope_theta", self._fields), *((f"{name}: rope_theta", found) for name, found in scalings.items())]
        bases = {self._base(name, found["rope_theta"]) for name, found in places if found.get("rope_theta") is not None}
        factors = {self._factor(name, found) for name, found in scalings.items()}
        if len(bases) > 1 or len(factors) > 1:
            raise ConfigError(
                f"{self._file}: rope_theta, rope_scaling and rope_parameters say different things; one of them is "
                "enough; remove the wrong one"
            )
        return next(iter(bases), int(self._rope_theta)), next(iter(factors), None)

    def _base(self, name: str, base: Any) -> int:
        if not is_number(base) or base <= 0:
            raise self._wrong(name, base, "a number above 0")
        if base != int(base):
            raise ConfigError(
                f"{self._file}: {name} is {short(base)}; Megatron's --rotary-base is a whole number; take another model"
            )
        return int(base)

    def _factor(self, name: str, scaling: Mapping[str, Any]) -> float | None:
        """Read one of the two fields."""
        left = {key: value for key, value in scaling.items() if key != "rope_theta"}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        if self._has_sections:
            left.pop("mrope_section", None)
            kind = "default" if kind == "mrope" else kind
        if left.pop("partial_rotary_factor", 1.0) == 1.0:
            if kind == "default" and not left:
                return None
            factor = left.pop("factor", None)
            if kind == "llama3" and left == _LLAMA3 and is_number(factor) and factor > 0:
                return float(factor)
        numbers = ", ".join(f"{key} {value:g}" for key, value in _LLAMA3.items())
        raise ConfigError(
            f"{self._file}: {name} is {short(scaling)}; Megatron has no scaling of positions but llama3 with any "
            f"factor and {numbers}; take another model"
        )
