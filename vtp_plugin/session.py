"""The applied plugin: what was asked for, what was planned, and what runs.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

import torch.distributed as dist

import vtp_plugin
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import Direction, TransportRules, pipeline_boundaries
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.pipeline import Coord, PipelineLayout, RankOrder
from vtp_plugin.platform import detect
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.communicator import PipelineCommunicator, open_channels
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.startup import agree, gather_node_sizes, open_store
from vtp_plugin.runtime.tied import TiedWeight, tied_weight_crossings
from vtp_plugin.runtime.transport import HEADER_LENGTH

if TYPE_CHECKING:
    from vtp_plugin.patching import AppliedPatches

_ORDERS = {"tp-cp-ep-dp-pp": RankOrder.STAGE_MAJOR, "tp-cp-ep-pp-dp": RankOrder.REPLICA_MAJOR}


class Session:
    """State of the plugin in this process.

    Attributes:
        config: what was asked for, so far.
        platform: where it runs; known once the device option is.
        layout: who is where; known once the list and the world size are.
        communicator: moves activations; None while Megatron's own is in use.
        tied_weight: exchange of a shared embedding; None on ranks that hold no end of it, or with Megatron's own.
        monitor: keeps the time; None before the ranks have agreed.
        applied: sets of patches in the order of application.
        is_activated: the patches that depend on the command line are applied.
        tensor_bytes: size of the tensor that crosses a boundary; None where it is not known beforehand.
    """

    def __init__(self, config: VtpConfig) -> None:
        """Start with what ``apply()`` was told."""
        self.config = config
        self.platform: Platform | None = None
        self.layout: PipelineLayout | None = None
        self.communicator: PipelineCommunicator | None = None
        self.tied_weight: TiedWeight | None = None
        self.monitor: Monitor | None = None
        self.applied: list[AppliedPatches] = []
        self.stage_group: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None
        self.is_activated = False
        self.tensor_bytes: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use: stages differ, or it was forced."""
        return self.layout is not None and (self.config.force or not self.layout.is_uniform)

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
            cp: context-parallel size.
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
        layout = PipelineLayout.from_sizes(sizes, world_size=world_size, cp=cp, order=_ORDERS[order])
        dp = layout.stages[0].dp
        if self.config.data_parallel_size not in (None, dp):
            raise ConfigError(
                f"--vtp-data-parallel-size {self.config.data_parallel_size} contradicts the world: {world_size} ranks "
                f"/ ({'+'.join(str(s) for s in sizes)}) ranks a replica / cp {cp} = {dp} replicas; change one of them"
            )
        self.layout = layout

    def statement(self) -> dict[str, object]:
        """Say what this rank is about to run; every rank must say the same."""
        assert self.layout is not None and self.platform is not None
        return {
            "vtp_plugin version": vtp_plugin.__version__,
            "megatron-core version": distribution_version("megatron-core"),
            "vtp_size_list": ",".join(str(size) for size in self.layout.tp_sizes),
            "world size": self.layout.world_size,
            "rank order": self.layout.order.value,
            "context-parallel size": self.layout.stages[0].cp,
            "transport": self.config.transport,
            "sites": ",".join(self.config.sites or ()),
            "platform": self.platform.name,
            "forced": self.config.force,
            "timeout_s": self.config.timeout_s,
        }

    def request_statement(self) -> dict[str, object]:
        """Say what this rank was started with, before any layout is known."""
        sizes = self.config.size_list
        return {
            "vtp_plugin version": vtp_plugin.__version__,
            "vtp_size_list": ",".join(str(size) for size in sizes) if isinstance(sizes, tuple) else sizes,
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
    ) -> None:
        """Run a check on all ranks, go on only if all succeed and agree, then begin to watch the others.

        Args:
            store: reaches all ranks.
            prepare: the check; what it returns must be equal on all ranks.
            rank: own rank.
            world_size: number of ranks.
            name: of the check, for error messages.
            timeout_s: for the check; default is the configured one, which the check itself may change.
        """
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        monitor_store = store.clone() if self.monitor is None else None
        self.store = store  # the check may use it
        agree(store, name, prepare, rank=rank, world_size=world_size, timeout_s=limit_s)
        if monitor_store is not None:
            self.monitor = Monitor(monitor_store, rank=rank, world_size=world_size, timeout_s=self.config.timeout_s)
            self.monitor.start()
            atexit.register(self.stop_monitor)

    def stop_monitor(self) -> None:
        """End the watch over the other ranks; they are told that this rank is done."""
        atexit.unregister(self.stop_monitor)
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.stop()

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

    def open(self, *, stage_group: dist.ProcessGroup, is_ring: bool) -> None:
        """Open the channels of this rank. All ranks call this at the same point, after Megatron made its groups.

        Args:
            stage_group: tensor-parallel group of the own stage.
            is_ring: virtual stages let the last stage send to the first.
        """
        self.stage_group = stage_group
        if not self.is_active:
            return
        assert self.layout is not None and self.platform is not None
        layout, own = self.layout, self.own
        boundaries = pipeline_boundaries(layout, is_ring=is_ring, rules=self.transport_rules)
        tied = () if layout.is_uniform or layout.num_stages == 1 else tied_weight_crossings(layout)
        crossings = [boundary.crossing(direction) for boundary in boundaries for direction in Direction]
        crossings += [crossing for pair in tied for crossing in pair]
        for crossing in crossings:
            require_valid(crossing.probe)
            require_valid(crossing.plan_header(HEADER_LENGTH))
        channels = open_channels(
            crossings,
            stage_group=stage_group,
            platform=self.platform,
            monitor=self.monitor,
            timeout_s=self.config.timeout_s,
        )
        mine = [b for b in boundaries if (b.dp_rank, b.cp_rank) == (own.dp_rank, own.cp_rank)]
        before = next((b for b in mine if b.downstream == own.stage), None)
        after = next((b for b in mine if b.upstream == own.stage), None)
        self.communicator = PipelineCommunicator(
            forward_in=channels[before.name(Direction.FORWARD)] if before else None,
            forward_out=channels[after.name(Direction.FORWARD)] if after else None,
            backward_in=channels[after.name(Direction.BACKWARD)] if after else None,
            backward_out=channels[before.name(Direction.BACKWARD)] if before else None,
        )
        if tied and own.stage in (0, layout.num_stages - 1):
            own_pair = tied[layout.replicas.index((own.dp_rank, own.cp_rank))]
            to_last, to_first = (channels[crossing.name] for crossing in own_pair)
            self.tied_weight = TiedWeight(
                is_first=own.stage == 0,
                to_last=to_last,
                to_first=to_first,
            )

    def close(self) -> None:
        """Forget the channels, as ``destroy_model_parallel`` forgets its groups, once all is sent."""
        if self.communicator is not None:
            self.communicator.finish_step()
        self.communicator = None
        self.tied_weight = None
        self.stage_group = None

    def describe(self) -> str:
        """Show the layout and how every boundary is crossed, for the log of rank 0."""
        assert self.layout is not None and self.platform is not None
        lines = [self.layout.describe()]
        if not self.is_active:
            lines.append("all stages have one size: Megatron's own groups and communicator")
        for i in range(self.layout.num_stages - 1 if self.is_active else 0):
            strategy, reason = self.transport_rules.choose(self.layout, i, i + 1)
            lines.append(f"boundary {i}->{i + 1}: {strategy} ({reason})")
        lines.append(f"platform: {self.platform.name} ({self.platform.reason})")
        return "\n".join(lines)

    def check_model_config(self, tensor_model_parallel_size: int) -> None:
        """Refuse a model configuration that was made for another stage's size.

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
