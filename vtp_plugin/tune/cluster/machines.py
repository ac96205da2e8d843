"""Machines of a cluster, as its file says."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from vtp_plugin.config.flag import parse_bytes
from vtp_plugin.errors import LayoutError
from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.util.typed_json import Count, Key, Number, PlainText, plain_text, positive_number

Part = Literal["dense", "experts", "embedding", "head", "update"]
"""What has a time of its own: a dense layer, one with experts, what is before and behind them, the optimizer."""


def _of_ms(value: object) -> float:
    return positive_number(value) / 1e3


def _of_tbytes(value: object) -> float:
    return positive_number(value) * 1e12


def _of_sizes(value: object) -> int | None:
    return parse_bytes(text) if (text := plain_text(value)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time of one part of the model on one card, as a file has it; there times are in milliseconds.

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
    tp: Count
    micro_batch_size: Count
    seq_length: Count
    forward_s: Annotated[float, Key("forward_ms"), _of_ms]
    backward_s: Annotated[float, Key("backward_ms"), _of_ms] = 0.0
    is_recomputed: Annotated[bool, Key("recomputed")] = False
    weights_s: Annotated[float | None, Key("weights_ms"), _of_ms] = None

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


def scatter(rounds_s: Sequence[float]) -> float:
    """Say how far apart rounds of one measurement lie: the range of their middle half, as a share of their median.

    >>> scatter([1.0, 1.0, 1.0, 1.25, 9.0]), scatter([2.0])
    (0.25, 0.0)
    """
    if len(rounds_s) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(rounds_s, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


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
    """A kind of card, as a file has it.

    Attributes:
        name: name of the kind, for people.
        memory_bytes: memory of a card, in bytes; None for no limit.
        teraflops: operations in a second of the data sheet, in 1e12; None if not known.
        share: the share of them that layers reach.
        memory_bytes_per_s: memory bandwidth, which the optimizer waits for; None if not known.
        price_per_hour: price of a card for an hour; None where it is not known.
        times: measured times of the model's parts.
        profile: file that has more of them; empty for none.
        origin: where those of the profile come from; None without one.
        source: where the figures come from, for people.
    """

    name: Annotated[str, Key("")] = ""
    memory_bytes: Annotated[int | None, Key("memory"), _of_sizes] = None
    teraflops: Number | None = None
    share: Number = 0.4
    memory_bytes_per_s: Annotated[float | None, Key("memory_tbyte_per_s"), _of_tbytes] = None
    price_per_hour: Number | None = None
    times: tuple[Time, ...] = ()
    profile: PlainText = ""
    origin: Annotated[Origin | None, Key("")] = None
    source: PlainText = ""

    @property
    def flops_per_s(self) -> float | None:
        """Operations that layers reach in a second; None if not known."""
        return None if self.teraflops is None else self.teraflops * self.share * 1e12


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
