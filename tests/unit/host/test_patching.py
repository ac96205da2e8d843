"""Patch engine on a toy host package that is written to disk and really imported."""

from __future__ import annotations

import contextlib
import doctest
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vtp_plugin.errors import PatchError
from vtp_plugin.host.patching import (
    AppliedPatches,
    PatchRecord,
    Record,
    WriteRecord,
    apply_records,
    engine,
    format_status,
)
from vtp_plugin.host.patching.names import find

STATE = """
import functools

LIMIT = 4

def setup(size):
    return ("setup", size)

def other(size):
    return ("other", size)

class Frozen(type):
    def __setattr__(cls, name, value):
        raise TypeError("frozen")

class Sealed(metaclass=Frozen):
    def seal(self):
        return "seal"

class Base:
    def step(self, x):
        return (type(self).__name__, x)

class Grid(Base):
    def __init__(self, size):
        self._size = size

    def area(self, k=1):
        return self._size * k

    @staticmethod
    def unit(x):
        return ("unit", x)

    @classmethod
    def make(cls, size):
        return cls(size)

    @property
    def size(self):
        return self._size

class Other(Base):
    pass
"""

FILES = {
    "toyhost/__init__.py": "",
    "toyhost/state.py": STATE,
    "toyhost/core/__init__.py": "from .finalize import finalize\n",  # the function shadows the submodule
    "toyhost/core/finalize.py": "def finalize(x):\n    return ('finalize', x)\n",
    "toyhost/user.py": "from toyhost.state import Grid, setup\ndef call():\n    return setup(1)\n",
    "toyhost/renamed.py": "from toyhost.state import setup as configure\n",
    "toyhost/late.py": "from toyhost.state import setup as begin\n",
    "toyhost/broken.py": "import package_that_nobody_has\n",
    "toyhost/lazy.py": "def __getattr__(name):\n    raise AssertionError(f'lazy module asked for {name}')\n",
    "toyhost/methods.py": "from toyhost.state import Base, Grid\nbase_step = Base.step\ngrid_step = Grid.step\n",
    "toyhost/deferred.py": "from toyhost.state import setup\n",
    "toyhostile.py": "from toyhost.state import setup\n",  # another package whose name starts alike
    "intruder.py": (
        "import functools\n"
        "def wrap(f):\n"
        "    @functools.wraps(f)\n"
        "    def inner(*args):\n"
        "        return ('intruder', f(*args))\n"
        "    return inner\n"
    ),
}
TARGETS = {
    "setup": "toyhost.state:setup",
    "other": "toyhost.state:other",
    "finalize": "toyhost.core.finalize:finalize",
    "area": "toyhost.state:Grid.area",
    "unit": "toyhost.state:Grid.unit",
    "make": "toyhost.state:Grid.make",
    "step": "toyhost.state:Grid.step",
}


