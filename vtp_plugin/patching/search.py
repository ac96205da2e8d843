"""Find what holds given objects: names of modules and classes, default arguments, partial objects, and what else.

Modules are read name by name. The rest is found backwards, by asking Python's garbage collector what refers to an
object: 0.1 s for each step back in a process with torch and Megatron, where reading all classes and functions takes 1
s. It compares every reference in the process with each of the objects, so it is asked about as few as possible: not
about what this package itself holds them in. No attribute is asked for, so no lazy module loads. What ``gc.freeze()``
has put aside is found under module names only.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from vtp_plugin.ground.undo import ABSENT, Item, Name, Place, namespace
from vtp_plugin.patching.objects import MARKER, attributes, functions
from vtp_plugin.patching.places import Default, PartialPart

# From an original to the class or function that holds it: a staticmethod, the dictionary of its class, the class.
_STEPS: Final = 3
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, CellType, staticmethod, classmethod, MethodType)
_BELOW_TORCH: Final = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "networkx", "numpy", "triton"}
# Objects of these modules describe code, such as annotations, fields and their caches; nobody calls what they hold.
_DESCRIBING: Final = frozenset(
    {"builtins", "types", "typing", "dataclasses", "functools", "inspect", "weakref", "mindspeed.patch_utils"}
)
_OWN: Final = __name__.partition(".")[0]


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


@dataclass(frozen=True, slots=True)
class _Known:
    """One of the objects, or something that leads to one; `new` is its counterpart, `ABSENT` if it has none."""

    value: object
    of: int
    new: object
    path: str


def is_own(module: str) -> bool:
    """Tell whether a module belongs to the package that this engine is part of: it keeps originals on purpose."""
    return f"{module}.".startswith(f"{_OWN}.")


def find(swaps: Iterable[tuple[object, object]]) -> tuple[list[Hit], list[tuple[int, str]]]:
    """Find all that holds one of some objects, except in the code of this package.

    Args:
        swaps: the objects, each with its counterpart.

    Returns:
        The places that can be changed, and where objects stay (a closure, a container, an attribute), each as the `id`
        of the object and a text for people; both sorted.
    """
    pairs = list(swaps)
    known = {id(old): _Known(old, id(old), new, "") for old, new in pairs}
    modules = _modules(is_own)
    owners = _frozen_owners(known, modules)
    objects = _climb(known, modules, owners, _own_holders(pairs))
    hits: list[Hit] = []
    unreached: set[tuple[int, str]] = set()
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
            # A partial object is an owner itself: its parts are hits.
            elif not isinstance(item.value, functools.partial):
                unreached.add((item.of, where + label + item.path))
    # An object that an owner holds is listed with the owner's name, which says more than its class.
    unreached |= {
        (known[key].of, text + known[key].path) for key, text in objects.items() if key in known.keys() - named
    }
    return sorted(hits, key=lambda hit: hit.where), sorted(unreached)


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
    """Return the `id`s whose object is the value of a name in a loaded module.

    Args:
        ids: of the objects.
        is_left_out: tells which modules do not count.
    """
    modules = _modules(is_left_out).values()
    return {key for module in modules for key in ids.intersection(map(id, list(namespace(module).values())))}


def _own_holders(pairs: Sequence[tuple[object, object]]) -> set[int]:
    """Return the `id`s of what holds objects for us: the pairs, and the closures and attributes of replacements."""
    found = set(map(id, pairs))
    for value in itertools.chain.from_iterable(pairs):
        for function in functions(value):
            # A replacement holds its original, wherever it was written.
            if type(function) is FunctionType and MARKER in function.__dict__:
                found |= {id(function.__dict__), *map(id, function.__closure__ or ())}
    return found


def _climb(
    known: dict[int, _Known], modules: Mapping[int, ModuleType], owners: dict[int, Any], own_holders: set[int]
) -> dict[int, str]:
    """Go back from the objects along references, as far as the owners: modules, classes, functions, partial objects.

    Args:
        known: the objects; gets the containers and other objects on the path.
        modules: by `id` of their namespace.
        owners: gets what was found, by `id`.
        own_holders: the `id`s of what leads nowhere.

    Returns:
        What to call the other objects on the path, by `id`.
    """
    objects: dict[int, str] = {}
    frontier = [item.value for item in known.values()]
    for _ in range(_STEPS):
        if not frontier:
            break
        skipped = known.keys() | owners.keys() | own_holders | {id(frontier)}
        ahead: list[Any] = []
        for holder in gc.get_referrers(*frontier):
            kind: type = type(holder)
            if id(holder) in skipped:
                continue
            if (module := modules.get(id(holder))) is not None:
                owners[id(module)] = module
            elif kind is FunctionType or issubclass(kind, type):
                # A replacement holds its original, wherever it was written.
                if not is_own(_home(holder)) and MARKER not in attributes(holder):
                    owners[id(holder)] = holder
            elif kind in _CONTAINERS or issubclass(kind, functools.partial):
                _add(known, holder)
                ahead.append(holder)
                if issubclass(kind, functools.partial):
                    owners[id(holder)] = holder
            elif kind.__module__ not in _DESCRIBING and not is_own(kind.__module__):
                _add(known, holder)
                ahead.append(holder)
                objects[id(holder)] = f"an object of class {kind.__module__}.{kind.__qualname__}"
        frontier = ahead
    return objects


def _add(known: dict[int, _Known], holder: Any) -> None:
    """Note what leads to an object, and its counterpart if it can be made anew."""
    for label, value, _ in held(holder):
        item = known.get(id(value))
        if item is not None:
            known[id(holder)] = _Known(holder, item.of, _rewrapped(holder, item.new), label + item.path)
            return
    # An object with slots, an object written in C, or one whose class is searched for.
    item = next((known[id(value)] for value in gc.get_referents(holder) if id(value) in known), None)
    if item is not None:
        known[id(holder)] = _Known(holder, item.of, ABSENT, item.path)


def _rewrapped(holder: Any, new: Any) -> object:
    """Return `new` in the descriptor or bound method that holds the old object, `ABSENT` for other holders."""
    if new is not ABSENT and isinstance(holder, staticmethod | classmethod):
        return type(holder)(new)
    return MethodType(new, holder.__self__) if new is not ABSENT and isinstance(holder, MethodType) else ABSENT


def held(holder: Any) -> Iterator[tuple[str, object, Place | None]]:
    """Yield what an object holds, each with its label and, where it can be changed, its place.

    Every mapping is copied first: other threads go on assigning while we look.
    """
    # The type is asked, since isinstance would ask a lazy module for its __class__ and so load it.
    kind = type(holder)
    if kind is FunctionType:
        yield from _held_by_function(holder)
    elif issubclass(kind, functools.partial):
        yield " (partial)", holder.func, PartialPart(holder, 0)
        yield from ((f" (partial, {i})", value, PartialPart(holder, i + 1)) for i, value in enumerate(holder.args))
        for name, value in list(holder.keywords.items()):
            yield f" (partial, {name})", value, Item(holder.keywords, name)
    elif issubclass(kind, ModuleType | type):
        mark = "." if issubclass(kind, type) else ":"
        yield from ((mark + name, value, Name(holder, name)) for name, value in list(namespace(holder).items()))
    elif issubclass(kind, dict):
        for key, value in list(holder.items()):
            yield f"[{key!r:.40}]" if isinstance(key, str | int) else "[..]", value, None
    elif issubclass(kind, list | tuple):
        yield from ((f"[{i}]", value, None) for i, value in enumerate(holder))
    elif issubclass(kind, set | frozenset):
        yield from (("{..}", value, None) for value in list(holder))
    elif kind is CellType:
        yield "", _content(holder), None
    elif issubclass(kind, staticmethod | classmethod | MethodType):
        yield "", holder.__func__, None
    else:
        yield from ((f".{name}", value, None) for name, value in list(_instance_dict(holder).items()))


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, object, Place | None]]:
    defaults, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(defaults)
    for i, value in enumerate(defaults):
        yield f" (default {code.co_varnames[first + i]})", value, Default(function, i)
    keyword_defaults = function.__kwdefaults__ or {}
    for name, value in list(keyword_defaults.items()):
        yield f" (default {name})", value, Item(keyword_defaults, name)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield f" (closure variable {name})", _content(cell), None
    for name, value in list(function.__dict__.items()):
        if name != "__wrapped__":
            yield f".{name}", value, None


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


def _modules(is_left_out: Callable[[str], bool]) -> dict[int, ModuleType]:
    """Return the loaded modules, each once, by `id` of their namespace."""
    found: dict[int, ModuleType] = {}
    for name in sorted(sys.modules):
        module = sys.modules.get(name)
        # The type is asked, since isinstance would ask a lazy module for its __class__ and so load it.
        if module is not None and issubclass(type(module), ModuleType) and not is_left_out(name):
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
        return next(_names_of_partial(owner, modules), ("a functools.partial", ""))
    home = _home(owner)
    shown = shown_module(home)
    return shown if issubclass(type(owner), ModuleType) else f"{shown}:{owner.__qualname__}", home


def _names_of_partial(partial: functools.partial[Any], modules: Mapping[int, ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield the names of modules that hold a partial object, as :func:`_name` returns them."""
    for module in (modules[id(holder)] for holder in gc.get_referrers(partial) if id(holder) in modules):
        home = _home(module)
        for name, value in list(namespace(module).items()):
            if value is partial:
                yield f"{shown_module(home)}:{name}", home


def shown_module(name: str) -> str:
    """Return what people call a module: the script by its file.

    >>> shown_module("os.path")
    'os.path'
    """
    module = sys.modules.get(name)
    file = namespace(module).get("__file__") if name == "__main__" and module is not None else None
    return os.path.basename(file) if isinstance(file, str) else name
