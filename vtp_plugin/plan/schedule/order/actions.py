"""Actions of a rank in a step: computes and messages, in an order.

The loop behind every walk over orders: let workers proceed until none can.

Lowering, checking, simulating and replaying orders have this in common: each worker takes the entries of its list one
after another, and stops at an entry that needs something from another worker. What can be taken now can also be taken
later. So the result does not depend on which worker goes first, and a worker that is stuck at the end stays stuck.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import TypeVar

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.util.text import TextEnum


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

    @property
    def worker_boundaries(self) -> tuple[tuple[int, int], ...]:
        """Pairs `(upstream worker, downstream worker)` between which activations cross, boundary by boundary.

        >>> u_placement(3, num_replicas=(1, 2, 2)).worker_boundaries
        ((0, 1), (0, 2), (1, 3), (2, 4), (3, 0), (4, 0))
        """
        # One number of replicas divides the other, so after the larger number of microbatches the pairs repeat.
        first, num = self._first_workers, self.num_replicas
        return tuple(
            (first[upstream] + h % num[upstream], first[downstream] + h % num[downstream])
            for upstream, downstream in self.boundaries
            for h in range(max(num[upstream], num[downstream]))
        )


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


class Op(TextEnum):
    """Kinds of actions; :mod:`vtp_plugin.plan.schedule.order.add_communication` says what each one promises.

    A backward is whole, `B`, or split in two: `I` gives the gradient of the input, for which the stage before waits,
    and `W`, later, the gradients of the weights, for which nobody waits before the step ends. The letters are those of
    torch's pipeline schedules.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's name
    W = "W"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_RECV_B = "WAIT_RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"

    @cached_property
    def is_compute(self) -> bool:
        """Whether the action computes; all others communicate."""
        return self in (Op.F, Op.B, Op.I, Op.W)

    @cached_property
    def is_backward(self) -> bool:
        """Whether the action belongs to the backward pass, and so is about a gradient, not an activation."""
        return self in (Op.I, Op.W) or self.value.endswith("B")


_TEXT = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """One thing that a stage does for one microbatch.

    Attributes:
        op: What is done.
        vstage: Virtual stage that does it: `1SEND_F3` sends the output of virtual stage 1 to virtual stage 2, where
            `2RECV_F3` receives it; `1SEND_B3` sends the gradient of virtual stage 1's input to virtual stage 0.
        microbatch: Number of the microbatch in the step, from 0. A stage that serves k replicas in turn (unequal data
            parallelism) counts the microbatches of all replicas: number i belongs to replica i mod k.
        source: Virtual stage that the input comes from, for a message at a virtual stage with several inputs:
            `2RECV_F3:0` receives what virtual stage 0 sends, `2SEND_B3:0` sends its gradient back. -1 elsewhere.

    >>> str(Action(op=Op.SEND_F, vstage=1, microbatch=3)), str(Action(op=Op.RECV_F, vstage=2, microbatch=3, source=0))
    ('1SEND_F3', '2RECV_F3:0')
    """

    op: Op
    vstage: int
    microbatch: int
    source: int = -1

    @property
    def whole(self) -> Action:
        """What this compute is to those who wait for its result: an `I` gives them the same as a whole `B`.

        >>> str(parse_action("1I3").whole), str(parse_action("1W3").whole)
        ('1B3', '1W3')
        """
        return replace(self, op=Op.B) if self.op is Op.I else self

    def __str__(self) -> str:
        return f"{self.vstage}{self.op}{self.microbatch}" + ("" if self.source < 0 else f":{self.source}")


def parse_action(text: str) -> Action:
    """Read the text form of an action.

    Raises:
        ConfigError: The text is not of this form.

    >>> parse_action("0RECV_B2")
    Action(op=<Op.RECV_B: 'RECV_B'>, vstage=0, microbatch=2, source=-1)
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in Op.__members__:
        raise ConfigError(f"{text!r} is no action: write virtual stage, operation, microbatch, such as 2F0 or 1SEND_B3")
    source = -1 if match[4] is None else int(match[4])
    return Action(op=Op(match[2]), vstage=int(match[1]), microbatch=int(match[3]), source=source)


def format_actions(actions: tuple[Action, ...]) -> str:
    """Write actions in one line; inverse of :func:`parse_actions`.

    >>> format_actions(parse_actions("0F0 0F1 0B0"))
    '0F0 0F1 0B0'
    """
    return " ".join(str(action) for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read actions that are separated by white space."""
    return tuple(parse_action(word) for word in text.split())


