"""Bytes of weights, gradients and optimizer state on every rank.

Gradients lie in buffers, one for routed experts and one for all else, each a row of buckets. With the distributed
optimizer weights lie in such buffers, too: every parameter begins at a multiple of 64 elements, every bucket ends at
one of 128 and of the number of replicas, and each replica keeps optimizer state for its part of every bucket. Read in
megatron/core of 0.19: ``distributed/param_and_grad_buffer.py`` and ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vtp_plugin.plan.layout.chunks import Chunk, Kept
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activations import kept_by_module, waiting_by_module
from vtp_plugin.plan.memory.layer_sizes import Microbatch, Sizes
from vtp_plugin.plan.memory.overhead import overhead_bytes
from vtp_plugin.plan.memory.parameters import Parameter, chunk_parameters
from vtp_plugin.plan.model.gpt_model import GPTModel

_START, _END = 64, 128
_MASTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is kept while it is trained.

    Attributes:
        weight_itemsize_bytes: bytes of one element of the weights; below 4 the optimizer keeps a copy of 4 bytes.
        gradient_itemsize_bytes: bytes of one element of the gradient buffers.
        num_moments: numbers of 4 bytes that the optimizer keeps for each weight: 2 for Adam.
        is_distributed: whether replicas share the optimizer state.
        bucket_size: elements from which on a bucket of the first stage's first chunk is closed; None for one bucket.
        backend: backend of the collectives, see :func:`~vtp_plugin.plan.memory.overhead.overhead_bytes`.
    """

    weight_itemsize_bytes: int
    gradient_itemsize_bytes: int
    num_moments: int
    is_distributed: bool
    bucket_size: int | None
    backend: str = "gloo"


class ChunkBytes(NamedTuple):
    """What a chunk keeps of one microbatch on a rank.

    Attributes:
        activation_bytes: bytes between its forward and its backward.
        waiting_bytes: bytes between the gradient of its input and those of its weights, where backwards are split; None
            if not known.
    """

    activation_bytes: int
    waiting_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank holds.

    Attributes:
        num_parameters: number of elements of its weights.
        weight_bytes: bytes of its weights, with the gaps of their buffers.
        gradient_bytes: bytes of its gradient buffers.
        optimizer_bytes: bytes of moments and of weights in full precision, without the counters of steps.
        overhead_bytes: bytes on a device that are no tensor of the model, such as buffers of collectives.
        kept_bytes: bytes kept for one microbatch by all chunks, by module.
        chunks: bytes kept for one microbatch by each chunk; empty if not known.
    """

    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    overhead_bytes: int
    kept_bytes: Mapping[str, int]
    chunks: tuple[ChunkBytes, ...]

    @property
    def steady_bytes(self) -> int:
        """Bytes that it holds all the time."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.overhead_bytes

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of the activations of one microbatch in all chunks; None if not known."""
        return sum(chunk.activation_bytes for chunk in self.chunks) if self.chunks else None

    @property
    def waiting_bytes(self) -> int | None:
        """Bytes of one microbatch that waits in all chunks; None if not known."""
        known = [chunk.waiting_bytes for chunk in self.chunks if chunk.waiting_bytes is not None]
        return sum(known) if known else None

    def kept_parts(self, kept: Kept) -> tuple[int, int]:
        """Give the bytes of so many activations, and of so many microbatches that wait, as far as they are known."""
        pairs = [*zip(self.chunks, kept, strict=True)] if self.chunks else []
        return (
            sum(chunk.activation_bytes * number for chunk, (number, _) in pairs),
            sum((chunk.waiting_bytes or 0) * number for chunk, (_, number) in pairs),
        )

    def held_bytes(self, kept: Kept) -> int:
        """Give all that it holds with so many activations and waiting microbatches of each chunk, where known."""
        return self.steady_bytes + sum(self.kept_parts(kept))

    def fullest(self, peaks: Sequence[Kept]) -> Kept:
        """Give the moment at which it holds the most."""
        return max(peaks, key=self.held_bytes)


def footprints(
    model: GPTModel,
    training: Training,
    layout: PipelineLayout,
    chunks: Sequence[Sequence[Chunk]],
    batch: Microbatch | None = None,
    samples: Sequence[int] = (),
) -> tuple[Footprint, ...]:
    """Give what every rank holds, rank 0 first.

    Args:
        model: the whole model.
        training: how it is kept.
        layout: the ranks of every stage.
        chunks: chunks of every stage.
        batch: a microbatch; None where activations are not known.
        samples: number of samples of a microbatch on every stage, where stages run microbatches of their own sizes.

    Raises:
        ConfigError: a stage cannot cut the model.
    """
    held = [
        [chunk_parameters(model, chunk, grid, layout.experts[stage]) for chunk in chunks[stage]]
        for stage, grid in enumerate(layout.stages)
    ]
    known: dict[_Place, Footprint] = {}
    for rank in range(layout.world_size):
        place = _place(layout, rank)
        if place not in known:
            grid, experts, own = layout.stages[place.stage], layout.experts[place.stage], chunks[place.stage]
            here = replace(batch, size=samples[place.stage]) if batch and samples else batch
            sizes = here and Sizes(model=model, batch=here, tp=grid.tp, cp=grid.cp, etp=experts.tp)
            flat = [parameter for parameters in held[place.stage] for parameter in parameters]
            overhead = overhead_bytes(training.backend, sizes, flat, own, grid, experts if model.experts else None)
            known[place] = _footprint(training, held[place.stage], place, overhead, sizes, own)
    return tuple(known[_place(layout, rank)] for rank in range(layout.world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a rank's footprint depends on: its stage, and which of how many replicas it is.

    ``apart`` counts the copies of a routed expert where they have groups of their own, else it is None.
    """

    stage: int
    dense: tuple[int, int]
    apart: tuple[int, int] | None


