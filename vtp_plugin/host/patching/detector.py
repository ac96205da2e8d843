"""Find what still holds given objects, whatever it is, and name it for people: nothing is changed.

Python's garbage collector is asked what refers to an object, and what refers to that: 0.1 s for each step in a process
with torch and Megatron. It compares every reference in the process with each of the objects, so it is asked about as
few as possible: not about what this package itself holds them in.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from vtp_plugin.host.patching.names import held, home_of, is_own, modules_by_namespace, shown_module
from vtp_plugin.host.patching.objects import MARKER, attributes, functions

# From an original to what holds it: a staticmethod, the dictionary of its class, the class.
_STEPS: Final = 3
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, CellType, staticmethod, classmethod, MethodType)
# Objects of these modules describe code, such as annotations, fields and their caches; nobody calls what they hold.
_DESCRIBING: Final = frozenset(
    {"builtins", "types", "typing", "dataclasses", "functools", "inspect", "weakref", "mindspeed.patch_utils"}
)


@dataclass(frozen=True, slots=True)
class _Known:
    """One of the objects, or something that leads to one."""

    value: object
    of: int
    path: str


def detect(swaps: Iterable[tuple[object, object]]) -> list[tuple[int, str]]:
    """Find what holds one of some objects, except the code of this package.

    Args:
        swaps: the objects, each with its counterpart, which may hold it.

    Returns:
        For each holder (a name, a closure, a container, an attribute) the `id` of the object and a text for people;
        sorted.
    """
    pairs = list(swaps)
    known = {id(old): _Known(old, id(old), "") for old, _ in pairs}
    owners: dict[int, Any] = {}
    objects = _climb(known, owners, _own_holders(pairs))
    found: set[tuple[int, str]] = set()
    named: set[int] = set()
    for owner in owners.values():
        where = shown_module(home_of(owner))
        where += "" if issubclass(type(owner), ModuleType) else f":{owner.__qualname__}"
        for label, value, _ in held(owner):
            if (item := known.get(id(value))) is not None:
                named.add(id(value))
                found.add((item.of, where + label + item.path))
    # An object that an owner holds is listed with the owner's name, which says more than its class.
    found |= {(known[key].of, text + known[key].path) for key, text in objects.items() if key in known.keys() - named}
    return sorted(found)


def _own_holders(pairs: Sequence[tuple[object, object]]) -> set[int]:
    """Return the `id`s of what holds objects for us: the pairs, and the closures and attributes of replacements."""
    found = set(map(id, pairs))
    for value in itertools.chain.from_iterable(pairs):
        for function in functions(value):
            # A replacement holds its original, wherever it was written.
            if type(function) is FunctionType and MARKER in function.__dict__:
                found |= {id(function.__dict__), *map(id, function.__closure__ or ())}
            elif isinstance(function, type):
                # What a class is made of: the original itself, and the replacement that is made of it.
                found |= {id(function.__mro__), id(function.__bases__), *map(id, _cells_of_super(function))}
    return found


def _cells_of_super(kind: type) -> Iterator[CellType]:
    """Yield the cells in which methods that call ``super()`` have their class.

    >>> class Base:
    ...     def act(self):
    ...         return super().__repr__
    >>> [cell.cell_contents is Base for cell in _cells_of_super(Base)]
    [True]
    """
    for value in vars(kind).values():
        for method in functions(value):
            if type(method) is FunctionType and "__class__" in method.__code__.co_freevars:
                assert method.__closure__ is not None
                yield method.__closure__[method.__code__.co_freevars.index("__class__")]


def _climb(known: dict[int, _Known], owners: dict[int, Any], own_holders: set[int]) -> dict[int, str]:
    """Go back from the objects along references, as far as the owners: modules, classes and functions.

    Args:
        known: the objects; gets the containers and other objects on the path.
        owners: gets what was found, by `id`.
        own_holders: the `id`s of what leads nowhere.

    Returns:
        What to call the other objects on the path, by `id`.
    """
    objects: dict[int, str] = {}
    modules = modules_by_namespace()
    frontier = [item.value for item in known.values()]
    for _ in range(_STEPS):
        if not frontier:
            break
        skipped = known.keys() | owners.keys() | own_holders | {id(frontier)}
        ahead: list[Any] = []
        for holder in gc.get_referrers(*frontier):
            kind: type = type(holder)
            if id(holder) in skipped or _is_annotation(holder):
                continue
            if (module := modules.get(id(holder))) is not None:
                owners[id(module)] = module
            elif kind is FunctionType or issubclass(kind, type):
                # A replacement holds its original, wherever it was written.
                if not is_own(home_of(holder)) and MARKER not in attributes(holder):
                    owners[id(holder)] = holder
            elif kind in _CONTAINERS or issubclass(kind, functools.partial):
                _add(known, holder)
                ahead.append(holder)
            elif kind.__module__ not in _DESCRIBING and not is_own(kind.__module__):
                _add(known, holder)
                ahead.append(holder)
                objects[id(holder)] = f"an object of class {kind.__module__}.{kind.__qualname__}"
        frontier = ahead
    return objects


def _is_annotation(holder: Any) -> bool:
    """Tell whether something is the parameters of an annotation, such as those of ``Grid | None``."""
    return type(holder) is tuple and any(item is type(None) or type(item).__module__ == "typing" for item in holder)


def _add(known: dict[int, _Known], holder: Any) -> None:
    """Note what leads to an object."""
    for label, value, _ in held(holder):
        item = known.get(id(value))
        if item is not None:
            known[id(holder)] = _Known(holder, item.of, label + item.path)
            return
    # An object with slots, an object written in C, or one whose class is searched for.
    item = next((known[id(value)] for value in gc.get_referents(holder) if id(value) in known), None)
    if item is not None:
        known[id(holder)] = _Known(holder, item.of, item.path)