def write_host(root: Path) -> None:
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The toy host, all of it loaded but `late` and `broken`; gives its module `state`."""
    write_host(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("toyhost.core", "toyhost.user", "toyhost.renamed", "toyhost.lazy", "toyhostile", "intruder"):
        importlib.import_module(name)
    yield sys.modules["toyhost.state"]
    for name in [name for name in sys.modules if name.startswith(("toyhost", "intruder"))]:
        del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(name)


def tagged(tag: str) -> Callable[[Any], Any]:
    """A build that wraps a function so that its result carries the tag."""

    def build(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (tag, original(*args, **kwargs))

        return replacement

    return build


def record(target: str, build: Callable[[Any], Any] | None = None, **fields: Any) -> PatchRecord:
    fields = {"id": "X1", "why": "why", "versions": ">=1,<2", "remove_when": "never"} | fields
    return PatchRecord(target=target, build=build or tagged("new"), **fields)


def write(target: str, **fields: Any) -> WriteRecord:
    return WriteRecord(
        target=target, **{"id": "W1", "why": "why", "versions": ">=1,<2", "remove_when": "never"} | fields
    )


def apply(*records: Record, version: str = "1.5") -> AppliedPatches:
    return apply_records(records, version, "toyhost", optional_packages=("toyhost.extra",))


def snapshot() -> dict[tuple[str, str], object]:
    """Every attribute of every loaded host module and of its classes, by place."""
    places: dict[tuple[str, str], object] = {}
    for name, loaded in sys.modules.items():
        if name.startswith("toyhost"):
            for attribute, value in vars(loaded).items():
                places[name, attribute] = value
                if isinstance(value, type):
                    places |= {(f"{name}:{attribute}", key): inner for key, inner in vars(value).items()}
    return places


def assert_same(before: dict[tuple[str, str], object]) -> None:
    after = snapshot()
    assert {p for p in before.keys() | after.keys() if after.get(p, 0) is not before.get(p, 1)} == set()


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(module("vtp_plugin.host.patching.record"))
    assert results.attempted > 0 and results.failed == 0


# What is replaced


def test_function_and_its_aliases_are_replaced(host: Any) -> None:
    apply(record(TARGETS["setup"]))
    assert host.setup(3) == ("new", ("setup", 3))
    assert module("toyhost.user").call() == ("new", ("setup", 1))
    assert module("toyhost.renamed").configure is host.setup


def test_siblings_are_left_alone_and_other_packages_follow(host: Any) -> None:
    before = snapshot()
    applied = apply(record(TARGETS["setup"]))
    assert module("toyhostile").setup is host.setup
    assert applied.status()[0].aliases_outside == ("toyhostile:setup",)
    changed = {place for place, value in snapshot().items() if value is not before[place]}
    names = {("toyhost.state", "setup"), ("toyhost.user", "setup"), ("toyhost.renamed", "configure")}
    assert changed == names | {("toyhostile", "setup")}


def test_module_imported_later_gets_the_replacement_and_goes_back(host: Any) -> None:
    original = host.setup
    applied = apply(record(TARGETS["setup"]))
    late = module("toyhost.late")
    assert late.begin is host.setup is not original
    assert "toyhost.late:begin" in applied.status()[0].aliases_found
    applied.revert()
    assert late.begin is original


def test_submodule_shadowed_by_a_function(host: Any) -> None:
    apply(record(TARGETS["finalize"]))
    assert sys.modules["toyhost.core.finalize"].finalize(1) == ("new", ("finalize", 1))
    assert module("toyhost.core").finalize is sys.modules["toyhost.core.finalize"].finalize


def test_method_staticmethod_classmethod_keep_their_kind(host: Any) -> None:
    apply(*(record(TARGETS[name], id=name) for name in ("area", "unit", "make")))
    assert host.Grid(2).area(k=3) == ("new", 6)
    assert host.Grid.unit(1) == host.Grid(2).unit(1) == ("new", ("unit", 1))
    tag, made = host.Grid.make(5)
    assert (tag, type(made), made.size) == ("new", host.Grid, 5)
    subclass = type("Sub", (host.Grid,), {})
    assert type(subclass.make(1)[1]) is subclass


def test_property_is_replaced_by_a_property(host: Any) -> None:
    applied = apply(record("toyhost.state:Grid.size", lambda p: property(lambda self: p.fget(self) + 1)))
    assert host.Grid(2).size == 3
    applied.revert()
    assert host.Grid(2).size == 2


def test_class_is_replaced_also_in_importers(host: Any) -> None:
    apply(record("toyhost.state:Grid", lambda old: type("Grid", (old,), {"area": lambda self: -1})))
    assert module("toyhost.user").Grid(3).area() == -1


def test_inherited_method_changes_only_the_named_class(host: Any) -> None:
    methods, original = module("toyhost.methods"), host.Base.step
    apply(record(TARGETS["step"]))
    assert host.Grid(1).step(0) == ("new", ("Grid", 0))
    assert host.Other().step(0) == ("Other", 0)
    assert "step" in vars(host.Grid) and methods.base_step is original


def test_lazy_loader_module_stays_unloaded(host: Any) -> None:
    spec = importlib.util.find_spec("toyhost.deferred")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = sys.modules["toyhost.deferred"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    apply(record(TARGETS["setup"]))
    assert "setup" not in object.__getattribute__(lazy, "__dict__")
    assert lazy.setup is host.setup


# What other packages took before

SCRIPT = """
import functools
import toyhost.core
from toyhost.state import Grid, setup

class Widget:
    begin = setup
    helper = staticmethod(setup)
    made = classmethod(setup)
    def use(self, f=setup, *, g=setup):
        return f, g

def call(first, f=setup, *, g=setup):
    return f, g

def outer():
    def inner(f=setup):
        return f
    return inner

