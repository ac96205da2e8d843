"""Speeds of machines: measured durations, shares, profiles."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.layout.layer_lists import Chunk
from vtp_plugin.plan.memory.footprint import Parameter, adapter_parameters, chunk_parameters
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.lora import Lora
from vtp_plugin.util.typed_json import Key, PlainText, positive_number, whole_number

Source = Literal["measured", "fitted", "data sheet"]
"""Where a time comes from."""


def least_sure(sources: Collection[Source]) -> Source:
    """Choose the source that says least about this machine.

    >>> least_sure({"measured", "fitted"})
    'fitted'
    """
    order: tuple[Source, ...] = ("data sheet", "fitted", "measured")
    return next(source for source in order if source in sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long the layers of a model take on a stage: of one kind of card, or of several that wait for each other.

    Attributes:
        forward_s: seconds of the forward pass of each layer, for one microbatch.
        backward_s: seconds of the backward pass of each layer, for one microbatch.
        weights_s: the part of ``backward_s`` that a split backward leaves for later, the gradients of weights; empty
            where it is not known, and then it is taken for half. Both ends of the model leave nothing for later.
        first_s: forward and backward seconds of what the first stage has before its layers.
        last_s: forward and backward seconds of what the last stage has behind its layers.
        update_s: seconds of the optimizer in a step, for each layer; empty for none.
        gradient_bytes: bytes of the gradients of each layer that all replicas sum; empty for none.
        expert_bytes: bytes of the gradients of each layer's experts that only some of a stage's ranks have copies of;
            empty for none.
        source: where the least reliable of these times comes from.
        peers: number of ranks that share experts, which send tokens to each other.
        peer_bytes: bytes of a message between two of these ranks.
        peer_messages: for each layer the number of such messages, one after another, in the forward and in the backward
            pass; empty for none.
        peer_s: seconds of such a message, as far as the times of the layers include it.
        gather_s: seconds in which the ranks of a stage gather a tensor that crosses a boundary, of which each has a
            part, or in which one of them gathers or scatters it.
        broadcast_s: seconds in which one rank of a stage broadcasts a tensor that crosses a boundary.
        forward_sums: prefix sums of ``forward_s``: entry i is the sum over the layers before i; so are the next six.
        backward_sums: prefix sums of ``backward_s``.
        weights_sums: prefix sums of ``weights_s``.
        update_sums: prefix sums of ``update_s``.
        gradient_sums: prefix sums of ``gradient_bytes``.
        expert_sums: prefix sums of ``expert_bytes``.
        message_sums: prefix sums of ``peer_messages``, forward and backward.
        ends_s: forward and backward seconds together of the model's ends: of none, of the first, of the last, of both.
        least_s: forward and backward seconds of the quickest layer.
        least_passing_s: the same of a backward without the gradients of weights.
        least_forward_share: the least share that a forward has of forward and backward, of all layers and both ends.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...] = ()
    first_s: tuple[float, float] = (0.0, 0.0)
    last_s: tuple[float, float] = (0.0, 0.0)
    update_s: tuple[float, ...] = ()
    gradient_bytes: tuple[float, ...] = ()
    expert_bytes: tuple[float, ...] = ()
    source: Source = "measured"
    peers: int = 1
    peer_bytes: int = 0
    peer_messages: tuple[tuple[int, int], ...] = ()
    peer_s: float = 0.0
    gather_s: float = 0.0
    broadcast_s: float = 0.0
    forward_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    backward_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    weights_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    update_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    gradient_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    expert_sums: tuple[float, ...] = field(init=False, repr=False, compare=False)
    message_sums: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, repr=False, compare=False)
    ends_s: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)
    least_s: float = field(init=False, repr=False, compare=False)
    least_passing_s: float = field(init=False, repr=False, compare=False)
    least_forward_share: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nothing = (0.0,) * len(self.forward_s)
        counts = self.peer_messages or ((0, 0),) * len(self.forward_s)
        forward, backward = _sums(self.forward_s), _sums(self.backward_s)
        both = [forward[i + 1] - forward[i] + backward[i + 1] - backward[i] for i in range(len(self.forward_s))]
        parts = [*zip(self.forward_s, self.backward_s, strict=True), self.first_s, self.last_s]
        first, last = sum(self.first_s), sum(self.last_s)
        derived = {
            "forward_sums": forward,
            "backward_sums": backward,
            "weights_sums": _sums(self.of_weights_s),
            "update_sums": _sums(self.update_s or nothing),
            "gradient_sums": _sums(self.gradient_bytes or nothing),
            "expert_sums": _sums(self.expert_bytes or nothing),
            "message_sums": (_sums([number[0] for number in counts]), _sums([number[1] for number in counts])),
            "ends_s": (0.0, first, last, first + last),
            "least_s": min(both, default=math.inf),
            "least_passing_s": min(map(operator.sub, both, self.of_weights_s), default=math.inf),
            "least_forward_share": min((part[0] / sum(part) for part in parts if sum(part)), default=0.0),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def of_weights_s(self) -> tuple[float, ...]:
        """Seconds of the gradients of weights of each layer."""
        return self.weights_s or tuple(whole / 2 for whole in self.backward_s)

    def times_s(self, start: int, end: int, *, is_first: bool, is_last: bool) -> tuple[float, float]:
        """Give the forward and backward seconds of a stage that holds the layers from ``start`` to before ``end``."""
        forward = self.forward_sums[end] - self.forward_sums[start]
        backward = self.backward_sums[end] - self.backward_sums[start]
        for is_there, (more_forward, more_backward) in ((is_first, self.first_s), (is_last, self.last_s)):
            if is_there:
                forward, backward = forward + more_forward, backward + more_backward
        return forward, backward


def slowest(speeds: Sequence[Speed], peer_s: float) -> Speed:
    """Give the speed of a stage whose replicas wait for each other: in each layer for the slowest.

    Args:
        speeds: the speed of every kind of replica, of which all send as many messages between ranks that share experts.
        peer_s: seconds of such a message, which the times of the layers then include.

    >>> one, other = (Speed(forward_s=(time, 1.0), backward_s=(1.0, 1.0)) for time in (1.0, 2.0))
    >>> slowest([one, other], 0.0).forward_sums
    (0.0, 2.0, 3.0)
    """
    first = speeds[0]
    if len(speeds) == 1 and not peer_s:
        return first
    num_layers = len(first.forward_s)
    counts = first.peer_messages or ((0, 0),) * num_layers
    nothing = (0.0,) * num_layers

    def largest(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(max(column) for column in zip(*rows, strict=True))

    def layers(rows: Sequence[Sequence[float]], way: int) -> tuple[float, ...]:
        return largest(
            [[time + number[way] * peer_s for time, number in zip(row, counts, strict=True)] for row in rows]
        )

    def ends(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)

    return Speed(
        forward_s=layers([speed.forward_s for speed in speeds], 0),
        backward_s=layers([speed.backward_s for speed in speeds], 1),
        weights_s=largest([speed.of_weights_s for speed in speeds]),
        first_s=ends([speed.first_s for speed in speeds]),
        last_s=ends([speed.last_s for speed in speeds]),
        update_s=largest([speed.update_s or nothing for speed in speeds]),
        gradient_bytes=largest([speed.gradient_bytes or nothing for speed in speeds]),
        expert_bytes=largest([speed.expert_bytes or nothing for speed in speeds]),
        source=least_sure({speed.source for speed in speeds}),
        peers=first.peers,
        peer_bytes=first.peer_bytes,
        peer_messages=first.peer_messages,
        peer_s=peer_s,
        gather_s=max(speed.gather_s for speed in speeds),
        broadcast_s=max(speed.broadcast_s for speed in speeds),
    )


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


def _of_us(value: object) -> float:
    return positive_number(value) / 1e6


def _of_gbytes(value: object) -> float:
    if not (rate := positive_number(value) * 1e9) > 0:
        raise ValueError("must be above 0")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between cards, as a file has it; there in microseconds and gigabytes.

    Attributes:
        latency_s: seconds of latency, one way.
        bytes_per_s: bandwidth in each direction.
        at_once: number of cards of a node that can send so fast at the same time; None where that is not known: then a
            tensor takes as long as if one card sent all of it, whatever the transport.
        source: where the figures come from, for people.
    """

    latency_s: Annotated[float, Key("latency_us", is_needed=True), _of_us] = 0.0
    bytes_per_s: Annotated[float, Key("gbyte_per_s", is_needed=True), _of_gbytes] = float("inf")
    at_once: Annotated[int | None, whole_number(1)] = None
    source: PlainText = field(default="", compare=False, repr=False)

    def time_s(self, num_bytes: float) -> float:
        """Say how long a message takes.

        >>> Link(latency_s=0.5, bytes_per_s=8.0).time_s(4)
        1.0
        """
        return self.latency_s + num_bytes / self.bytes_per_s


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Give the seconds of a ring all-reduce.

    >>> all_reduce_s(8, 2, Link(latency_s=0.5, bytes_per_s=4.0)), all_reduce_s(8, 1, Link())
    (3.0, 0.0)
    """
    return 2 * (num_ranks - 1) * link.time_s(num_bytes / num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch, and how its tensors are stored and computed.

    Attributes:
        size: number of samples.
        length: number of tokens of a sample.
        itemsize_bytes: bytes of one element of an activation.
        gradient_itemsize_bytes: bytes of one element of the gradients that replicas sum.
        topk: number of experts of a token.
        is_recomputed: whether whole layers are recomputed in the backward pass.
        shares_update: whether replicas share the optimizer's work.
        cp: context-parallel size: each rank has a share of the sequence.
        ep: expert-parallel size.
        etp: tensor-parallel size of the experts; None for that of the stage.
        is_gathered: whether ranks that share experts gather all tokens; else each sends the others their tokens.
        lora: the adapters of a model that is frozen otherwise; None where all weights are trained.
    """

    size: int
    length: int
    itemsize_bytes: int
    gradient_itemsize_bytes: int
    topk: int
    is_recomputed: bool
    shares_update: bool
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    is_gathered: bool = False
    lora: Lora | None = None

    @property
    def num_tokens(self) -> int:
        """Number of a microbatch's tokens on a context-parallel rank."""
        return self.size * self.length // self.cp


