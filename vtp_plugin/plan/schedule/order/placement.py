"""Where the pieces of the model lie: on which stages, in a chain, a U or a tree of modules, and with which replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.layout.replica_map import ReplicaMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the pieces of the model lie along its depth.

    A *virtual stage* is one consecutive piece of the model (a model chunk). In a chain virtual stage 0 takes the
    samples and the last one computes the loss. Several encoders in front of a language model make a tree: the output of
    every virtual stage goes to one other, but the language model's first one has several inputs. A *stage* is a
    pipeline stage, Megatron's pipeline rank.

    Under unequal data parallelism the stages of a pipeline have different numbers of replicas, which share the
    microbatches: replica `h mod num_replicas[i]` of stage i handles microbatch h, so a narrow stage serves the replicas
    of a wide one in turn. A *worker* is one replica of one stage; without replicas it is the stage. Workers are
    numbered stage by stage.

    A collective inside a compute may span replicas: that of experts that lie on several of them, for example. Then
    these replicas run the compute *jointly*: each waits in it for the others, so all must come to it, with the same
    number of microbatches of this virtual stage behind them.

    Attributes:
        stages: `stages[v]` is the stage that holds virtual stage v. Every stage from 0 on holds at least one.
        num_replicas: Replicas of every stage; one each by default, and then worker i is stage i.
        joint: Numbers of neighbouring replicas that run a forward, and a backward, jointly, by virtual stage; by
            default each runs alone, (1, 1). Replicas 0 to n - 1 are the first such group, n to 2n - 1 the second.
        successors: `successors[v]`, a later virtual stage, takes the output of v; the last has none. By default v + 1.
        num_frozen: Number of virtual stages, the first ones, that train nothing: they have no backward, and no gradient
            comes back to them.

    Raises:
        ConfigError: There is no virtual stage, a stage number is left out, the list of replicas has another length than
            the list of stages, two stages with a boundary between them have numbers of replicas of which neither
            divides the other, a successor is not a later virtual stage, or replicas do not fall into joint groups.

    >>> u_placement(3).stages, u_placement(3).vstages(0), u_placement(3).chunk(3)
    ((0, 1, 2, 0), (0, 3), 1)
    >>> wide = plain_placement(2, num_replicas=(1, 2))
    >>> [(wide.worker_of(0, h), wide.worker_of(1, h)) for h in range(4)]
    [(0, 1), (0, 2), (0, 1), (0, 2)]
    >>> two_encoders = Placement(stages=(0, 1, 2, 3), successors=(2, 2, 3))
    >>> two_encoders.predecessors(2), two_encoders.boundaries
    ((0, 1), ((0, 2), (1, 2), (2, 3)))
    >>> experts = plain_placement(2, num_replicas=(1, 4), joint=((1, 1), (2, 2)))
    >>> [list(experts.joint_microbatches(1, h, is_backward=False)) for h in (0, 3, 5)]
    [[0, 1], [2, 3], [4, 5]]
    """

    stages: tuple[int, ...]
    num_replicas: tuple[int, ...] = ()
    successors: tuple[int, ...] = ()
    joint: tuple[tuple[int, int], ...] = ()
    num_frozen: int = 0
    _first_workers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the fields, and give every stage one replica by default."""
        if not self.stages:
            raise ConfigError("a placement needs at least one virtual stage")
        if set(self.stages) != set(range(max(self.stages) + 1)):
            raise ConfigError(
                f"placement {self.stages} leaves out a stage: "
                f"the stages 0 to {max(self.stages)} must each hold a virtual stage"
            )
        last = self.num_vstages - 1
        successors = self.successors or tuple(range(1, self.num_vstages))
        if len(successors) != last or not all(v < after <= last for v, after in enumerate(successors)):
            raise ConfigError(
                f"successors {successors} of {self.num_vstages} virtual stages: each but the last needs a later one"
            )
        object.__setattr__(self, "successors", successors)
        predecessors: list[list[int]] = [[] for _ in self.stages]
        for v, after in enumerate(successors):
            predecessors[after].append(v)
        object.__setattr__(self, "_predecessors", tuple(map(tuple, predecessors)))
        num_replicas = self.num_replicas or (1,) * self.num_stages
        if len(num_replicas) != self.num_stages or min(num_replicas) < 1:
            raise ConfigError(f"replicas {num_replicas} of {self.num_stages} stages: each stage needs at least 1")
        for upstream, downstream in self.boundaries:
            low, high = sorted((num_replicas[upstream], num_replicas[downstream]))
            if high % low:
                raise ConfigError(
                    f"{num_replicas[upstream]} replicas of stage {upstream} and {num_replicas[downstream]} of stage "
                    f"{downstream} cannot serve each other in turn: {high} mod {low} = {high % low} must be 0"
                )
        object.__setattr__(self, "num_replicas", num_replicas)
        object.__setattr__(self, "joint", self.joint or ((1, 1),) * self.num_vstages)
        if len(self.joint) != self.num_vstages or any(
            num_replicas[stage] % size for stage, sizes in zip(self.stages, self.joint, strict=True) for size in sizes
        ):
            raise ConfigError(
                f"joint replicas {self.joint} of virtual stages on stages with {num_replicas} replicas: each virtual "
                "stage needs two numbers that divide them"
            )
        object.__setattr__(self, "_first_workers", tuple(sum(num_replicas[:i]) for i in range(self.num_stages)))

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return max(self.stages) + 1

    @property
    def num_vstages(self) -> int:
        """Number of virtual stages."""
        return len(self.stages)

    def vstages(self, stage: int) -> tuple[int, ...]:
        """List the virtual stages of a stage, in the order of the model's depth."""
        return tuple(v for v, holder in enumerate(self.stages) if holder == stage)

    def chunk(self, vstage: int) -> int:
        """Return the number of a virtual stage among the chunks of its stage, Megatron's `vp_stage`."""
        return self.stages[:vstage].count(self.stages[vstage])

    def crosses(self, vstage: int) -> bool:
        """Whether the output of a virtual stage goes to another stage; False for -1 and for the last."""
        return 0 <= vstage < self.num_vstages - 1 and self.stages[vstage] != self.stages[self.successors[vstage]]

    @property
    def is_chain(self) -> bool:
        """Whether every virtual stage follows on the one before it."""
        return self.successors == tuple(range(1, self.num_vstages))

    def is_trained(self, vstage: int) -> bool:
        """Whether a virtual stage has a backward."""
        return vstage >= self.num_frozen

    def predecessors(self, vstage: int) -> tuple[int, ...]:
        """List the virtual stages whose outputs a virtual stage takes; none if it takes only samples."""
        return self._predecessors[vstage]

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """Pairs `(upstream stage, downstream stage)` between which activations cross, each once, along the model.

        >>> interleaved_placement(2, 2).boundaries, u_placement(3).boundaries
        (((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 0)))
        """
        pairs = [(self.stages[v], self.stages[after]) for v, after in enumerate(self.successors) if self.crosses(v)]
        return tuple(dict.fromkeys(pairs))

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return sum(self.num_replicas)

    def worker(self, stage: int, replica: int) -> int:
        """Return the number of a worker.

        >>> plain_placement(3, num_replicas=(1, 2, 2)).worker(2, 1)
        4
        """
        if not 0 <= replica < self.num_replicas[stage]:
            raise PlanError(f"replica {replica} is none of the {self.num_replicas[stage]} of stage {stage}")
        return self._first_workers[stage] + replica

    def stage_and_replica(self, worker: int) -> tuple[int, int]:
        """Return stage and replica of a worker, the inverse of :meth:`worker`.

        >>> plain_placement(3, num_replicas=(1, 2, 2)).stage_and_replica(4)
        (2, 1)
        """
        stage = max(i for i, first in enumerate(self._first_workers) if first <= worker)
        return stage, worker - self._first_workers[stage]

    def stage_of(self, worker: int) -> int:
        """Return the stage of a worker."""
        return self.stage_and_replica(worker)[0]

    def by_worker(self, by_stage: Sequence[int]) -> tuple[int, ...]:
        """Return the entry of its stage for every worker.

        >>> plain_placement(2, num_replicas=(1, 2)).by_worker((7, 2))
        (7, 2, 2)
        """
        return tuple(by_stage[self.stage_of(worker)] for worker in range(self.num_workers))

    def worker_of(self, vstage: int, microbatch: int) -> int:
        """Return the worker that handles a microbatch on a virtual stage."""
        stage = self.stages[vstage]
        return self._first_workers[stage] + microbatch % self.num_replicas[stage]

    def joint_microbatches(self, vstage: int, microbatch: int, *, is_backward: bool) -> range:
        """List the microbatches whose forwards, or backwards, on a virtual stage are one joint compute with this one.

        >>> list(plain_placement(2, num_replicas=(1, 2)).joint_microbatches(1, 5, is_backward=True))
        [5]
        """
        size = self.joint[vstage][is_backward]
        first = microbatch - microbatch % self.num_replicas[self.stages[vstage]] % size
        return range(first, first + size)

    @property
    def least_in_flight(self) -> tuple[int, ...]:
        """By stage, how many microbatches a worker must be able to have in flight: a joint compute takes several.

        >>> plain_placement(2, num_replicas=(1, 4), joint=((1, 1), (2, 2))).least_in_flight
        (2, 1)
        """
        # Joint groups of n run microbatches 0 to n - 1, n to 2n - 1, and so on; those of other stages may overlap them.
        together = math.lcm(*chain.from_iterable(self.joint))
        return tuple(math.ceil(together / number) for number in self.num_replicas)

    def microbatches(self, worker: int, num_microbatches: int) -> range:
        """List the microbatches of a step that a worker handles.

        >>> list(plain_placement(2, num_replicas=(1, 2)).microbatches(2, 6))
        [1, 3, 5]
        """
        stage, replica = self.stage_and_replica(worker)
        return range(replica, num_microbatches, self.num_replicas[stage])

    def label(self, worker: int) -> str:
        """Name a worker for a reader: `stage 1`, or `stage 1 replica 0` where the stage has several."""
        stage, replica = self.stage_and_replica(worker)
        return f"stage {stage}" + (f" replica {replica}" if self.num_replicas[stage] > 1 else "")


