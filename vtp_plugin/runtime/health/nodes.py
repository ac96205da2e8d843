"""Which ranks each node of the launcher has, as the nodes tell each other over the store."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from vtp_plugin.errors import LayoutError, PeerError
from vtp_plugin.runtime.health.store import Topic, part_of
from vtp_plugin.runtime.health.store_posts import read_number
from vtp_plugin.runtime.health.waiting import STORE_KEEPER, WAITED, poll, some_ranks, until_store_ends

_MOST_RANKS = 1 << 20


@until_store_ends(STORE_KEEPER, "the ranks of each node")
def gather_node_sizes(
    store: dist.Store, environment: Mapping[str, str], *, divisor: int, timeout_s: float
) -> tuple[int, ...]:
    """Share how many tensor-parallel ranks each node of the launcher has.

    Args:
        store: the run's store.
        environment: variables of this process, with torchrun's ``GROUP_RANK``, ``GROUP_WORLD_SIZE`` and
            ``LOCAL_WORLD_SIZE``.
        divisor: number of ranks of a node with the same tensor-parallel rank: data- times context-parallel size.
        timeout_s: how long to wait for the other nodes.

    Returns:
        ``LOCAL_WORLD_SIZE / divisor`` of node 0, 1, ...

    Raises:
        ConfigError: a variable is missing, or a node's ranks do not divide.
        PeerError: a node did not answer, or posted no number.
    """
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in names:
        if not environment.get(name, "").isdigit():
            raise LayoutError(
                f"--vtp-size-list auto needs the launcher's {name}, which is not set; use torchrun, or give the TP "
                "size of every stage"
            )
    node, num_nodes, num_local = (int(environment[name]) for name in names)
    nodes = part_of(store, Topic.NODES)
    nodes.set(str(node), str(0 if num_local % divisor else num_local // divisor))
    if num_local % divisor:
        raise LayoutError(
            f"--vtp-size-list auto: node {node} has {num_local} ranks, not a multiple of data- times context-parallel "
            f"size {divisor}; start another number of ranks there, or give the TP size of every stage"
        )
    keys = [str(i) for i in range(num_nodes)]
    if not poll(lambda: nodes.check(keys), timeout_s):
        missing = [int(key) for key in keys if not nodes.check([key])]
        raise PeerError(
            f"{WAITED} {timeout_s:.1f} s for node {some_ranks(missing)}: no answer; look for a node that did not start"
        )
    sizes = tuple(read_number(nodes, key, Topic.NODES.key, 0, _MOST_RANKS) for key in keys)
    if 0 in sizes:
        raise LayoutError(
            f"--vtp-size-list auto: the number of ranks of node {sizes.index(0)} does not fit; see its message"
        )
    return sizes
