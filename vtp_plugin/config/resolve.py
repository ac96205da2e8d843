"""What follows from the configuration before anything is opened: layout, boundaries, sites, options of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.parse_values import format_value
from vtp_plugin.errors import LayoutError
from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.schedule.cost.cost_text import parse_costs
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.make.limits import by_stage, check_in_flight
from vtp_plugin.plan.schedule.order.placement import Placement, plain_placement, u_placement

_ORDERS = {"tp-cp-ep-dp-pp": RankOrder.STAGE_MAJOR, "tp-cp-ep-pp-dp": RankOrder.REPLICA_MAJOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The user's options for a planned order.

    Attributes:
        costs: durations and links, in ms; None lets the first steps measure them.
        in_flight: most microbatches in flight, on all stages or on each; None for the default.
        replan_share: if a step is longer or shorter than planned by more than this share, measured costs are measured
            again.
        report_interval_steps: training steps from one comparison of planned and real times to the next.
        split_backward: whether gradients of weights may be computed later than those of inputs.
    """

    costs: Costs | None = None
    in_flight: tuple[int, ...] | None = None
    replan_share: float = 0.25
    report_interval_steps: int = 100
    split_backward: bool = False


def plan_layout(
    config: VtpConfig,
    *,
    world_size: int,
    pipeline_size: int,
    tensor_size: int | None,
    cp: int,
    order: str,
    ep: int = 1,
    etp: int | None = None,
) -> PipelineLayout:
    """Make the layout from the plugin's lists and Megatron's sizes.

    Args:
        config: the plugin's configuration, with a list of sizes.
        world_size: number of ranks.
        pipeline_size: Megatron's pipeline size; 1 counts as not given.
        tensor_size: Megatron's tensor size; None counts as not given.
        cp: Megatron's context-parallel size; with --vtp-cp-list, 1 counts as not given.
        order: Megatron's rank order.
        ep: Megatron's expert-parallel size; with --vtp-ep-list, 1 counts as not given.
        etp: Megatron's tensor-parallel size of the experts; None is each stage's own tensor-parallel size.

    Raises:
        ConfigError: the sizes contradict each other or the number of ranks.

    >>> config = VtpConfig(size_list=(1, 2))
    >>> plan_layout(config, world_size=6, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp").dp_sizes
    (2, 2)
    """
    sizes = config.size_list
    assert isinstance(sizes, tuple)
    shown = format_value(sizes)
    if pipeline_size not in (1, len(sizes)):
        raise LayoutError(
            f"--pipeline-model-parallel-size {pipeline_size} contradicts --vtp-size-list {shown} with {len(sizes)} "
            "stages; leave it out or make both equal"
        )
    if tensor_size not in (None, max(sizes)):
        raise LayoutError(
            f"--tensor-model-parallel-size {tensor_size} contradicts --vtp-size-list {shown}; leave it out or give "
            f"the largest size of the list, {max(sizes)}"
        )
    if order not in _ORDERS:
        raise LayoutError(f"rank order {order!r} is unknown to the plugin; use one of {', '.join(_ORDERS)}")
    layout = PipelineLayout.from_sizes(
        sizes,
        world_size=world_size,
        cp=choose_cp_sizes(config.cp_list, cp, num_stages=len(sizes)),
        dp=config.dp_list,
        order=_ORDERS[order],
        ep=choose_sizes(config.ep_list, ep, flag="--expert-model-parallel-size", list_flag="--vtp-ep-list") or 1,
        etp=choose_sizes(config.etp_list, etp, flag="--expert-tensor-parallel-size", list_flag="--vtp-etp-list"),
    )
    dp = layout.stages[0].dp
    if config.data_parallel_size not in (None, dp):
        raise LayoutError(
            f"--vtp-data-parallel-size {config.data_parallel_size}; this run has {world_size} ranks, a replica needs "
            f"{world_size // dp}, so there are {dp} replicas; give {dp}, or start "
            f"{config.data_parallel_size * (world_size // dp)} processes"
        )
    return layout