Joint = tuple[tuple[int, int], ...]
"""See :attr:`Placement.joint`."""


def plain_placement(num_stages: int, *, num_replicas: tuple[int, ...] = (), joint: Joint = ()) -> Placement:
    """Place one virtual stage on each stage: (0, 1, .., P-1).

    >>> plain_placement(3).stages
    (0, 1, 2)
    """
    _require_stages(num_stages, 1)
    return Placement(stages=tuple(range(num_stages)), num_replicas=num_replicas, joint=joint)


def interleaved_placement(num_stages: int, num_chunks: int) -> Placement:
    """Go round all stages `num_chunks` times, as Megatron's virtual pipeline does.

    >>> interleaved_placement(2, 3).stages
    (0, 1, 0, 1, 0, 1)
    """
    _require_stages(num_stages, num_chunks)
    return Placement(stages=tuple(range(num_stages)) * num_chunks)


def u_placement(
    num_stages: int, *, num_rings: int = 1, num_replicas: tuple[int, ...] = (), joint: Joint = ()
) -> Placement:
    """Place the first and the last part of the model on stage 0, the edge: (0, 1, .., P-1, 0).

    With several rings the model goes through the cloud as often, and through the edge between: an encoder, then a
    language model, for example.

    Raises:
        ConfigError: Fewer than two stages: an edge without a cloud is no pipeline. Or fewer than one ring.

    >>> u_placement(2).stages, u_placement(3, num_rings=2).stages
    ((0, 1, 0), (0, 1, 2, 0, 1, 2, 0))
    """
    if num_stages < 2:
        raise ConfigError(f"a U-shaped pipeline of {num_stages} stage: it needs an edge and at least one cloud stage")
    if num_rings < 1:
        raise ConfigError(f"a U-shaped pipeline of {num_rings} rings: it needs at least one")
    return Placement(stages=(*range(num_stages),) * num_rings + (0,), num_replicas=num_replicas, joint=joint)


