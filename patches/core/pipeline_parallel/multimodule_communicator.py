"""B5, B6: a planned order for modules with grids of their own, in the place of Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.utils import get_model_config

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.layout.channel import ChannelId, Direction
from vtp_plugin.layout.pipeline import PipelineLayout, StageGrid
from vtp_plugin.layout.stage_grid import StageRanks
from vtp_plugin.options.derived import ScheduleOptions, option_context
from vtp_plugin.options.table.check import check_config
from vtp_plugin.patches.core.pipeline_parallel.bridge_communicator import split_sizes
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import module_format
from vtp_plugin.patches.core.pipeline_parallel.schedules import run_planned
from vtp_plugin.patching import PatchRecord
from vtp_plugin.patching.record import wrap_with
from vtp_plugin.runtime.step.executor import Inputs
from vtp_plugin.runtime.step.grad_sync import GradSync
from vtp_plugin.runtime.step.links import ActivationLink, ChannelLink, GradientLink, Link, LinkId, ModuleLink
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.wire.tensor_format import TensorFormat
from vtp_plugin.schedule.make.limits import by_stage, check_in_flight
from vtp_plugin.schedule.order.actions import Action
from vtp_plugin.schedule.order.modules import ModulePlacement, place_modules
from vtp_plugin.session import Session
from vtp_plugin.session.modules import open_module
from vtp_plugin.session.surroundings import Surroundings

_DIMS = ("tp", "cp", "dp", "pp")


def records(surroundings: Surroundings) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    why = "a planned order of several modules posts every receive before the compute that hides it"
    return (
        PatchRecord(
            id="B5",
            target="megatron.core.pipeline_parallel.multimodule_communicator:"
            "MultiModulePipelineCommunicator._build_rank_module_info_map",
            build=wrap_with(_open_pipelines, surroundings),
            why=f"{why}, so the stages of a module need channels",
            remove_when="Megatron's schedules take an order of actions",
            versions=">=0.19,<0.20",
        ),
        PatchRecord(
            id="B6",
            target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
            build=wrap_with(_run_step, surroundings),
            why=f"{why}; Megatron's 1F1B waits for each message, and lets no encoder run ahead",
            remove_when="Megatron's schedules take an order of actions",
            versions=">=0.19,<0.20",
        ),
    )


def _open_pipelines(surroundings: Surroundings, original: Callable[..., None], communicator: Any) -> None:
    """Note what this rank does in its modules; before that open channels between the stages of every module."""
    session = surroundings.session
    if session is not None and session.config.has_planned_schedule:
        surroundings.watch()
        for grid in communicator.module_to_grid_map.values():
            layout = layout_of(grid)
            # The grid of stages has opened its own.
            if layout.num_stages > 1 and not isinstance(grid, StageRanks):
                is_here = grid.is_current_rank_in_grid()
                module = open_module(layout, surroundings, stage_group=grid.get_pg("tp") if is_here else None)
                if module is not None:
                    session.modules[grid.get_pg("pp")] = module
    original(communicator)


def layout_of(grid: Any) -> PipelineLayout:
    """Return the stages of a module.

    Raises:
        ConfigError: the ranks of a stage do not follow each other.
    """
    if isinstance(grid, StageRanks):
        return grid.layout
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    used = [name for name in grid.dim_names if sizes[name] > 1]
    if sizes.get("pp", 1) > 1 and used != [name for name in _DIMS if name in used]:
        raise ConfigError(
            f"a grid with the dimensions {', '.join(used)}; a planned schedule needs the ranks of a stage next to each "
            "other: give the dimensions in the order tp, cp, dp, pp"
        )
    stage = StageGrid(*(sizes.get(name, 1) for name in _DIMS[:-1]))
    return PipelineLayout((stage,) * sizes.get("pp", 1), first_rank=grid.rank_offset)


@dataclass(frozen=True, kw_only=True)
class _Modules:
    """This rank's part of several modules, for all steps.

    Attributes:
        runner: runs the planned steps.
        links: of this rank.
        name: module of this rank.
        inputs: modules whose outputs its stage takes, in the order of the placement.
    """

    runner: ScheduleRunner
    links: Mapping[LinkId, Link]
    name: str
    inputs: tuple[str, ...]


def _run_step(surroundings: Surroundings, original: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run one step of several modules as planned; anything else by Megatron's function."""
    session, communicator = surroundings.session, arguments.get("p2p_communicator")
    is_planned = session is not None and session.config.has_planned_schedule
    if not is_planned or not isinstance(communicator, MultiModulePipelineCommunicator):
        return original(**arguments)
    if getattr(communicator, "vtp_modules", None) is None:
        communicator.vtp_modules = _open(
            surroundings, session, communicator, get_model_config(_only(arguments["model"]))
        )
    return _forward_backward(communicator.vtp_modules, **arguments)