def _place(layout: PipelineLayout, rank: int) -> _Place:
    coord, expert = layout.coord(rank), layout.expert_coord(rank)
    grid, experts = layout.stages[coord.stage], layout.experts[coord.stage]
    return _Place(
        stage=coord.stage,
        dense=(coord.dp_rank * grid.cp + coord.cp_rank, grid.dp * grid.cp),
        apart=(expert.dp_rank, experts.dp) if layout.has_expert_groups else None,
    )


def _footprint(
    training: Training,
    held: Sequence[Sequence[Parameter]],
    place: _Place,
    overhead: int,
    sizes: Sizes | None,
    chunks: Sequence[Chunk],
) -> Footprint:
    num_parameters = num_buffered = num_owned = 0
    for number, parameters in enumerate(held):
        bucket_size = training.bucket_size if place.stage == number == 0 else None
        num_parameters += sum(parameter.numel for parameter in parameters)
        for buffer, (replica, num_replicas) in _buffers(parameters, place):
            if not training.is_distributed:
                numel = owned = sum(parameter.numel for parameter in buffer)
            else:
                numel, owned = _shared_buffer(buffer, bucket_size, replica, num_replicas)
            num_buffered += numel
            num_owned += owned
    masters = _MASTER_BYTES if training.weight_itemsize_bytes < _MASTER_BYTES else 0
    return Footprint(
        num_parameters=num_parameters,
        weight_bytes=num_buffered * training.weight_itemsize_bytes,
        gradient_bytes=num_buffered * training.gradient_itemsize_bytes,
        optimizer_bytes=num_owned * (_MASTER_BYTES * training.num_moments + masters),
        overhead_bytes=overhead,
        kept_bytes=kept_by_module(sizes, chunks) if sizes else {},
        chunks=tuple(_chunk_bytes(sizes, chunk) for chunk in chunks) if sizes else (),
    )


def _chunk_bytes(sizes: Sizes, chunk: Chunk) -> ChunkBytes:
    waiting = waiting_by_module(sizes, [chunk])
    return ChunkBytes(sum(kept_by_module(sizes, [chunk]).values()), None if waiting is None else sum(waiting.values()))


def _buffers(parameters: Sequence[Parameter], place: _Place) -> Iterator[tuple[Sequence[Parameter], tuple[int, int]]]:
    """Give the parameters of every buffer, and which of how many replicas this rank is for them."""
    if place.apart is None:
        yield parameters, place.dense
        return
    yield [parameter for parameter in parameters if not parameter.is_expert], place.dense
    yield [parameter for parameter in parameters if parameter.is_expert], place.apart


def _shared_buffer(
    parameters: Sequence[Parameter], bucket_size: int | None, replica: int, num_replicas: int
) -> tuple[int, int]:
    """Give the elements of a buffer of the distributed optimizer, and those whose state a replica keeps.

    >>> parameters = [Parameter(name="b", numel=100), Parameter(name="a", numel=10)]
    >>> [_shared_buffer(parameters, None, replica, 2) for replica in (0, 1)]
    [(256, 74), (256, 36)]
    """
    end, owned = 0, 0
    for bucket in _buckets(parameters, bucket_size):
        start, places, place = end, [], end
        for parameter in bucket:
            place = _up(place, _START)
            places.append((place, place + parameter.numel))
            place += parameter.numel
        end = _up(place, math.lcm(num_replicas, _END))
        share = (end - start) // num_replicas
        low, high = start + replica * share, start + (replica + 1) * share
        owned += sum(max(0, min(last, high) - max(first, low)) for first, last in places)
    return end, owned


def _buckets(parameters: Sequence[Parameter], bucket_size: int | None) -> Iterator[list[Parameter]]:
    """Cut the parameters of a buffer, the last one first, into buckets; a shared parameter has one of its own."""
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        if parameter.is_shared and bucket:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled = _up(filled, _START) + parameter.numel
        if parameter.is_shared or (bucket_size is not None and filled >= bucket_size):
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
