"""Megatron's groups, made for stages of unequal size, and groups of modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _get_default_store, _pg_map

from vtp_plugin.config.resolve import check_call
from vtp_plugin.errors import ConfigError, PlanError, refuse
from vtp_plugin.host.patching import Writes, Written, replaces
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import share_of_experts, share_of_model, share_of_world
from vtp_plugin.plan.layout.stage_grid import LayoutRankGenerator, rank_generators
from vtp_plugin.runtime.comm.collectives import ModelGroup, close_groups, open_leaders_group, settle
from vtp_plugin.session import PlannedRun, Session
from vtp_plugin.session.stage_comm_grid import agree_on_request, learn_site

_BACKENDS, _MEMBERS = (
    Written(
        id=f"model-groups/{holds}",
        target=f"torch.distributed.distributed_c10d:{name}",
        when=Moment.STAGES,
        why="an entry for each ModelGroup: torch asks for its backend when it reports a failed collective, and "
        "Megatron for its ranks",
        remove_when="with `parallel-state`",
    )
    for name, holds in (("_pg_map", "backends"), ("_pg_group_ranks", "ranks"))
)


@contextmanager
def known(writes: Writes, group: dist.ProcessGroup, ranks: Sequence[int], like: dist.ProcessGroup) -> Iterator[None]:
    """Let torch know a group that it did not make, inside a ``with`` block.

    Args:
        writes: names that the run's patches may write.
        group: that torch did not make.
        ranks: its ranks, in their order.
        like: a group with the same backend.
    """
    places = {rank: place for place, rank in enumerate(ranks)}
    with writes[_BACKENDS].during(_pg_map[like], key=group), writes[_MEMBERS].during(places, key=group):
        yield


_MODULE = "megatron.core.parallel_state"
# Names of the module, and the ends of their records' ids.
_GENERATOR = {"RankGenerator": "rank-generator"}
_GROUPS = {"_MODEL_PARALLEL_GROUP": "model-group", "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer-group"}
_MODEL_RANKS = "_MODEL_PARALLEL_GLOBAL_RANKS"
_EXPERT_GROUP = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
_EXPERT_GROUPS = {_EXPERT_GROUP: "expert-group", f"{_EXPERT_GROUP}_WITH_EGTP": "egtp-group"}
_PIPELINE = {"_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline-group", "_PIPELINE_GLOBAL_RANKS": "pipeline-ranks"}
_EMBEDDING_RANKS = {"_EMBEDDING_GLOBAL_RANKS": "embedding-ranks", "_POSITION_EMBEDDING_GLOBAL_RANKS": "position-ranks"}
_WRITTEN = (
    (_GENERATOR, "Megatron takes its rank lists from it; set only while Megatron makes its groups"),
    (_GROUPS, "between sites, and where stages differ in their replicas, a ModelGroup sums over the model"),
    (
        {"create_group": "create-group"},
        "notes what it makes, since Megatron does not keep all groups of a rank of a narrow stage, and leaves out the "
        "embedding groups of unequal ends: nobody may use them, and such a rank would be in one for every rank of the "
        "widest; set only while Megatron makes its groups",
    ),
    (_PIPELINE, "a rank of a narrow stage is in several pipeline groups, and Megatron can only have one"),
    (
        _EMBEDDING_RANKS,
        "the ends of a pipeline hold different slices of the embedding, or the last one holds none: an all-reduce over "
        "them would mix rows",
    ),
    (_EXPERT_GROUPS, "where stages differ in their copies of experts, a ModelGroup counts each expert once"),
    ({_MODEL_RANKS: "model-ranks"}, "the ranks of that ModelGroup, to which this rank belongs"),
)
_LACKS = {
    "optimizer-group": {"<0.13": "the distributed optimizer gives the group itself, which `grad-stats-group` replaces"},
    "egtp-group": {"<0.19": "it has no such group"},
}
_GLOBALS: Final[Mapping[str, Written]] = {
    name: Written(
        id=f"parallel-state/{short}",
        target=f"{_MODULE}:{name}",
        when=Moment.LIST,
        unneeded=_LACKS.get(short, {}),
        why=why,
        remove_when="with `parallel-state`",
    )
    for ids, why in _WRITTEN
    for name, short in ids.items()
}
_TORCH = Written(
    id="parallel-state/world-size",
    target=f"{_MODULE}:torch",
    when=Moment.LIST,
    unneeded={">=0.19": "initialize_model_parallel takes the size of the world as local_world_size"},
    why="Megatron asks it for the size of the world and has no argument for it; set only while it makes its groups",
    remove_when="Megatron 0.16 is no longer supported",
)
_CONFIG = Written(
    id="layerwise-config",
    target="megatron.core.model_parallel_config:ModelParallelConfig",
    when=Moment.LIST,
    why="steps by hand for the Ascend implementation read `layerwise_disaggregated_training` of a configuration; an "
    "attribute of the class, while our channels are open",
    remove_when="nobody writes such steps any more",
)


@replaces(f"{_MODULE}:is_pipeline_last_stage", id="last-stage/chunk", when=Moment.U_SHAPE)
def _is_last(session: Session, host: MegatronHost, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Replace `is_pipeline_last_stage`: the model ends on the last chunk of the stage with the loss.

    Why: as `last-stage`, for callers that name a chunk, such as the readers of data.

    Remove when: with `last-stage`.
    """
    num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    is_last_chunk = num_chunks is None or host.asks_for_chunk(num_chunks - 1, *args, **kwargs)
    return is_last_chunk and session.planned.own.stage == session.planned.loss_stage


