"""The channels of tied embeddings: what crosses between the first and the last stage."""

from __future__ import annotations

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.channel_spec import ChannelSpec
from vtp_plugin.boundary.side import Side
from vtp_plugin.layout.pipeline import PipelineLayout


def tied_weight_specs(layout: PipelineLayout) -> tuple[ChannelSpec, ...]:
    """List the channels between the first and the last stage, in one order for all ranks.

    Every replica of either end receives from one replica of the other end: the one with the same number, modulo the
    number of replicas there.

    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, cp=(1, 2))
    >>> [(spec.src.ranks, spec.dst.ranks) for spec in tied_weight_specs(layout)]
    [((0,), (1,)), ((1,), (0,)), ((0,), (2,))]
    """
    first, last = 0, layout.num_stages - 1
    specs = []
    for dp_rank, cp_rank in layout.replicas:
        for src, dst, way in ((first, last, "first->last"), (last, first, "last->first")):
            if dp_rank < layout.stages[dst].dp and cp_rank < layout.stages[dst].cp:
                ends = [Side(ranks_by_cp=(_tp_ranks(layout, stage, dp_rank, cp_rank),)) for stage in (src, dst)]
                name = f"tied embedding, {way}, replica dp {dp_rank} cp {cp_rank}"
                spec = ChannelSpec(
                    name=name,
                    src=ends[0],
                    dst=ends[1],
                    strategy="sliced",
                    unit="step",
                    cargo=Cargo.TIED_EMBEDDING,
                )
                specs.append(spec)
    return tuple(specs)


def _tp_ranks(layout: PipelineLayout, stage: int, dp_rank: int, cp_rank: int) -> tuple[int, ...]:
    grid = layout.stages[stage]
    return layout.tp_ranks(stage, dp_rank % grid.dp, cp_rank % grid.cp)