def _only(value: Any) -> Any:
    """Take a model, or a data iterator, out of Megatron's list of one."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ConfigError(f"{len(value)} model chunks a stage; modules with grids of their own have one")
    return value[0]


def _open(surroundings: Surroundings, session: Session, communicator: Any, config: Any) -> _Modules:
    """Plan who sends to whom, compare it over all ranks, and join the links of this one.

    Raises:
        ConfigError: there is no order for such modules, or a configuration asks for what does not work.
    """
    found: list[ModulePlacement] = []

    def prepare() -> Mapping[str, object]:
        layouts = {name: layout_of(grid) for name, grid in communicator.module_to_grid_map.items()}
        placed = place_modules({name: one.num_stages for name, one in layouts.items()}, communicator.topology)
        if len(communicator.rank_module_map) != 1:
            raise ConfigError(
                f"this rank holds {len(communicator.rank_module_map)} modules; a planned schedule needs modules on "
                "ranks of their own: use Megatron's schedule (leave schedule='planned' out)"
            )
        if session.config.in_flight is not None:
            check_in_flight(session.config.in_flight, placed.placement.num_stages)
        if not config.variable_seq_lengths:
            raise ConfigError("variable_seq_lengths=False; modules have tensors of different shapes: set it to True")
        (name,) = communicator.rank_module_map
        context = option_context(session.config, layouts[name], device=surroundings.platform().name)
        refuse(check_config(config, context))
        found.append(placed)
        return {"stages of the modules": str(placed.first_stages), "order": str(placed.placement.successors)}

    session.ranks.agree("planning of the modules", prepare)
    (placed,) = found
    ((name, info),) = communicator.rank_module_map.items()
    stage = placed.first_stages[name] + info.pp_rank
    in_flight = by_stage(session.config.in_flight, placed.placement.num_stages)
    runner = ScheduleRunner(
        placed.placement,
        stage,
        session.ranks,
        surroundings.platform(),
        ScheduleOptions(costs=None, in_flight=in_flight),
    )
    links = _links(session, info, placed, name)
    return _Modules(runner=runner, links=links, name=name, inputs=placed.inputs(stage))


def _links(session: Session, info: Any, placed: ModulePlacement, name: str) -> dict[LinkId, Link]:
    """Give this rank's links."""
    stage = placed.first_stages[name] + info.pp_rank
    links: dict[LinkId, Link] = {}
    module = session.modules.get(info.p2p_communicator.pp_group)
    if module is not None:
        # All ranks of the module come here: what they compare is compared now.
        form: TensorFormat = module_format(session, module, info.p2p_communicator.config)
        for way, ends, direction in (
            ("recv_prev", (stage - 1, stage), Direction.FORWARD),
            ("send_prev", (stage - 1, stage), Direction.BACKWARD),
            ("send_next", (stage, stage + 1), Direction.FORWARD),
            ("recv_next", (stage, stage + 1), Direction.BACKWARD),
        ):
            if module.communicator.reaches(way):
                link = ModuleLink(ChannelLink(module.communicator.channel(way), form))
                links[ChannelId.between(*ends, direction), ends[0]] = link
    by_source = {placed.module_of(before): before for before in placed.placement.predecessors(stage)}
    for one in info.bridge_comms_as_dest_module:
        links.update(_bridge_links(one, (by_source[one.src_module_name], stage)))
    for one in info.bridge_comms_as_src_module:
        links.update(_bridge_links(one, (stage, placed.placement.successors[stage])))
    return links


