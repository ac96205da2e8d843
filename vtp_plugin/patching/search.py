"""Find what holds given objects: names of modules and classes, default arguments, partial objects, and what else.

Modules are read name by name; the rest is found backwards, by asking Python's garbage collector what refers to an
object (0.1 s per step back in a process with torch and Megatron, where reading all classes and functions takes 1 s).
No attribute is asked for, so no lazy module loads. What ``gc.freeze()`` has put aside is found under module names only.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from vtp_plugin.patching.objects import MARKER, attributes
from vtp_plugin.patching.places import Default, PartialPart
from vtp_plugin.undo import ABSENT, Name, Place, namespace

# From an original to the class or function that holds it: a staticmethod, the dictionary of its class, the class.
_STEPS: Final = 3
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, CellType, staticmethod, classmethod, MethodType)
_BELOW_TORCH: Final = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "networkx", "numpy", "triton"}
# Objects of these modules describe code, such as annotations, fields and their caches; nobody calls what they hold.
_DESCRIBING: Final = frozenset({"builtins", "types", "typing", "dataclasses", "functools", "inspect", "weakref"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A place that holds an object, and what it is to hold instead.

    Attributes:
        where: ``"module:name"``, ``"module:Class.name"`` or ``"module:function (default name)"``, for people.
        module: name in ``sys.modules`` of the module that the place belongs to, as far as it is known.
        of: `id` of the object that was searched for.
        place: reads and writes it.
        new: the object's counterpart, or a staticmethod, classmethod or bound method of it, as the place holds it.
    """

    where: str
    module: str
    of: int
    place: Place
    new: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What :func:`find` found, sorted by place.

    Attributes:
        hits: places that can be changed.
        unreached: `id` of the object and the place, for people, where it stays: a closure, a container, an attribute.
    """

    hits: tuple[Hit, ...]
    unreached: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """Something that is, or leads to, one of the objects; `new` is its counterpart, `ABSENT` if it has none."""

    value: object
    of: int
    new: object
    path: str


def find(swaps: Iterable[tuple[object, object]], is_own: Callable[[str], bool]) -> Found:
    """Find all that holds one of some objects.

    Args:
        swaps: the objects, each with its counterpart.
        is_own: tells whether a module belongs to the searching package; what its code holds does not count.
    """
    known = {id(old): _Known(old, id(old), new, "") for old, new in swaps}
    modules = _modules(is_own)
    owners = _frozen_owners(known, modules)
    objects: dict[int, str] = {}
    _climb(known, modules, owners, objects, is_own)
    hits: list[Hit] = []
    unreached: list[tuple[int, str]] = []
    named: set[int] = set()
    for owner in owners.values():
        where, module = _name(owner, modules)
        for label, value, place in held(owner):
            item = known.get(id(value))
            if item is None:
                continue
            named.add(id(value))
            if place is not None and item.new is not ABSENT:
                hits.append(Hit(where=where + label, module=module, of=item.of, place=place, new=item.new))
            elif not isinstance(item.value, functools.partial):
                unreached.append((item.of, where + label + item.path))
    unreached += [
        (known[key].of, text + known[key].path) for key, text in objects.items() if key in known.keys() - named
    ]
    return Found(hits=tuple(sorted(hits, key=lambda hit: hit.where)), unreached=tuple(sorted(set(unreached))))


def _frozen_owners(known: Mapping[int, _Known], modules: Mapping[int, ModuleType]) -> dict[int, Any]:
    """Return the modules, by `id`, that the garbage collector would not name since their names were frozen.

    Libraries below torch are left out: they know nothing of a host that is built on torch.
    """
    if not gc.get_freeze_count():
        return {}
    return {
        id(module): module
        for module in modules.values()
        if str(namespace(module).get("__name__")).partition(".")[0] not in _BELOW_TORCH
        and not known.keys().isdisjoint(map(id, list(namespace(module).values())))
    }


def named_among(ids: set[int], is_left_out: Callable[[str], bool]) -> set[int]:
    """Return those `id`s whose object a name of a loaded module holds.

    Args:
        ids: of the objects.
        is_left_out: tells which modules do not count.
    """
    modules = _modules(is_left_out).values()
    return {key for module in modules for key in ids.intersection(map(id, list(namespace(module).values())))}


def _climb(
    known: dict[int, _Known],
    modules: Mapping[int, ModuleType],
    owners: dict[int, Any],
    objects: dict[int, str],
    is_own: Callable[[str], bool],
) -> None:
    """Go back from the objects along references, as far as the owners: modules, classes, functions, partial objects.

    Args:
        known: the objects; gets the containers and other objects on the way.
        modules: by `id` of their namespace.
        owners: gets what was found, by `id`.
        objects: gets, by `id`, what the instances of classes on the way are called.
        is_own: as for :func:`find`.
    """
    frontier = [item.value for item in known.values()]
    for _ in range(_STEPS):
        holders = gc.get_referrers(*frontier) if frontier else []
        frontier = []
        for holder in holders:
            kind: type = type(holder)
            if id(holder) in known or id(holder) in owners:
                continue
            if kind is dict and id(holder) in modules:
                module = modules[id(holder)]
                owners[id(module)] = module
            elif kind is FunctionType or issubclass(kind, type):
                # A replacement holds its original, wherever it was written.
                if not is_own(_home(holder)) and MARKER not in attributes(holder):
                    owners[id(holder)] = holder
            elif kind in _CONTAINERS or issubclass(kind, functools.partial):
                _add(known, holder)
                frontier.append(holder)
                if issubclass(kind, functools.partial):
                    owners[id(holder)] = holder
            elif kind.__module__ not in _DESCRIBING and not is_own(kind.__module__):
                _add(known, holder)
                objects[id(holder)] = f"an object of class {kind.__module__}.{kind.__qualname__}"
                frontier.append(holder)


def _add(known: dict[int, _Known], holder: Any) -> None:
    """Note what leads to an object, and its counterpart if it can be made anew."""
    for label, value in _contents(holder):
        item = known.get(id(value))
        if item is not None:
            known[id(holder)] = _Known(holder, item.of, _rewrapped(holder, item.new), label + item.path)
            return
    # An object with slots, an object written in C, or one whose class is searched for.
    item = next((known[id(value)] for value in gc.get_referents(holder) if id(value) in known), None)
    if item is not None:
        known[id(holder)] = _Known(holder, item.of, ABSENT, item.path)


def _rewrapped(holder: Any, new: Any) -> object:
    if new is ABSENT:
        return ABSENT
    if isinstance(holder, staticmethod | classmethod):
        return type(holder)(new)
    return MethodType(new, holder.__self__) if isinstance(holder, MethodType) else ABSENT


def _contents(holder: Any) -> Iterator[tuple[str, object]]:
    """Yield what a container or another object holds, each with its label."""
    if isinstance(holder, dict):
        yield from (
            (f"[{key!r:.40}]" if isinstance(key, str | int) else "[..]", value) for key, value in _items(holder)
        )
    elif isinstance(holder, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(holder))
    elif isinstance(holder, set | frozenset):
        yield from (("{..}", value) for value in list(holder))
    elif isinstance(holder, CellType):
        yield "", _content(holder)
    elif isinstance(holder, staticmethod | classmethod | MethodType):
        yield "", holder.__func__
    elif isinstance(holder, functools.partial):
        yield from ((label, value) for label, value, _ in held(holder))
    else:
        yield from ((f".{name}", value) for name, value in _items(_instance_dict(holder)))


def held(owner: Any) -> Iterator[tuple[str, object, Place | None]]:
    """Yield what an owner holds, each with its label and, where it can be changed, its place."""
    if isinstance(owner, FunctionType):
        first = owner.__code__.co_argcount - len(owner.__defaults__ or ())
        names = owner.__code__.co_varnames
        for i, value in enumerate(owner.__defaults__ or ()):
            yield f" (default {names[first + i]})", value, Default(owner, i)
        for name, value in _items(owner.__kwdefaults__ or {}):
            yield f" (default {name})", value, Default(owner, name)
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            if name != "__class__":
                yield f" (closure variable {name})", _content(cell), None
        for name, value in _items(owner.__dict__):
            if name != "__wrapped__":
                yield f".{name}", value, None
    elif issubclass(type(owner), functools.partial):
        yield " (partial)", owner.func, PartialPart(owner, None)
        yield from ((f" (partial, {i})", value, PartialPart(owner, i)) for i, value in enumerate(owner.args))
        yield from ((f" (partial, {k})", value, PartialPart(owner, k)) for k, value in _items(owner.keywords))
    else:
        mark = "." if issubclass(type(owner), type) else ":"
        yield from ((mark + name, value, Name(owner, name)) for name, value in _items(namespace(owner)))


def _items(mapping: Mapping[Any, Any]) -> Sequence[tuple[Any, Any]]:
    return list(mapping.items())


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _instance_dict(instance: object) -> dict[str, object]:
    try:
        found = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _modules(is_own: Callable[[str], bool]) -> dict[int, ModuleType]:
    """Return the loaded modules, each once, by `id` of their namespace."""
    found: dict[int, ModuleType] = {}
    for name in sorted(sys.modules):
        module = sys.modules.get(name)
        # The type is asked, since isinstance would ask a lazy module for its __class__ and so load it.
        if module is not None and issubclass(type(module), ModuleType) and not is_own(name):
            found.setdefault(id(namespace(module)), module)
    return found


def _home(owner: Any) -> str:
    """Return the module that a class, a function or a module comes from."""
    names = owner.__globals__ if isinstance(owner, FunctionType) else namespace(owner)
    name = names.get("__module__" if issubclass(type(owner), type) else "__name__")
    return name if isinstance(name, str) else ""


def _name(owner: Any, modules: Mapping[int, ModuleType]) -> tuple[str, str]:
    """Return what an owner is called, and its module's name."""
    if issubclass(type(owner), functools.partial):
        return _name_of_holder(owner, modules)
    home = _home(owner)
    shown = shown_module(home)
    if issubclass(type(owner), ModuleType):
        return shown, home
    return f"{shown}:{owner.__qualname__}", home


def _name_of_holder(partial: functools.partial[Any], modules: Mapping[int, ModuleType]) -> tuple[str, str]:
    """Return what a partial object is called: a name of a module that holds it, if there is one."""
    for holder in gc.get_referrers(partial):
        module = modules.get(id(holder)) if type(holder) is dict else None
        if module is not None:
            names = (name for name, value in _items(namespace(module)) if value is partial)
            name = next(names, None)
            if name is not None:
                return f"{shown_module(_home(module))}:{name}", _home(module)
    return "a functools.partial", ""


def shown_module(name: str) -> str:
    """Return what people call a module: the script by its file.

    >>> shown_module("os.path")
    'os.path'
    """
    module = sys.modules.get(name)
    file = namespace(module).get("__file__") if name == "__main__" and module is not None else None
    return os.path.basename(file) if isinstance(file, str) else name
