"""Options of the plugin, by subject."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.flag import (
    DeviceName,
    FlagGroup,
    declare,
    format_value,
    given,
    own,
    parse_bridges,
    parse_bytes,
    parse_cost_words,
    parse_cp_list,
    parse_dp_list,
    parse_ep_list,
    parse_etp_list,
    parse_in_flight,
    parse_layer_list,
    parse_size_list,
    parse_stages,
    parse_steps,
    same,
)
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES

stage_option = functools.partial(declare, FlagGroup.WHERE)


@dataclass(frozen=True, kw_only=True)
class StageFields:
    """Options about ranks, stages, layers and devices.

    Attributes:
        size_list: tensor-parallel size of every pipeline stage, first stage first; or 'auto': node k of the launcher is
            stage k, or with --vtp-stages a layout that fits the devices that are there
        stages: with '--vtp-size-list auto': the fewest and the most pipeline stages; TP sizes, layers and replicas are
            chosen for the devices that are there. --vtp-sites then names every site once, in the order of the pipeline
        cp_list: context-parallel size of every stage; default: --context-parallel-size on all
        dp_list: data-parallel size (number of replicas) of every stage; default: one size for all, from the number of
            ranks
        ep_list: expert-parallel size of every stage; default: --expert-model-parallel-size on all
        etp_list: tensor-parallel size of the experts of every stage; default: --expert-tensor-parallel-size on all, or
            else each stage's own tensor-parallel size
        data_parallel_size: replicas of every stage; needed with '--vtp-size-list auto' only
        device: device to train on, one kind for the whole run; auto (default) asks in this order: npu, cuda, cpu
        force: use the plugin for stages of one size too (for tests and benchmarks)
        layerwise_disaggregated: U-shaped pipeline: stage 0, the edge, holds the first and the last layers, with
            embedding, head, loss and data; give the layers by --num-layer-list, or by --pipeline-model-parallel-layout
            with one part more than stages
        num_layer_list: U-shaped pipeline: layers of the edge's first part, of every cloud stage, and of the edge's last
            part
        encoder_layer_list: U-shaped pipeline with an encoder whose middle layers are in the cloud, too: two rings.
            Layers of its first part on the edge, of its part on every cloud stage, and of its last part on the edge,
            which is where the first part of the language model is
    """

    size_list: tuple[int, ...] | Literal["auto"] | None = stage_option(
        same("vtp_size_list", at_start=True), None, "1,4,4", keyword="vtp_size_list", parse=parse_size_list
    )
    stages: tuple[int, int] | None = stage_option(
        same("vtp_stages", at_start=True, separator=":", none=""), None, "MIN:MAX", parse=parse_stages
    )
    cp_list: tuple[int, ...] | None = stage_option(
        same("vtp_cp_list", at_start=True), None, "1,2,2", keyword="vtp_cp_list", parse=parse_cp_list
    )
    dp_list: tuple[int, ...] | None = stage_option(
        same("vtp_dp_list", at_start=True), None, "1,2,2", keyword="vtp_dp_list", parse=parse_dp_list
    )
    ep_list: tuple[int, ...] | None = stage_option(
        same("vtp_ep_list", at_start=True), None, "1,2,2", keyword="vtp_ep_list", parse=parse_ep_list
    )
    etp_list: tuple[int, ...] | None = stage_option(
        same("vtp_etp_list", at_start=True), None, "1,1,1", keyword="vtp_etp_list", parse=parse_etp_list
    )
    data_parallel_size: int | None = stage_option(
        own("the sizes that follow from it are compared, as vtp_dp_list"), None, "N", type=int
    )
    device: DeviceName = stage_option(own("the platform that is found is compared"), "auto")
    force: bool = stage_option(same("forced"), False)
    layerwise_disaggregated: bool = stage_option(
        same("layerwise disaggregated"), False, name="--layerwise-disaggregated-training"
    )
    num_layer_list: tuple[int, ...] | None = stage_option(
        same("num_layer_list", none=""), None, "1,3,3,1", name="--num-layer-list", parse=parse_layer_list
    )
    encoder_layer_list: tuple[int, ...] | None = stage_option(
        same("vtp_encoder_layer_list", none=""),
        None,
        "1,3,3,1",
        parse=functools.partial(parse_layer_list, flag="--vtp-encoder-layer-list"),
    )

    def check_stages(self) -> None:
        """Reject lists that do not fit each other."""
        if self.stages is not None and self.size_list != "auto":
            raise LayoutError(
                f"--vtp-stages {':'.join(map(str, self.stages))} needs --vtp-size-list auto; give both, or leave it out"
            )
        self._check_list("cp_list", self.cp_list, "context-parallel")
        self._check_list("dp_list", self.dp_list, "data-parallel")
        self._check_list("ep_list", self.ep_list, "expert-parallel")
        self._check_list("etp_list", self.etp_list, "expert tensor-parallel")
        if self.num_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.encoder_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--vtp-encoder-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.dp_list is not None and self.data_parallel_size is not None:
            raise LayoutError(
                f"data-parallel size {self.data_parallel_size} and vtp_dp_list {format_value(self.dp_list)} say the "
                "same thing twice; give one of them"
            )
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise LayoutError(f"data-parallel size {self.data_parallel_size} must be at least 1; leave it out for 1")

    def refuse_to_fit(self) -> None:
        """Reject a layout that is to be chosen once the script runs."""
        if self.stages is not None:
            raise LayoutError(
                "--vtp-stages in apply(); the layout must be chosen before the script starts, since that changes RANK, "
                "WORLD_SIZE and flags, which the script may have read; start with python -m vtp_plugin run, and leave "
                "--vtp-stages and 'auto' out of apply()"
            )

    def _check_list(self, name: str, sizes: tuple[int, ...] | None, what: str) -> None:
        if sizes is None:
            return
        shown = format_value(sizes)
        if self.size_list == "auto":
            raise LayoutError(f"vtp_{name} {shown} with vtp_size_list 'auto'; write the TP size of every stage instead")
        if isinstance(self.size_list, tuple) and len(sizes) != len(self.size_list):
            raise LayoutError(
                f"vtp_{name} {shown} has {len(sizes)} entries, the size list has {len(self.size_list)} stages; "
                f"give one {what} size per stage"
            )

    @property
    def num_rings(self) -> int:
        """How often a microbatch passes the cloud of a U-shaped pipeline; 0 for other pipelines."""
        return 0 if not self.layerwise_disaggregated else 1 if self.encoder_layer_list is None else 2

    @property
    def least_on_edge(self) -> int:
        """Least number of language layers of the edge's parts: in two rings they may be embedding and head alone."""
        return 0 if self.num_rings > 1 else 1

    @property
    def has_unequal_dp(self) -> bool:
        """Whether stages have different numbers of replicas."""
        return self.dp_list is not None and len(set(self.dp_list)) > 1


