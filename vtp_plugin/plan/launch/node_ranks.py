"""Which node has which ranks of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

USUAL_DEVICES = 8
"""Devices of a node whose number is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """A node and its ranks.

    Attributes:
        name: name of the node.
        ranks: its ranks, ascending.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def blocks(self) -> tuple[range, ...]:
        """The ranks as blocks: a launcher numbers the processes of one agent one after another.

        >>> NodeRanks(name="a", ranks=(0, 1, 4)).blocks
        (range(0, 2), range(4, 5))
        """
        groups = groupby(enumerate(self.ranks), key=lambda one: one[1] - one[0])
        runs = [[rank for _, rank in group] for _, group in groups]
        return tuple(range(run[0], run[-1] + 1) for run in runs)

    def stages(self, layout: PipelineLayout) -> tuple[int, ...]:
        """Return the stages that have ranks here, ascending."""
        return tuple(sorted({layout.stage_of(rank) for rank in self.ranks}))

    def __str__(self) -> str:
        return f"{self.name}: rank{'s'[: len(self.ranks) > 1]} {format_ranks(self.ranks)}"


def ranks_by_node(node_names: Sequence[Sequence[str]], layout: PipelineLayout) -> dict[str, list[int]]:
    """Return the ranks of every node: by stage, then by replica.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=6)
    >>> ranks_by_node([["a", "b"], ["b", "a"]], layout)
    {'a': [0, 4, 5], 'b': [1, 2, 3]}
    """
    ranks: dict[str, list[int]] = {}
    for stage, names in enumerate(node_names):
        for replica, name in enumerate(names):
            for cp_rank in range(layout.stages[stage].cp):
                ranks.setdefault(name, []).extend(layout.tp_ranks(stage, replica, cp_rank))
    return ranks


def named_nodes(node_names: Sequence[Sequence[str]], layout: PipelineLayout) -> tuple[NodeRanks, ...]:
    """Return the nodes of a layout whose places are chosen, in the order of their first ranks.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.
    """
    nodes = [
        NodeRanks(name=name, ranks=tuple(sorted(ranks))) for name, ranks in ranks_by_node(node_names, layout).items()
    ]
    return tuple(sorted(nodes, key=lambda node: node.ranks))


def fill_nodes(layout: PipelineLayout, num_devices: Sequence[int]) -> tuple[NodeRanks, ...]:
    """Give nodes their ranks, one node after another.

    A tensor-parallel group that does not fit what is left of a node is begun on the next one. If the nodes are then too
    few, each one gets as many ranks as it has devices.

    Args:
        layout: the pipeline layout.
        num_devices: number of devices of every node.

    Raises:
        ConfigError: the nodes have fewer devices than the layout has ranks.

    >>> layout = PipelineLayout.from_sizes((2, 4), world_size=6)
    >>> [str(node) for node in fill_nodes(layout, (4, 4))]
    ['node 0: ranks 0-1', 'node 1: ranks 2-5']
    >>> [str(node) for node in fill_nodes(layout, (4, 2))]
    ['node 0: ranks 0-3', 'node 1: ranks 4-5']
    """
    if sum(num_devices) < layout.world_size:
        shown = ",".join(map(str, num_devices))
        raise LayoutError(
            f"--nodes {shown}: {sum(num_devices)} devices; the layout has {layout.world_size} ranks, one for each "
            "device; give more nodes, or a smaller layout"
        )
    taken = _whole_groups(layout, num_devices)
    if taken is None:
        taken, left = [], layout.world_size
        for number in num_devices:
            taken.append(min(number, left))
            left -= taken[-1]
    return _numbered(taken)


def _whole_groups(layout: PipelineLayout, num_devices: Sequence[int]) -> list[int] | None:
    """Count the ranks of every node if no tensor-parallel group is split; None if they do not fit so."""
    taken = [0] * len(num_devices)
    node = 0
    for size in _groups(layout):
        while node < len(taken) and taken[node] + size > num_devices[node]:
            node += 1
        if node == len(taken):
            return None
        taken[node] += size
    return taken


def _groups(layout: PipelineLayout) -> Iterator[int]:
    """Yield the sizes of the tensor-parallel groups, in the order of their ranks."""
    rank = 0
    while rank < layout.world_size:
        size = layout.stages[layout.stage_of(rank)].tp
        yield size
        rank += size


def usual_nodes(layout: PipelineLayout, sites: Sequence[str] = ()) -> tuple[NodeRanks, ...]:
    """Give nodes their ranks where nothing is known of the nodes.

    What fits into one node of eight devices is one node, for each site of its own. Else each stage has a node, or as
    many as it needs; where ranks are numbered replica by replica, so has each stage of each replica.

    Args:
        layout: the pipeline layout.
        sites: site of every stage; empty where there are none.

    >>> [str(node) for node in usual_nodes(PipelineLayout.from_sizes((8, 6), world_size=14))]
    ['node 0: ranks 0-7', 'node 1: ranks 8-13']
    >>> [str(node) for node in usual_nodes(PipelineLayout.from_sizes((4, 8), world_size=24))]
    ['node 0: ranks 0-7', 'node 1: ranks 8-15', 'node 2: ranks 16-23']
    >>> layout = PipelineLayout.from_sizes((1, 2, 2), world_size=5)
    >>> [str(node) for node in usual_nodes(layout, ("edge", "cloud", "cloud"))]
    ['node 0: rank 0', 'node 1: ranks 1-4']
    """
    stages = [layout.stage_of(rank) for rank in range(layout.world_size)]
    taken: list[int] = []
    for _, of_site in groupby(stages, key=lambda stage: sites[stage] if sites else ""):
        own = [*of_site]
        if len(own) <= USUAL_DEVICES:
            taken.append(len(own))
            continue
        for stage, group in groupby(own):
            tp, size = layout.stages[stage].tp, len([*group])
            most = USUAL_DEVICES // tp * tp or USUAL_DEVICES
            taken += [min(most, size - start) for start in range(0, size, most)]
    return _numbered(taken)


def _numbered(taken: Sequence[int]) -> tuple[NodeRanks, ...]:
    """Make nodes of so many consecutive ranks each; those without any are left out, and keep their number."""
    nodes, first = [], 0
    for number, size in enumerate(taken):
        if size:
            nodes.append(NodeRanks(name=f"node {number}", ranks=tuple(range(first, first + size))))
        first += size
    return tuple(nodes)


def split_groups(layout: PipelineLayout, nodes: Sequence[NodeRanks]) -> dict[int, tuple[str, ...]]:
    """Find the stages with a tensor-parallel group on several nodes, and the nodes of the first such group.

    >>> layout = PipelineLayout.from_sizes((2, 4), world_size=6)
    >>> split_groups(layout, fill_nodes(layout, (4, 2)))
    {1: ('node 0', 'node 1')}
    """
    node_of = {rank: node.name for node in nodes for rank in node.ranks}
    found: dict[int, tuple[str, ...]] = {}
    for stage, grid in enumerate(layout.stages):
        for dp_rank in range(grid.dp):
            for cp_rank in range(grid.cp):
                names = dict.fromkeys(node_of[rank] for rank in layout.tp_ranks(stage, dp_rank, cp_rank))
                if len(names) > 1:
                    found.setdefault(stage, tuple(names))
    return found