half = functools.partial(setup, 3)
handed = functools.partial(sorted, setup, key=setup)
inner = outer()
area = Grid.area
unit = Grid.unit
bound = type("Any", (), {"f": setup})().f
"""
KEPT = """
from toyhost.state import setup

class Holder:
    def __init__(self, f):
        self.f = f

class Slotted:
    __slots__ = ("f",)

TABLE = {"setup": setup}
STEPS = [len, (setup,)]
HELD = Holder(setup)
BOX = Slotted()
BOX.f = setup

def keep(f):
    def kept():
        return f(1)
    return kept

kept = keep(setup)
"""


@pytest.fixture
def write_module(tmp_path: Path) -> Iterator[Callable[[str, str], Any]]:
    """Write a module of another package and import it."""
    written: list[str] = []

    def write(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        written.append(name)
        return module(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


def held_by(script: Any) -> dict[str, object]:
    """What every binding of SCRIPT holds."""
    widget = script.Widget
    return {
        "name": script.setup,
        "class attribute": vars(widget)["begin"],
        "staticmethod": vars(widget)["helper"].__func__,
        "classmethod": vars(widget)["made"].__func__,
        "default of a method": widget.use.__defaults__[0],
        "keyword default of a method": widget.use.__kwdefaults__["g"],
        "default": script.call.__defaults__[0],
        "keyword default": script.call.__kwdefaults__["g"],
        "default of a nested function": script.inner.__defaults__[0],
        "partial": script.half.func,
        "argument of a partial": script.handed.args[0],
        "keyword of a partial": script.handed.keywords["key"],
        "bound method": script.bound.__func__,
    }


def test_every_kind_of_binding_follows_and_goes_back(host: Any, write_module: Callable[[str, str], Any]) -> None:
    script, original = write_module("toyscript", SCRIPT), host.setup
    before = held_by(script)
    assert set(before.values()) == {original}
    applied = apply(record(TARGETS["setup"]))
    assert {kind: held is host.setup for kind, held in held_by(script).items()} == dict.fromkeys(before, True)
    assert script.half() == ("new", ("setup", 3)) and script.call(0) == (host.setup, host.setup)
    assert isinstance(vars(script.Widget)["helper"], staticmethod) and not applied.unreached
    applied.revert()
    assert {kind: held is original for kind, held in held_by(script).items()} == dict.fromkeys(before, True)


# One binding each, and what it holds.
SINGLE = {
    "name": ("from toyhost.state import setup", "setup"),
    "another name": ("from toyhost.state import setup as begin", "begin"),
    "class attribute": ("import toyhost.state\nclass Widget:\n    begin = toyhost.state.setup", "Widget.begin"),
    "staticmethod": (
        "import toyhost.state\nclass Widget:\n    begin = staticmethod(toyhost.state.setup)",
        "Widget.begin",
    ),
    "default": ("import toyhost.state\ndef call(f=toyhost.state.setup):\n    return f", "call()"),
    "partial": ("import functools, toyhost.state\nbegin = functools.partial(toyhost.state.setup, 3)", "begin.func"),
}


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_single_binding_is_found(
    host: Any, write_module: Callable[[str, str], Any], kind: str, *, is_late: bool
) -> None:
    """What applying and reverting search is as much as an object's number of references asks for."""
    (text, holds), original = SINGLE[kind], host.setup
    script = None if is_late else write_module("toyscript", text)
    applied = apply(record(TARGETS["setup"]))
    script = script or write_module("toyscript", text)
    assert eval(holds, vars(script)) is host.setup is not original
    applied.revert()
    assert eval(holds, vars(script)) is host.setup is original


@pytest.mark.parametrize("is_late", [False, True])
def test_the_function_inside_a_descriptor_is_found(
    host: Any, write_module: Callable[[str, str], Any], *, is_late: bool
) -> None:
    text, original = "import toyhost.state\nbegin = toyhost.state.Grid.unit", host.Grid.unit
    script = None if is_late else write_module("toyscript", text)
    applied = apply(record(TARGETS["unit"]))
    script = script or write_module("toyscript", text)
    assert script.begin is host.Grid.unit is not original
    applied.revert()
    assert script.begin is host.Grid.unit is original


