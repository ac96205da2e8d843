"""Read the file of a cluster: TOML, checked key by key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vtp_plugin.cluster.machines import Card, Cluster, Nodes, Time
from vtp_plugin.errors import ConfigError
from vtp_plugin.ground.values import parse_bytes
from vtp_plugin.search.question import Link

_PARTS = ("dense", "experts", "embedding", "head", "update")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster.

    Args:
        path: of the file; ``docs/search.md`` says what stands in it.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a key is unknown, missing or of another type.
    """
    # Python has it from 3.11 on; before, the package tomli is the same.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return parse_cluster(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_cluster(data: Mapping[str, Any]) -> Cluster:
    """Read what a file says.

    Raises:
        ConfigError: a key is unknown, missing or of another type.

    >>> cluster = parse_cluster({
    ...     "cards": {"old": {"memory": "32GiB", "teraflops": 100, "share": 0.5}},
    ...     "nodes": [{"cards": "old", "cards_per_node": 4, "count": 2}],
    ...     "links": {
    ...         "inside": {"latency_us": 5, "gbyte_per_s": 50}, "between": {"latency_us": 10, "gbyte_per_s": 10}}})
    >>> cluster.nodes[0].card.flops_per_s, cluster.between[""].bytes_per_s
    (50000000000000.0, 10000000000.0)
    """
    top = _Table(data, "the file")
    cards = {name: _card(name, top.table("cards").table(name)) for name in top.table("cards")}
    nodes = tuple(_nodes(number, table, cards) for number, table in enumerate(top.tables("nodes")))
    links = top.table("links")
    across = {}
    for name in links.table("across", is_optional=True):
        sites = sorted(name.split())
        if len(sites) != 2:
            raise ConfigError(f'links.across."{name}" must name two sites, such as "edge cloud"')
        across[sites[0], sites[1]] = _link(links.table("across").table(name))
    cluster = Cluster(nodes=nodes, inside=_links(links, "inside"), between=_links(links, "between"), across=across)
    links.done()
    top.done()
    if not nodes:
        raise ConfigError("no nodes; give [[nodes]] with cards, cards_per_node and count")
    return cluster


def _card(name: str, table: _Table) -> Card:
    teraflops, share = table.known("teraflops"), table.number("share", 0.4)
    memory, rate = table.text("memory", ""), table.known("memory_tbyte_per_s")
    card = Card(
        name=name,
        memory_bytes=parse_bytes(memory) if memory else None,
        flops_per_s=None if teraflops is None else teraflops * share * 1e12,
        memory_bytes_per_s=None if rate is None else rate * 1e12,
        price_per_hour=table.known("price_per_hour"),
        times=tuple(_time(each) for each in table.tables("times")),
    )
    table.text("source", "")  # for people
    table.done()
    if card.flops_per_s is None and not card.times:
        raise ConfigError(f"cards.{name} has neither times, which profile writes, nor teraflops of a data sheet")
    return card


def _time(table: _Table) -> Time:
    part = table.text("part")
    if part not in _PARTS:
        raise ConfigError(f"{table.name}.part is {part!r}; it is one of {', '.join(_PARTS)}")
    time = Time(
        part=part,
        tp=table.count("tp"),
        micro_batch_size=table.count("micro_batch_size"),
        seq_length=table.count("seq_length"),
        forward_s=table.number("forward_ms") / 1e3,
        backward_s=table.number("backward_ms", 0.0) / 1e3,
    )
    table.done()
    return time


def _nodes(number: int, table: _Table, cards: Mapping[str, Card]) -> Nodes:
    kind = table.text("cards")
    if kind not in cards:
        raise ConfigError(f"{table.name}.cards is {kind!r}, which is none of the cards {', '.join(cards)}")
    nodes = Nodes(
        name=table.text("name", f"{kind} {number}"),
        card=cards[kind],
        num_nodes=table.count("count", 1),
        num_cards=table.count("cards_per_node"),
        site=table.text("site", ""),
    )
    table.done()
    return nodes


def _links(links: _Table, name: str) -> dict[str, Link]:
    """Read a link for all, or one for each name."""
    table = links.table(name, is_optional=True)
    if "latency_us" in table:
        return {"": _link(table)}
    return {key: _link(table.table(key)) for key in table}


def _link(table: _Table) -> Link:
    link = Link(latency_s=table.number("latency_us") / 1e6, bytes_per_s=table.number("gbyte_per_s") * 1e9)
    table.text("source", "")  # for people
    table.done()
    if link.bytes_per_s <= 0:
        raise ConfigError(f"{table.name}.gbyte_per_s must be above 0")
    return link


class _Table:
    """A table whose keys are taken one by one, so that none goes unread."""

    def __init__(self, data: object, name: str) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{name} must be a table, not {data!r}")
        self.data = dict(data)
        self.name = name
        self.left = set(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def _path(self, key: str) -> str:
        return key if self.name == "the file" else f"{self.name}.{key}"

    def table(self, key: str, *, is_optional: bool = False) -> _Table:
        if key not in self.data and not is_optional:
            raise ConfigError(f"the table {self._path(key)} is missing")
        self.left.discard(key)
        return _Table(self.data.get(key, {}), self._path(key))

    def tables(self, key: str) -> list[_Table]:
        self.left.discard(key)
        found = self.data.get(key, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self._path(key)} must be a list of tables: write [[{self._path(key)}]]")
        return [_Table(each, f"{self._path(key)}[{number}]") for number, each in enumerate(found)]

    def text(self, key: str, *default: str) -> str:
        value = self._take(key, *default)
        if not isinstance(value, str):
            raise ConfigError(f"{self._path(key)} must be text, not {value!r}")
        return value

    def number(self, key: str, *default: float) -> float:
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{self._path(key)} must be a number from 0 on, not {value!r}")
        return float(value)

    def known(self, key: str) -> float | None:
        """Take a number that may not be there."""
        return self.number(key) if key in self else None

    def count(self, key: str, *default: int) -> int:
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._path(key)} must be a whole number from 1 on, not {value!r}")
        return value

    def _take(self, key: str, *default: object) -> object:
        self.left.discard(key)
        if key not in self.data:
            if not default:
                raise ConfigError(f"{self._path(key)} is missing")
            return default[0]
        return self.data[key]

    def done(self) -> None:
        if self.left:
            raise ConfigError(f"unknown key {self._path(sorted(self.left)[0])}; known here: see docs/search.md")
