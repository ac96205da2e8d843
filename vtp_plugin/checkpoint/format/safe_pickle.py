"""Reads pickles without importing or calling what they name; what was read can be written again.

A pickle names the functions and classes that make its objects, and an ordinary reader calls them. Here each such object
becomes a :class:`PickledObject`, which only keeps the arguments. Nor can a few bytes use much memory or time: memo
indices, long integers, and keys that take long to hash are refused.

What torch and Megatron load themselves, with real objects, ``patches/core/dist_checkpointing/serialization.py`` guards.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

# Containers that take what they are given and nothing more.
_REAL = {("collections", "OrderedDict"): OrderedDict}
_MAX_NAMES = 4096
_MAX_BITS = 256
# Keys are small; a tuple of tuples that hold each other twice takes for ever to hash.
_MAX_KEY_PARTS = 256
_MAX_KEY_DEPTH = 8
# What no writer of checkpoints uses: it makes, of a few bytes, a large object, or one from outside the pickle.
_UNUSED = (
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.FROZENSET),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


class PickledObject:
    """Stands for an object whose class is not imported. Each class that a pickle names is a subclass.

    Attributes:
        origin: module and name of the class or function.
        args: arguments that it was called with.
        state: the state that was set afterwards; for most objects a dictionary of attributes.
        entries: elements, if it is a list.
        fields: items, if it is a dictionary.
        is_called: whether its class was called, which a pickle need not do.
        was_called: whether its class was called for any object of the pickle.
    """

    origin: ClassVar[tuple[str, str]] = ("", "")
    is_called = False
    was_called: ClassVar[bool] = False
    args: tuple[Any, ...]
    state: Any = None
    entries: list[Any]
    fields: dict[Any, Any]

    def __new__(cls, *args: Any) -> PickledObject:
        """Make an object, as a pickle may do without calling its class."""
        self = object.__new__(cls)
        self.args, self.entries, self.fields = args, [], {}
        return self

    def __init__(self, *args: Any) -> None:
        del args
        self.is_called = type(self).was_called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fields[key] = value

    def append(self, value: Any) -> None:
        """Take an element of a list."""
        self.entries.append(value)

    def extend(self, values: Any) -> None:
        """Take elements of a list."""
        self.entries.extend(values)

    @property
    def name(self) -> str:
        """Module and name of its class."""
        return ".".join(self.origin)


class Reference:
    """Stands for data that a pickle refers to outside itself, such as the elements of a tensor.

    Args:
        pid: the persistent id in the pickle.
    """

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class ForbiddenError(Exception):
    """A pickle names a class or function that is not allowed.

    Args:
        name: module and name of the class or function.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


# Those of the standard library that are written in Python. The other reader keeps its memory by number, so that nine
# bytes may ask for 64 GiB; the other writer looks up each class that it writes.
_Reader: Any = pickle._Unpickler
_Writer: Any = pickle._Pickler


class _Unpickler(_Reader):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load for code, load in _Reader.dispatch.items() if bytes([code]) not in _UNUSED
    }

    def __init__(self, data: bytes, is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(io.BytesIO(data))
        self._is_allowed = is_allowed
        self.known: dict[tuple[str, str], type] = dict(_REAL)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        origin = (module_name, global_name)
        if not self._is_allowed(*origin):
            raise ForbiddenError(".".join(origin))
        if origin not in self.known:
            if len(self.known) > _MAX_NAMES:
                raise pickle.UnpicklingError(f"more than {_MAX_NAMES} names")
            self.known[origin] = type(global_name, (PickledObject,), {"origin": origin})
        return self.known[origin]

    def persistent_load(self, pid: Any) -> Reference:
        return Reference(pid)

    # What the stack holds here is said in pickletools.

    def load_setitem(self) -> None:
        _require_small_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _require_small_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        _require_small_keys(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        _require_small_keys(self.stack)
        super().load_additems()

    def load_reduce(self) -> None:
        _require_unfilled(*self.stack[-2:])
        super().load_reduce()

    def _instantiate(self, klass: Any, args: Any) -> None:
        _require_unfilled(klass, args)
        super()._instantiate(klass, args)

    def load_int(self) -> None:
        super().load_int()
        _require_short(self.stack[-1])

    def load_long(self) -> None:
        super().load_long()
        _require_short(self.stack[-1])

    def load_long1(self) -> None:
        super().load_long1()
        _require_short(self.stack[-1])

    def load_long4(self) -> None:
        super().load_long4()
        _require_short(self.stack[-1])

    dispatch.update(
        {
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.DICT[0]: load_dict,
            pickle.ADDITEMS[0]: load_additems,
            pickle.REDUCE[0]: load_reduce,
            pickle.INT[0]: load_int,
            pickle.LONG[0]: load_long,
            pickle.LONG1[0]: load_long1,
            pickle.LONG4[0]: load_long4,
        }
    )


def _require_short(number: int) -> None:
    if number.bit_length() > _MAX_BITS:
        raise pickle.UnpicklingError(f"an integer of more than {_MAX_BITS} bits")


def _require_small_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if isinstance(key, tuple):
            _require_small(key)


def _require_small(key: tuple[Any, ...]) -> None:
    level = [key]
    for _ in range(_MAX_KEY_DEPTH):
        if sum(map(len, level)) > _MAX_KEY_PARTS:
            break
        level = [part for each in level for part in each if isinstance(part, tuple)]
        if not level:
            return
    raise pickle.UnpicklingError("a key that is no small one")


def _require_unfilled(made: Any, args: Any) -> None:
    """Refuse a container that is filled by the call of its class, as no writer does: its keys would go unchecked."""
    if made is OrderedDict and args:
        raise pickle.UnpicklingError("a container that is made of another one")


def load_safely(data: bytes, is_allowed: Callable[[str, str], bool] = lambda module, name: True) -> Any:
    r"""Read a pickle.

    Args:
        data: the pickle.
        is_allowed: tells whether a module and a name of it may be named.

    Raises:
        ForbiddenError: something else is named.
        Exception: of any kind; the pickle is damaged.

    >>> read = load_safely(b"cos\nsystem\n(S'rm -rf /'\ntR.")
    >>> read.name, read.args
    ('os.system', ('rm -rf /',))
    """
    return _Unpickler(data, is_allowed).load()


def names_called(data: bytes) -> frozenset[str]:
    r"""Say which classes and functions a pickle calls; of others it only makes objects, and fills them.

    >>> names_called(b"cos\nsystem\n(S'rm -rf /'\ntR.")
    frozenset({'os.system'})
    """
    reader = _Unpickler(data, lambda module, name: True)
    reader.load()
    return frozenset(
        ".".join(kind.origin) for kind in reader.known.values() if issubclass(kind, PickledObject) and kind.was_called
    )


class _Pickler(_Writer):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Reference) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PickledObject):
            return NotImplemented
        make = (type(obj), obj.args) if obj.is_called else (copyreg.__newobj__, (type(obj), *obj.args))  # type: ignore[attr-defined]
        return (*make, obj.state, iter(obj.entries), iter(obj.fields.items()))

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, PickledObject):
            module, own = obj.origin
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def dump_again(value: Any) -> bytes:
    """Write what was read by :func:`load_safely`, as the pickle that torch writes."""
    file = io.BytesIO()
    pickler = cast(Any, _Pickler)(file, protocol=2)
    pickler.dump(value)
    return file.getvalue()
