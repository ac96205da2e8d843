"""Cards, nodes and links of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vtp_plugin.errors import LayoutError
from vtp_plugin.search.question import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A measured time of one part of the model on one card.

    Attributes:
        part: ``dense``, ``experts``, ``embedding`` or ``head``; ``update`` for the optimizer.
        tp: tensor-parallel size; without the time of messages between its cards.
        micro_batch_size: samples.
        seq_length: tokens of a sample.
        forward_s: of a microbatch; of ``update`` for each million of parameters.
        backward_s: likewise; 0 for ``update``.
    """

    part: str
    tp: int
    micro_batch_size: int
    seq_length: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of card.

    Attributes:
        name: for people.
        memory_bytes: None where it does not count.
        flops_per_s: that layers reach: those of the data sheet, times the share that is reached; None if not known.
        memory_bytes_per_s: of its memory, which the optimizer waits for; None if not known.
        price_per_hour: None where it is not known.
        times: measured.
    """

    name: str
    memory_bytes: int | None
    flops_per_s: float | None
    memory_bytes_per_s: float | None
    price_per_hour: float | None
    times: tuple[Time, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes that are alike.

    Attributes:
        name: of them all.
        card: the kind.
        num_nodes: how many there are.
        num_cards: of each.
        site: of them; empty where there are none.
    """

    name: str
    card: Card
    num_nodes: int
    num_cards: int
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All machines.

    Attributes:
        nodes: in the order of the file.
        inside: between cards of a node, by kind of card; ``""`` for all others.
        between: between nodes of a site, by site; ``""`` for all others.
        across: between sites, by two names in order.
    """

    nodes: tuple[Nodes, ...]
    inside: Mapping[str, Link]
    between: Mapping[str, Link]
    across: Mapping[tuple[str, str], Link]

    def __post_init__(self) -> None:
        for group in self.nodes:
            if group.num_cards > 1 and not {group.card.name, ""} & set(self.inside):
                self._refuse(f"cards of {group.name}", f"[links.inside.{group.card.name}] or [links.inside]")
            several = [other for other in self.nodes if other.site == group.site]
            if sum(other.num_nodes for other in several) > 1 and not {group.site, ""} & set(self.between):
                self._refuse(f"nodes of {group.site or 'the cluster'}", "[links.between]")
        sites = sorted({group.site for group in self.nodes})
        for number, one in enumerate(sites):
            for other in sites[number + 1 :]:
                if (one, other) not in self.across:
                    self._refuse(f"sites {one} and {other}", f'[links.across."{one} {other}"]')

    @staticmethod
    def _refuse(what: str, table: str) -> None:
        raise LayoutError(f"no link between the {what}; give latency_us and gbyte_per_s in {table}")
