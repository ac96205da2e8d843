"""The applied plugin: what was asked for, what was planned, and what runs.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

import torch.distributed as dist

import vtp_plugin
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import Direction, TransportRules, pipeline_boundaries
from vtp_plugin.config import VtpConfig, choose_cp_sizes
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.layout.pipeline import Coord, PipelineLayout, RankOrder
from vtp_plugin.layout.replicas import DpMode, ReplicaMap
from vtp_plugin.platform import detect
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import HEADER_LENGTH, Audit
from vtp_plugin.runtime.communicator import ExchangeOptions, PipelineCommunicator, open_channels
from vtp_plugin.runtime.measure import Report, share_reports
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.planned import PlannedPipeline, Planning
from vtp_plugin.runtime.startup import agree, gather_node_sizes, open_store
from vtp_plugin.runtime.tied import TiedWeight, tied_weight_crossings
from vtp_plugin.runtime.workers import own_channels, place_workers, worker_of
from vtp_plugin.schedule import plain_placement, u_placement
from vtp_plugin.schedule.limits import check_in_flight
from vtp_plugin.schedule.stated import parse_costs

if TYPE_CHECKING:
    import torch

    from vtp_plugin.patching import AppliedPatches

_ORDERS = {"tp-cp-ep-dp-pp": RankOrder.STAGE_MAJOR, "tp-cp-ep-pp-dp": RankOrder.REPLICA_MAJOR}


class Session:
    """State of the plugin in this process.

    Attributes:
        config: what was asked for, so far.
        platform: where it runs; known once the device option is.
        layout: who is where; known once the list and the world size are.
        communicator: moves activations; None while Megatron's own is in use.
        communicators: one for every replica of the pipeline that this rank works in; several only where a neighbour has
            more replicas than the own stage.
        pipeline_groups: own pipeline group in each of these replicas.
        pipeline: runs planned schedules; None with Megatron's own.
        tied_weight: exchange of a shared embedding; None on ranks that hold no end of it, or with Megatron's own.
        embedding: word embedding of the model that was built last, on the edge of a U-shaped pipeline.
        monitor: keeps the time; None before the ranks have agreed.
        applied: sets of patches in the order of application.
        is_activated: the patches that depend on the command line are applied.
        has_agreed_on_exchange: all ranks' model configurations were compared.
        exchange_options: what they said here then; None before.
        tensor_bytes: size of the tensor that crosses a boundary; None where it is not known beforehand.
        audit: record of what crosses; None unless asked for, or before the channels are open.
    """

    def __init__(self, config: VtpConfig) -> None:
        """Start with what ``apply()`` was told."""
        self.config = config
        self.platform: Platform | None = None
        self.layout: PipelineLayout | None = None
        self.communicator: PipelineCommunicator | None = None
        self.communicators: tuple[PipelineCommunicator, ...] = ()
        self.pipeline_groups: tuple[dist.ProcessGroup, ...] = ()
        self.pipeline: PlannedPipeline | None = None
        self.tied_weight: TiedWeight | None = None
        self.monitor: Monitor | None = None
        self.applied: list[AppliedPatches] = []
        self.stage_group: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None
        self.is_activated = False
        self.has_agreed_on_exchange = False
        self.exchange_options: ExchangeOptions | None = None
        self.tensor_bytes: int | None = None
        self.audit: Audit | None = None
        self.embedding: weakref.ref[torch.nn.Parameter] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use: stages differ, or something asks for them."""
        is_asked = self.config.force or self.config.has_planned_schedule
        return self.layout is not None and (is_asked or not self.layout.is_uniform)

    @property
    def has_stock_ends(self) -> bool:
        """Whether Megatron's own code fits what joins the first and the last stage: tied weights, the token count."""
        return self.layout is None or (self.layout.is_uniform and not self.config.layerwise_disaggregated)

    @property
    def loss_stage(self) -> int:
        """Stage that computes the loss."""
        assert self.layout is not None
        return 0 if self.config.layerwise_disaggregated else self.layout.num_stages - 1

    @property
    def replicas(self) -> ReplicaMap:
        """Which replicas of the stages work together."""
        assert self.layout is not None
        return ReplicaMap(dp_sizes=self.layout.dp_sizes, mode=DpMode(self.config.dp_mode))

    @property
    def writer_rank(self) -> int:
        """Rank that reports: in a U-shaped pipeline the edge's leader, else the world's last one, as in Megatron."""
        assert self.layout is not None
        return self.layout.leader(0, 0, 0) if self.config.layerwise_disaggregated else self.layout.writer_rank

    @property
    def _boundaries(self) -> tuple[tuple[int, int], ...]:
        """Neighbouring stages, the way from the end of a U back to its edge included."""
        assert self.layout is not None
        num_stages = self.layout.num_stages
        is_u_shaped = self.config.layerwise_disaggregated and num_stages > 1
        return (u_placement(num_stages) if is_u_shaped else plain_placement(num_stages)).boundaries

    @property
    def transport_rules(self) -> TransportRules:
        """What decides how the boundaries are crossed."""
        return TransportRules(
            transport=self.config.transport, sites=self.config.sites or (), tensor_bytes=self.tensor_bytes
        )

    @property
    def own(self) -> Coord:
        """Place of this rank."""
        assert self.layout is not None
        return self.layout.coord(dist.get_rank())

    def choose_platform(self) -> Platform:
        """Find the platform and, on CPU, map what Megatron calls on ``torch.cuda``; idempotent."""
        if self.platform is None:
            self.platform = detect(self.config.device)
            self.platform.install()
        return self.platform

    def plan(self, *, world_size: int, pipeline_size: int, tensor_size: int | None, cp: int, order: str) -> None:
        """Make the layout from the list and Megatron's own size options.

        Args:
            world_size: number of ranks.
            pipeline_size: Megatron's pipeline size; 1 counts as not given.
            tensor_size: Megatron's tensor size; None counts as not given.
            cp: Megatron's context-parallel size; with a list of our own, 1 counts as not given.
            order: Megatron's rank order.

        Raises:
            ConfigError: the sizes contradict each other or the world.
        """
        sizes = self.config.size_list
        assert isinstance(sizes, tuple)
        shown = ",".join(str(size) for size in sizes)
        if pipeline_size not in (1, len(sizes)):
            raise ConfigError(
                f"--pipeline-model-parallel-size {pipeline_size} contradicts --vtp-size-list {shown} with {len(sizes)} "
                "stages; leave it out or make both equal"
            )
        if tensor_size not in (None, max(sizes)):
            raise ConfigError(
                f"--tensor-model-parallel-size {tensor_size} contradicts --vtp-size-list {shown}; leave it out or give "
                f"the largest size of the list, {max(sizes)}"
            )
        if order not in _ORDERS:
            raise ConfigError(f"rank order {order!r} is unknown to the plugin; use one of {', '.join(_ORDERS)}")
        cp_sizes = choose_cp_sizes(self.config.cp_list, cp, num_stages=len(sizes))
        layout = PipelineLayout.from_sizes(
            sizes, world_size=world_size, cp=cp_sizes, dp=self.config.dp_list, order=_ORDERS[order]
        )
        dp = layout.stages[0].dp
        if self.config.data_parallel_size not in (None, dp):
            raise ConfigError(
                f"--vtp-data-parallel-size {self.config.data_parallel_size} contradicts the world: {world_size} ranks "
                f"/ {world_size // dp} ranks a replica (sum of tp * cp over the stages) = {dp} replicas; change one of "
                "them"
            )
        self.layout = layout
        self.replicas.check(self._boundaries)
        self._planning(0)  # the size of an activation is not known yet
        for upstream, downstream in self._boundaries:
            self.transport_rules.choose(layout, upstream, downstream)

    def statement(self) -> dict[str, object]:
        """Say what this rank is about to run; every rank must say the same."""
        assert self.layout is not None and self.platform is not None
        return {
            "vtp_plugin version": vtp_plugin.__version__,
            "megatron-core version": distribution_version("megatron-core"),
            "vtp_size_list": ",".join(str(size) for size in self.layout.tp_sizes),
            "world size": self.layout.world_size,
            "rank order": self.layout.order.value,
            "vtp_cp_list": ",".join(str(size) for size in self.layout.cp_sizes),
            "vtp_dp_list": ",".join(str(size) for size in self.layout.dp_sizes),
            "dp mode": self.config.dp_mode,
            "transport": self.config.transport,
            "sites": ",".join(self.config.sites or ()),
            "platform": self.platform.name,
            "forced": self.config.force,
            "timeout_s": self.config.timeout_s,
            "schedule": self.config.schedule,
            "layerwise disaggregated": self.config.layerwise_disaggregated,
            "vtp_in_flight": ",".join(map(str, self.config.in_flight or ())),
            "vtp_costs": " ".join(self.config.costs or ()),
        }

    def request_statement(self) -> dict[str, object]:
        """Say what this rank was started with, before any layout is known."""
        sizes, cp_sizes, dp_sizes = self.config.size_list, self.config.cp_list, self.config.dp_list
        return {
            "vtp_plugin version": vtp_plugin.__version__,
            "vtp_size_list": ",".join(str(size) for size in sizes) if isinstance(sizes, tuple) else sizes,
            "vtp_cp_list": ",".join(str(size) for size in cp_sizes) if cp_sizes else None,
            "vtp_dp_list": ",".join(str(size) for size in dp_sizes) if dp_sizes else None,
            "timeout_s": self.config.timeout_s,
        }

    def meet(self, environment: Mapping[str, str]) -> None:
        """Wait for all ranks that the launcher started, if it says where they meet, and compare what they were told.

        Raises:
            ConfigError: a rank was told something else.
            PeerError: a rank did not come within the timeout.
        """
        rank, world_size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        is_launched = rank.isdigit() and world_size.isdigit() and "MASTER_ADDR" in environment
        if dist.is_initialized() or not is_launched or int(world_size) < 2:
            return
        store = open_store(int(rank), int(world_size), self.config.timeout_s)
        self.agree(store, self.request_statement, rank=int(rank), world_size=int(world_size), name="start")

    def agree(
        self,
        store: dist.Store,
        prepare: Callable[[], Mapping[str, object]],
        *,
        rank: int,
        world_size: int,
        name: str = "start-up check",
        timeout_s: float | None = None,
        is_partial: bool = False,
    ) -> None:
        """Run a check on all ranks, go on only if all succeed and agree, then begin to watch the others.

        Args:
            store: reaches all ranks.
            prepare: the check; what it returns must be equal on all ranks.
            rank: own rank.
            world_size: number of ranks.
            name: of the check, for error messages.
            timeout_s: for the check; default is the configured one, which the check itself may change.
            is_partial: a rank need not state every value that another one states.
        """
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        monitor_store = store.clone() if self.monitor is None else None
        self.store = store  # the check may use it
        agree(store, name, prepare, rank=rank, world_size=world_size, timeout_s=limit_s, is_partial=is_partial)
        if monitor_store is not None:
            self.monitor = Monitor(monitor_store, rank=rank, world_size=world_size, timeout_s=self.config.timeout_s)
            self.monitor.start()
            atexit.register(self.stop_monitor)

    def stop_monitor(self) -> None:
        """End the watch over the other ranks; they are told that this rank is done."""
        atexit.unregister(self.stop_monitor)
        monitor, self.monitor = self.monitor, None
        if monitor is None:
            return
        monitor.stop()
        if self.communicator is not None and not monitor.is_failing:
            # The last pass may have been an evaluation, whose sends nobody has waited for: what is still under way when
            # the process ends is lost.
            with contextlib.suppress(PeerError):
                self.finish_step()

    def resolve_auto(self, cp: int) -> None:
        """Replace the list ``"auto"`` by one stage per node of the launcher.

        Raises:
            ConfigError: the launcher does not say which node this is, or a node's ranks do not divide.
        """
        if self.config.size_list != "auto":
            return
        assert self.store is not None
        dp = self.config.data_parallel_size or 1
        sizes = gather_node_sizes(self.store, os.environ, divisor=dp * cp, timeout_s=self.config.timeout_s)
        self.config = dataclasses.replace(self.config, size_list=sizes)

    def open_audit(self, rank: int) -> None:
        """Begin the record of what crosses, if it is asked for; idempotent.

        Raises:
            ConfigError: it cannot be written.
        """
        if self.config.audit is not None and self.audit is None:
            self.audit = Audit(self.config.audit, rank)

    def open(self, *, stage_group: dist.ProcessGroup, num_chunks: int) -> None:
        """Open the channels of this rank. All ranks call this at the same point, after Megatron made its groups.

        Args:
            stage_group: tensor-parallel group of the own stage.
            num_chunks: model chunks of every stage, Megatron's virtual pipeline size.
        """
        self.stage_group = stage_group
        assert self.layout is not None
        num_stages = self.layout.num_stages
        replicas = self.replicas
        placement = place_workers(replicas, num_chunks=num_chunks, is_u_shaped=self.config.layerwise_disaggregated)
        if not self.is_active:
            return
        assert self.platform is not None
        layout, own = self.layout, self.own
        boundaries = pipeline_boundaries(
            layout,
            is_ring=placement.num_vstages > num_stages,
            rules=self.transport_rules,
            dp_mode=replicas.mode,
        )
        is_tied_local = self.has_stock_ends or self.config.layerwise_disaggregated or num_stages == 1
        tied = () if is_tied_local else tied_weight_crossings(layout)
        crossings = [boundary.crossing(direction) for boundary in boundaries for direction in Direction]
        crossings += tied
        self.open_audit(dist.get_rank())
        for crossing in crossings:
            require_valid(crossing.probe)
            require_valid(crossing.plan_header(HEADER_LENGTH))
        channels = open_channels(
            crossings,
            stage_group=stage_group,
            platform=self.platform,
            monitor=self.monitor,
            timeout_s=self.config.timeout_s,
            audit=self.audit,
        )
        rank = dist.get_rank()
        mine = [b for b in boundaries if rank in (b.dst if b.downstream == own.stage else b.src).ranks]
        befores = [b for b in mine if b.downstream == own.stage] or [None]
        afters = [b for b in mine if b.upstream == own.stage] or [None]
        self.communicators = tuple(
            PipelineCommunicator(
                forward_in=channels[before.name(Direction.FORWARD)] if before else None,
                forward_out=channels[after.name(Direction.FORWARD)] if after else None,
                backward_in=channels[after.name(Direction.BACKWARD)] if after else None,
                backward_out=channels[before.name(Direction.BACKWARD)] if before else None,
            )
            for before, after in (
                (befores[i % len(befores)], afters[i % len(afters)]) for i in range(math.lcm(len(befores), len(afters)))
            )
        )
        self.communicator = self.communicators[0]
        if self.config.has_planned_schedule and num_stages > 1:
            by_name = own_channels(placement, replicas, mine, channels)
            worker = worker_of(placement, replicas, own.stage, own.dp_rank)
            planning = self._planning(self.tensor_bytes)
            self.pipeline = PlannedPipeline(placement, worker, by_name, self, self.platform, planning)
        if tied and own.stage in (0, layout.num_stages - 1):
            (incoming,) = (channels[crossing.name] for crossing in tied if rank in crossing.dst.ranks)
            self.tied_weight = TiedWeight(
                is_first=own.stage == 0,
                outgoing=tuple(channels[crossing.name] for crossing in tied if rank in crossing.src.ranks),
                incoming=incoming,
            )

    def agree_on_step(self, prepare: Callable[[], Mapping[str, object]]) -> None:
        """Run a function on all ranks; go on only if it returns the same everywhere."""
        assert self.store is not None
        world_size = dist.get_world_size()
        self.agree(self.store, prepare, rank=dist.get_rank(), world_size=world_size, name="planning of a step")

    def share_reports(self, own: Report, combine: Callable[[Sequence[Report]], str]) -> str:
        """Make one text of all ranks' reports, on rank 0, and return it on all."""
        assert self.store is not None
        return share_reports(
            self.store,
            own,
            combine,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=self.config.timeout_s,
        )

    def _planning(self, message_bytes: int | None) -> Planning:
        """Read what the orders are to be planned for.

        Args:
            message_bytes: size of an activation, if it is known.

        Raises:
            ConfigError: limits or costs fit no such pipeline, or there is no choice of an order.
        """
        config = self.config
        if config.in_flight is None and config.costs is None:
            return Planning()
        if not config.layerwise_disaggregated:
            raise ConfigError(
                "--vtp-in-flight and --vtp-costs choose the order of a U-shaped pipeline; other orders are fixed: "
                "leave them out, or add --layerwise-disaggregated-training"
            )
        assert self.layout is not None
        num_stages = self.layout.num_stages
        if config.in_flight is not None:
            check_in_flight(config.in_flight, num_stages)
        words = config.costs
        costs = None if words is None else parse_costs(words, u_placement(num_stages), message_bytes=message_bytes)
        return Planning(costs=costs, in_flight=config.in_flight)

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        for communicator in self.communicators:
            communicator.finish_step()

    def close(self) -> None:
        """Forget the channels, as ``destroy_model_parallel`` forgets its groups, once all is sent."""
        self.finish_step()
        self.communicator, self.communicators, self.pipeline_groups = None, (), ()
        self.pipeline = None
        self.tied_weight = None
        self.stage_group = None
        if self.audit is not None:
            self.audit.close()
            self.audit = None

    def describe(self) -> str:
        """Show the layout and how every boundary is crossed, for the log of rank 0."""
        assert self.layout is not None and self.platform is not None
        lines = [self.layout.describe()]
        if not self.is_active:
            lines.append("all stages have one size: Megatron's own groups and communicator")
        if not self.replicas.is_equal:
            lines.append(f"data-parallel sizes differ: {self.config.dp_mode}, run by the planned schedule")
        for upstream, downstream in self._boundaries if self.is_active else ():
            strategy, reason = self.transport_rules.choose(self.layout, upstream, downstream)
            lines.append(f"boundary {upstream}->{downstream}: {strategy} ({reason})")
        lines.append(f"platform: {self.platform.name} ({self.platform.reason})")
        return "\n".join(lines)

    def agree_on_exchange(self, read: Callable[[], ExchangeOptions]) -> ExchangeOptions:
        """Read how tensors cross and, the first time, compare it over all ranks; a collective call.

        A tensor of another type or shape than the receiver expects would end a process inside the backend.

        Args:
            read: reads and checks the model's configuration.

        Raises:
            ConfigError: a rank's configuration is wrong, or two differ.
        """
        if self.has_agreed_on_exchange or dist.get_backend() == "fake":
            return read()
        assert self.layout is not None and self.store is not None
        tp_size = self.layout.tp_sizes[self.own.stage]
        found: list[ExchangeOptions] = []

        def prepare() -> dict[str, object]:
            found.append(read())
            return found[0].statement(tp_size)

        self.agree(
            self.store,
            prepare,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            name="the first step's check",
            is_partial=True,
        )
        self.has_agreed_on_exchange = True
        self.exchange_options = found[0]
        return found[0]

    def check_model_config(self, tensor_model_parallel_size: int, context_parallel_size: int) -> None:
        """Refuse a model configuration that was made for another stage's sizes.

        Raises:
            ConfigError: the configuration does not say the own stage's size.
        """
        assert self.layout is not None
        own_size = self.layout.tp_sizes[self.own.stage]
        if tensor_model_parallel_size != own_size:
            raise ConfigError(
                f"the model's config says tensor_model_parallel_size={tensor_model_parallel_size}, but stage "
                f"{self.own.stage} has {own_size}; build the config with "
                "parallel_state.get_tensor_model_parallel_world_size()"
            )
        own_cp = self.layout.cp_sizes[self.own.stage]
        if len(set(self.layout.cp_sizes)) > 1 and context_parallel_size != own_cp:
            raise ConfigError(
                f"the model's config says context_parallel_size={context_parallel_size}, but stage {self.own.stage} "
                f"has {own_cp}; build the config with parallel_state.get_context_parallel_world_size()"
            )