def part_parameters(
    model: GPTModel, *layers: int, is_first: bool = False, is_last: bool = False
) -> tuple[Parameter, ...]:
    """List the parameters of some layers, and of an end of the model, on one rank."""
    chunk = Chunk(layers=layers, is_first=is_first, is_last=is_last, is_whole=False)
    return chunk_parameters(model, chunk, StageGrid(1), ExpertGrid(1, 1, 1))


def count(parameters: Sequence[Parameter]) -> int:
    """Count the weights."""
    return sum(parameter.numel for parameter in parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How ranks of a stage share tokens, weights and messages.

    Attributes:
        tp: tensor-parallel size.
        etp: tensor-parallel size of the experts.
        peers: number of ranks that together have all experts once.
        num_copies: number of copies of every expert.
        activation_bytes: bytes of the activations of all tokens of a context-parallel rank.
        row_bytes: bytes of the tokens that ranks with the same experts gather, counted once for each of a token's
            experts.
        key_bytes: bytes of the keys and values that a rank hands on to its context-parallel neighbour.
        peer_bytes: bytes of a message between ranks that share experts.
        num_messages: number of such messages, one after another, in the forward pass of a layer.
        is_apart: whether the gradients of experts are summed separately from the others.
    """

    tp: int
    etp: int
    peers: int
    num_copies: float
    activation_bytes: int
    row_bytes: int
    key_bytes: int
    peer_bytes: int
    num_messages: int
    is_apart: bool

    @classmethod
    def of(cls, model: GPTModel, batch: Batch, tp: int, num_replicas: int) -> Shares:
        """Derive the shares from the sizes."""
        etp = batch.etp or tp
        peers, activation_bytes = etp * batch.ep, batch.num_tokens * model.hidden * batch.itemsize_bytes
        # Tokens are cut by tensor-parallel ranks before they go to experts; all ranks but the own one get some.
        own = activation_bytes // tp
        if batch.is_gathered:
            row_bytes, peer_bytes, num_messages = 0, own, 2 * (peers - 1)
        else:
            row_bytes, peer_bytes = batch.topk * own * etp, batch.topk * own // batch.ep
            num_messages = 2 * (batch.ep - 1)
        groups = max(1, model.groups // tp)
        channels = 2 * model.kv_channels
        if (latent := model.latent) is not None:
            groups = model.heads // tp
            channels = latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim
        return cls(
            tp=tp,
            etp=etp,
            peers=peers,
            num_copies=tp * batch.cp * num_replicas / peers,
            activation_bytes=activation_bytes,
            row_bytes=row_bytes,
            key_bytes=batch.num_tokens * groups * channels * batch.itemsize_bytes,
            peer_bytes=peer_bytes,
            num_messages=num_messages if model.experts is not None else 0,
            is_apart=peers != tp,
        )

    def layer(self, model: GPTModel, layer: int, lora: Lora | None = None) -> tuple[float, float]:
        """Count what is trained of a layer on a rank: weights whose gradients all replicas sum, and the others."""
        if lora is not None:
            chunk = Chunk(layers=(layer,), is_first=False, is_last=False, is_whole=False)
            experts = ExpertGrid(self.etp, self.peers // self.etp, 1)
            parameters = adapter_parameters(model, chunk, self.tp, experts, lora)
            own = float(count([parameter for parameter in parameters if parameter.is_expert]))
            return (count(parameters) - own, own) if self.is_apart else (float(count(parameters)), 0.0)
        parameters = part_parameters(model, layer)
        routed = count([parameter for parameter in parameters if parameter.is_expert])
        dense, own = (count(parameters) - routed) / self.tp, routed / self.peers
        return (dense, own) if self.is_apart else (dense + own, 0.0)
