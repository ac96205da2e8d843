"""The session: what is asked for, what is planned, and what is running.

One :class:`Session` exists between ``apply()`` and ``revert()``. The patches are built around it; nothing else of the
plugin keeps state. What is planned is a :class:`~vtp_plugin.session.planned_run.PlannedRun`, what is running a
:class:`~vtp_plugin.session.open_pipelines.Pipeline`; a function that needs one of them takes it as an argument, or asks
the session for it where Megatron calls it. What belongs to one start of model parallelism ends with it: the session
holds one :class:`~vtp_plugin.session.start.Start` after another.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from vtp_plugin.checkpoint.save.saving import Savings
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import plan_layout
from vtp_plugin.elastic.progress import Progress
from vtp_plugin.elastic.stop_marker import RUN_FOLDER_VARIABLE
from vtp_plugin.errors import PatchError, PlanError
from vtp_plugin.host.patching import Writes
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.u_layers import FirstRing
from vtp_plugin.platform import detect
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.health.nodes import gather_node_sizes
from vtp_plugin.runtime.step.companion_tensors import Companion
from vtp_plugin.session.applied_sets import AppliedSets
from vtp_plugin.session.edge_seed import EdgeSeed
from vtp_plugin.session.loading import Loading
from vtp_plugin.session.open_pipelines import Pipeline, Pipelines, open_pipeline
from vtp_plugin.session.pipeline_plan import PipelinePlan, plan_module
from vtp_plugin.session.planned_run import PlannedRun
from vtp_plugin.session.protected_link import protected_link
from vtp_plugin.session.ranks import AllRanks
from vtp_plugin.session.start import Start
from vtp_plugin.session.step_summary import StepSummary
from vtp_plugin.util import log


class Session:
    """State of the plugin in this process.

    Args:
        config: options that ``apply()`` was given.
        platform: platform on which it runs; None finds it.
        watch_failures: see the attribute.

    Attributes:
        watch_failures: installs what reports errors of this process in one line, and to other ranks; called once a list
            of sizes is asked for.
        ranks: what this rank does together with all others, outside the process groups.
        applied: sets of patches in the order of application.
        pipelines: pipelines that this rank works in: the run's own, and those of modules.
        savings, loading: checkpoints that are being written; what is known of one that is being read.
        edge_seed: what an edge's layers are drawn from. writes: names of Megatron and torch that patches may write.
        steps: the training steps of this process.
        progress: notes the steps of a fitted run; None in other runs.
        start: what this start of model parallelism has opened; after it has ended, a new one.
        until_revert: what ends with the session.
    """

    def __init__(
        self,
        config: VtpConfig,
        *,
        platform: Platform | None = None,
        watch_failures: Callable[[], None] = lambda: None,
    ) -> None:
        self.watch_failures = watch_failures
        self.pipelines = Pipelines()
        self.ranks = AllRanks(lambda: self.config.timeout_s, self._finish, self._how_to_resume)
        self.applied, self.writes = AppliedSets(), Writes()
        self.savings, self.loading, self.edge_seed = Savings(), Loading(), EdgeSeed()
        self._config, self._platform = config, platform
        self._close_log: Callable[[], None] | None = None
        self._recorder: Recorder | None = None
        self.progress = Progress.of_process(os.environ)
        self.start, self.steps, self.until_revert = Start(), StepSummary(), ExitStack()
        self._planned: PlannedRun | None = None

    @property
    def config(self) -> VtpConfig:
        """Options that are known so far."""
        return self._config

    def ask(self, config: VtpConfig) -> None:
        """Set the options: those that ``apply()`` was given, and those that were read since."""
        self._config = config

    @property
    def is_planned(self) -> bool:
        """Whether the layout is known."""
        return self._planned is not None

    @property
    def planned(self) -> PlannedRun:
        """Plan of the run.

        Raises:
            PlanError: nothing is planned yet.
        """
        if self._planned is None:
            raise PlanError("the layout is used before it is planned")
        return self._planned

    @property
    def has_arguments(self) -> bool:
        """Whether the plan follows from arguments that megatron.training has validated."""
        return self._planned is not None and self._planned.has_arguments

    @property
    def is_running(self) -> bool:
        """Whether Megatron's groups exist, and the plugin's channels if there are any."""
        return self.pipelines.own is not None

    @property
    def running(self) -> Pipeline:
        """The run's own pipeline, once it is open.

        Raises:
            PlanError: the pipeline is not open.
        """
        own = self.pipelines.own
        if own is None:
            raise PlanError("the pipeline is used before it is open")
        return own

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are in use."""
        return self.is_planned and self.planned.is_active

    @property
    def platform(self) -> Platform | None:
        """Platform on which it runs; None until :meth:`choose_platform`."""
        return self._platform

    def choose_platform(self) -> Platform:
        """Find the platform and, on CPU, map what Megatron calls on ``torch.cuda``; idempotent."""
        if self._platform is None:
            self._platform = detect(self.config.device)
            self._platform.install()
        return self._platform

    def plan(self, **sizes: Any) -> None:
        """Make the layout from Megatron's sizes, the arguments of :func:`~vtp_plugin.config.resolve.plan_layout`.

        Raises:
            ConfigError: the sizes contradict each other or the world, or the stages do not fit together.
        """
        layout = plan_layout(self.config, **sizes)
        planned = PlannedRun(config=self.config, layout=layout, platform=self.choose_platform())
        planned.check()
        self.until_revert.enter_context(protected_link(self.config, planned.platform.name))
        self._planned = planned

    def learn(
        self,
        *,
        tensor_bytes: int | None = None,
        is_sharded: bool | None = None,
        log_interval_steps: int | None = None,
        has_packed_rows: bool | None = None,
        check_batch: Callable[[Any], None] | None = None,
        has_arguments: bool | None = None,
        companion: Companion | None = None,
        first_ring: FirstRing | None = None,
        note: str | None = None,
    ) -> None:
        """Add what the model's options say to the plan: attributes of ``PlannedRun``, a companion, a note."""
        known = {
            "tensor_bytes": tensor_bytes,
            "is_sharded": is_sharded,
            "log_interval_steps": log_interval_steps,
            "has_packed_rows": has_packed_rows,
            "check_batch": check_batch,
            "has_arguments": has_arguments,
            "first_ring": first_ring,
        }
        changes: dict[str, object] = {name: value for name, value in known.items() if value is not None}
        if companion is not None:
            known_companions = {each.kind: each for each in (*self.planned.companions, companion)}
            changes["companions"] = tuple(known_companions.values())
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
        self.config.refuse_to_fit()
        assert self.ranks.store is not None
        dp = self.config.data_parallel_size or 1
        sizes = gather_node_sizes(self.ranks.store, os.environ, divisor=dp * cp, timeout_s=self.config.timeout_s)
        self.ask(dataclasses.replace(self.config, size_list=sizes))

    @property
    def recorder(self) -> Recorder:
        """Recorder of what this rank does."""
        if self._recorder is None:
            self._recorder = Recorder(self.choose_platform())
        return self._recorder

    def open(
        self,
        *,
        stage_group: dist.ProcessGroup,
        pipeline_groups: tuple[dist.ProcessGroup, ...],
        num_chunks: int,
        embedding_stages: Sequence[int] | None = None,
    ) -> None:
        """Open the run's own pipeline. All ranks call this at the same point, after Megatron made its groups.

        Args:
            stage_group: tensor-parallel group of this rank's stage.
            pipeline_groups: this rank's pipeline group in each replica that this rank works in.
            num_chunks: number of model chunks of every stage, Megatron's virtual pipeline size.
            embedding_stages: stages that may hold a copy of the word embedding; None for the first and the last.

        Raises:
            ConfigError: no placement of so many chunks fits the stages.
        """
        plan = self.planned.pipeline(num_chunks=num_chunks, embedding_stages=embedding_stages)
        if dist.get_backend() != "fake":
            self.start.open_records(self.planned, dist.get_rank(), self.ranks, self.recorder)
        pipeline = self._open(plan, stage_group=stage_group, pipeline_groups=pipeline_groups)
        self.start.ending.callback(self.pipelines.close, pipeline)

    def open_module(
        self,
        layout: PipelineLayout,
        *,
        stage_group: dist.ProcessGroup | None,
        pipeline_groups: tuple[dist.ProcessGroup, ...],
    ) -> None:
        """Open the pipeline of a module. All ranks of the world call this at the same point.

        Args:
            layout: stages and ranks of the module.
            stage_group: tensor-parallel group of this rank's stage; None outside the module.
            pipeline_groups: this rank's pipeline groups in the module; none outside it.
        """
        plan = plan_module(self.config, layout, device=self.choose_platform().name)
        self._open(plan, stage_group=stage_group, pipeline_groups=pipeline_groups)

    def _open(self, plan: PipelinePlan, **groups: Any) -> Pipeline | None:
        audit = self.start.open_audit(self.config, dist.get_rank()) if plan.is_active else None
        pipeline = open_pipeline(plan, self.ranks, self.choose_platform(), audit, self.recorder, **groups)
        if pipeline is not None:
            self.pipelines.add(pipeline)
        return pipeline

    def close_module(self, pipeline_group: dist.ProcessGroup | None) -> None:
        """Close a module's pipeline once all is sent, when its grid is destroyed; do nothing if it has no channels."""
        module = self.pipelines.of_module(pipeline_group)
        if module is not None:
            module.finish_step()
            self.pipelines.close(module)

    def close(self) -> None:
        """End this start once all is sent, with ``destroy_model_parallel``; the next start plans again."""
        self.pipelines.finish_step()
        self.release()

    def release(self) -> None:
        """End the groups and files of this start, and forget what was agreed on; idempotent."""
        self.start.ending.close()
        self.start = Start()
        # What follows from validated arguments lasts as long as they do.
        if not self.has_arguments:
            self._planned = None

    def open_log(self, rank: int | None = None) -> None:
        """Let the plugin's log be seen, INFO on one rank of each site; may be called again when more is known.

        Args:
            rank: this rank; None before the layout is known.
        """
        if self._close_log is None:
            self._close_log = log.install(self.config.log_level)
        log.set_level(self.config.log_level)
        if rank is not None and self.is_planned:
            log.set_reporter(rank=rank, is_reporter=rank in self.planned.reporting_ranks.values())

    def describe(self, rank: int, layers: Sequence[str] = (), *, is_behind_banner: bool = False) -> None:
        """Log the start-up summary, once for each start; arguments are those of ``PlannedRun.describe``."""
        if self.start.is_described:
            return
        self.start.is_described = True
        self.open_log(rank)
        log.info(self.planned.describe(layers, is_behind_banner=is_behind_banner))
        log.debug(f"digest {self.planned.digest}: logs that show the same come from ranks with equal requests")

    def begin_step(self) -> None:
        """Note that a training step begins."""
        self.steps.begin()
        self.edge_seed.warn_of_other_weights()
        self.start.begin_step()

    def _finish(self) -> None:
        """Wait for what is sent, and log what this process has done; called at a good end."""
        self.pipelines.finish_step()
        steps = self.steps.describe()
        if not steps:
            return
        saved = "" if self.savings.newest is None else f", checkpoint {self.savings.newest}"
        peak_bytes = None if self._platform is None else self._platform.peak_memory_bytes()
        memory = "" if peak_bytes is None else f", peak memory of this rank {peak_bytes / 2**30:.1f} GiB"
        log.info(f"done: {steps}{saved}{memory}")

    def _how_to_resume(self) -> str:
        """Say, on one rank of a machine, how a run resumes that nobody restarts, once it has saved a checkpoint."""
        newest, is_first = self.savings.newest, os.environ.get("LOCAL_RANK", "0") == "0"
        if newest is None or RUN_FOLDER_VARIABLE in os.environ or not is_first:
            return ""
        return f"; to resume from {newest.name}, start again with --load {newest.parent}"

    def close_log(self) -> None:
        """Restore the logger; do nothing if the plugin has not changed it."""
        close, self._close_log = self._close_log or (lambda: None), None
        close()

    def refuse_originals(self, name: str, value: object) -> None:
        """Refuse a function that goes past the patches.

        Args:
            name: the user's name for the function.
            value: the function: perhaps one of Megatron's that was imported before ``apply()``, or one that calls such.

        Raises:
            PatchError: the function goes past the patches.
        """
        for applied in self.applied:
            if line := applied.taken_before(value):
                raise PatchError(
                    f"{name} was imported from Megatron before vtp_plugin.apply() and would give wrong gradients; "
                    f"{line}: move vtp_plugin.apply() above that line"
                )
