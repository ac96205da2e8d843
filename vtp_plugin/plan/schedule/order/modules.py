"""Which pipeline stage holds which part of which module, where several modules make one model (MIMO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.order.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlacement:
    """The stages of all modules as one placement: encoders first, the module with the loss last.

    Attributes:
        placement: every stage of every module holds one virtual stage.
        first_stages: first stage of every module, in the order of the stages.
    """

    placement: Placement
    first_stages: Mapping[str, int]

    def inputs(self, stage: int) -> tuple[str, ...]:
        """Name the modules whose outputs a stage takes, in the order of its predecessors; inside a module its own."""
        return tuple(map(self.module_of, self.placement.predecessors(stage)))

    def module_of(self, stage: int) -> str:
        """Return the module that a stage belongs to."""
        return [name for name, first in self.first_stages.items() if first <= stage][-1]


def place_modules(num_stages: Mapping[str, int], topology: Mapping[str, Sequence[str]]) -> ModulePlacement:
    """Place the stages of modules that feed each other.

    Args:
        num_stages: pipeline stages of every module.
        topology: modules that take a module's output, by its name, as in Megatron's `MultiModulePipelineCommunicator`.

    Raises:
        ConfigError: a module feeds several others, several modules feed none, or modules feed each other in a circle.

    >>> found = place_modules({"vision": 1, "sound": 2, "language": 2}, {"vision": ["language"], "sound": ["language"]})
    >>> found.placement.successors, found.first_stages, found.inputs(3)
    ((3, 2, 3, 4), {'vision': 0, 'sound': 1, 'language': 3}, ('vision', 'sound'))
    """
    outputs = {name: tuple(topology.get(name, ())) for name in num_stages}
    for name, takers in outputs.items():
        if len(takers) > 1:
            raise ConfigError(
                f"module {name!r} feeds {', '.join(takers)}; a planned schedule sends each output to one module: use "
                "Megatron's schedule (leave schedule='planned' out)"
            )
    ends = [name for name, takers in outputs.items() if not takers]
    if len(ends) != 1:
        raise ConfigError(
            f"the modules {', '.join(ends) or 'of a circle'} feed no other; a planned schedule ends in one module, "
            "that with the loss: use Megatron's schedule (leave schedule='planned' out)"
        )
    before = {name: [other for other in outputs if name in outputs[other]] for name in outputs}
    try:
        order = tuple(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ConfigError(f"modules feed each other in a circle: {' -> '.join(error.args[1])}") from error
    first_stages: dict[str, int] = {}
    for name in order:
        first_stages[name] = sum(num_stages[earlier] for earlier in first_stages)
    successors: list[int] = []
    for name in order:
        inside = range(first_stages[name] + 1, first_stages[name] + num_stages[name])
        successors += [*inside, *(first_stages[taker] for taker in outputs[name])]
    placement = Placement(stages=tuple(range(len(successors) + 1)), successors=tuple(successors))
    return ModulePlacement(placement=placement, first_stages=first_stages)