def channels(placement: Placement) -> tuple[ChannelId, ...]:
    """List all channels: for each pair of workers the forward one, then the backward one.

    >>> from vtp_plugin.plan.schedule.order.actions import plain_placement
    >>> [str(channel) for channel in channels(plain_placement(2, num_replicas=(1, 2)))][1:3]
    ['boundary 0->1, backward', 'boundary 0->2, forward']
    """
    return tuple(
        ChannelId.between(upstream, downstream, direction)
        for upstream, downstream in placement.worker_boundaries
        for direction in Direction
    )


def channel_label(placement: Placement, channel: ChannelId) -> str:
    """Name a channel for a reader: by stages and replicas if there are replicas, otherwise as `str` does.

    >>> from vtp_plugin.plan.schedule.order.actions import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2))
    >>> channel_label(placement, channels(placement)[2])
    'boundary stage 0->stage 1 replica 1, forward'
    """
    if placement.num_workers == placement.num_stages:
        return str(channel)
    ends = f"{placement.label(channel.upstream)}->{placement.label(channel.downstream)}"
    return f"boundary {ends}, {channel.direction}"


def channel_of(placement: Placement, action: Action) -> ChannelId:
    """Return the channel of a send or a receive.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.actions import u_placement
    >>> [str(channel_of(u_placement(3), parse_action(text))) for text in ("3RECV_F0", "2RECV_B0")]
    ['boundary 2->0, forward', 'boundary 2->0, backward']
    """
    upstream = crossing_output(placement, action)
    return ChannelId.between(
        placement.worker_of(upstream, action.microbatch),
        placement.worker_of(placement.successors[upstream], action.microbatch),
        Direction.BACKWARD if action.op.is_backward else Direction.FORWARD,
    )


def by_channel(placement: Placement, actions: Iterable[Action]) -> dict[ChannelId, list[Action]]:
    """Group sends, or receives, by their channel, in the given order."""
    groups: dict[ChannelId, list[Action]] = defaultdict(list)
    for action in actions:
        groups[channel_of(placement, action)].append(action)
    return groups


def crossing_output(placement: Placement, action: Action) -> int:
    """Return v if a message passes between the virtual stage v and its successor.

    Args:
        placement: Which virtual stage follows on which.
        action: Its send or its receive, or the wait for one of them.
    """
    # Activations are received, and gradients sent, at the end of the link that is farther along the model.
    is_at_far_end = (action.op in _SENDS) == action.op.is_backward
    if not is_at_far_end:
        return action.vstage
    return placement.predecessors(action.vstage)[0] if action.source < 0 else action.source


def inputs_of(placement: Placement, compute: Action) -> set[Action]:
    """Return the computes whose results a compute takes as its input.

    A gradient comes from a `B`, which may be split: the result names it as :attr:`Action.whole` does.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.actions import plain_placement
    >>> sorted(map(str, inputs_of(plain_placement(3), parse_action("1B0"))))
    ['1F0', '2B0']
    >>> [str(one) for one in inputs_of(plain_placement(3), parse_action("1W0"))]
    ['1B0']
    >>> two_encoders = Placement(stages=(0, 1, 2), successors=(2, 2))
    >>> sorted(map(str, inputs_of(two_encoders, parse_action("2F0"))))
    ['0F0', '1F0']
    """
    v = compute.vstage
    if compute.op is Op.F:
        needed = [(Op.F, before) for before in placement.predecessors(v)]
    elif compute.op is Op.W:
        needed = [(Op.B, v)]
    else:
        needed = [(Op.F, v), *((Op.B, after) for after in placement.successors[v : v + 1])]
    return {Action(op=op, vstage=w, microbatch=compute.microbatch) for op, w in needed}


