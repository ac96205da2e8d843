"""Find the lists of sizes that the cards can be put into, the one with the fewest spare cards first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.fit.ask import Ask
from vtp_plugin.fit.cards import Node
from vtp_plugin.fit.layers import share_layers, share_within
from vtp_plugin.fit.step import step_time
from vtp_plugin.search.pack import multisets, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A list that fits.

    Attributes:
        sizes: tensor-parallel size of every stage.
        layers: of every stage; of a U the edge's first part, every cloud stage, the edge's last part.
        num_replicas: of every stage.
        places: for every stage the node of each replica, as a number among ``nodes``.
        nodes: what is there, in the order of the pipeline.
        cp: context-parallel size of every stage.
        step: how long a step takes as simulated, where a layer takes one card 1 forward and 2 backward.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    places: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    cp: int
    step: float

    @property
    def num_used(self) -> int:
        """Cards that work."""
        return sum(self.sizes) * self.cp * self.num_replicas

    @property
    def num_spare(self) -> tuple[int, ...]:
        """Cards of each node that the run does without."""
        left = [node.num_cards for node in self.nodes]
        for size, places in zip(self.sizes, self.places, strict=True):
            for node in places:
                left[node] -= size * self.cp
        return tuple(left)

    @property
    def node_names(self) -> list[list[str]]:
        """Name of the node of every replica of every stage."""
        return [[self.nodes[place].name for place in places] for places in self.places]

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage."""
        return tuple(self.nodes[places[0]].site for places in self.places)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage while lists are tried: the node of each replica, its size."""

    places: tuple[int, ...]
    size: int


def search(nodes: Sequence[Node], ask: Ask) -> dict[int, Fitted]:
    """Find the best list for every number of replicas that is possible; none if nothing fits.

    For each number the list that leaves the fewest cards spare is taken; of several the one with fewest stages, then
    with the largest sizes.

    Args:
        nodes: in the order of the pipeline.
        ask: what is wanted.
    """
    sizes = allowed_sizes(nodes, ask)
    found = {number: _best(nodes, ask, sizes, number) for number in replica_counts(nodes, ask)}
    return {number: best for number, best in found.items() if best is not None}


def allowed_sizes(nodes: Sequence[Node], ask: Ask) -> tuple[int, ...]:
    """List the tensor-parallel sizes that a stage can have inside some node, descending."""
    largest = max((node.num_cards for node in nodes), default=0) // ask.cp
    return tuple(size for size in range(largest, 0, -1) if not ask.problems_of_size(size))


def replica_counts(nodes: Sequence[Node], ask: Ask) -> Iterator[int]:
    """Yield the numbers of replicas that divide the batches and for which there are cards, ascending."""
    most = sum(node.num_cards for node in nodes) // (ask.cp * ask.least_stages)
    for number in range(1, most + 1) if ask.num_replicas is None else (ask.num_replicas,):
        if not ask.problems_of_replicas(number):
            yield number


def _best(nodes: Sequence[Node], ask: Ask, sizes: Sequence[int], num_replicas: int) -> Fitted | None:
    """Return the best list for a number of replicas; None if none fits."""
    for stages in _lists(nodes, ask, sizes, num_replicas):
        own = tuple(stage.size for stage in stages)
        if (layers := _layers(nodes, ask, stages, num_replicas)) is not None:
            return Fitted(
                sizes=own,
                layers=layers,
                num_replicas=num_replicas,
                places=tuple(stage.places for stage in stages),
                nodes=tuple(nodes),
                cp=ask.cp,
                step=step_time(own, layers, ask.num_microbatches(num_replicas)),
            )
    return None


def _layers(nodes: Sequence[Node], ask: Ask, stages: Sequence[_Stage], num_replicas: int) -> tuple[int, ...] | None:
    """Share out the layers; None if experts, layers or memory do not go in."""
    sizes = [stage.size for stage in stages]
    layout = ask.layout(sizes, num_replicas)
    if layout is None:
        return None
    first, last = ask.ends or (0, 0)
    skipped = 1 if ask.ends else 0

    def whole(layers: tuple[int, ...]) -> tuple[int, ...]:
        return layers if ask.ends is None else (first, *layers, last)

    def share(most: Sequence[int | None]) -> tuple[int, ...] | None:
        return share_layers(ask.num_layers, sizes[skipped:], most[skipped:], is_alike=ask.is_alike)

    limits = [_least_memory(nodes, stage) for stage in stages]
    count, limited = ask.stage_bytes, [limit for limit in limits if limit is not None]
    if count is None or not limited:
        layers = share([None] * len(stages))
        return None if layers is None else whole(layers)

    def is_over(layers: tuple[int, ...]) -> list[bool]:
        held = count(layout, whole(layers))
        return [limit is not None and num_bytes > limit for limit, num_bytes in zip(limits, held, strict=True)]

    def share_cloud(most: Sequence[int | None]) -> tuple[int, ...] | None:
        return share([None] * skipped + list(most))

    def is_over_cloud(layers: tuple[int, ...]) -> list[bool]:
        return is_over(layers)[skipped:]

    layers = share_within(share_cloud, is_over_cloud, len(stages) - skipped)
    return None if layers is None or any(is_over(layers)) else whole(layers)


def _least_memory(nodes: Sequence[Node], stage: _Stage) -> int | None:
    known = [nodes[place].memory_bytes for place in stage.places]
    return min((limit for limit in known if limit is not None), default=None)


def _lists(nodes: Sequence[Node], ask: Ask, sizes: Sequence[int], num_replicas: int) -> Iterator[tuple[_Stage, ...]]:
    """Yield the lists that can be put into the nodes, the one with the fewest spare cards first."""
    if not sizes:
        return
    names = ask.sites or ("",)
    pools = [[number for number, node in enumerate(nodes) if node.site == name] for name in names]
    rooms = [[nodes[number].num_cards // ask.cp for number in pool] for pool in pools]
    tops = [sum(pool) // num_replicas for pool in rooms]

    def in_pools(first: int, total: int, count: int) -> Iterator[tuple[_Stage, ...]]:
        """Yield the stages of the pools from one on that have so many ranks in so many stages together."""
        num_later = len(pools) - first - 1
        if num_later == 0:
            yield from in_pool(first, total, count)
            return
        counts = (1,) if ask.ends and first == 0 else range(1, count - num_later + 1)
        for own in range(min(total - num_later, tops[first]), 0, -1):
            for own_count in counts:
                for rest in in_pools(first + 1, total - own, count - own_count):
                    for here in in_pool(first, own, own_count):
                        yield (*here, *rest)

    def in_pool(pool: int, total: int, count: int) -> Iterator[tuple[_Stage, ...]]:
        if not count <= total <= tops[pool]:
            return
        for chosen in multisets(sizes, total, count):
            places = pack([size for size in chosen for _ in range(num_replicas)], rooms[pool])
            if places is not None:
                yield _join(chosen, [pools[pool][place] for place in places], num_replicas)

    most = min(ask.most_stages, sum(tops), ask.num_layers + (1 if ask.ends else 0))
    for total in range(sum(tops), 0, -1):
        for count in range(ask.least_stages, most + 1):
            yield from in_pools(0, total, count)


def _join(chosen: Sequence[int], places: Sequence[int], num_replicas: int) -> tuple[_Stage, ...]:
    """Make stages of groups: replicas of one stage are near each other, and stages follow their nodes.

    >>> [(stage.places, stage.size) for stage in _join((4, 2), (1, 0, 0, 1), 2)]
    [((0, 1), 4), ((0, 1), 2)]
    """
    by_size: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        by_size.setdefault(chosen[number // num_replicas], []).append(place)
    stages = [
        _Stage(tuple(sorted(found)[start : start + num_replicas]), size)
        for size, found in by_size.items()
        for start in range(0, len(found), num_replicas)
    ]
    return tuple(sorted(stages, key=lambda stage: (stage.places[0], -stage.size, stage.places)))
