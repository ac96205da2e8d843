"""The state of the applied plugin, in three states: what is asked for, what is planned, what is running.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state. What is planned is a :class:`~vtp_plugin.session.planned.PlannedRun`, what is running a
:class:`~vtp_plugin.session.running.RunningPipeline`; a function that needs one of them takes it, or asks the session
for it where it is called by Megatron.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import PatchError, PlanError
from vtp_plugin.ground import log
from vtp_plugin.options.derived import plan_layout
from vtp_plugin.patching import Writes
from vtp_plugin.platform import detect
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.life.nodes import gather_node_sizes
from vtp_plugin.runtime.wire.audit import Audit
from vtp_plugin.runtime.wire.tensor_format import TensorFormat
from vtp_plugin.session.planned import PlannedRun
from vtp_plugin.session.ranks import AllRanks
from vtp_plugin.session.running import RunningPipeline, open_pipeline

if TYPE_CHECKING:
    import torch

    from vtp_plugin.patching import AppliedPatches
    from vtp_plugin.session.modules import ModulePipeline

KnowGroup = Callable[[dist.ProcessGroup, Sequence[int], dist.ProcessGroup], "contextlib.AbstractContextManager[None]"]


class Session:
    """State of the plugin in this process.

    Attributes:
        config: what was asked for, so far.
        watch_failures: makes errors that end this process one line, and tells the other ranks; called once a list is
            asked for.
        platform: where it runs; None until :meth:`choose_platform`.
        ranks: what this rank does together with all others, outside the process groups.
        embedding: word embedding of the model that was built last, on the edge of a U-shaped pipeline.
        applied: sets of patches in the order of application.
        is_activated: the patches that depend on the command line are applied.
        has_bridges: the plugin's bridges are in the place of Megatron's.
        writes: the names of Megatron and torch that patches may write.
        tensor_format: how tensors cross, by the model configuration; None before all ranks' were compared.
        audit: record of what crosses; None unless asked for, or before it begins.
        close_log: puts the logger back as it was; None before the plugin said anything.
        on_revert: called before the patches are undone.
        modules: pipelines of modules with grids of their own, by this rank's pipeline group in them.
        know_group: inside its context torch knows a group that it did not make: the group, its ranks, and a group with
            the same backend.
        known_groups: such contexts of the run's own pipeline, and what else :meth:`close` ends.
        has_arguments: what is planned follows from arguments that megatron.training has validated, and lasts as long as
            they do; otherwise :meth:`close` forgets it.
    """

    def __init__(self, config: VtpConfig) -> None:
        """Start with what ``apply()`` was given."""
        self.config = config
        self.watch_failures: Callable[[], None] = lambda: None
        self.platform: Platform | None = None
        self.ranks = AllRanks(lambda: self.config.timeout_s, self.finish_step)
        self.applied: list[AppliedPatches] = []
        self.is_activated = False
        self.has_bridges = False
        self.writes = Writes()
        self.tensor_format: TensorFormat | None = None
        self.audit: Audit | None = None
        self.embedding: weakref.ref[torch.nn.Parameter] | None = None
        self.close_log: Callable[[], None] | None = None
        self.on_revert: Callable[[], None] = lambda: None
        self.modules: dict[dist.ProcessGroup, ModulePipeline] = {}
        self.know_group: KnowGroup = lambda *_group: contextlib.nullcontext()
        self.known_groups = contextlib.ExitStack()
        self.has_arguments = False
        self._planned: PlannedRun | None = None
        self._running: RunningPipeline | None = None

    @property
    def is_planned(self) -> bool:
        """Whether the layout is known."""
        return self._planned is not None

    @property
    def planned(self) -> PlannedRun:
        """What is planned.

        Raises:
            PlanError: nothing is, yet.
        """
        if self._planned is None:
            raise PlanError("the layout is used before it is planned")
        return self._planned

    @property
    def is_running(self) -> bool:
        """Whether Megatron's groups exist, and our channels, where there are any."""
        return self._running is not None

    @property
    def running(self) -> RunningPipeline:
        """What is running.

        Raises:
            PlanError: nothing is, yet or any more.
        """
        if self._running is None:
            raise PlanError("the pipeline is used before it is open")
        return self._running

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use."""
        return self.is_planned and self.planned.is_active

    def choose_platform(self) -> Platform:
        """Find the platform and, on CPU, map what Megatron calls on ``torch.cuda``; idempotent."""
        if self.platform is None:
            self.platform = detect(self.config.device)
            self.platform.install()
        return self.platform

    def plan(self, **sizes: Any) -> None:
        """Make the layout; arguments are Megatron's sizes, as for :func:`~vtp_plugin.options.derived.plan_layout`.

        Raises:
            ConfigError: the sizes contradict each other or the world, or the stages do not fit together.
        """
        layout = plan_layout(self.config, **sizes)
        planned = PlannedRun(config=self.config, layout=layout, platform=self.choose_platform())
        planned.check()
        self._planned = planned
        self.has_arguments = False

    def learn(
        self,
        *,
        tensor_bytes: int | None = None,
        is_sharded: bool | None = None,
        log_interval_steps: int | None = None,
        packed_length: int | None = None,
        note: str | None = None,
    ) -> None:
        """Add to what is planned what the model's options say; arguments as the attributes of ``PlannedRun``."""
        known = {
            "tensor_bytes": tensor_bytes,
            "is_sharded": is_sharded,
            "log_interval_steps": log_interval_steps,
            "packed_length": packed_length,
        }
        changes: dict[str, object] = {name: value for name, value in known.items() if value is not None}
        if note is not None:
            changes["notes"] = (*self.planned.notes, note)
        self._planned = dataclasses.replace(self.planned, **changes)

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

    def open(
        self,
        *,
        stage_group: dist.ProcessGroup,
        pipeline_groups: tuple[dist.ProcessGroup, ...],
        num_chunks: int,
        embedding_stages: Sequence[int] | None = None,
    ) -> None:
        """Open the channels of this rank; arguments as for :func:`~vtp_plugin.session.running.open_pipeline`."""
        if self.planned.is_active:
            self.open_audit(dist.get_rank())
        self._running = open_pipeline(
            self.planned,
            self.ranks,
            stage_group=stage_group,
            pipeline_groups=pipeline_groups,
            num_chunks=num_chunks,
            embedding_stages=embedding_stages,
            audit=self.audit,
        )

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        if self._running is not None:
            self._running.finish_step()
        for module in self.modules.values():
            module.communicator.finish_step()

    def close(self) -> None:
        """End this start, as ``destroy_model_parallel`` forgets its groups, once all is sent; the next plans anew."""
        self.finish_step()
        self.release()

    def release(self) -> None:
        """End the groups and files of this start, and forget what was agreed on; idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
        self.known_groups.close()
        self.tensor_format = self.embedding = None
        if not self.has_arguments:
            self._planned = None
        if self.audit is not None:
            self.audit.close()
            self.audit = None

    def open_log(self, rank: int | None = None) -> None:
        """Let the plugin's records be seen, of INFO those of one rank a site; may be called again when more is known.

        Args:
            rank: this rank, once the layout is known.
        """
        if self.close_log is None:
            self.close_log = log.install(self.config.log_level)
        log.set_level(self.config.log_level)
        if rank is not None and self.is_planned:
            log.set_reporter(rank=rank, is_reporter=rank in self.planned.reporting_ranks.values())

    def agree_on_formats(self, read: Callable[[], tuple[TensorFormat, ...]]) -> tuple[TensorFormat, ...]:
        """Read how tensors cross, ring by ring, and, the first time, compare it over all ranks; a collective call.

        A tensor of another type or shape than the receiver expects would end a process inside the backend.

        Args:
            read: reads and checks the model's configuration.

        Raises:
            ConfigError: a rank's configuration is wrong, or two differ.
        """
        if self.tensor_format is not None or dist.get_backend() == "fake":
            return read()
        tp_size = self.planned.layout.tp_sizes[self.planned.own.stage]
        found: list[tuple[TensorFormat, ...]] = []

        def prepare() -> dict[str, object]:
            found.append(read())
            forms = [state_format(form, tp_size) for form in found[0]]
            rings = ["", *(f" of ring {number}" for number in range(2, len(forms) + 1))]
            return {
                f"{name}{ring}": value for ring, form in zip(rings, forms, strict=True) for name, value in form.items()
            }

        self.ranks.agree("the first step's check", prepare, is_partial=True)
        self.tensor_format = found[0][-1]
        return found[0]

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


def state_format(form: TensorFormat, tp_size: int) -> dict[str, object]:
    """Say what all ranks must have alike; a stage of one tensor-parallel rank has no say about sequence parallelism."""
    sharding = {} if tp_size == 1 else {"sequence_parallel": form.src_sharded}
    return {
        "pipeline_dtype": str(form.dtype),
        "hidden_size": form.width,
        "variable_seq_lengths": form.has_variable_shapes,
        "batch_p2p_comm": form.is_batched,
        **sharding,
    }