def joint_with(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the computes of other workers that are one joint compute with this one; most have none.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.actions import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2), joint=((1, 1), (2, 1)))
    >>> [[str(one) for one in joint_with(placement, parse_action(text))] for text in ("1F3", "1B3")]
    [['1F2'], []]
    """
    if compute.op is Op.W:
        return ()
    together = placement.joint_microbatches(compute.vstage, compute.microbatch, is_backward=compute.op.is_backward)
    return tuple(
        Action(op=compute.op, vstage=compute.vstage, microbatch=h) for h in together if h != compute.microbatch
    )


def receives_for(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the receives of a compute's inputs; none if they are samples or come from the same stage.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> [str(one) for one in receives_for(Placement(stages=(0, 1, 2), successors=(2, 2)), parse_action("2F0"))]
    ['2RECV_F0:0', '2RECV_F0:1']
    """
    if compute.op is Op.F:
        return _at_inputs(placement, Op.RECV_F, compute)
    if compute.op is Op.W:
        return ()
    return (_with_op(Op.RECV_B, compute),) if placement.crosses(compute.vstage) else ()


def sends_after(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the sends of a compute's results; none if they stay on the stage."""
    if compute.op is Op.W:
        return ()
    if compute.op.is_backward:
        return _at_inputs(placement, Op.SEND_B, compute)
    return (_with_op(Op.SEND_F, compute),) if placement.crosses(compute.vstage) else ()


def peer_of(placement: Placement, action: Action) -> Action:
    """Return the receive that belongs to a send, or the send that belongs to a receive.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.actions import plain_placement
    >>> [str(peer_of(plain_placement(3), parse_action(text))) for text in ("1SEND_F3", "2RECV_F3", "1SEND_B3")]
    ['2RECV_F3', '1SEND_F3', '0RECV_B3']
    """
    link, op = crossing_output(placement, action), _PEERS[action.op]
    if action.vstage != link:
        return Action(op=op, vstage=link, microbatch=action.microbatch)
    after = placement.successors[link]
    source = link if len(placement.predecessors(after)) > 1 else -1
    return Action(op=op, vstage=after, microbatch=action.microbatch, source=source)


def wait_for(action: Action) -> Action:
    """Return the wait that completes a send or a receive."""
    return _with_op(_WAITS[action.op], action)


def started_by(wait: Action) -> Action:
    """Return the send or the receive that a wait completes."""
    return _with_op(_STARTS[wait.op], wait)


def _with_op(op: Op, action: Action) -> Action:
    return Action(op=op, vstage=action.vstage, microbatch=action.microbatch, source=action.source)


def _at_inputs(placement: Placement, op: Op, compute: Action) -> tuple[Action, ...]:
    """List the messages of one kind at all inputs of a compute's virtual stage that come from other stages."""
    v, inputs = compute.vstage, placement.predecessors(compute.vstage)
    return tuple(
        Action(op=op, vstage=v, microbatch=compute.microbatch, source=before if len(inputs) > 1 else -1)
        for before in inputs
        if placement.crosses(before) and (op is not Op.SEND_B or placement.is_trained(before))
    )


_SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.WAIT_SEND_F, Op.WAIT_SEND_B})
_PEERS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_WAITS = {op: Op(f"WAIT_{op}") for op in _PEERS}
_STARTS = {wait: start for start, wait in _WAITS.items()}


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


Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The orders of all workers for one step: compute only, or lowered, which means with all communication.

    Attributes:
        name: Short name of the kind, such as `1f1b`.
        placement: Which stage holds which virtual stage, and its replicas.
        num_microbatches: Microbatches of the step, numbered from 0; the replicas of a stage share them.
        orders: `orders[worker]` are the actions of a worker, one after the other.
        forward_only: Whether there is no backward pass (evaluation).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Actions, ...]
    forward_only: bool = False

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ when anything but the name differs; ranks compare them."""
        # The numbers of replicas are in it too, in the labels of the orders.
        follows = "" if self.placement.is_chain else f" {self.placement.successors}"
        if any(max(sizes) > 1 for sizes in self.placement.joint):
            follows += f" {self.placement.joint}"
        text = f"{self.placement.stages}{follows} {self.num_microbatches} {self.forward_only}\n{self.describe()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Write one line for each worker, such as `stage 1: 1F0 1B0` or `stage 1 replica 0: 1F0 1F2`."""
        lines = (f"{self.placement.label(worker)}: {format_actions(order)}" for worker, order in enumerate(self.orders))
        return "\n".join(lines)


