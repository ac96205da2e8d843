"""The model-parallel group of stages that have different numbers of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.share import RankShare
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.process_groups import open_group


class ModelGroup(dist.ProcessGroup):
    """Reduces over the stages. Each stage counts once, however many cp and dp ranks or copies of experts it has.

    Stock Megatron has one model-parallel group per replica. If one replica of a small stage serves several of a large
    stage, its ranks would have to call such a reduction several times; here all ranks of the world call it once. A sum
    takes one replica of every stage: what is summed over a model-parallel group (squared norms, counts of zeros) is
    equal on the replicas of a stage. Every other reduction takes all ranks. With the distributed optimizer each rank
    holds a different share of these numbers: where each number is held once in the world, a sum takes all ranks.

    The reduction runs inside each stage, then between the leaders of the stages, then a broadcast brings it back. All
    ranks of the world call these three ordinary collectives of ordinary groups in one order, so this group hangs only
    where those would. Its ranks, ``rank`` and ``size`` are those of one replica's group, to which this rank belongs:
    Megatron names optimizer states by that rank, and takes groups of the same ranks for one group. torch does not know
    this class: the caller enters the group where torch looks up backends and ranks.

    Attributes:
        ranks: global ranks that hold each weight once together with this rank.
        shares: group that sums the shares of an optimizer's state; None where nobody asks for it.
    """

    def __init__(
        self,
        share: RankShare,
        *,
        stage_leader: int,
        whole_stage_group: dist.ProcessGroup,
        leaders_group: dist.ProcessGroup | None,
    ) -> None:
        """Join the groups.

        Args:
            share: the ranks that this rank shares one copy of the weights with.
            stage_leader: first global rank of this rank's stage.
            whole_stage_group: group of all ranks of this rank's stage.
            leaders_group: group of the first rank of every stage; None on other ranks.
        """
        self.ranks = share.ranks
        self.shares: ModelGroup | None = None
        join: Any = super().__init__  # torch 2.14 declares another form than it takes
        join(share.index, share.size)
        self._counts = share.replica == 0
        self._leader = stage_leader
        self._whole_stage_group = whole_stage_group
        self._leaders_group = leaders_group

    # torch declares all forms of this method; dist.all_reduce uses this one.
    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: Sequence[torch.Tensor], opts: dist.AllreduceOptions
    ) -> dist.Work | None:
        """Reduce one tensor in place; ``dist.all_reduce`` calls this and waits for what it returns."""
        (tensor,) = tensors
        if opts.reduceOp == dist.ReduceOp.SUM and not self._counts:
            tensor.zero_()
        dist.all_reduce(tensor, opts.reduceOp, self._whole_stage_group)
        if self._leaders_group is not None:
            dist.all_reduce(tensor, opts.reduceOp, self._leaders_group)
        return dist.broadcast(tensor, self._leader, self._whole_stage_group, async_op=True)


def open_leaders_group(layout: PipelineLayout, platform: Platform, timeout_s: float) -> dist.ProcessGroup | None:
    """Open the group of the first ranks of all stages; every rank of the world calls this.

    Returns:
        The group; None on ranks that are not members.
    """
    leaders = [layout.leader(stage) for stage in range(layout.num_stages)]
    return open_group(leaders, platform=platform, timeout_s=timeout_s, description="leaders of the stages")
