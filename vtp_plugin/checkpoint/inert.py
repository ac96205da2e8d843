"""Pickles are read without what they name: nothing is imported, nothing runs, and what was read can be written again.

A pickle says which functions and classes make its objects, and whoever loads it calls them. Here each such object is an
:class:`Inert`, which only keeps what it would have been made of.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any, ClassVar, cast

# Containers that take what they are given and nothing more.
_REAL = {("collections", "OrderedDict"): OrderedDict}


class Inert:
    """Stands for an object whose class is not imported. Each class that a pickle names is a subclass.

    Attributes:
        origin: module and name of the class or function.
        args: what it was called with.
        state: what was set afterwards; a dictionary of attributes of most objects.
        entries: of a list.
        fields: of a dictionary.
        is_called: whether its class was called, which a pickle need not do.
    """

    origin: ClassVar[tuple[str, str]] = ("", "")
    is_called = False
    args: tuple[Any, ...]
    state: Any = None
    entries: list[Any]
    fields: dict[Any, Any]

    def __new__(cls, *args: Any) -> Inert:
        """Make an object, as a pickle may do without calling its class."""
        self = object.__new__(cls)
        self.args, self.entries, self.fields = args, [], {}
        return self

    def __init__(self, *args: Any) -> None:
        del args
        self.is_called = True

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
    """Stands for what a pickle keeps outside itself, such as the elements of a tensor.

    Args:
        words: by which it is found.
    """

    def __init__(self, words: Any) -> None:
        self.words = words


class ForbiddenError(Exception):
    """A pickle names what it must not.

    Args:
        name: module and name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(file)
        self._is_allowed = is_allowed
        self._known: dict[tuple[str, str], type] = dict(_REAL)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        origin = (module_name, global_name)
        if not self._is_allowed(*origin):
            raise ForbiddenError(".".join(origin))
        if origin not in self._known:
            self._known[origin] = type(global_name, (Inert,), {"origin": origin})
        return self._known[origin]

    def persistent_load(self, pid: Any) -> Reference:
        return Reference(pid)


def load_inert(data: bytes | IO[bytes], is_allowed: Callable[[str, str], bool] = lambda module, name: True) -> Any:
    r"""Read a pickle.

    Args:
        data: the pickle, or a file at its beginning.
        is_allowed: whether a module and a name of it may be named.

    Raises:
        ForbiddenError: something else is named.
        Exception: of any kind; the pickle is damaged.

    >>> read = load_inert(b"cos\nsystem\n(S'rm -rf /'\ntR.")
    >>> read.name, read.args
    ('os.system', ('rm -rf /',))
    """
    return _Unpickler(io.BytesIO(data) if isinstance(data, bytes) else data, is_allowed).load()


# The pickler of the standard library that is written in Python: the other one looks up each class that it writes.
_Written: Any = pickle._Pickler


class _Pickler(_Written):
    def persistent_id(self, obj: Any) -> Any:
        return obj.words if isinstance(obj, Reference) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Inert):
            return NotImplemented
        make = (type(obj), obj.args) if obj.is_called else (copyreg.__newobj__, (type(obj), *obj.args))  # type: ignore[attr-defined]
        return (*make, obj.state, iter(obj.entries), iter(obj.fields.items()))

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Inert):
            module, own = obj.origin
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def dump_inert(value: Any) -> bytes:
    """Write what was read by :func:`load_inert`, as the pickle that torch writes."""
    file = io.BytesIO()
    pickler = cast(Any, _Pickler)(file, protocol=2)
    pickler.dump(value)
    return file.getvalue()
