"""Checks of the values that Megatron stores beside tensors, such as arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vtp_plugin.errors import ConfigError, VtpError

_SIZES: Final = ("parallel_size", "vtp_size_list", "vtp_cp_list", "vtp_dp_list", "vtp_ep_list", "vtp_etp_list")
_MAX_SIZE: Final = 1 << 24  # ranks


@contextmanager
def taking(folder: Path) -> Iterator[None]:
    """Run code that relies on the values that Megatron stores in a checkpoint; if they are others, say so."""
    try:
        yield
    except VtpError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = ascii(f"{type(error).__name__}: {error}")[1:100]
        raise ConfigError(
            f"{folder} holds other values than Megatron stores ({reason}); nobody can read such a checkpoint; copy it "
            "again, or take another one"
        ) from error


def require_numbers(arguments: Mapping[str, Any]) -> None:
    """Check that sizes in stored arguments are numbers.

    Raises:
        ValueError: one is none.
    """
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.endswith(_SIZES) or value is None:
            continue
        values = value if name.endswith("_list") and isinstance(value, list | tuple) else [value]
        if any(type(each) is not int or not 0 <= each <= _MAX_SIZE for each in values):
            raise ValueError(f"{name} is no size")