ScheduleName = Literal["stock", "planned"]
schedule_option = functools.partial(declare, FlagGroup.WHEN)


@dataclass(frozen=True, kw_only=True)
class ScheduleFields:
    """Options about the order of a step.

    Attributes:
        schedule: stock (default) keeps Megatron's pipeline schedules; planned runs the same orders, but posts every
            receive before the compute that precedes it, and no compute waits for a send; with --vtp-bridges also the
            orders of several modules
        split_backward: with --vtp-schedule planned or a U-shape: compute the gradients of linear layers' weights later
            than those of their inputs, where a stage would otherwise wait; where that gains nothing, the order stays as
            it is. A stage keeps more for this; --vtp-in-flight limits it
        in_flight: with --vtp-schedule planned (not interleaved) or a U-shape: most microbatches in flight on each
            stage, or one number for all. A stage keeps that many activations of each of its chunks. Default of a
            U-shape: as many as keep the busiest stage busy, plus two; else as in 1F1B (more of them hide slow links).
            With several modules: one number for each stage of all modules, encoders first; more let an encoder run
            ahead
        costs: U-shaped pipeline: the durations and links that the order is planned for, such as forward_ms=40,80,40
            latency_ms=20. Default: the first steps measure them, and the run prints them as this flag.
        replan_share: U-shaped pipeline: without --vtp-costs, measure again and plan a new order, at most three times,
            if a step is longer or shorter than planned by more than this share; default 0.25 (a quarter), inf for never
    """

    schedule: ScheduleName = schedule_option(same("schedule"), "stock")
    split_backward: bool = schedule_option(same("vtp_split_backward"), False)
    in_flight: tuple[int, ...] | None = schedule_option(
        same("vtp_in_flight", none=""), None, "8,4,4", parse=parse_in_flight
    )
    costs: tuple[str, ...] | None = schedule_option(
        same("vtp_costs", none="", separator=" "), None, "KEY=VALUE", nargs="+", parse=parse_cost_words
    )
    replan_share: float = schedule_option(same("vtp_replan_share"), 0.25, "0.25", type=float)

    def check_schedule(self) -> None:
        """Reject a share that no step can differ by."""
        if not self.replan_share > 0:
            raise LayoutError(
                f"--vtp-replan-share {self.replan_share} must be positive, such as 0.25 for a quarter, or inf for never"
            )


TransportName = str
"""`"auto"`, or the name of a strategy that users are offered."""
DpModeName = Literal["multiplex", "split"]
transport_option = functools.partial(declare, FlagGroup.WHAT)
_OFFERED = {name: strategy.help for name, strategy in STRATEGIES.items() if strategy.help is not None}


