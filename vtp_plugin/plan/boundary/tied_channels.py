"""The channels of shared embeddings: what crosses between the stages that hold a copy of the word embedding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import Endpoint
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout


def tied_weight_specs(layout: PipelineLayout, stages: Sequence[int] | None = None) -> tuple[ChannelSpec, ...]:
    """List the channels between the stages that may hold a copy of the word embedding, in one order for all ranks.

    Every replica of a stage receives from one replica of each other stage: the one with the same number, modulo the
    number of replicas there.

    Args:
        layout: stages and ranks of the pipeline.
        stages: stages that may hold a copy, ascending; None for the first and the last.

    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, cp=(1, 2))
    >>> [(spec.src.ranks, spec.dst.ranks) for spec in tied_weight_specs(layout)]
    [((0,), (1,)), ((1,), (0,)), ((0,), (2,))]
    >>> layout = PipelineLayout.from_sizes((1, 1, 1), world_size=3)
    >>> [(spec.src.ranks, spec.dst.ranks) for spec in tied_weight_specs(layout, (0, 1, 2))][2:]
    [((0,), (2,)), ((2,), (0,)), ((1,), (2,)), ((2,), (1,))]
    """
    last = layout.num_stages - 1
    names = {0: "first", last: "last"}
    pairs = list(combinations(stages or (0, last), 2))
    specs = []
    for dp_rank, cp_rank in layout.replicas:
        for src, dst in (way for pair in pairs for way in (pair, pair[::-1])):
            way = f"{names.get(src, f'stage {src}')}->{names.get(dst, f'stage {dst}')}"
            if dp_rank < layout.stages[dst].dp and cp_rank < layout.stages[dst].cp:
                ends = [Endpoint(ranks_by_cp=(_tp_ranks(layout, stage, dp_rank, cp_rank),)) for stage in (src, dst)]
                name = f"tied embedding, {way}, replica dp {dp_rank} cp {cp_rank}"
                spec = ChannelSpec(
                    name=name,
                    src=ends[0],
                    dst=ends[1],
                    strategy="sliced",
                    unit="step",
                    kind=MessageKind.TIED_EMBEDDING,
                )
                specs.append(spec)
    return tuple(specs)


def _tp_ranks(layout: PipelineLayout, stage: int, dp_rank: int, cp_rank: int) -> tuple[int, ...]:
    grid = layout.stages[stage]
    return layout.tp_ranks(stage, dp_rank % grid.dp, cp_rank % grid.cp)
