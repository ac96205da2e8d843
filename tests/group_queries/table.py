"""What Megatron's questions about groups get from the plugin, and what would be true: ``callers.json`` has all callers.

A caller that is not there fails the test that reaches it (``recorder``), or that finds it in the sources (``finder``).
Read what it concludes before you add it; where the answer is not true, mend it. Kinds of groups:

* stage: inside one stage, such as tensor-, context-, data- and expert-parallel ones.
* pipeline: one rank of every stage.
* model, experts, optimizer: sum over the stages; a ModelGroup between stages with other replicas or sites.
* embedding: the ends of the pipeline; None between unequal stages.
* grid: of a module with a grid of its own, or one that a caller made.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = "tests/group_queries/callers.json"
# The families of Megatron whose callers in the core grids were all seen: there these grids always record.
HOSTS = ("0.12", "0.16", "0.19")


class Answer(NamedTuple):
    """What some callers get and what would be true.

    Attributes:
        gets: from the plugin.
        true: what the caller concludes from it, and why that is right.
        callers: functions, with their classes, by module.
    """

    gets: str
    true: str
    callers: Mapping[str, list[str]]

    def names(self) -> Iterator[str]:
        """Yield the callers as ``module:function``."""
        yield from (f"{module}:{function}" for module, functions in self.callers.items() for function in functions)


@functools.cache
def answers() -> Mapping[str, list[Answer]]:
    """Read the table, by kind of group."""
    rows = json.loads(Path(__file__).with_name("callers.json").read_text())
    return {kind: [Answer(**row) for row in found] for kind, found in rows.items()}


@functools.cache
def _known() -> Mapping[str, frozenset[str]]:
    return {kind: frozenset(name for answer in found for name in answer.names()) for kind, found in answers().items()}


def known_callers() -> frozenset[str]:
    """Give all callers, of whatever kind of group."""
    return frozenset().union(*_known().values())


def unknown_callers(queries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Say which of these (caller, kind, question) are not in the table, one line each."""
    return [
        f"{caller} asks a {kind} group: {asks}; read what it concludes and add it to {TABLE}"
        for caller, kind, asks in sorted(queries)
        if caller not in _known().get(kind, frozenset())
    ]