Entry = TypeVar("Entry")


def advance(num_workers: int, go: Callable[[int], Iterable[int]]) -> None:
    """Let workers proceed until none can.

    Args:
        num_workers: workers are numbered from 0.
        go: lets one worker go as far as it can, and returns the workers that it may have freed: none if it did not
            move; too many do no harm. It is called at least once for each worker, and again when another one names it.
    """
    waiting = deque(range(num_workers))
    is_waiting = [True] * num_workers
    while waiting:
        worker = waiting.popleft()
        is_waiting[worker] = False
        for other in go(worker):
            if other != worker and not is_waiting[other]:
                is_waiting[other] = True
                waiting.append(other)


def advance_orders(orders: Sequence[Sequence[Entry]], take: Callable[[int, Entry], bool]) -> list[int]:
    """Let every worker take the entries of its order, and return how many each has taken.

    Args:
        orders: order of every worker.
        take: takes one entry of a worker; False if the worker has to wait for another one.

    >>> done = set()
    >>> def take(worker, entry):
    ...     return entry - 1 in done | {0} and not done.add(entry)
    >>> advance_orders([[2, 3], [1, 5]], take)
    [2, 1]
    """
    reached = [0] * len(orders)
    everybody = range(len(orders))

    def go(worker: int) -> Iterable[int]:
        order, start = orders[worker], reached[worker]
        while reached[worker] < len(order) and take(worker, order[reached[worker]]):
            reached[worker] += 1
        return everybody if reached[worker] > start else ()

    advance(len(orders), go)
    return reached


def carriers(
    placement: Placement, src: int, dst: Collection[int] | None = None, chunks: Collection[int] | None = None
) -> frozenset[int]:
    """Return the virtual stages with whose output a companion crosses.

    It is read where stage `src` holds a virtual stage, and travels with every activation up to the last stage that
    wants it. Where the model comes back to `src`, that stage reads again, or the companion ends there.

    Args:
        placement: which stage holds which virtual stage; a chain.
        src: stage that reads the companion from its batch.
        dst: stages that want it; None for all others.
        chunks: chunks of stage `src` that read it, such as the one before the second of two rings; None for all.

    Raises:
        PlanError: the virtual stages are no chain, or a stage does not exist.

    >>> from vtp_plugin.plan.schedule.order.actions import interleaved_placement, plain_placement, u_placement
    >>> placements = plain_placement(4), u_placement(3), u_placement(2, num_rings=2)
    >>> [sorted(carriers(placement, 0)) for placement in placements]
    [[0, 1, 2], [0, 1], [0, 2]]
    >>> sorted(carriers(plain_placement(4), 1, {2})), sorted(carriers(interleaved_placement(3, 2), 1, {0}))
    ([1], [1, 2])
    >>> [sorted(carriers(u_placement(3, num_rings=2), 0, chunks={chunk})) for chunk in (0, 1)]
    [[0, 1], [3, 4]]
    """
    stages = placement.stages
    if not placement.is_chain or not {src, *(dst or ())} <= set(stages):
        raise PlanError(
            f"a companion from stage {src} to {dst} over {stages}: these stages are no chain that holds them"
        )
    carrying: set[int] = set()
    behind: list[int] = []
    for vstage, after in enumerate(stages[1:]):
        if stages[vstage] == src:
            behind = [vstage] if chunks is None or placement.chunk(vstage) in chunks else []
        elif behind:
            behind.append(vstage)
        if behind and after != src and (dst is None or after in dst):
            carrying.update(behind)
    return frozenset(carrying)
