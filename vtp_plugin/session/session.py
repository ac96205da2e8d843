"""The state of the applied plugin.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

import vtp_plugin
from vtp_plugin import log
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import Direction, PipelineBoundary, pipeline_boundaries
from vtp_plugin.boundary.rules import TransportRules
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError, PatchError
from vtp_plugin.layout.pipeline import Coord, PipelineLayout
from vtp_plugin.layout.replicas import DpMode, ReplicaMap
from vtp_plugin.options import OptionContext
from vtp_plugin.options.plan import plan_layout, plan_orders, reporting_ranks, stage_boundaries, stage_sites
from vtp_plugin.platform import detect
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import HEADER_LENGTH, Audit
from vtp_plugin.runtime.communicator import ExchangeOptions, PipelineCommunicator, join_channels, open_channels
from vtp_plugin.runtime.planned import PlannedPipeline
from vtp_plugin.runtime.probe import settle, try_strategies
from vtp_plugin.runtime.startup import gather_node_sizes
from vtp_plugin.runtime.tied import TiedWeight, join_tied_weight, tied_weight_crossings
from vtp_plugin.runtime.transport import Channel
from vtp_plugin.runtime.workers import own_channels, place_workers, worker_of
from vtp_plugin.session.ranks import AllRanks
from vtp_plugin.session.statement import digest_of, state_run

if TYPE_CHECKING:
    import torch

    from vtp_plugin.patching import AppliedPatches


class Session:
    """State of the plugin in this process.

    Attributes:
        config: what was asked for, so far.
        watch_failures: makes errors that end this process one line, and tells the other ranks; called once a list is
            asked for.
        platform: where it runs; known once the device option is.
        layout: who is where; known once the list and the world size are.
        ranks: what this rank does together with all others, outside the process groups.
        communicators: they move activations, one for every replica of the pipeline that this rank works in; several
            only where a neighbour has more replicas than the own stage, none while Megatron's own is in use.
        pipeline_groups: own pipeline group in each of these replicas.
        pipeline: runs planned schedules; None with Megatron's own.
        tied_weight: exchange of a shared embedding; None on ranks that hold no end of it, or with Megatron's own.
        embedding: word embedding of the model that was built last, on the edge of a U-shaped pipeline.
        applied: sets of patches in the order of application.
        is_activated: the patches that depend on the command line are applied.
        exchange_options: how tensors cross, by the model configuration; None before all ranks' were compared.
        tensor_bytes: size of the tensor that crosses a boundary; None where it is not known beforehand.
        is_sharded: ranks hold slices of activations (sequence parallelism), as far as is known beforehand.
        log_interval_steps: training steps from one line about real and planned times to the next.
        audit: record of what crosses; None unless asked for, or before the channels are open.
        notes: lines that the start-up summary ends with.
        close_log: puts the logger back as it was; None before the plugin said anything.
    """

    def __init__(self, config: VtpConfig) -> None:
        """Start with what ``apply()`` was told."""
        self.config = config
        self.watch_failures: Callable[[], None] = lambda: None
        self.platform: Platform | None = None
        self.layout: PipelineLayout | None = None
        self.ranks = AllRanks(lambda: self.config.timeout_s, self.finish_step)
        self.communicators: tuple[PipelineCommunicator, ...] = ()
        self.pipeline_groups: tuple[dist.ProcessGroup, ...] = ()
        self.pipeline: PlannedPipeline | None = None
        self.tied_weight: TiedWeight | None = None
        self.applied: list[AppliedPatches] = []
        self.stage_group: dist.ProcessGroup | None = None
        self.is_activated = False
        self.exchange_options: ExchangeOptions | None = None
        self.tensor_bytes: int | None = None
        self.is_sharded = False
        self.log_interval_steps = 100
        self.audit: Audit | None = None
        self.embedding: weakref.ref[torch.nn.Parameter] | None = None
        self.notes: list[str] = []
        self.close_log: Callable[[], None] | None = None

    @property
    def communicator(self) -> PipelineCommunicator | None:
        """Communicator of the first replica of the pipeline; None while Megatron's own is in use."""
        return self.communicators[0] if self.communicators else None

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
        assert self.layout is not None
        return stage_boundaries(self.config, self.layout.num_stages)

    @property
    def transport_rules(self) -> TransportRules:
        """What decides how the boundaries are crossed."""
        return TransportRules(
            transport=self.config.transport,
            sites=self.config.sites or (),
            tensor_bytes=self.tensor_bytes,
            threshold_bytes=self.config.transport_threshold_bytes,
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
        """Make the layout; arguments as for :func:`plan_layout`.

        Raises:
            ConfigError: the sizes contradict each other or the world, or the stages do not fit together.
        """
        layout = plan_layout(
            self.config,
            world_size=world_size,
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
            cp=cp,
            order=order,
        )
        self.layout = layout
        self.replicas.check(self._boundaries)
        plan_orders(self.config, layout.num_stages, 0)  # the size of an activation is not known yet
        for upstream, downstream in self._boundaries:
            self.transport_rules.choose(layout, upstream, downstream)

    def statement(self) -> dict[str, object]:
        """Say what this rank is about to run; every rank must say the same."""
        assert self.layout is not None and self.platform is not None
        return state_run(self.config, self.layout, self.platform.name)

    def resolve_auto(self, cp: int) -> None:
        """Replace the list ``"auto"`` by one stage per node of the launcher.

        Raises:
            ConfigError: the launcher does not say which node this is, or a node's ranks do not divide.
        """
        if self.config.size_list != "auto":
            return
        assert self.ranks.store is not None
        dp = self.config.data_parallel_size or 1
        sizes = gather_node_sizes(self.ranks.store, os.environ, divisor=dp * cp, timeout_s=self.config.timeout_s)
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
            monitor=self.ranks.monitor,
            timeout_s=self.config.timeout_s,
            audit=self.audit,
        )
        channels = self._settle_transport(boundaries, channels)
        rank = dist.get_rank()
        mine = [b for b in boundaries if rank in (b.dst if b.downstream == own.stage else b.src).ranks]
        self.communicators = join_channels(mine, own.stage, channels)
        if self.config.has_planned_schedule and num_stages > 1:
            by_name = own_channels(placement, replicas, mine, channels)
            worker = worker_of(placement, replicas, own.stage, own.dp_rank)
            planning = plan_orders(
                self.config, num_stages, self.tensor_bytes, report_interval_steps=self.log_interval_steps
            )
            self.pipeline = PlannedPipeline(placement, worker, by_name, self.ranks, self.platform, planning)
        if tied and own.stage in (0, num_stages - 1):
            self.tied_weight = join_tied_weight(tied, channels, is_first=own.stage == 0)

    def _settle_transport(
        self, boundaries: Sequence[PipelineBoundary], channels: dict[str, Channel]
    ) -> dict[str, Channel]:
        """Try both strategies where the rules leave it open, and let the channels cross by the faster one."""
        assert self.layout is not None and self.platform is not None
        layout, rules = self.layout, self.transport_rules
        tried = [b for b in boundaries if rules.is_open(layout, b.upstream, b.downstream)]
        if not tried or dist.get_backend() == "fake":
            return channels
        choices = try_strategies(
            tried, channels, share_reports=self.ranks.share_reports, platform=self.platform, is_sharded=self.is_sharded
        )
        log.info("\n".join(map(str, choices.values())))
        return settle(tried, channels, choices)

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        for communicator in self.communicators:
            communicator.finish_step()

    def close(self) -> None:
        """Forget the channels, as ``destroy_model_parallel`` forgets its groups, once all is sent."""
        self.finish_step()
        self.communicators, self.pipeline_groups = (), ()
        self.pipeline = None
        self.tied_weight = None
        self.stage_group = None
        if self.audit is not None:
            self.audit.close()
            self.audit = None

    def describe(self) -> str:
        """Say that the plugin is active, with a digest of what was agreed on; then who is where and what crosses."""
        assert self.layout is not None and self.platform is not None
        sizes = ",".join(map(str, self.layout.tp_sizes))
        lines = [
            f"vtp_plugin {vtp_plugin.__version__} is active: vtp_size_list {sizes} on {self.layout.world_size} ranks, "
            f"digest {digest_of(self.statement())}",
            self.layout.describe(writer_rank=self.writer_rank),
        ]
        if not self.is_active:
            lines.append("all stages have one size: Megatron's own groups and communicator")
        if not self.replicas.is_equal:
            lines.append(f"data-parallel sizes differ: {self.config.dp_mode}, run by the planned schedule")
        for upstream, downstream in self._boundaries if self.is_active else ():
            strategy, reason = self.transport_rules.choose(self.layout, upstream, downstream)
            lines.append(f"boundary {upstream}->{downstream}: {strategy} ({reason})")
        lines.append(f"platform: {self.platform.name} ({self.platform.reason})")
        return "\n".join([*lines, *self.notes])

    def open_log(self, rank: int | None = None) -> None:
        """Let the plugin's records be seen, of INFO those of one rank a site; may be called again when more is known.

        Args:
            rank: own rank, once the layout is known.
        """
        if self.close_log is None:
            self.close_log = log.install(self.config.log_level)
        log.set_level(self.config.log_level)
        if rank is not None and self.layout is not None:
            log.set_reporter(rank=rank, is_reporter=rank in self.reporting_ranks.values())

    @property
    def has_sites(self) -> bool:
        """Whether the stages lie on several sites, as far as is known before the layout."""
        return self.config.layerwise_disaggregated or len(set(self.config.sites or ())) > 1

    @property
    def reporting_ranks(self) -> dict[str, int]:
        """Rank of every site that shows what the plugin says."""
        assert self.layout is not None
        return reporting_ranks(self.layout, stage_sites(self.config, self.layout.num_stages))

    def site_of(self, rank: int) -> str:
        """Return the site of a rank; the empty string where all are at one."""
        assert self.layout is not None
        return stage_sites(self.config, self.layout.num_stages)[self.layout.stage_of(rank)]

    def agree_on_exchange(self, read: Callable[[], ExchangeOptions]) -> ExchangeOptions:
        """Read how tensors cross and, the first time, compare it over all ranks; a collective call.

        A tensor of another type or shape than the receiver expects would end a process inside the backend.

        Args:
            read: reads and checks the model's configuration.

        Raises:
            ConfigError: a rank's configuration is wrong, or two differ.
        """
        if self.exchange_options is not None or dist.get_backend() == "fake":
            return read()
        assert self.layout is not None
        tp_size = self.layout.tp_sizes[self.own.stage]
        found: list[ExchangeOptions] = []

        def prepare() -> dict[str, object]:
            found.append(read())
            return found[0].statement(tp_size)

        self.ranks.agree_again(prepare, name="the first step's check", is_partial=True)
        self.exchange_options = found[0]
        return found[0]

    def option_context(self, num_virtual: int) -> OptionContext:
        """Say what Megatron's options are checked against.

        Args:
            num_virtual: chunks per stage.
        """
        layout, platform = self.layout, self.platform
        assert layout is not None and platform is not None
        return OptionContext(
            tp_sizes=layout.tp_sizes,
            cp_sizes=layout.cp_sizes,
            dp_sizes=layout.dp_sizes,
            num_virtual=num_virtual,
            forced=self.config.force or self.config.has_planned_schedule,
            device=platform.name,
        )

    def refuse_originals(self, name: str, value: object) -> None:
        """Refuse a function that goes past the patches.

        Args:
            name: what the user calls it.
            value: the function, maybe one of Megatron's that was taken before ``apply()``, or one that calls it.

        Raises:
            PatchError: it is.
        """
        for applied in self.applied:
            if line := applied.taken_before(value):
                raise PatchError(
                    f"{name} was taken from Megatron before vtp_plugin.apply() and would give wrong gradients; {line}: "
                    "move vtp_plugin.apply() above that line"
                )

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