def check_call(layout: PipelineLayout, stage: int, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Find arguments of `initialize_model_parallel` that contradict those that megatron.training has validated.

    Args:
        layout: made from the validated arguments.
        stage: stage of the calling rank; Megatron's arguments have its sizes. Those that the plugin's lists give may be
            left out.
        options: arguments of the call, by name.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> call = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
    >>> call |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "order": "tp-cp-ep-dp-pp"}
    >>> check_call(layout, 1, call)
    ()
    >>> print(*check_call(layout, 1, {**call, "context_parallel_size": 2}))
    initialize_model_parallel(context_parallel_size=2); Megatron's validated arguments say 1; give the same in both
    """
    orders = {order: name for name, order in _ORDERS.items()}
    own_sizes = {
        "tensor_model_parallel_size": (layout.tp_sizes[stage], True),
        "pipeline_model_parallel_size": (layout.num_stages, True),
        "context_parallel_size": (layout.cp_sizes[stage], len(set(layout.cp_sizes)) > 1),
        "expert_model_parallel_size": (layout.ep_sizes[stage], len(set(layout.ep_sizes)) > 1),
        "expert_tensor_parallel_size": (layout.etp_sizes[stage], len(set(layout.etp_sizes)) > 1),
    }
    fitting: dict[str, tuple[object, ...]] = {
        name: (own, None, 1) if is_listed else (own, None) for name, (own, is_listed) in own_sizes.items()
    }
    fitting["order"] = (orders[layout.order],)
    return tuple(
        f"initialize_model_parallel({name}={options[name]}); Megatron's validated arguments say {values[0]}; give the "
        "same in both"
        for name, values in fitting.items()
        if options[name] not in values
    )


def replica_map(config: VtpConfig, layout: PipelineLayout) -> ReplicaMap:
    """Return which replicas of the stages work together.

    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, dp=(1, 2))
    >>> replica_map(VtpConfig(size_list=(1, 1), dp_list=(1, 2), dp_mode="split"), layout).is_split
    True
    """
    return ReplicaMap(dp_sizes=layout.dp_sizes, mode=DpMode(config.dp_mode))


def is_active(config: VtpConfig, layout: PipelineLayout) -> bool:
    """Tell whether the plugin's groups and communicator are in use: if stages differ, or an option needs them.

    >>> layout = PipelineLayout.from_sizes((2, 2), world_size=4)
    >>> [is_active(VtpConfig(size_list=(2, 2), force=force), layout) for force in (False, True)]
    [False, True]
    """
    return config.is_forced or not layout.is_uniform


def crossing_bytes(options: Any, cp_sizes: Sequence[int]) -> int | None:
    """Return the size of a tensor that crosses between stages of the largest context-parallel size; None if unknown.

    Args:
        options: Megatron's arguments.
        cp_sizes: context-parallel size of every stage.

    >>> from types import SimpleNamespace
    >>> options = SimpleNamespace(seq_length=12, micro_batch_size=2, hidden_size=5, fp16=False, bf16=True)
    >>> crossing_bytes(options, (1, 3))
    80
    """
    if not (options.hidden_size and options.seq_length and options.micro_batch_size):
        return None
    itemsize_bytes = 2 if options.fp16 or options.bf16 else 4
    return options.seq_length // max(cp_sizes) * options.micro_batch_size * options.hidden_size * itemsize_bytes


def transport_rules(config: VtpConfig, tensor_bytes: int | None, *, is_sharded: bool = False) -> TransportRules:
    """Return the rules that choose the strategy of every boundary.

    Args:
        config: the plugin's configuration.
        tensor_bytes: size of the tensors that cross; None if it is not known beforehand.
        is_sharded: whether ranks hold slices of these tensors (sequence parallelism).

    >>> transport_rules(VtpConfig(size_list=(1, 2), transport="rank0"), None).transport
    'rank0'
    """
    return TransportRules(
        transport=config.transport,
        sites=config.sites or (),
        tensor_bytes=tensor_bytes,
        threshold_bytes=config.transport_threshold_bytes,
        is_sharded=is_sharded,
        is_split=config.dp_mode == "split",
    )


def option_context(config: VtpConfig, layout: PipelineLayout, *, device: str = "auto") -> OptionContext:
    """Return what Megatron's options are checked against.

    Args:
        config: the plugin's configuration.
        layout: the ranks of every stage.
        device: name of the platform.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> context = option_context(VtpConfig(size_list=(1, 2), force=True), layout)
    >>> context.size_list, context.forced, context.is_planned
    ('--vtp-size-list 1,2', True, False)
    """
    return OptionContext(
        tp_sizes=layout.tp_sizes,
        cp_sizes=layout.cp_sizes,
        dp_sizes=layout.dp_sizes,
        ep_sizes=layout.ep_sizes,
        etp_sizes=layout.etp_sizes,
        is_split=replica_map(config, layout).is_split,
        forced=config.is_forced,
        is_planned=config.has_planned_schedule and layout.num_stages > 1,
        has_split_backward=config.split_backward,
        is_u_shaped=config.layerwise_disaggregated,
        num_rings=config.num_rings,
        device=device,
    )


def choose_cp_sizes(cp_list: Sequence[int] | None, context_parallel_size: int, *, num_stages: int) -> tuple[int, ...]:
    """Return the context-parallel size of every stage, from the plugin's list or Megatron's one size.

    >>> choose_cp_sizes(None, 2, num_stages=3), choose_cp_sizes((1, 2), 2, num_stages=2)
    ((2, 2, 2), (1, 2))

    Raises:
        ConfigError: both are given, and Megatron's is not the largest of the list.
    """
    chosen = choose_sizes(cp_list, context_parallel_size, flag="--context-parallel-size", list_flag="--vtp-cp-list")
    return chosen if isinstance(chosen, tuple) else (context_parallel_size,) * num_stages


def choose_sizes(
    sizes: Sequence[int] | None, size: int | None, *, flag: str, list_flag: str
) -> tuple[int, ...] | int | None:
    """Return the plugin's list if it is given, else Megatron's one size.

    Args:
        sizes: the plugin's list.
        size: Megatron's size; beside a list, 1 and None count as not given.
        flag: flag of Megatron's size, for the error.
        list_flag: flag of the list, for the error.

    Raises:
        ConfigError: both are given, and Megatron's is not the largest of the list.

    >>> choose_sizes((1, 2), 1, flag="--context-parallel-size", list_flag="--vtp-cp-list")
    (1, 2)
    """
    if sizes is None:
        return size
    if size not in (None, 1, max(sizes)):
        raise LayoutError(
            f"{flag} {size} contradicts {list_flag} {format_value(tuple(sizes))}; leave it out or give the largest "
            f"size of the list, {max(sizes)}"
        )
    return tuple(sizes)


def stage_boundaries(config: VtpConfig, num_stages: int) -> tuple[tuple[int, int], ...]:
    """List the neighbouring stages; in a U the last stage and stage 0 are neighbours, too.

    >>> stage_boundaries(VtpConfig(size_list=(1, 2, 2), layerwise_disaggregated=True), 3)
    ((0, 1), (1, 2), (2, 0))
    """
    is_u_shaped = config.layerwise_disaggregated and num_stages > 1
    return (u_placement(num_stages) if is_u_shaped else plain_placement(num_stages)).boundaries


def stage_sites(config: VtpConfig, num_stages: int) -> tuple[str, ...]:
    """Return the site of every stage; a U-shaped pipeline has an edge and a cloud even if no sites were named.

    >>> stage_sites(VtpConfig(size_list=(1, 2, 2), layerwise_disaggregated=True), 3)
    ('edge', 'cloud', 'cloud')
    >>> stage_sites(VtpConfig(size_list=(1, 2)), 2)
    ('', '')
    """
    if config.sites is not None:
        return config.sites
    return ("edge",) + ("cloud",) * (num_stages - 1) if config.layerwise_disaggregated else ("",) * num_stages


def reporting_ranks(layout: PipelineLayout, sites: Sequence[str]) -> dict[str, int]:
    """Return the rank of every site that shows log lines of level INFO: the first leader of the site's first stage.

    >>> reporting_ranks(PipelineLayout.from_sizes((1, 2, 2), world_size=5), ("edge", "cloud", "cloud"))
    {'edge': 0, 'cloud': 1}
    """
    return {site: layout.leader(list(sites).index(site)) for site in dict.fromkeys(sites)}


def read_schedule_options(
    config: VtpConfig,
    num_stages: int,
    message_bytes: int | None,
    *,
    num_chunks: int = 1,
    fixed: Placement | None = None,
    report_interval_steps: int = 100,
) -> ScheduleOptions:
    """Read the options of the order.

    Args:
        config: the plugin's configuration.
        num_stages: number of pipeline stages.
        message_bytes: size of an activation, if known.
        num_chunks: model chunks of every stage.
        fixed: placement of a pipeline that is no U; without it costs are rejected or, for split backwards, not read.
        report_interval_steps: training steps from one comparison of planned and real times to the next.

    Raises:
        ConfigError: limits or costs do not fit the pipeline, or its order is fixed.
    """
    is_u = config.layerwise_disaggregated
    if config.costs is not None and fixed is None and not (is_u or config.split_backward):
        way_out = "leave it out, or add --layerwise-disaggregated-training or --vtp-split-backward"
        raise LayoutError(f"--vtp-costs is for a U or split backwards; {way_out}")
    in_flight = config.in_flight
    if in_flight is not None:
        if not config.has_planned_schedule or (num_chunks > 1 and not is_u):
            raise LayoutError(
                f"--vtp-in-flight {','.join(map(str, in_flight))}; it is used by planned schedules without "
                "interleaving only; add --vtp-schedule planned and leave interleaving out, or leave --vtp-in-flight out"
            )
        check_in_flight(in_flight, num_stages)
        if not is_u:
            in_flight = by_stage(in_flight, num_stages)
    costs, placement = None, fixed or (u_placement(num_stages, num_rings=config.num_rings) if is_u else None)
    if config.costs is not None and placement is not None:
        costs = parse_costs(config.costs, placement, message_bytes=message_bytes)
    return ScheduleOptions(
        costs=costs,
        in_flight=in_flight,
        replan_share=config.replan_share,
        report_interval_steps=report_interval_steps,
        split_backward=config.split_backward,
    )
