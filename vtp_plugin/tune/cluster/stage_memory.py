"""The memory of a stage as a sum over its layers, quick enough for a search that asks a million times."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from itertools import accumulate, product
from typing import NamedTuple

from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.footprint import Training, footprints
from vtp_plugin.plan.memory.layer_sizes import Microbatch
from vtp_plugin.plan.model.gpt_model import GPTModel


class HeldPart(NamedTuple):
    """A part of a model that a stage holds: one of its virtual stages.

    Attributes:
        tp: tensor-parallel size of the stage.
        num_replicas: number of replicas of the stage.
        start: first layer.
        end: first layer behind the part.
        is_first: whether it has the embedding.
        is_last: whether it has the head.
        in_flight: number of microbatches whose activations it keeps.
        waiting: number of microbatches that keep only what the gradients of their weights need.
    """

    tp: int
    num_replicas: int
    start: int
    end: int
    is_first: bool
    is_last: bool
    in_flight: int
    waiting: int = 0


class _Held(NamedTuple):
    """Bytes that the fullest rank of a stage holds: all the time, for one activation, for one microbatch that waits."""

    steady_bytes: int
    activation_bytes: int
    waiting_bytes: int


HeldBytes = Callable[[HeldPart], int]
"""Gives the bytes that a part adds to its stage's fullest rank."""

CountedTwice = Callable[[int, int, tuple[tuple[bool, bool], ...]], int]
"""Gives the bytes that a rank holds once, while a sum over its virtual stages counts them several times. Arguments:
tensor-parallel size, number of replicas, and for each virtual stage whether it has the embedding, and the head."""


class StageMemory:
    """Gives the bytes that the fullest rank of a stage holds.

    What a layer adds is the difference between a stage with two layers of its kind and one with one.

    Args:
        model: the whole model.
        training: how the model is kept while it is trained.
        batch: a microbatch; None where activations are not known.
        cp: context-parallel size of every stage, which share the batch's sequences.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.
    """

    def __init__(
        self,
        model: GPTModel,
        training: Training,
        batch: Microbatch | None,
        *,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
    ) -> None:
        self._model, self._training, self._batch = model, training, batch
        self._cp, self._ep, self._etp = cp, ep, etp
        self._sums = cache(self._sum_layers)
        self._twice = cache(self._count_twice)

    def held_bytes(self, part: HeldPart) -> int:
        """Answer as ``HeldBytes``."""
        tp, num_replicas, start, end, is_first, is_last, in_flight, num_waiting = part
        rows, ends = self._sums(tp, num_replicas)
        bare, below, above = ends[is_first, is_last], rows[start], rows[end]
        held = bare[0] + above[0] - below[0] + (bare[1] + above[1] - below[1]) * in_flight
        return held + (bare[2] + above[2] - below[2]) * num_waiting

    def counted_twice(self, tp: int, num_replicas: int, ends: tuple[tuple[bool, bool], ...]) -> int:
        """Answer as ``CountedTwice``: communicators, workspaces, blocks of the allocator."""
        return self._twice(tp, num_replicas, ends)

    def _sum_layers(self, tp: int, num_replicas: int) -> tuple[tuple[_Held, ...], dict[tuple[bool, bool], _Held]]:
        """Give prefix sums of what layers add, and what a stage without layers holds, by the model's ends on it."""

        def held(layers: tuple[int, ...], ends: tuple[bool, bool] = (False, False)) -> _Held:
            return self._fullest(tp, num_replicas, _chunk(layers, ends))

        model = self._model
        kinds = [model.experts is not None and model.experts.layers[layer] for layer in range(model.num_layers)]
        firsts = {kind: kinds.index(kind) for kind in set(kinds)}
        one = {kind: held((layer,)) for kind, layer in firsts.items()}
        two = {kind: held((layer, layer)) for kind, layer in firsts.items()}
        added = [_Held(*map(operator.sub, two[kind], one[kind])) for kind in kinds]
        sums = (accumulate(column, initial=0) for column in zip(*added, strict=True))
        rows = tuple(_Held(*row) for row in zip(*sums, strict=True))
        whole = {(first, last): held((0,), (first, last)) for first, last in product((False, True), repeat=2)}
        return rows, {ends: _Held(*map(operator.sub, one, added[0])) for ends, one in whole.items()}

    def _count_twice(self, tp: int, num_replicas: int, ends: tuple[tuple[bool, bool], ...]) -> int:
        chunks = [_chunk((0,), own) for own in ends]
        apart = sum(self._fullest(tp, num_replicas, chunk)[0] for chunk in chunks)
        return apart - self._fullest(tp, num_replicas, *chunks)[0]

    def _fullest(self, tp: int, num_replicas: int, *chunks: Chunk) -> _Held:
        layout = PipelineLayout.from_sizes(
            (tp,), world_size=tp * self._cp * num_replicas, cp=self._cp, ep=self._ep, etp=self._etp
        )
        held = footprints(self._model, self._training, layout, (chunks,), self._batch)
        one = max(held, key=lambda one: one.steady_bytes)
        # Where it is not known what waits, nothing of an activation is free before the gradients of weights are there.
        waiting = one.activation_bytes if one.waiting_bytes is None else one.waiting_bytes
        return _Held(one.steady_bytes, one.activation_bytes or 0, waiting or 0)


def _chunk(layers: tuple[int, ...], ends: tuple[bool, bool]) -> Chunk:
    return Chunk(layers=layers, is_first=ends[0], is_last=ends[1], is_whole=all(ends))
