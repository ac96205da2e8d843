"""Reads the file of a cluster: TOML, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vtp_plugin.config.parse_values import parse_bytes
from vtp_plugin.errors import ConfigError
from vtp_plugin.tune.cluster.machines import Card, Cluster, Links, Nodes
from vtp_plugin.tune.cluster.profile_files import read_links, read_profile, read_time
from vtp_plugin.tune.cluster.toml_table import Table, read_file


def read_cluster(path: Path) -> Cluster:
    """Read a cluster.

    Args:
        path: path of the file; ``docs/guides/search.md`` says what stands in it.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a key is unknown, missing or of another type.
    """
    return read_file(path, lambda top: parse_cluster(top, path.parent))


def parse_cluster(top: Table, folder: Path) -> Cluster:
    """Read a cluster from the tables of its file.

    Args:
        top: the file's outermost table.
        folder: folder of the files that it names.

    Raises:
        ConfigError: a key is unknown, missing or of another type.

    >>> cluster = parse_cluster(Table({
    ...     "cards": {"old": {"memory": "32GiB", "teraflops": 100, "share": 0.5}},
    ...     "nodes": [{"cards": "old", "cards_per_node": 4, "count": 2}],
    ...     "links": {
    ...         "inside": {"latency_us": 5, "gbyte_per_s": 50}, "between": {"latency_us": 10, "gbyte_per_s": 10}}},
    ...     "the file"), Path())
    >>> cluster.nodes[0].card.flops_per_s, cluster.links.between[""].bytes_per_s
    (50000000000000.0, 10000000000.0)
    """
    cards = {name: _card(name, top.table("cards").table(name), folder) for name in top.table("cards")}
    nodes = tuple(_nodes(number, table, cards) for number, table in enumerate(top.tables("nodes")))
    cluster = Cluster(nodes=nodes, links=_links(top.table("links"), folder))
    if not nodes:
        raise ConfigError("no nodes; give [[nodes]] with `cards`, `cards_per_node` and `count`")
    return cluster


def _card(name: str, table: Table, folder: Path) -> Card:
    teraflops, share = table.known("teraflops"), table.number("share", 0.4)
    memory, rate = table.text("memory", ""), table.known("memory_tbyte_per_s")
    profile = table.text("profile", "")
    origin, times = read_profile(folder / profile) if profile else (None, ())
    card = Card(
        name=name,
        memory_bytes=parse_bytes(memory) if memory else None,
        flops_per_s=None if teraflops is None else teraflops * share * 1e12,
        memory_bytes_per_s=None if rate is None else rate * 1e12,
        price_per_hour=table.known("price_per_hour"),
        times=(*times, *(read_time(each) for each in table.tables("times"))),
        origin=origin,
    )
    table.text("source", "")  # for people
    table.done()
    if card.flops_per_s is None and not card.times:
        raise ConfigError(f"cards.{name} has neither `profile`, nor `times`, nor `teraflops`; give one of them")
    return card


def _nodes(number: int, table: Table, cards: Mapping[str, Card]) -> Nodes:
    kind = table.text("cards")
    if kind not in cards:
        raise ConfigError(f"{table.path('cards')} is {kind!r}; known kinds are {', '.join(cards)}; use one of them")
    nodes = Nodes(
        name=table.text("name", f"{kind} {number}"),
        card=cards[kind],
        num_nodes=table.count("count", 1),
        num_cards=table.count("cards_per_node"),
        site=table.text("site", ""),
    )
    table.done()
    return nodes


def _links(table: Table, folder: Path) -> Links:
    """Read links; those in the file win over those of a profile."""
    profile = table.text("profile", "")
    found = read_file(folder / profile, read_links) if profile else Links()
    own = read_links(table)
    table.done()
    return found | own
