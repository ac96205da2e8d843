"""Ways to complete a tensor inside a stage whose ranks hold one piece each: which is fastest?

The rows divide, so the all-gather works in place; with rows that do not, padding would cost it two more copies. The
broadcast is for comparison: it starts from the whole tensor at the leader.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.boundary_results import MIB, Record, shape_of
from benchmarks.ranks import Stages
from vtp_plugin.plan.boundary.endpoint import even_cuts

BROADCAST, ALL_GATHER, POINT_TO_POINT = "broadcast", "all-gather", "point to point"

Finish = Callable[[torch.Tensor], torch.Tensor]
"""Takes the tensor of which only the own piece is right; gives the complete one, which may be the same."""


def finishes(stages: Stages) -> dict[str, Finish]:
    """Give the finishes by name, for a rank of the downstream stage."""
    cut_group = stages.own_group
    tp_rank, tp_size = dist.get_rank(cut_group), dist.get_world_size(cut_group)
    leader = stages.dst_ranks[0]

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=leader, group=cut_group)
        return tensor

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        start, stop = even_cuts(tensor.shape[0], tp_size)[tp_rank]
        dist.all_gather_into_tensor(tensor, tensor[start:stop], group=cut_group)
        return tensor

    def point_to_point(tensor: torch.Tensor) -> torch.Tensor:
        cuts = even_cuts(tensor.shape[0], tp_size)
        pieces = [tensor[start:stop] for start, stop in cuts]
        # Everyone begins with its right neighbour, so that no rank is everybody's first target.
        others = [(tp_rank + step) % tp_size for step in range(1, tp_size)]
        receives = [dist.P2POp(dist.irecv, pieces[i], group=cut_group, group_peer=i) for i in reversed(others)]
        sends = [dist.P2POp(dist.isend, pieces[tp_rank], group=cut_group, group_peer=i) for i in others]
        for work in dist.batch_isend_irecv(receives + sends):
            work.wait()
        return tensor

    return {BROADCAST: broadcast, ALL_GATHER: all_gather, POINT_TO_POINT: point_to_point}


def time_finishes(stages: Stages, network: str, sizes_bytes: list[int], num_rounds: int) -> list[Record]:
    """Time every finish for every size; the finishes take turns in each round. Collective."""
    names = [BROADCAST, ALL_GATHER, POINT_TO_POINT]
    known = {} if stages.is_src else finishes(stages)
    times_s: dict[tuple[int, str], list[float]] = {}
    for num_round in range(num_rounds + 1):
        for num_bytes in sizes_bytes:
            whole = torch.rand(shape_of(num_bytes), generator=torch.Generator().manual_seed(1))
            for name in names * (3 if num_bytes <= 4 * MIB else 1):
                elapsed_s = _time(stages, known.get(name), name, whole)
                # The first round opens connections and touches memory.
                if num_round:
                    times_s.setdefault((num_bytes, name), []).append(elapsed_s)
    return [
        Record(network=network, sizes=stages.sizes, name=name, num_bytes=num_bytes, times_s=tuple(values))
        for (num_bytes, name), values in times_s.items()
    ]


def _time(stages: Stages, finish: Finish | None, name: str, whole: torch.Tensor) -> float:
    """Time one finish, and check what it made; the upstream rank stands by."""
    if finish is None:
        return stages.time(lambda: None)
    tp_rank = stages.rank - stages.dst_ranks[0]
    start, stop = even_cuts(whole.shape[0], stages.sizes[1])[tp_rank]
    tensor = torch.zeros_like(whole)
    if name == BROADCAST:
        tensor = whole.clone() if tp_rank == 0 else tensor
    else:
        tensor[start:stop] = whole[start:stop]
    done: list[torch.Tensor] = []
    elapsed_s = stages.time(lambda: done.append(finish(tensor)))
    assert torch.equal(done[0], whole), f"{name} gave wrong data"
    return elapsed_s