def test_nothing_is_searched_where_all_references_are_known(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes a tenth of a second in a process with torch and Megatron."""
    searches: list[object] = []
    monkeypatch.setattr(engine, "find", lambda *args: searches.append(args) or find(*args))
    del sys.modules["toyhost.renamed"], sys.modules["toyhost"].renamed  # it has another name for one of them
    gc.collect()
    applied = apply(record(TARGETS["setup"]), record(TARGETS["area"], id="X2"), record(TARGETS["make"], id="X3"))
    assert applied.is_reached and applied.status()[0].aliases_found == ("toyhost.user:setup",)
    applied.revert()
    assert not searches
    kept = [host.setup]
    assert not apply(record(TARGETS["setup"])).is_reached and len(searches) == 1
    del kept


def test_methods_that_a_script_took_follow_and_go_back(host: Any, write_module: Callable[[str, str], Any]) -> None:
    script = write_module("toyscript", SCRIPT)
    area, unit = script.area, script.unit
    applied = apply(record(TARGETS["area"]), record(TARGETS["unit"], id="X2"))
    assert script.area is host.Grid.area is not area and script.unit is host.Grid.unit is not unit
    applied.revert()
    assert script.area is area is host.Grid.area and script.unit is unit is host.Grid.unit


def test_a_live_reference_needs_nothing(host: Any, write_module: Callable[[str, str], Any]) -> None:
    script = write_module("toyscript", "import toyhost.state as state\n")
    applied = apply(record(TARGETS["setup"]))
    assert script.state.setup(1) == ("new", ("setup", 1))
    assert applied.status()[0].aliases_outside == ("toyhostile:setup",)


def test_the_script_itself_follows(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "begin", host.setup, raising=False)
    applied = apply(record(TARGETS["setup"]))
    assert main.begin is host.setup  # type: ignore[attr-defined]
    assert any(place.endswith(":begin") for place in applied.status()[0].aliases_outside)


def test_what_the_plugin_itself_holds_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, own = host.setup, ModuleType("vtp_plugin.kept")
    vars(own)["setup"] = original
    monkeypatch.setitem(sys.modules, own.__name__, own)
    apply(record(TARGETS["setup"]))
    assert vars(own)["setup"] is original


def test_an_original_that_comes_to_light_later_is_named(host: Any, write_module: Callable[[str, str], Any]) -> None:
    original = host.setup
    applied = apply(record(TARGETS["setup"]))
    script = write_module("toyscript", "kept = None\n")
    assert not applied.unreached
    script.kept = original
    assert applied.unreached == ("toyscript:kept (setup)",)
    applied.revert()
    assert script.kept is original


def test_what_cannot_be_rebound_is_named(host: Any, write_module: Callable[[str, str], Any]) -> None:
    kept, original = write_module("toykept", KEPT), host.setup
    applied = apply(record(TARGETS["setup"]))
    places = ("TABLE['setup']", "STEPS[1][0]", "HELD.f", "BOX", "keep.<locals>.kept (closure variable f)")
    assert {*applied.unreached} == {f"toykept:{place} (setup)" for place in places}
    assert kept.TABLE["setup"] is original and len(applied.unreached) == 5
    assert apply(record(TARGETS["area"])).unreached == ()


def test_revert_leaves_what_a_script_assigned_meanwhile(host: Any, write_module: Callable[[str, str], Any]) -> None:
    script, original = write_module("toyscript", SCRIPT), host.setup
    applied = apply(record(TARGETS["setup"]))
    script.setup = script.Widget.begin = len
    applied.revert()
    assert script.setup is script.Widget.begin is len
    assert script.call.__defaults__[0] is host.setup is original


def test_revert_reaches_what_took_the_replacement(host: Any, write_module: Callable[[str, str], Any]) -> None:
    original = host.setup
    applied = apply(record(TARGETS["setup"]))
    script = write_module("toyscript", SCRIPT)
    assert set(held_by(script).values()) == {host.setup}
    applied.revert()
    assert set(held_by(script).values()) == {original}


def test_a_class_that_lets_nobody_change_it_is_named(host: Any, write_module: Callable[[str, str], Any]) -> None:
    text = "from toyhost.state import Frozen, setup\nclass Iced(metaclass=Frozen):\n    begin = setup\n"
    write_module("toyscript", text)
    applied = apply(record(TARGETS["setup"]))
    assert applied.unreached == ("toyscript:Iced.begin (setup)",)
    applied.revert()


@pytest.mark.parametrize("base", ["Grid", "type('Between', (Grid,), {})"])
def test_a_class_with_subclasses_elsewhere_is_refused(
    host: Any, write_module: Callable[[str, str], Any], base: str
) -> None:
    script = write_module("toyscript", f"from toyhost.state import Grid\nclass Mine({base}):\n    pass\n")
    replaced = record("toyhost.state:Grid", lambda old: type("Grid", (old,), {}))
    before = snapshot()
    with pytest.raises(PatchError, match=r"toyscript has made class \w+ from it already.* move vtp_plugin.apply\(\)"):
        apply(replaced)
    assert_same(before)
    del script.Mine  # and nobody else holds it
    apply(replaced)


STALE = """
import functools
from toyhost.state import setup as begin, other
table = [begin]

def logged(f):
    @functools.wraps(f)
    def logging(*args):
        return f(*args)
    return logging

class Hook:
    def __init__(self):
        self.f = table[0]
    def __call__(self, *args):
        return self.f(*args)
    def run(self, *args):
        return self.f(*args)
"""


@pytest.mark.parametrize(
    ("taken", "is_stale"),
    [
        ("table[0]", True),
        ("functools.partial(table[0], 1)", True),
        ("logged(table[0])", True),
        ("functools.partial(logged(table[0]), 1)", True),
        ("lambda f=table[0]: f(1)", True),
        ("Hook()", True),
        ("Hook().run", True),
        ("begin", False),
        ("logged(begin)", False),
        ("functools.partial(begin, 1)", False),
        ("lambda: begin(1)", False),
        ("other", False),
        ("None", False),
    ],
)
def test_an_original_is_recognised_wherever_it_hides(
    host: Any, write_module: Callable[[str, str], Any], taken: str, is_stale: bool
) -> None:
    script = write_module("toystale", STALE)
    applied = apply(record(TARGETS["setup"]))
    line = "toyhostile: from toyhost.user import setup and toystale: from toyhost.user import setup as begin"
    assert applied.taken_before(eval(taken, vars(script))) == (line if is_stale else "")


# Revert


@pytest.mark.parametrize("count", [0, 1, 2, len(TARGETS)])
def test_revert_restores_identity_of_everything(host: Any, count: int) -> None:
    before = snapshot()
    for names in combinations(TARGETS, count):
        applied = apply(*(record(TARGETS[name], id=name) for name in names))
        assert all(status.applied for status in applied.status())
        applied.revert()
        assert_same(before)


def test_revert_reaches_methods_that_modules_took_after_applying(host: Any) -> None:
    applied = apply(record(TARGETS["step"]))
    methods = module("toyhost.methods")
    applied.revert()
    assert methods.grid_step is methods.base_step is host.Base.step


def test_second_revert_does_nothing(host: Any) -> None:
    applied = apply(record(TARGETS["setup"]))
    applied.revert()
    again = apply(record(TARGETS["setup"]))
    applied.revert()
    assert again.status()[0].applied and host.setup(1)[0] == "new"


@pytest.mark.parametrize("place", ["toyhost.state", "toyhost.user"])
def test_revert_refuses_when_overwritten_and_changes_nothing(host: Any, place: str) -> None:
    applied = apply(record(TARGETS["setup"]), record(TARGETS["area"], id="X2"))
    module(place).setup = module("intruder").wrap(host.setup)
    before = snapshot()
    with pytest.raises(PatchError, match=rf"X1.*{place}:setup is now intruder\.setup"):
        applied.revert()
    assert_same(before)
    assert applied.active


def test_revert_refuses_when_deleted(host: Any) -> None:
    applied = apply(record(TARGETS["area"]))
    del host.Grid.area
    with pytest.raises(PatchError, match="Grid.area is now deleted"):
        applied.revert()


def test_two_applies_revert_in_any_order(host: Any) -> None:
    before = snapshot()
    first, second = apply(record(TARGETS["setup"])), apply(record(TARGETS["area"]))
    first.revert()
    assert host.Grid(1).area() == ("new", 1)
    second.revert()
    assert_same(before)


# All or none


def raising(original: Any) -> Any:
    raise KeyError("no such thing")


BAD_RECORDS = {
    "missing attribute": (record("toyhost.state:nothing"), "module toyhost.state has no attribute 'nothing'"),
    "missing method": (record("toyhost.state:Grid.nothing"), "class Grid has no attribute 'nothing'"),
    "missing class": (record("toyhost.state:setup.area"), "'setup' in module toyhost.state is not a class"),
    "missing module": (record("toyhost.nothing:f"), "No module named 'toyhost.nothing'"),
    "broken module": (record("toyhost.broken:f"), "No module named 'package_that_nobody_has'"),
    "outside the host": (record("toyhostile:setup"), "not part of toyhost"),
    "a function of what is built on it": (record("mindspeed_mm.training:pretrain"), "not part of toyhost"),
    "a method outside the host": (record("toyhostile:Grid.setup"), "not part of toyhost"),
    "constant": (record("toyhost.state:LIMIT"), "it is a int"),
    "build raises": (record(TARGETS["other"], raising), "no such thing"),
    "build returns nothing": (record(TARGETS["other"], lambda f: None), "NoneType instead of a plain function"),
    "build returns the original": (record(TARGETS["other"], lambda f: f), "the original itself"),
    "build returns a descriptor": (record(TARGETS["unit"], staticmethod), "staticmethod instead of a plain function"),
    "function for a class": (record("toyhost.state:Grid", lambda c: lambda: 0), "no class in place of a class"),
    "function for a property": (record("toyhost.state:Grid.size", lambda p: lambda self: 0), "no property"),
    "host object as replacement": (record(TARGETS["other"], lambda f: module("toyhost.core").finalize), "in use"),
    "no room for the marker": (record(TARGETS["other"], lambda f: [].append), "cannot carry the marker"),
    "cannot be set": (record("toyhost.state:Sealed.seal"), "frozen"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_failure_leaves_nothing_behind_and_names_everything(host: Any, name: str) -> None:
    bad, reason = BAD_RECORDS[name]
    before = snapshot()
    good = (record(TARGETS["setup"], id="X0"), record(TARGETS["step"], id="X2"))
    with pytest.raises(PatchError) as caught:
        apply(*good, bad)
    assert_same(before)
    message = str(caught.value)
    assert message.startswith(f"patch X1 on {bad.target} (toyhost 1.5): ")
    assert reason in message and "\n" not in message
    assert ";" in message  # the way out follows


@pytest.mark.parametrize("second", ["toyhost.state:setup", "toyhost.renamed:configure"])
def test_same_function_twice(host: Any, second: str) -> None:
    with pytest.raises(PatchError, match="X2.*record X1 has the same target"):
        apply(record(TARGETS["setup"]), record(second, id="X2"))
    with pytest.raises(PatchError, match="the same target"):
        apply(*[record(second)] * 2)


def test_method_together_with_the_one_it_inherits(host: Any) -> None:
    with pytest.raises(PatchError, match="X1.*inherited from the target of record X2"):
        apply(record(TARGETS["step"]), record("toyhost.state:Base.step", id="X2"))


def test_two_classes_that_inherit_one_method(host: Any) -> None:
    apply(record(TARGETS["step"]), record("toyhost.state:Other.step", id="X2"))
    assert host.Other().step(0) == ("new", ("Other", 0))


@pytest.mark.parametrize("name", TARGETS)
def test_double_apply_is_refused(host: Any, name: str) -> None:
    apply(record(TARGETS[name]))
    before = snapshot()
    with pytest.raises(PatchError, match="X9.*patched already .by record X1."):
        apply(record(TARGETS[name], id="X9"))
    assert_same(before)


@pytest.mark.parametrize("copies", [functools.WRAPPER_UPDATES, ()], ids=["all", "no attributes"])
def test_double_apply_is_seen_below_a_foreign_wrapper(host: Any, copies: tuple[str, ...]) -> None:
    apply(record(TARGETS["setup"]))
    host.setup = functools.update_wrapper(lambda size: size, host.setup, updated=copies)
    with pytest.raises(PatchError, match="patched already"):
        apply(record(TARGETS["setup"]))


def test_double_apply_of_a_property_is_refused(host: Any) -> None:
    patch = record("toyhost.state:Grid.size", lambda p: property(lambda self: 0))
    apply(patch)
    with pytest.raises(PatchError, match="patched already"):
        apply(patch)


# Versions and status


@pytest.mark.parametrize(
    ("version", "tag"), [("0.9", None), ("1.0", "one"), ("1.9.3+local", "one"), ("2.0", "two"), ("3.0", None)]
)
def test_version_selects_the_record(host: Any, version: str, tag: str | None) -> None:
    applied = apply(
        record(TARGETS["setup"], tagged("one"), id="one", versions=">=1,<2"),
        record(TARGETS["setup"], tagged("two"), id="two", versions=">=2,<3"),
        version=version,
    )
    assert host.setup(0) == (("setup", 0) if tag is None else (tag, ("setup", 0)))
    assert [s.id for s in applied.status() if s.applied] == ([tag] if tag else [])


def test_record_for_another_version_imports_nothing(host: Any) -> None:
    apply(record("toyhost.late:begin", versions="<1"))
    assert "toyhost.late" not in sys.modules


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("0.9", "toyhost.state:setup"),
        ("1.5", None),
        ("2.0", "toyhost.state:Grid.area"),
        ("2.0+local", "toyhost.state:Grid.area"),
    ],
)
def test_a_record_lies_elsewhere_in_other_versions(version: str, target: str | None) -> None:
    moved = PatchRecord(
        id="X1",
        targets={"<1": "toyhost.state:setup", ">=2": "toyhost.state:Grid.area"},
        unneeded={">=1,<2": "it has no such thing"},
        build=lambda original: original,
        why="...",
        remove_when="never",
    )
    found = moved.at(version)
    assert (found and found.target) == target
    assert found is None or found.at(version) == found


@pytest.mark.parametrize(("version", "words"), [("1.5", "several things"), ("3.0", "nothing")])
def test_ranges_that_overlap_or_leave_out_a_version(version: str, words: str) -> None:
    with pytest.raises(PatchError, match=f"patch X1: its ranges say {words} of version {version}"):
        record("", targets={"<2": "toyhost.state:setup"}, unneeded={">=1,<3": "it has none"}).at(version)


def test_bad_host_version(host: Any) -> None:
    with pytest.raises(PatchError, match="not a PEP 440 version"):
        apply(record(TARGETS["setup"]), version="core_v1.5")


@pytest.mark.parametrize(
    "fields",
    [
        {"target": "toyhost.state.setup"},
        {"target": ""},
        {"aliases": ("toyhost.user",)},
        {"versions": "1 to 2"},
        {"versions": "~=1.2"},
        {"targets": {"<1": "toyhost.state.setup"}},
        {"targets": {"1": "toyhost.state:setup"}},
        {"unneeded": {"": "it has none"}},
    ],
)
def test_malformed_record(fields: dict[str, Any]) -> None:
    with pytest.raises(PatchError, match="patch X1"):
        record(fields.pop("target", TARGETS["setup"]), **fields)


def test_status_lists_aliases_found_and_missing(host: Any) -> None:
    declared = ("toyhost.user:setup", "toyhost.user:begin", "toyhost.late:begin")
    applied = apply(record(TARGETS["setup"], aliases=declared))
    (status,) = applied.status()
    assert status.aliases_found == ("toyhost.renamed:configure", "toyhost.user:setup")
    assert status.aliases_missing == ("toyhost.user:begin",)  # the module of the third one is not loaded
    applied.revert()
    (status,) = applied.status()
    assert (status.state, status.aliases_found, status.aliases_missing) == ("reverted", (), ())


def test_status_says_which_optional_package_is_absent(host: Any) -> None:
    applied = apply(record("toyhost.extra.moe:f"), write("toyhost.extra.moe:LIMIT"), record(TARGETS["setup"], id="X2"))
    *absent, present = applied.status()
    assert [(s.state, s.skipped) for s in absent] == [("skipped", "package toyhost.extra is absent")] * 2
    assert present.state == "applied"


@pytest.mark.parametrize("target", ["toyhost.extra.moe:f", "toyhost.extra.moe.router:f"])
def test_a_module_that_has_moved_inside_an_optional_package_is_an_error(host: Any, tmp_path: Path, target: str) -> None:
    (tmp_path / "toyhost" / "extra").mkdir()
    (tmp_path / "toyhost" / "extra" / "__init__.py").touch()
    importlib.invalidate_caches()
    for bad in (record(target), write(target)):
        with pytest.raises(PatchError, match="No module named 'toyhost.extra.moe'"):
            apply(record(TARGETS["setup"], id="X2"), bad)
    assert host.setup(1) == ("setup", 1)


def test_a_declared_alias_whose_module_has_moved_is_missing(host: Any) -> None:
    aliases = ("toyhost.gone:setup", "toyhost.late:begin", "toyhost.extra.moe:setup")
    (status,) = apply(record(TARGETS["setup"], aliases=aliases)).status()
    # The second one exists and is not loaded; of the third one the package is absent.
    assert status.aliases_missing == ("toyhost.gone:setup",)


def test_status_sees_that_a_replacement_was_overwritten(host: Any) -> None:
    applied = apply(record(TARGETS["setup"]))
    host.setup = module("intruder").wrap(host.setup)
    assert not applied.status()[0].applied


def test_foreign_wrapper_is_wrapped_and_reported(host: Any) -> None:
    host.setup = module("intruder").wrap(host.setup)
    applied = apply(record(TARGETS["setup"]))
    assert applied.status()[0].foreign_wrapper == "intruder"
    assert host.setup(1) == ("new", ("intruder", ("setup", 1)))


def test_foreign_replacement_of_a_method_is_reported(host: Any) -> None:
    host.Grid.unit = staticmethod(module("intruder").wrap(host.Grid.unit))
    assert apply(record(TARGETS["unit"])).status()[0].foreign_wrapper == "intruder"


@pytest.mark.parametrize("name", TARGETS)
def test_stock_targets_are_not_foreign(host: Any, name: str) -> None:
    assert apply(record(TARGETS[name])).status()[0].foreign_wrapper == ""


def test_standard_decorator_is_not_foreign(host: Any) -> None:
    host.setup = contextlib.contextmanager(host.setup)
    assert apply(record(TARGETS["setup"])).status()[0].foreign_wrapper == ""


# Writes


def test_a_write_is_listed_and_undone(host: Any) -> None:
    limit = write("toyhost.state:LIMIT")
    applied = apply(record(TARGETS["setup"]), limit)
    assert [status.state for status in applied.status()] == ["applied", "ready"]
    before = snapshot()
    with limit.during(5):
        assert (host.LIMIT, applied.status()[1].state) == (5, "written")
    assert_same(before)
    limit.put(6)
    limit.put(7)
    assert (host.LIMIT, applied.status()[1].state) == (7, "written")
    applied.revert()
    assert (host.LIMIT, [status.state for status in applied.status()]) == (4, ["reverted", "reverted"])


def test_a_write_changes_one_name_and_no_alias(host: Any) -> None:
    setup = write("toyhost.user:setup")
    apply(setup)
    with setup.during(lambda size: ("written", size)):
        assert module("toyhost.user").call() == ("written", 1)
        assert host.setup(1) == module("toyhost.renamed").configure(1) == ("setup", 1)
    assert module("toyhost.user").setup is host.setup


def test_writes_to_entries_of_a_dictionary_of_another_package(host: Any) -> None:
    table = module("toyhostile").table = {"a": 1}
    entries = write("toyhostile:table")
    applied = apply(entries)
    entries.put(2, key="a")
    entries.put(3, key="b")
    entries.put(4, key="c")
    del table["c"]  # the owner may clear it meanwhile
    assert table == {"a": 2, "b": 3}
    applied.revert()
    assert table == {"a": 1} and module("toyhostile").table is table


def test_what_others_assigned_after_a_write_stays(host: Any) -> None:
    limit = write("toyhost.state:LIMIT")
    applied = apply(limit)
    limit.put(5)
    host.LIMIT = 9
    applied.revert()
    assert host.LIMIT == 9


@pytest.mark.parametrize("target", ["toyhost.state:GONE", "toyhost.gone:LIMIT"])
def test_a_write_without_its_target_leaves_nothing_behind(host: Any, target: str) -> None:
    before = snapshot()
    with pytest.raises(PatchError, match="patch W1 on toyhost"):
        apply(record(TARGETS["setup"]), write(target))
    assert_same(before)


def test_format_status(host: Any) -> None:
    text = format_status(
        apply(record(TARGETS["setup"], why="only place"), record(TARGETS["area"], id="longer", versions="<1")).status()
    )
    lines = text.splitlines()
    assert lines[0].split() == ["id", "state", "target", "versions"]
    assert lines[1].split() == ["X1", "applied", "toyhost.state:setup", ">=1,<2"]
    assert "    why: only place" in lines and "    skipped: not for toyhost 1.5" in lines
    assert lines[1].index("applied") == lines[0].index("state")
