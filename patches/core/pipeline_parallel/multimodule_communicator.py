"""`module-channels`, `module-schedule`: a planned order for modules with own grids, in the place of Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.utils import get_model_config

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.pipeline_parallel.bridge_communicator import split_sizes
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format
from vtp_plugin.patches.core.pipeline_parallel.planned_step import StepCall, StepPlan, chunks_of, run_step
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.stage_grid import StageRanks, layout_of_grid
from vtp_plugin.runtime.step.executor import Inputs
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.session import Session
from vtp_plugin.session.stage_comm_grid import JoinedModules, Joints, join_modules, plan_modules, watch_for_modules


@replaces(
    "megatron.core.pipeline_parallel.multimodule_communicator:"
    "MultiModulePipelineCommunicator._build_rank_module_info_map",
    id="module-channels",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
)
def _open_pipelines(session: Session, original: Callable[..., None], communicator: Any) -> None:
    """Note what this rank does in its modules; before that open channels between the stages of every module.

    Why: a planned order of several modules posts every receive before the compute that hides it, so the stages of a
    module need channels.

    Remove when: Megatron's schedules take an order of actions.
    """
    if session.config.has_planned_schedule:
        watch_for_modules(session)
        for grid in communicator.module_to_grid_map.values():
            layout = layout_of_grid(grid)
            # The grid of stages has opened its own.
            if layout.num_stages > 1 and not isinstance(grid, StageRanks):
                is_here = grid.is_current_rank_in_grid()
                stage_group, groups = (grid.get_pg("tp"), (grid.get_pg("pp"),)) if is_here else (None, ())
                session.open_module(layout, stage_group=stage_group, pipeline_groups=groups)
    original(communicator)


@replaces(
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    id="module-schedule",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
)
def _run_step(session: Session, original: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run one step of several modules as planned; anything else by Megatron's function.

    Why: a planned order of several modules posts every receive before the compute that hides it; Megatron's 1F1B waits
    for each message, and lets no encoder run ahead.

    Remove when: Megatron's schedules take an order of actions.
    """
    communicator = arguments.get("p2p_communicator")
    if not session.config.has_planned_schedule or not isinstance(communicator, MultiModulePipelineCommunicator):
        return original(**arguments)
    for given in (arguments["model"], arguments["data_iterator"]):
        if isinstance(given, list) and len(given) != 1:
            raise ConfigError(f"{len(given)} model chunks a stage; modules with grids of their own have one")
    if getattr(communicator, "vtp_modules", None) is None:
        config = get_model_config(chunks_of(arguments["model"])[0])
        communicator.vtp_modules = _join(session, communicator, config)
    return run_step(ModulesBackend(communicator.vtp_modules), **arguments)


def _join(session: Session, communicator: Any, config: Any) -> JoinedModules:
    """Plan who sends to whom, compare it over all ranks, and join the channels of this one.

    Raises:
        ConfigError: there is no order for such modules, or a configuration asks for what does not work.
    """

    def read() -> dict[str, PipelineLayout]:
        return {name: layout_of_grid(grid) for name, grid in communicator.module_to_grid_map.items()}

    own = communicator.rank_module_map
    placed = plan_modules(session, read, communicator.topology, [*own], config)
    ((name, info),) = own.items()
    pipeline = session.pipelines.of_module(info.p2p_communicator.pp_group)
    joints = Joints(
        name=name,
        stage=info.pp_rank,
        pipeline=pipeline,
        # All ranks of the module come here: what they compare is compared now.
        form=None if pipeline is None else tensor_format(session, pipeline, info.p2p_communicator.config),
        before={one.src_module_name: one.vtp_bridge for one in info.bridge_comms_as_dest_module},
        after=[one.vtp_bridge for one in info.bridge_comms_as_src_module],
        split_sizes=split_sizes,
    )
    return join_modules(session, placed, joints)


@dataclass(frozen=True, slots=True)
class ModulesBackend:
    """Planned steps over several modules with grids of their own.

    Attributes:
        modules: this rank's part of them.
    """

    modules: JoinedModules

    @property
    def runner(self) -> ScheduleRunner:
        """Runs the schedules."""
        return self.modules.runner

    def plan(self, call: StepCall) -> StepPlan:
        """Plan a step. What says shapes is not used: they cross with the tensors.

        Raises:
            ConfigError: there is no such order.
        """
        return StepPlan(
            schedule=self.runner.schedule(call.num_microbatches, forward_only=call.forward_only, group_size=None),
            channels=self.modules.channels,
            passes=_ModulePasses(modules=self.modules, config=call.config, groups=call.pg_collection),
            finalize_options={"pg_collection": call.pg_collection, "force_all_reduce": call.force_all_reduce},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModulePasses:
    """A forward and a backward of this rank's module, which take and give tensors by the names of modules."""

    modules: JoinedModules
    config: Any
    groups: Any

    def forward(
        self, *, chunk: int, input_tensor: Inputs, is_last_stage: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step: Any = schedules.forward_step
        has_language = self.groups.has_language_model()
        output, num_tokens = step(
            input_tensor=self._by_module(input_tensor),
            is_last_stage=is_last_stage,
            cp_group_size=self.groups.get_language_model_cp_size() if has_language else None,
            **options,
        )
        return output if is_last_stage else output[self.modules.name], num_tokens

    def backward(
        self,
        chunk: int,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last_stage: bool,
    ) -> Inputs:
        found = schedules.backward_step_multimodule(
            self._by_module(activation),
            output if is_last_stage else {self.modules.name: output},
            None if is_last_stage else {self.modules.name: gradient},
            self.config,
            language_model_module_name=self.groups.language_model_module_name,
        )
        return tuple(found[source] for source in self.modules.inputs)

    def _by_module(self, activation: Inputs) -> dict[str, Any]:
        given = activation if isinstance(activation, tuple) else (activation,)
        return dict(zip(self.modules.inputs, given, strict=False))
