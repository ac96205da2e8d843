"""Finds by name, and through references, what holds an object.

Find by name what holds given objects: names of modules, and what hangs on them.

Every module is read name by name. What its names hold is opened where the module knows the host: it is part of it, or
holds a module, a class or a function of it. Opened are classes, functions with default arguments, and partial objects.
No attribute is asked for, so no lazy module loads. What lies elsewhere ``vtp_plugin.host.patching.names`` finds.

Each search looks at everything that is loaded. An object's number of references says whether one is needed.

Find what still holds given objects, whatever it is, and name it for people: nothing is changed.

Python's garbage collector is asked what refers to an object, and what refers to that: 0.1 s for each step in a process
with torch and Megatron. It compares every reference in the process with each of the objects, so it is asked about as
few as possible: not about what this package itself holds them in.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from vtp_plugin.host.patching.record import MARKER, Default, PartialPart, attributes, functions
from vtp_plugin.util.undo import ABSENT, Item, Name, Slot, namespace

_OWN: Final = __name__.partition(".")[0]
# These packages know nothing of a host that is built on torch.
_BELOW_TORCH: Final = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "networkx", "numpy", "triton"}
_LEFT_OUT: Final = {_OWN, *_BELOW_TORCH}
# Values of these kinds hold nothing that can be changed by name. Most defaults are such.
_LEADING_NOWHERE: Final = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, set, frozenset})
_WRAPPING: Final = (staticmethod, classmethod, MethodType)


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
    place: Slot
    new: object


def count_references(values: Sequence[object]) -> list[int]:
    """Count the references to some objects, but the one in the list that is given.

    >>> first, second = object(), object()
    >>> [number - 1 for number in count_references([first, second])]  # each variable is one
    [0, 0]
    """
    alone = [object()]
    own = sys.getrefcount(alone[0])
    return [sys.getrefcount(values[i]) - own for i in range(len(values))]


def find_in_modules(swaps: Iterable[tuple[str, object, object]]) -> list[Hit]:
    """Find the modules that hold some objects under their own names, and nothing else.

    Args:
        swaps: the objects, each with its name in front and its counterpart behind it.
    """
    pairs = list(swaps)
    counterparts = {id(old): new for _, old, new in pairs}
    names = {name for name, _, _ in pairs}
    found: list[Hit] = []
    for module in _loaded(_is_left_out).values():
        held = namespace(module)
        for name in names & held.keys():
            home = home_of(module)
            where = f"{shown_module(home)}:{name}"
            found += _hits(held.get(name), counterparts, where=where, module=home, place=Name(module, name))
    return found


def find(swaps: Iterable[tuple[object, object]], owns: Callable[[str], bool]) -> list[Hit]:
    """Find the places that hold one of some objects, except in the code of this package.

    Args:
        swaps: the objects, each with its counterpart.
        owns: tells whether a module is part of the host.

    Returns:
        The places, sorted by what they are called.
    """
    pairs = list(swaps)
    counterparts = {id(old): new for old, new in pairs}
    modules = _knowing_modules(owns, counterparts.keys())
    homes = set(map(home_of, modules))
    choose = functools.partial(_wanted, counterparts.keys(), _Kinds(type(old) for old, _ in pairs))
    ahead = [_Owner(module, shown_module(home_of(module)), home_of(module)) for module in modules]
    opened: set[int] = set()
    hits: list[Hit] = []
    while ahead:
        owner = ahead.pop()
        for label, value, place in held(owner.value, choose):
            if place is None:
                continue
            where = owner.where + label
            hits += _hits(value, counterparts, where=where, module=owner.module, place=place)
            if id(value) not in opened:
                opened.add(id(value))
                ahead += _opened(value, homes, opened, where=where, module=owner.module)
    return sorted(hits, key=lambda hit: hit.where)


@dataclass(frozen=True, slots=True)
class _Owner:
    """Something to be opened: what it is called, and its module's name."""

    value: Any
    where: str
    module: str


class _Kinds(dict[type, bool]):
    """By type, whether a value of it may hold places or be one of the objects; each type is looked at once.

    Args:
        sought: the types of the objects.
    """

    def __init__(self, sought: Iterable[type]) -> None:
        super().__init__(dict.fromkeys(sought, True))

    def __missing__(self, kind: type) -> bool:
        """Look at a type."""
        self[kind] = issubclass(kind, (FunctionType, type, functools.partial, *_WRAPPING))
        return self[kind]