@dataclass(frozen=True, kw_only=True)
class TransportFields:
    """Options about what crosses boundaries and bridges.

    Attributes:
        transport_threshold_bytes: with --vtp-transport auto: tensors of this size and more cross in slices if there is
            a choice, smaller ones by rank0, and the run tries nothing; bytes, or a number with KiB or MiB
        dp_mode: how stages of different data-parallel sizes work together: multiplex (default) lets a narrow stage run
            its microbatches in turn for each replica of a wide one; split lets it run larger microbatches, and each
            replica of the wide one gets a part (--micro-batch-size then holds for the widest stage)
        bridges: use the plugin's bridges between modules (MIMO) instead of Megatron's, also without --vtp-size-list;
            'extended' also lets the colocated one do what Megatron's does not support
    """

    transport: TransportName = transport_option(
        same("transport"),
        "auto",
        help=f"how tensors cross between stages: {', '.join(map(' '.join, _OFFERED.items()))}; auto (default) takes "
        "rank0 between sites and for small tensors; for others a run tries what there is at its start and takes the "
        "fastest",
        choices=("auto", *_OFFERED),
    )
    transport_threshold_bytes: int | None = transport_option(
        same("vtp_transport_threshold"), None, "4MiB", name="--vtp-transport-threshold", parse=parse_bytes
    )
    dp_mode: DpModeName = transport_option(same("dp mode"), "multiplex")
    bridges: bool | Literal["extended"] = transport_option(
        same("vtp_bridges", at_start=True), False, "extended", **{"nargs": "?", "const": True, "parse": parse_bridges}
    )

    def check_transport(self) -> None:
        """Reject a threshold for a transport that has none."""
        if self.transport_threshold_bytes is not None and self.transport != "auto":
            raise LayoutError(
                f"--vtp-transport-threshold {self.transport_threshold_bytes} with --vtp-transport {self.transport}; it "
                "is used by auto only; leave one of them out"
            )


LogLevelName = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
log_option = functools.partial(declare, FlagGroup.FAILURE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Options about the log, the trace, and ranks that stop or do not come.

    Attributes:
        timeout_s: a rank that does not answer for this long ends the run on all ranks; default 600
        log_level: how much the plugin says: DEBUG, INFO (default), WARNING or ERROR. INFO comes from rank 0 and from
            the first rank of every other site, DEBUG from all ranks
        trace: write what each rank does and when into a folder, rank 3 into rank3.jsonl; `trace` joins the files to one
            picture of all ranks beside the plan. All ranks give it or none; sites may name different folders
        trace_steps: with --vtp-trace: first and last training step that is written, counted from the start of the
            process; default 2-21. A step of one rank takes about 100 bytes for each message and each compute
        timing: at every line of Megatron's log, say what the last step's time went to on each stage: compute, exposed
            communication and bubble, with the slowest rank of each; also to Megatron's TensorBoard and W&B. A rank that
            computes much longer than the others of its stage is named. With several sites also what crossed between
            them, how fast, and how long stages waited for it
    """

    timeout_s: float = log_option(same("timeout_s", at_start=True), 600.0, "SECONDS", type=float)
    log_level: LogLevelName = log_option(own("it changes nothing but the log"), "INFO", "INFO")

    trace: str | None = log_option(given("whether --vtp-trace is given"), None, "DIR")
    trace_steps: tuple[int, int] = log_option(
        same("vtp_trace_steps", separator="-"), (2, 21), "2-21", parse=parse_steps
    )

    timing: bool = log_option(same("vtp_timing"), False)

    def check_failure(self) -> None:
        """Refuse a time limit that is not positive."""
        if not 0 < self.timeout_s < float("inf"):
            raise LayoutError(f"timeout of {self.timeout_s} s must be positive and finite; leave it out for 600 s")


saved_option = functools.partial(declare, FlagGroup.SAVED)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Options about checkpoints.

    Attributes:
        load_newest_valid: if the checkpoint that would be loaded is damaged, load the newest older one that is intact,
            persistent or not, and log what was skipped and why. Each is read whole to check it, then again to load it.
            Without this a damaged one is rejected
        keep_checkpoints: after each save keep only this many of the newest intact checkpoints, and delete others;
            default: keep all
    """

    load_newest_valid: bool = saved_option(same("load_newest_valid"), False)
    keep_checkpoints: int | None = saved_option(same("keep_checkpoints"), None, "N", type=int)

    def check_saved(self) -> None:
        """Reject a number that keeps none."""
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise LayoutError(
                f"--vtp-keep-checkpoints {self.keep_checkpoints}; the newest one is always kept; give 1 or more, or "
                "leave it out to keep all"
            )
