"""H4: process groups for stages of unequal size, built by Megatron's own function from planned rank lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _get_default_store

from vtp_plugin import log
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.layout.groups import LayoutRankGenerator
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.patching import PatchRecord
from vtp_plugin.runtime.model_group import ModelGroup, open_leaders_group
from vtp_plugin.session import PlannedRun, Session
from vtp_plugin.session.request import agree_on_request, learn_site


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H4",
            target="megatron.core.parallel_state:initialize_model_parallel",
            build=functools.partial(_initialize, session),
            why="the one place where all groups are made; it runs unchanged on our rank lists, so a uniform list gives "
            "exactly Megatron's groups, in Megatron's order",
            versions=">=0.19,<0.20",
            remove_when="Megatron takes a list of tensor-parallel sizes",
        ),
        PatchRecord(
            id="H4b",
            target="megatron.core.parallel_state:destroy_model_parallel",
            build=functools.partial(_destroy, session),
            why="our channels end with Megatron's groups",
            versions=">=0.19,<0.20",
            remove_when="with H4",
        ),
    )


def u_records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the record that only a U-shaped pipeline needs."""
    return (
        PatchRecord(
            id="U2",
            target="megatron.core.parallel_state:is_pipeline_last_stage",
            build=functools.partial(_is_last, session),
            why="as U1, for those who ask with a chunk's number, such as the readers of data",
            versions=">=0.19,<0.20",
            remove_when="with U1",
        ),
    )