def _bridge_links(bridge: Any, ends: tuple[int, int]) -> dict[LinkId, Link]:
    return {
        (ChannelId.between(*ends, Direction.FORWARD), ends[0]): ActivationLink(bridge.vtp_bridge, split_sizes),
        (ChannelId.between(*ends, Direction.BACKWARD), ends[0]): GradientLink(bridge.vtp_bridge, split_sizes),
    }


@dataclass(kw_only=True)
class _Compute:
    """Forward and backward of this rank's stage by Megatron's functions for several modules."""

    modules: _Modules
    config: Any
    model: Any
    iterator: Any
    sync: GradSync
    is_last_stage: bool
    loss_module: str | None
    is_forward_only: bool
    first_val_step: bool | None
    num_tokens: torch.Tensor
    options: dict[str, Any]
    reports: list[Any] = field(default_factory=list[Any])

    def forward(self, action: Action, activation: Inputs) -> torch.Tensor:
        step: Any = schedules.forward_step
        output, num_tokens = step(
            data_iterator=self.iterator,
            model=self.model,
            input_tensor=self._by_module(activation),
            forward_data_store=self.reports,
            config=self.config,
            is_first_microbatch=schedules.check_first_val_step(
                self.first_val_step, self.is_forward_only, action.microbatch == 0
            ),
            current_microbatch=action.microbatch,
            is_last_stage=self.is_last_stage,
            **self.options,
        )
        self.num_tokens += num_tokens
        return output if self.is_last_stage else output[self.modules.name]

    def backward(
        self,
        action: Action,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> Inputs:
        inputs, name = self._by_module(activation), self.modules.name
        with self.sync.backward(0, is_last=is_last):
            found = schedules.backward_step_multimodule(
                inputs,
                output if self.is_last_stage else {name: output},
                None if self.is_last_stage else {name: gradient},
                self.config,
                language_model_module_name=self.loss_module,
            )
        return tuple(found[source] for source in self.modules.inputs)

    def release(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _by_module(self, activation: Inputs) -> dict[str, Any]:
        given = activation if isinstance(activation, tuple) else (activation,)
        return dict(zip(self.modules.inputs, given, strict=False))


def _forward_backward(
    modules: _Modules,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one step; arguments and result as of `forward_backward_pipelining_without_interleaving`.

    What says shapes is not used: they cross with the tensors.
    """
    model = _only(model)
    config = get_model_config(model)
    schedule = modules.runner.schedule(num_microbatches, forward_only=forward_only, group_size=None)
    has_language = pg_collection.has_language_model()
    compute = _Compute(
        modules=modules,
        config=config,
        model=model,
        iterator=_only(data_iterator),
        sync=GradSync(config, [model], forward_only=forward_only, is_first_stage=p2p_communicator.is_pp_first_stage),
        is_last_stage=p2p_communicator.is_pp_last_stage,
        loss_module=pg_collection.language_model_module_name,
        is_forward_only=forward_only,
        first_val_step=first_val_step,
        num_tokens=torch.zeros([], dtype=torch.int, device="cuda"),
        options={
            "forward_step_func": forward_step_func,
            "num_microbatches": num_microbatches,
            "collect_non_loss_data": collect_non_loss_data,
            "cp_group_size": pg_collection.get_language_model_cp_size() if has_language else None,
        },
    )
    options = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    return run_planned(modules.runner, schedule, modules.links, compute, chunks=[model], options=options)
