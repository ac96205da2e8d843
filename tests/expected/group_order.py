"""The groups that Megatron creates for a layout, and their order, as data; what really happens is compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.stage_grid import LayoutRankGenerator


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One process group to create.

    Attributes:
        name: description of the group, shared by all groups of its kind.
        ranks: members in planned order. A process group sorts them: its group rank is the place in ascending order.
    """

    name: str
    ranks: tuple[int, ...]


class _Kind(NamedTuple):
    """One kind of group that Megatron creates: its description, the axes, the generator, and if gloo doubles it."""

    name: str
    token: str
    expert: bool = False
    gloo: bool = False


# Creation order of initialize_model_parallel in megatron-core 0.19.
_KINDS = (
    _Kind("GTP_WEIGHT_REMAT_GROUP", "gtp_remat"),
    _Kind("DATA_PARALLEL_GROUP_WITH_CP", "dp-cp", gloo=True),
    _Kind("DATA_PARALLEL_GROUP", "dp", gloo=True),
    _Kind("CONTEXT_PARALLEL_GROUP", "cp"),
    _Kind("MODEL_PARALLEL_GROUP", "tp-gtp_remat-pp"),
    _Kind("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    _Kind("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    _Kind("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp-gtp_remat-dp-cp"),
    _Kind("TENSOR_AND_DATA_PARALLEL_GROUP", "tp-gtp_remat-dp"),
    _Kind("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp-cp"),
    _Kind("EXPERT_GTP_WEIGHT_REMAT_GROUP", "gtp_remat", expert=True),
    _Kind("EXPERT_MODEL_PARALLEL_GROUP", "ep", expert=True),
    _Kind("EXPERT_TENSOR_PARALLEL_GROUP", "tp", expert=True),
    _Kind("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp-ep", expert=True),
    _Kind("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp-ep-pp", expert=True),
    _Kind("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp-ep-gtp_remat-pp", expert=True),
    _Kind("EXPERT_DATA_PARALLEL_GROUP", "dp", expert=True, gloo=True),
)


def model_parallel_groups(layout: PipelineLayout, *, gloo: bool = False) -> tuple[GroupSpec, ...]:
    """List the groups that ``initialize_model_parallel`` of megatron-core 0.19 creates, in its order.

    For unequal stages these are the groups it creates when its rank generators are replaced by
    :class:`LayoutRankGenerator`. One distributed-optimizer instance, default embedding ranks.

    Args:
        layout: the stages.
        gloo: whether to list the gloo doubles too (``create_gloo_process_groups``).

    Raises:
        ConfigError: see :class:`LayoutRankGenerator`.
    """
    dense = LayoutRankGenerator(layout)
    expert = LayoutRankGenerator(layout, expert=True)
    specs: list[GroupSpec] = []
    for kind in _KINDS:
        for ranks in (expert if kind.expert else dense).get_ranks(kind.token):
            specs.append(GroupSpec(kind.name, tuple(ranks)))
            if kind.gloo and gloo:
                specs.append(GroupSpec(f"{kind.name}_GLOO", tuple(ranks)))
            if kind.token == "pp":
                specs.extend(_embedding_groups(ranks))
    everyone = [rank for ranks in expert.get_ranks("tp-ep-pp") for rank in ranks]
    specs.append(GroupSpec("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", tuple(everyone)))
    return tuple(specs)


def _embedding_groups(group: list[int]) -> tuple[GroupSpec, GroupSpec]:
    """Groups that Megatron makes from each pipeline group: both ends tie the embedding, the first has positions."""
    ends = (group[0],) if len(group) == 1 else (group[0], group[-1])
    return GroupSpec("EMBEDDING_GROUP", ends), GroupSpec("POSITION_EMBEDDING_GROUP", (group[0],))
