"""Machines of a cluster, as its file says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.util.typed_json import read_toml

Read = TypeVar("Read")


def read_file(path: Path, read: Callable[[Table], Read]) -> Read:
    """Read a TOML file.

    Args:
        path: path of the file.
        read: turns the file's outermost table into the result.

    Raises:
        ConfigError: it cannot be read, is no TOML, or ``read`` rejects it.
    """
    try:
        top = Table(read_toml(path), TOP)
        found = read(top)
        top.done()
        return found
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


TOP = "the file"


class Table:
    """A table that knows which of its keys were read, so that unknown ones are rejected."""

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

    def path(self, key: str) -> str:
        """Give the full name of a key, with the tables around it."""
        return key if self.name == TOP else f"{self.name}.{key}"

    def table(self, key: str, *, is_optional: bool = False) -> Table:
        """Read a table; an optional one that is missing is empty."""
        if key not in self.data and not is_optional:
            raise ConfigError(f"the table {self.path(key)} is missing")
        self.left.discard(key)
        return Table(self.data.get(key, {}), self.path(key))

    def tables(self, key: str) -> list[Table]:
        """Read a list of tables; empty if it is missing."""
        self.left.discard(key)
        found = self.data.get(key, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.path(key)} must be a list of tables: write [[{self.path(key)}]]")
        return [Table(each, f"{self.path(key)}[{number}]") for number, each in enumerate(found)]

    def text(self, key: str, *default: str) -> str:
        """Read a text."""
        value = self._take(key, *default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path(key)} must be text, not {value!r}")
        return value

    def number(self, key: str, *default: float) -> float:
        """Read a number that is at least 0."""
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{self.path(key)} must be a number from 0 on, not {value!r}")
        return float(value)

    def known(self, key: str) -> float | None:
        """Read a number; None if it is missing."""
        return self.number(key) if key in self else None

    def count(self, key: str, *default: int) -> int:
        """Read a whole number that is at least 1."""
        value = self._take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path(key)} must be a whole number from 1 on, not {value!r}")
        return value

    def _take(self, key: str, *default: object) -> object:
        self.left.discard(key)
        if key not in self.data:
            if not default:
                raise ConfigError(f"{self.path(key)} is missing")
            return default[0]
        return self.data[key]

    def flag(self, key: str) -> bool:
        """Read true or false; false if it is missing."""
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path(key)} must be true or false, not {value!r}")
        return value

    def value(self, key: str) -> object:
        """Read a value of any type."""
        return self._take(key)

    def done(self) -> None:
        """Reject keys that were not read."""
        if self.left:
            raise ConfigError(
                f"unknown key {self.path(sorted(self.left)[0])}; use one of those in docs/guides/search.md"
            )


Part = Literal["dense", "experts", "embedding", "head", "update"]
"""What has a time of its own: a dense layer, one with experts, what is before and behind them, the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time of one part of the model on one card.

    Attributes:
        part: name of the part of the model, or ``update`` for the optimizer.
        tp: tensor-parallel size; the time is without messages between the cards.
        micro_batch_size: number of samples of a microbatch.
        seq_length: number of tokens of a sample.
        forward_s: seconds of the forward pass of a microbatch; with ``update`` of the optimizer, for each million
            parameters.
        backward_s: seconds of the backward pass of a microbatch; 0 with ``update``.
        is_recomputed: whether whole layers are recomputed in the backward pass; ``backward_s`` includes that.
        weights_s: the part of ``backward_s`` for the gradients of weights that a split backward leaves for later; None
            where it was not measured.
    """

    part: Part
    tp: int
    micro_batch_size: int
    seq_length: int
    forward_s: float
    backward_s: float
    is_recomputed: bool = False
    weights_s: float | None = None

    @property
    def of_weights_s(self) -> float:
        """Seconds of the gradients of weights; where they were not measured, half of what is not recomputed.

        >>> from dataclasses import replace
        >>> layer = Time(part="dense", tp=1, micro_batch_size=1, seq_length=8, forward_s=1.0, backward_s=3.0)
        >>> layer.of_weights_s, replace(layer, is_recomputed=True).of_weights_s
        (1.5, 1.0)
        """
        if self.weights_s is not None:
            return self.weights_s
        return max(0.0, self.backward_s - self.forward_s * self.is_recomputed) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where measured times come from.

    Attributes:
        name: name of the file, for people.
        device: name of the device, for people.
        megatron: version of Megatron.
        model: properties of the model that the times depend on, by name.
    """

    name: str
    device: str
    megatron: str
    model: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a rank runs.

    Attributes:
        node: name of the node.
        site: site of the node; empty where there are none.
        kind: kind of the rank's card, as the cluster's file names it; may be empty.
    """

    node: str
    site: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of card.

    Attributes:
        name: name of the kind, for people.
        memory_bytes: memory of a card, in bytes; None for no limit.
        flops_per_s: operations that layers reach in a second: those of the data sheet times the share that is reached;
            None if not known.
        memory_bytes_per_s: memory bandwidth, which the optimizer waits for; None if not known.
        price_per_hour: price of a card for an hour; None where it is not known.
        times: measured times of the model's parts.
        origin: where the times come from; None for those in the cluster's own file.
    """

    name: str
    memory_bytes: int | None
    flops_per_s: float | None
    memory_bytes_per_s: float | None
    price_per_hour: float | None
    times: tuple[Time, ...]
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node: cards between which tensor parallelism may be used.

    Attributes:
        name: name of the machine.
        num_cards: number of cards that work.
        site: site of the machine; empty where sites have no names.
        kind: kind of its cards, such as ``cuda``; empty where it is not known.
        memory_bytes: memory of one card, in bytes; None where it is not known.
    """

    name: str
    num_cards: int
    site: str = ""
    kind: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes that are alike.

    Attributes:
        name: name of the nodes together.
        card: the kind of card.
        num_nodes: number of nodes.
        num_cards: number of cards in each node.
        site: site of the nodes; empty where there are none.
    """

    name: str
    card: Card
    num_nodes: int
    num_cards: int
    site: str

    @property
    def each(self) -> tuple[Node, ...]:
        """The single nodes."""
        return tuple(
            Node(
                name=self.name if self.num_nodes == 1 else f"{self.name}.{number}",
                num_cards=self.num_cards,
                site=self.site,
                memory_bytes=self.card.memory_bytes,
            )
            for number in range(self.num_nodes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between cards.

    Attributes:
        inside: links between cards of a node, by kind of card; ``""`` for all others.
        between: links between nodes of a site, by kind of card, or else by site; ``""`` for all others. Between nodes
            of two kinds the slower one counts.
        across: links between sites, by two names in order.
        sums: cost of an all-reduce among cards of a node, as a link, by kind of card (``""`` for all others) and number
            of cards; where it was not measured, it follows from ``inside``. Files call it ``all_reduce``.
    """

    inside: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[str, Link] = field(default_factory=dict)
    across: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    sums: Mapping[str, Mapping[int, Link]] = field(default_factory=dict)

    def inside_of(self, kind: str) -> Link:
        """Give the link between cards of one kind in a node; where none is given, one that takes no time."""
        return self.inside.get(kind) or self.inside.get("", Link())

    def between_of(self, site: str, kind: str) -> Link:
        """Give the link between nodes of a site whose cards are of one kind.

        >>> slow, quick = Link(latency_s=1.0), Link(latency_s=0.1)
        >>> links = Links(between={"": slow, "new": quick})
        >>> links.between_of("cloud", "new").latency_s, links.between_of("cloud", "old").latency_s
        (0.1, 1.0)
        """
        return self.between.get(kind) or self.between.get(site) or self.between.get("", Link())

    def sum_of(self, kind: str, number: int) -> Link | None:
        """Give the measured all-reduce of so many cards of a kind; None if it was not measured."""
        return self.sums.get(kind, {}).get(number) or self.sums.get("", {}).get(number)

    def __or__(self, other: Links) -> Links:
        """Add links; those of the other one go before, its links for all also before ours for one kind or site.

        >>> slow, quick = Link(latency_s=1.0), Link(latency_s=0.1)
        >>> (Links(inside={"new": slow}) | Links(inside={"": quick})).inside_of("new").latency_s
        0.1
        >>> (Links(sums={"": {2: slow, 4: slow}}) | Links(sums={"": {2: quick}})).sum_of("new", 4).latency_s
        1.0
        """
        for_all = other.sums.get("", {})
        ours = {kind: {n: link for n, link in each.items() if n not in for_all} for kind, each in self.sums.items()}
        return Links(
            inside=_over(self.inside, other.inside),
            between=_over(self.between, other.between),
            across={**self.across, **other.across},
            sums={kind: {**ours.get(kind, {}), **other.sums.get(kind, {})} for kind in {**ours, **other.sums}},
        )


def _over(ours: Mapping[str, Link], other: Mapping[str, Link]) -> dict[str, Link]:
    """Override links with others; one for all replaces them all."""
    return dict(other) if "" in other else {**ours, **other}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All machines.

    Attributes:
        nodes: the nodes, in the order of the file.
        links: the links between their cards.
    """

    nodes: tuple[Nodes, ...]
    links: Links

    def __post_init__(self) -> None:
        links = self.links
        for group in self.nodes:
            if group.num_cards > 1 and not {group.card.name, ""} & set(links.inside):
                self._refuse(f"devices of {group.name}", f"[links.inside.{group.card.name}] or [links.inside]")
            several = [other for other in self.nodes if other.site == group.site]
            names = {group.card.name, group.site, ""}
            if sum(other.num_nodes for other in several) > 1 and not names & set(links.between):
                self._refuse(f"nodes of {group.site or 'the cluster'}", "[links.between]")
        sites = sorted({group.site for group in self.nodes})
        if both := sorted({group.card.name for group in self.nodes} & set(sites) & set(links.between)):
            raise LayoutError(
                f"[links.between.{both[0]}] may mean the kind of device or the site {both[0]}; rename one of them"
            )
        for number, one in enumerate(sites):
            for other in sites[number + 1 :]:
                if (one, other) not in links.across:
                    self._refuse(f"sites {one} and {other}", f'[links.across."{one} {other}"]')

    @staticmethod
    def _refuse(what: str, table: str) -> None:
        raise LayoutError(f"no link between the {what}; give latency_us and gbyte_per_s in {table}")