def _is_last(session: Session, original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        is_last_chunk = ignore_virtual or num_chunks is None or vp_stage == num_chunks - 1
        return is_last_chunk and session.planned.own.stage == session.planned.loss_stage

    return is_pipeline_last_stage


def _initialize(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if dist.get_backend() != "fake" and (session.ranks.monitor is None or not session.is_planned):
            store = session.ranks.store or _get_default_store()
            agree_on_request(session, store, lambda: None, rank=rank, world_size=world_size)
            session.ranks.agree("start-up check", lambda: _plan(session, options, world_size))
            learn_site(session, rank)
        else:
            _plan(session, options, world_size)
        layout, own = session.planned.layout, session.planned.own
        options["tensor_model_parallel_size"] = layout.tp_sizes[own.stage]
        options["context_parallel_size"] = layout.cp_sizes[own.stage]
        options["pipeline_model_parallel_size"] = layout.num_stages
        if session.is_active:
            _set_counts(session.planned, options)
            with _planned_ranks(layout, options):
                original(*bound.args, **bound.kwargs)
            pipeline_groups = _choose_own_lane(session.planned)
            if not layout.has_replicas or len(set(session.config.sites or ())) > 1:
                _unite_replicas(session.planned)
        else:
            original(*bound.args, **bound.kwargs)
            pipeline_groups = ()
        session.open(
            stage_group=parallel_state.get_tensor_model_parallel_group(),
            pipeline_groups=pipeline_groups,
            num_chunks=options["virtual_pipeline_model_parallel_size"] or 1,
        )
        session.open_log(rank)
        log.info(session.planned.describe())

    return initialize_model_parallel


def _set_counts(planned: PlannedRun, options: dict[str, Any]) -> None:
    """Let Megatron compute its numbers of groups as if all stages were like the own one.

    Where the stages' cp or dp sizes differ, the numbers would differ between ranks. Megatron uses them to check the
    world, and to count how many of the expert model groups make up the group of an optimizer instance: there is one
    such group then, the world.
    """
    layout, own = planned.layout, planned.own
    if layout.has_replicas:
        options["local_world_size"] = layout.uniform_world_size(dist.get_rank())
        return
    options["context_parallel_size"] = 1
    expert_size = int(options["expert_model_parallel_size"])
    options["local_world_size"] = layout.tp_sizes[own.stage] * layout.num_stages * expert_size


def _unite_replicas(planned: PlannedRun) -> None:
    """Let what is summed over the model take one replica of every stage, or with the distributed optimizer each share.

    Between sites also where Megatron's own groups are right: there the messages of one sum would cross many times.
    """
    layout, platform = planned.layout, planned.platform
    make_group = functools.partial(
        ModelGroup,
        layout,
        dist.get_rank(),
        whole_stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        leaders_group=open_leaders_group(layout, platform, planned.config.timeout_s),
    )
    parallel_state._MODEL_PARALLEL_GROUP = make_group()
    parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = make_group(has_shares=True)


def _plan(session: Session, options: dict[str, Any], world_size: int) -> dict[str, object]:
    """Make the layout if the arguments have not made it, and state it."""
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron's parallel_state is already initialized; call vtp_plugin.apply() before initialize_model_parallel"
        )
    if options["rank_offset"] != 0:
        raise ConfigError(f"rank_offset={options['rank_offset']} is not supported with vtp_size_list; leave it at 0")
    tensor_size = int(options["tensor_model_parallel_size"])
    if not session.is_planned:
        session.plan(
            world_size=world_size,
            pipeline_size=int(options["pipeline_model_parallel_size"]),
            tensor_size=None if tensor_size == 1 else tensor_size,
            cp=int(options["context_parallel_size"]),
            order=str(options["order"]),
        )
    return session.planned.statement()


@contextmanager
def _planned_ranks(layout: PipelineLayout, options: dict[str, Any]) -> Iterator[None]:
    """Let Megatron take rank lists from the layout: it makes the dense generator first, then the expert one."""
    ep = int(options["expert_model_parallel_size"])
    # Megatron's default is the own stage's size, which differs between ranks: only a uniform list may name another.
    expert_tp = options["expert_tensor_parallel_size"] if layout.is_uniform else None
    original = parallel_state.RankGenerator
    kinds = iter((False, True))

    def generator(**_sizes: Any) -> LayoutRankGenerator:
        if not next(kinds):
            return LayoutRankGenerator(layout)
        return LayoutRankGenerator(layout, ep=ep, expert=True, expert_tensor_parallel_size=expert_tp)

    parallel_state.RankGenerator = generator
    try:
        yield
    finally:
        parallel_state.RankGenerator = original


def _choose_own_lane(planned: PlannedRun) -> tuple[dist.ProcessGroup, ...]:
    """Set the pipeline globals of a rank that Megatron found in several lanes, and drop unequal embedding groups.

    Returns:
        The own pipeline group in each replica of the pipeline that this rank works in.
    """
    layout = planned.layout
    lanes = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, parallel_state._PIPELINE_GLOBAL_RANKS
    by_ranks = {tuple(ranks): group for group, ranks in zip(*lanes, strict=True)} if isinstance(lanes[0], list) else {}
    own = layout.coord(dist.get_rank())
    served = (layout.lane(own.tp_rank, dp_rank, own.cp_rank) for dp_rank, cp_rank in layout.replicas if cp_rank == 0)
    pipeline_groups = tuple(by_ranks[lane] for lane in served if lane in by_ranks) or (lanes[0],)
    if isinstance(parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, list):
        # A rank of a narrow stage is in several lanes; its own comes first.
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP[0]
        parallel_state._PIPELINE_GLOBAL_RANKS = parallel_state._PIPELINE_GLOBAL_RANKS[0]
    found, lane = tuple(parallel_state._PIPELINE_GLOBAL_RANKS), layout.lane_of(dist.get_rank())
    if found != lane:
        raise PlanError(f"Megatron put rank {dist.get_rank()} into the pipeline group of ranks {found}, not {lane}")
    if not planned.has_stock_ends:
        # The ends of a lane hold different slices of the embedding, or the last one holds none: an all-reduce over them
        # would mix rows.
        for name in (
            "_EMBEDDING_GROUP",
            "_EMBEDDING_GLOBAL_RANKS",
            "_POSITION_EMBEDDING_GROUP",
            "_POSITION_EMBEDDING_GLOBAL_RANKS",
        ):
            setattr(parallel_state, name, None)
    return pipeline_groups


def _destroy(session: Session, original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        session.close()
        original()

    return destroy_model_parallel
