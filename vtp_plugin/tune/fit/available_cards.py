"""The nodes of a run and the cards that work on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vtp_plugin.errors import LayoutError
from vtp_plugin.tune.cluster.machines import Node


def read_have(text: str) -> tuple[Node, ...]:
    """Read cards per node, each with the name of its site before a colon where there are sites.

    >>> [(node.name, node.num_cards) for node in read_have("8,6")]
    [('node 0', 8), ('node 1', 6)]
    >>> read_have("edge:1,cloud:8")[0].site
    'edge'

    Raises:
        ConfigError: an entry is no number of cards.
    """
    nodes = []
    for index, entry in enumerate(text.split(",")):
        site, _, number = entry.strip().rpartition(":")
        if not number.isdecimal():
            raise LayoutError(
                f"--have {text!r} has the entry {entry!r}, which is no number of devices; write the devices of every "
                "node, such as 8,6,8, or with sites edge:1,cloud:8"
            )
        nodes.append(Node(name=f"node {index}", num_cards=int(number), site=site))
    return tuple(nodes)


def in_order(nodes: Iterable[Node], sites: Sequence[str]) -> tuple[Node, ...]:
    """Sort nodes in the order of the pipeline: by site, then by name, numbers in names as numbers.

    Args:
        nodes: the nodes, in any order.
        sites: the sites, in the order of the pipeline; empty where there are none.

    Raises:
        ConfigError: a node's site is none of these, two nodes have one name, or the kinds of cards are mixed.

    >>> [node.name for node in in_order([Node(name="n10", num_cards=1), Node(name="n9", num_cards=1)], ())]
    ['n9', 'n10']
    """
    found = [replace(node, site="") if not sites else node for node in nodes]
    for node in found:
        if sites and node.site not in sites:
            raise LayoutError(
                f"site {node.site!r} of {node.name} is none of --vtp-sites {','.join(sites)}; give --vtp-site there"
            )
    kinds = sorted({node.kind for node in found if node.num_cards})
    if len(kinds) > 1:
        one = {kind: next(node.name for node in found if node.kind == kind and node.num_cards) for kind in kinds}
        shown = ", ".join(f"{kind} on {name}" for kind, name in one.items())
        raise LayoutError(
            f"kinds of devices are mixed: {shown}; a run has one kind; give --vtp-device, or leave some out"
        )
    names = [node.name for node in found]
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"{names.count(name)} nodes are called {name}; give every node a name of its own")
    order = {site: number for number, site in enumerate(sites)}
    return tuple(sorted(found, key=lambda node: (order.get(node.site, 0), _natural(node.name))))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
