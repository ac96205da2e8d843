"""What holds an object by a name is found and can be replaced; whatever else holds it is detected, and stays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vtp_plugin.host.patching.names import detect, find

Make = Callable[[str, str], Any]
TAKING = "from functools import partial\nfrom namedhost import Grid, setup\n"


def owns(module: str) -> bool:
    return module == "namedhost"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a module from its text; there is a host with a function and a class."""

    def make(name: str, text: str) -> Any:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(text, vars(module))
        return module

    make("namedhost", "def setup(): ...\nclass Grid: ...\n")
    return make


def swaps(*names: str) -> list[tuple[object, object]]:
    return [(vars(sys.modules["namedhost"])[name], lambda: None) for name in names]


def places(*names: str) -> set[str]:
    found = {hit.where for hit in find(swaps(*names), owns)}
    return found - {f"namedhost:{name}" for name in names}


def holders(*names: str) -> set[str]:
    """What the detector finds, apart from this file's own hands."""
    return {text for _, text in detect(swaps(*names)) if text.startswith("taking")}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "taking:setup"),
        ("class Hooks:\n    class Inner:\n        begin = setup\n", "taking:Hooks.Inner.begin"),
        ("def call(f=setup): ...\n", "taking:call (default f)"),
        ("class Hooks:\n    @staticmethod\n    def call(*, f=setup): ...\n", "taking:Hooks.call (default f)"),
        ("half = partial(partial(print, setup), end='')\n", "taking:half (partial, 0)"),
        ("import namedhost\nclass Hooks:\n    begin = namedhost.setup\n", "taking:Hooks.begin"),
    ],
)
def test_what_hangs_on_a_name_is_a_place(make: Make, text: str, place: str) -> None:
    make("taking", TAKING + text)
    assert place in places("setup") and place in holders("setup")


@pytest.mark.parametrize(
    ("text", "holder"),
    [
        ("halves = [partial(setup)]\n", "taking:halves[0] (partial)"),
        (
            "def outer():\n    def inner(f=setup): ...\n    return [inner]\nkept = outer()\n",
            "taking:outer.<locals>.inner (default f)",
        ),
        ("table = {'a': (setup,)}\n", "taking:table['a'][0]"),
    ],
)
def test_what_hangs_on_none_is_detected_only(make: Make, text: str, holder: str) -> None:
    make("taking", TAKING + text)
    assert places("setup") == {"taking:setup"}
    assert holders("setup") == {"taking:setup", holder}


def test_a_module_that_does_not_know_the_host_is_not_opened(make: Make) -> None:
    """Its classes and functions cannot hold what it has never seen; if somebody has put it there, it is detected."""
    taking = make("taking", TAKING)
    other = make("takingnothing", "class Hooks: ...\n")
    other.Hooks.begin = taking.setup
    assert places("setup") == {"taking:setup"}
    assert holders("setup") == {"taking:setup", "takingnothing:Hooks.begin"}


def test_names_are_found_where_the_garbage_collector_does_not_look(make: Make) -> None:
    make("taking", TAKING)
    gc.freeze()
    try:
        assert places("setup") == {"taking:setup"}
    finally:
        gc.unfreeze()


def test_an_annotation_is_no_holder(make: Make) -> None:
    make("taking", f"from typing import Optional\n{TAKING}def call(a: Grid | None, b: Optional[Grid]): ...\n")
    assert holders("Grid") == {"taking:Grid"}


def test_a_class_whose_methods_call_super_takes_no_further_look(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell in which they have their class leads nowhere, and each further look goes through all objects."""
    make("namedhost", "class Grid:\n    def act(self):\n        return super().__repr__\nclass Plain:\n    pass\n")
    make("taking", TAKING.replace("Grid, setup", "Grid") + "cells = [lambda kind=Grid: kind]\n")
    looks, look = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: looks.append(len(objects)) or look(*objects))
    assert not any("__class__" in text for text in holders("Grid"))
    assert {"taking:Grid", "taking:<lambda> (default kind)"} == holders("Grid")
    sys.modules.pop("taking")
    gc.collect()
    numbers = []
    for name in ("Grid", "Plain"):
        looks.clear()
        assert not holders(name)
        numbers.append(len(looks))
    assert numbers[0] == numbers[1] > 0