@replaces(f"{_MODULE}:initialize_model_parallel", id="parallel-state", when=Moment.LIST)
def _initialize(
    session: Session, host: MegatronHost, writes: Writes, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Run `initialize_model_parallel` on the rank lists of the layout, then open the channels.

    Why: the one place where all groups are made; it runs unchanged on our rank lists, so equal sizes give exactly
    Megatron's groups, in Megatron's order.

    Remove when: Megatron takes a list of tensor-parallel sizes.

    With a uniform list it runs unchanged.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    rank = dist.get_rank()
    _plan_together(session, host, options, rank)
    layout, own = session.planned.layout, session.planned.own
    options["tensor_model_parallel_size"] = layout.tp_sizes[own.stage]
    options["context_parallel_size"] = layout.cp_sizes[own.stage]
    options["expert_model_parallel_size"] = layout.experts[own.stage].ep
    options["expert_tensor_parallel_size"] = layout.experts[own.stage].tp
    options["pipeline_model_parallel_size"] = layout.num_stages
    if session.is_active:
        pipeline_groups = _make_groups(session, host, writes, original, bound)
        writes[_CONFIG].put(session.config.layerwise_disaggregated, key="layerwise_disaggregated_training")
    else:
        original(*bound.args, **bound.kwargs)
        pipeline_groups = ()
    session.open(
        stage_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_groups=pipeline_groups,
        num_chunks=options["virtual_pipeline_model_parallel_size"] or 1,
        embedding_stages=_embedding_stages(layout.num_stages, options["get_embedding_ranks"]),
    )
    session.open_log(rank)
    session.describe(rank)


def _embedding_stages(num_stages: int, choose: Callable[[list[int]], Sequence[int]] | None) -> list[int] | None:
    """Ask the script's function for the ranks of a pipeline's embedding group; its ranks are stages here.

    Scripts with multi-token prediction add the stage that holds it.

    >>> _embedding_stages(4, lambda ranks: [ranks[0], ranks[-1], ranks[2]])
    [0, 2, 3]
    """
    return None if choose is None or num_stages == 1 else sorted({0, *choose(list(range(num_stages)))})


def _plan_together(session: Session, host: MegatronHost, options: dict[str, Any], rank: int) -> None:
    """Plan the run on all ranks, which compare what they were asked for and what they have planned."""
    world_size = dist.get_world_size()
    if dist.get_backend() == "fake":
        _plan(session, host, options, world_size)  # one process only
        return
    if session.ranks.monitor is None or not session.has_arguments:
        store = session.ranks.store or _get_default_store()
        agree_on_request(session, store, lambda: None, rank=rank, world_size=world_size)
    session.ranks.agree("start-up check", lambda: _plan(session, host, options, world_size))
    learn_site(session, rank)


def _make_groups(
    session: Session,
    host: MegatronHost,
    writes: Writes,
    original: Callable[..., None],
    bound: inspect.BoundArguments,
) -> tuple[dist.ProcessGroup, ...]:
    """Let Megatron make its groups from our rank lists.

    Returns:
        This rank's pipeline group in each replica of the pipeline that this rank works in.
    """
    planned, options = session.planned, bound.arguments
    layout = planned.layout
    world_size = _set_counts(planned, options)
    made: list[dist.ProcessGroup] = []
    left_out = () if planned.has_stock_ends else ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP")
    with (
        writes[_GLOBALS["RankGenerator"]].during(_planned_generator(layout)),
        writes[_GLOBALS["create_group"]].during(_watched(parallel_state.create_group, made, left_out)),
        host.seen_world(options, world_size, lambda seen: writes[_TORCH].during(seen)),
    ):
        original(*bound.args, **bound.kwargs)
    pipeline_groups = _choose_own_pipeline_group(planned, writes)
    session.start.ending.callback(close_groups, _not_kept(made))
    if not (layout.has_equal_replicas and layout.has_equal_experts) or len(set(planned.config.sites or ())) > 1:
        _unite_replicas(session, writes)
    session.start.ending.callback(settle, planned.platform)
    return pipeline_groups


def _set_counts(planned: PlannedRun, options: dict[str, Any]) -> int:
    """Let Megatron count its groups as if all stages were like this rank's.

    Where the stages' cp or dp sizes or copies of experts differ, the counts would differ between ranks. Megatron uses
    them to check the world, and to count the expert model groups that make up the group of an optimizer instance. Both
    must agree on all ranks, so there is one such group then, the world.

    Returns:
        The size of the world that Megatron is to see.
    """
    layout, own = planned.layout, planned.own
    world_size = layout.uniform_world_size(dist.get_rank())
    tp = layout.tp_sizes[own.stage]
    if not layout.has_equal_replicas:
        options["context_parallel_size"] = 1
        world_size = tp * layout.num_stages
    if not (layout.has_equal_replicas and layout.has_equal_experts):
        # One copy of the experts in that world. Megatron only counts with these; the rank lists come from us.
        options["expert_tensor_parallel_size"] = tp
        options["expert_model_parallel_size"] = world_size // (tp * layout.num_stages)
    return world_size


def _unite_replicas(session: Session, writes: Writes) -> None:
    """Let sums over the model count one replica of every stage or, with the distributed optimizer, each rank's share.

    Between sites this also replaces groups that are right: in Megatron's, one sum crosses between the sites many times.
    """
    planned, layout, rank = session.planned, session.planned.layout, dist.get_rank()
    stage_group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    session.edge_seed.share(planned, stage_group)
    leaders_group = open_leaders_group(layout, planned.platform, planned.config.timeout_s)
    session.start.ending.callback(close_groups, (leaders_group,))
    make = functools.partial(
        ModelGroup,
        stage_leader=layout.leader(planned.own.stage),
        whole_stage_group=stage_group,
        leaders_group=leaders_group,
    )
    whole, shares, whole_experts = (
        make(share(layout, rank)) for share in (share_of_model, share_of_world, share_of_experts)
    )
    whole.shares = whole_experts.shares = shares
    for group in (whole, shares, whole_experts):
        session.start.ending.enter_context(known(session.writes, group, group.ranks, stage_group))
    groups = (whole, shares, whole_experts, whole_experts)
    for name, group in zip((*_GROUPS, *_EXPERT_GROUPS), groups, strict=True):
        if hasattr(parallel_state, name):
            writes[_GLOBALS[name]].put(group)
    writes[_GLOBALS[_MODEL_RANKS]].put(list(whole.ranks))


def _plan(session: Session, host: MegatronHost, options: dict[str, Any], world_size: int) -> dict[str, object]:
    """Make the layout unless validated arguments have made it, and say what all ranks must have planned."""
    if parallel_state.model_parallel_is_initialized():
        way_out = "destroy_model_parallel()" if session.is_running else "vtp_plugin.apply()"
        raise ConfigError(
            f"Megatron's parallel_state is already initialized; call {way_out} before initialize_model_parallel"
        )
    refuse(host.refusals_of_call(options, 0 if session.has_arguments else session.config.num_rings))  # or seen before
    tensor_size = int(options["tensor_model_parallel_size"])
    if session.has_arguments:
        refuse(check_call(session.planned.layout, session.planned.own.stage, options))
    else:
        session.plan(
            world_size=world_size,
            pipeline_size=int(options["pipeline_model_parallel_size"]),
            tensor_size=None if tensor_size == 1 else tensor_size,
            cp=int(options["context_parallel_size"]),
            order=str(options["order"]),
            ep=int(options["expert_model_parallel_size"]),
            etp=options["expert_tensor_parallel_size"],
        )
        session.learn(note=session.edge_seed.find(session.planned, dist.get_rank()))
    return session.planned.statement()


def _planned_generator(layout: PipelineLayout) -> Callable[..., LayoutRankGenerator]:
    """Return a stand-in for Megatron's class that gives the layout's rank lists."""
    generators = iter(rank_generators(layout))
    # Megatron makes two: the dense generator first, then the expert one.
    return lambda **_sizes: next(generators)


def _watched(
    original: Callable[..., Any], made: list[dist.ProcessGroup], left_out: Sequence[str]
) -> Callable[..., Any]:
    """Wrap `create_group` so that it notes this rank's groups, and makes none of some kinds.

    It leaves those out on all ranks alike: torch counts the groups that are made, and its counts must agree.
    """

    def create_group(*args: Any, group_desc: str | None = None, **kwargs: Any) -> Any:
        if group_desc in left_out:
            return None
        group = original(*args, group_desc=group_desc, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            made.append(group)
        return group

    return create_group


def _not_kept(made: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return the groups that Megatron has not kept: a rank of a narrow stage is in more of a kind than it takes."""
    kept: list[Any] = []
    for name, value in vars(parallel_state).items():
        # This list has every group that was made, for those who change timeouts, and goes with the others.
        if name != "_global_process_group_list":
            kept += value if isinstance(value, list) else [value]
    return [group for group in made if not any(group is one for one in kept)]


def _choose_own_pipeline_group(planned: PlannedRun, writes: Writes) -> tuple[dist.ProcessGroup, ...]:
    """Set the pipeline globals of a rank that is in several pipeline groups, and forget unequal embedding ranks.

    Returns:
        This rank's pipeline group in each replica of the pipeline that this rank works in.
    """
    layout, rank = planned.layout, dist.get_rank()
    found: tuple[Any, Any] = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, parallel_state._PIPELINE_GLOBAL_RANKS
    by_ranks = {tuple(ranks): group for group, ranks in zip(*found, strict=True)} if isinstance(found[0], list) else {}
    own = layout.coord(rank)
    served = [layout.pipeline_group(own.tp_rank, dp, own.cp_rank) for dp, cp in layout.replicas if cp == 0]
    pipeline_groups = tuple(by_ranks[ranks] for ranks in served if ranks in by_ranks) or (found[0],)
    if isinstance(found[0], list):
        for name, values in zip(_PIPELINE, found, strict=True):
            # The first one is `pipeline_group_of` this rank, which is checked below.
            writes[_GLOBALS[name]].put(values[0])
    chosen, wanted = tuple(parallel_state._PIPELINE_GLOBAL_RANKS or ()), layout.pipeline_group_of(rank)
    if chosen != wanted:
        raise PlanError(f"Megatron put rank {rank} into the pipeline group of ranks {chosen}, not {wanted}")
    if not planned.has_stock_ends:
        for name in _EMBEDDING_RANKS:
            writes[_GLOBALS[name]].put(None)
    return pipeline_groups


@replaces(f"{_MODULE}:destroy_model_parallel", id="parallel-state/destroy", when=Moment.LIST)
def _destroy(session: Session, writes: Writes, original: Callable[[], None]) -> None:
    """Run `destroy_model_parallel` after our channels are closed and our writes undone.

    Why: our channels end with Megatron's groups.

    Remove when: with `parallel-state`.
    """
    session.close()
    # Before Megatron forgets its groups: an undo after that would bring one of them back.
    writes.undo((*_GLOBALS.values(), _TORCH, _CONFIG))
    original()