def num_rings(placement: Placement) -> int:
    """Return how often a U-shaped placement passes the cloud; 0 if it is not of that shape.

    >>> [num_rings(one) for one in (u_placement(3), u_placement(2, num_rings=2), interleaved_placement(2, 2))]
    [1, 2, 0]
    """
    num_stages = placement.num_stages
    rings, rest = divmod(placement.num_vstages, num_stages)
    is_u_shaped = num_stages > 1 and rest == 1 and placement.stages == u_placement(num_stages, num_rings=rings).stages
    return rings if is_u_shaped else 0


def _require_stages(num_stages: int, num_chunks: int) -> None:
    if num_stages < 1 or num_chunks < 1:
        raise ConfigError(f"{num_stages} stages with {num_chunks} chunks each: both must be at least 1")


def place_workers(
    replicas: ReplicaMap,
    *,
    num_chunks: int,
    num_rings: int,
    expert_spans: Sequence[int] = (),
    is_loss_summed: bool = False,
) -> Placement:
    """Place the chunks on the stages, and the microbatches of one team on the replicas of its stages.

    Args:
        replicas: which replicas of the stages work together.
        num_chunks: number of model chunks of every stage, Megatron's virtual pipeline size.
        num_rings: number of rings of a U-shaped pipeline, where stage 0 holds both ends of the model; 0 for others.
        expert_spans: number of neighbouring replicas of a team that share one set of experts, by stage
            (:func:`~vtp_plugin.plan.layout.replica_map.expert_spans`); empty for 1 on all.
        is_loss_summed: whether the loss function sums over the replicas of its stage, in every microbatch.

    Raises:
        ConfigError: stages of different data-parallel sizes have several chunks.

    >>> place_workers(ReplicaMap(dp_sizes=(2, 4)), num_chunks=1, num_rings=0).num_replicas
    (1, 2)
    >>> place_workers(ReplicaMap(dp_sizes=(1, 2)), num_chunks=1, num_rings=0, is_loss_summed=True).joint
    ((1, 1), (2, 1))
    """
    num_stages = len(replicas.dp_sizes)
    # In split mode all replicas of a stage run parts of one microbatch: to the schedule they are one worker.
    num_replicas = () if replicas.is_split else tuple(map(replicas.num_replicas, range(num_stages)))
    if replicas.is_equal and not num_rings:
        return interleaved_placement(num_stages, num_chunks)
    alone = u_placement(num_stages, num_rings=num_rings) if num_rings else plain_placement(num_stages)
    spans = expert_spans if expert_spans and num_replicas else (1,) * num_stages
    joint = [(spans[stage], spans[stage]) for stage in alone.stages]
    if is_loss_summed and num_replicas:
        joint[-1] = num_replicas[alone.stages[-1]], joint[-1][1]
    if num_rings:
        return u_placement(num_stages, num_rings=num_rings, num_replicas=num_replicas, joint=tuple(joint))
    if num_chunks > 1:
        raise ConfigError(
            f"{num_chunks} model chunks on each stage do not work with --vtp-dp-list "
            f"{','.join(map(str, replicas.dp_sizes))}; use one chunk, or equal data-parallel sizes"
        )
    return plain_placement(num_stages, num_replicas=num_replicas, joint=tuple(joint))


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