def _knowing_modules(owns: Callable[[str], bool], ids: Collection[int]) -> list[ModuleType]:
    """Return the loaded modules that know the host or hold, under a name, an object with one of the `id`s."""
    modules = list(_loaded(_is_left_out).values())
    host = [module for module in modules if owns(home_of(module))]
    values = {id(value): value for module in host for value in list(namespace(module).values())}
    owns = functools.cache(owns)  # asked about the same few modules by every value
    written = (key for key, value in values.items() if issubclass(type(value), (FunctionType, type)))
    wanted = {*ids, *map(id, host), *(key for key in written if owns(home_of(values[key])))}
    return [module for module in modules if not wanted.isdisjoint(_held_ids(module))]


def _hits(value: Any, counterparts: Mapping[int, object], **place: Any) -> Iterator[Hit]:
    """Yield the hit of a place that holds one of the objects, itself or in a descriptor or bound method."""
    if id(value) in counterparts:
        yield Hit(of=id(value), new=counterparts[id(value)], **place)
    elif issubclass(type(value), _WRAPPING) and id(value.__func__) in counterparts:
        new: Any = counterparts[id(value.__func__)]
        wrapped = MethodType(new, value.__self__) if isinstance(value, MethodType) else type(value)(new)
        yield Hit(of=id(value.__func__), new=wrapped, **place)


def _wanted(ids: Collection[int], kinds: _Kinds, names: Mapping[str, object]) -> list[tuple[str, Any]]:
    """Choose the names that may hold one of the objects by `id`, or lead to one: few of many thousand."""
    ahead: list[tuple[str, Any]] = [item for item in list(names.items()) if kinds[type(item[1])]]
    return [item for item in ahead if type(item[1]) is not FunctionType or id(item[1]) in ids or _leads_on(item[1])]


def _leads_on(function: FunctionType) -> bool:
    """Tell whether a default of an argument may hold places, or be one of the objects."""
    defaults, by_name = function.__defaults__, function.__kwdefaults__
    return not (
        (defaults is None or _LEADING_NOWHERE.issuperset(map(type, defaults)))
        and (by_name is None or _LEADING_NOWHERE.issuperset(map(type, by_name.values())))
    )


def _opened(value: Any, homes: Collection[str], opened: set[int], *, where: str, module: str) -> Iterator[_Owner]:
    """Yield what of a value may hold places: a partial object, and classes and functions of those modules."""
    parts = [value]
    if issubclass(type(value), _WRAPPING):
        parts = [value.__func__, *([type(value.__self__)] if issubclass(type(value), MethodType) else [])]
        parts = [part for part in parts if id(part) not in opened]
        opened.update(map(id, parts))
    for part in parts:
        if issubclass(type(part), functools.partial):
            yield _Owner(part, where, module)
        elif issubclass(type(part), FunctionType | type) and (home := home_of(part)) in homes:
            yield _Owner(part, f"{shown_module(home)}:{part.__qualname__}", home)


def _held_ids(module: ModuleType) -> Iterator[int]:
    return map(id, list(namespace(module).values()))


def modules_by_namespace() -> dict[int, ModuleType]:
    """Return the loaded modules, but those of this package, by `id` of their namespace."""
    return _loaded(is_own)


def _is_left_out(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_OUT


def _loaded(is_left_out: Callable[[str], bool]) -> dict[int, ModuleType]:
    """Return the loaded modules, each once, by `id` of their namespace, but those left out by their name."""
    # The type is asked, since isinstance would ask a lazy module for its __class__ and so load it.
    return {
        id(namespace(module)): module
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and not is_left_out(name)
    }


def _all(names: Mapping[str, object]) -> list[tuple[str, object]]:
    return list(names.items())


def held(
    holder: Any, choose: Callable[[Mapping[str, object]], Iterable[tuple[str, object]]] = _all
) -> Iterator[tuple[str, object, Slot | None]]:
    """Yield what an object holds, each with its label and, where it can be changed, its place.

    Of the names of a module or class only those that `choose` returns. Every mapping is copied first: other threads
    assign while we look.
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
        for name, value in choose(namespace(holder)):
            yield mark + name, value, Name(holder, name)
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


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, object, Slot | None]]:
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


def is_own(module: str) -> bool:
    """Tell whether a module belongs to the package that this engine is part of: it keeps originals on purpose."""
    return f"{module}.".startswith(f"{_OWN}.")


def home_of(owner: Any) -> str:
    """Return the module that a class, a function or a module comes from."""
    names = owner.__globals__ if type(owner) is FunctionType else namespace(owner)
    name = names.get("__module__" if issubclass(type(owner), type) else "__name__")
    return name if isinstance(name, str) else ""


def shown_module(name: str) -> str:
    """Return what people call a module: the script by its file.

    >>> shown_module("os.path")
    'os.path'
    """
    module = sys.modules.get(name)
    file = namespace(module).get("__file__") if name == "__main__" and module is not None else None
    return os.path.basename(file) if isinstance(file, str) else name


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
