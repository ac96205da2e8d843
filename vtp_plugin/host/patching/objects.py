"""What the host's objects are made of: their functions, who wrapped them, and what can stand in for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final

from vtp_plugin.host.patching.record import Target

MARKER: Final = "__vtp_record__"
"""Attribute of every replacement (of a property: of its accessors); holds the id of its record."""

# These packages do not patch the host: the host decorates its functions with them.
_DECORATOR_LIBRARIES: Final = sys.stdlib_module_names | {"torch", "typing_extensions"}


def functions(value: Any) -> list[Any]:
    """Return what a raw attribute runs: the function inside a descriptor, the accessors of a property, or itself."""
    if isinstance(value, property):
        return [accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None]
    return [value.__func__] if isinstance(value, staticmethod | classmethod) else [value]


def attributes(obj: Any) -> Mapping[str, Any]:
    """Return the attributes of an object itself; of a class without inherited ones, of a proxy those behind it."""
    return getattr(obj, "__dict__", {})


def chain(value: Any) -> Iterator[Any]:
    """Yield the functions of a raw attribute and everything below them along `__wrapped__`, outermost first."""
    for link in functions(value):
        seen: set[int] = set()
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            link = attributes(link).get("__wrapped__")


def foreign_wrapper(target: Target, is_own: Callable[[str], bool]) -> str:
    """Name the module of another package that wrapped the target, or return an empty string.

    functools.wraps copies `__module__`, so the module whose globals the code runs with counts as well.

    Args:
        target: The patched attribute.
        is_own: Tells whether a module is part of the package that is patched.
    """
    if isinstance(target.defined_in, type) and not is_own(target.defined_in.__module__):
        return ""  # inherited from another package as it is
    for link in chain(target.value):
        for home in (getattr(link, "__module__", None), _code_home(link)):
            if isinstance(home, str) and not is_own(home) and home.partition(".")[0] not in _DECORATOR_LIBRARIES:
                return home
    return ""


def _code_home(obj: Any) -> str | None:
    """Return the module in which a Python function was written, whatever its `__module__` says."""
    return obj.__globals__.get("__name__") if isinstance(obj, FunctionType) else None


def wrong_kind(old: object, new: object) -> str | None:
    """Say what is wrong with a replacement, or return None when it can stand in for the original."""
    if new is old:
        return "the original itself"
    if isinstance(old, property):
        changed = isinstance(new, property) and any(all(n is not o for o in functions(old)) for n in functions(new))
        return None if changed else "no property with a new accessor"
    if isinstance(old, type):
        return None if isinstance(new, type) else "no class in place of a class"
    if not callable(new) or isinstance(new, staticmethod | classmethod):
        return f"a {type(new).__name__} instead of a plain function"
    return None


def describe(obj: Any) -> str:
    """Name an object and the module in which it was written, for messages."""
    function = next(iter(functions(obj)), obj)
    home = _code_home(function) or getattr(function, "__module__", None) or type(function).__module__
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"
