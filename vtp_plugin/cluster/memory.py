"""What a stage holds, as a sum over its layers, so that a search can ask a million times."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, product

from vtp_plugin.footprint.model import Model
from vtp_plugin.footprint.sizes import Microbatch
from vtp_plugin.footprint.state import Footprint, Training, footprints
from vtp_plugin.layout.chunks import Chunk
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.search.question import CountedTwice, HeldBytes


def held_bytes(
    model: Model,
    training: Training,
    batch: Microbatch | None,
    *,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
) -> HeldBytes:
    """Give what says how much the fullest rank of a stage holds.

    What a layer adds is the difference between two layers of its kind and one.

    Args:
        model: the whole model.
        training: how it is kept.
        batch: a microbatch; None where activations are not known.
        cp: context-parallel size of every stage, which share the batch's sequences.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.
    """

    @cache
    def sums(
        tp: int, num_replicas: int
    ) -> tuple[tuple[tuple[int, int], ...], dict[tuple[bool, bool], tuple[int, int]]]:
        def held(layers: tuple[int, ...], is_first: bool, is_last: bool, is_whole: bool) -> tuple[int, int]:
            layout = PipelineLayout.from_sizes((tp,), world_size=tp * cp * num_replicas, cp=cp, ep=ep, etp=etp)
            chunk = Chunk(layers=layers, is_first=is_first, is_last=is_last, is_whole=is_whole)
            return _fullest(footprints(model, training, layout, ((chunk,),), batch))

        kinds = [model.experts is not None and model.experts.layers[layer] for layer in range(model.num_layers)]
        firsts = {kind: kinds.index(kind) for kind in set(kinds)}
        one = {kind: held((layer,), False, False, False) for kind, layer in firsts.items()}
        two = {kind: held((layer, layer), False, False, False) for kind, layer in firsts.items()}
        added = [tuple(b - a for a, b in zip(one[kind], two[kind], strict=True)) for kind in kinds]
        rows = zip(*(accumulate(column, initial=0) for column in zip(*added, strict=True)), strict=True)
        ends = {}
        for is_first, is_last in product((False, True), repeat=2):
            own = held((0,), is_first, is_last, is_first and is_last)
            ends[is_first, is_last] = (own[0] - added[0][0], own[1] - added[0][1])
        return tuple((state, kept) for state, kept in rows), ends

    def of_stage(
        tp: int, num_replicas: int, start: int, end: int, is_first: bool, is_last: bool, in_flight: int
    ) -> int:
        rows, ends = sums(tp, num_replicas)
        state, kept = ends[is_first, is_last]
        state += rows[end][0] - rows[start][0]
        kept += rows[end][1] - rows[start][1]
        return state + kept * in_flight

    return of_stage


def counted_twice(
    model: Model,
    training: Training,
    batch: Microbatch | None,
    *,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
) -> CountedTwice:
    """Give what says how much virtual stages of one rank share: communicators, workspaces, the allocator's blocks.

    The arguments are those of :func:`held_bytes`.
    """

    @cache
    def of_stage(tp: int, num_replicas: int, ends: tuple[tuple[bool, bool], ...]) -> int:
        layout = PipelineLayout.from_sizes((tp,), world_size=tp * cp * num_replicas, cp=cp, ep=ep, etp=etp)

        def held(*ends: tuple[bool, bool]) -> int:
            chunks = [Chunk(layers=(0,), is_first=first, is_last=last, is_whole=first and last) for first, last in ends]
            return _fullest(footprints(model, training, layout, (chunks,), batch))[0]

        return sum(map(held, ends)) - held(*ends)

    return of_stage


def _fullest(held: tuple[Footprint, ...]) -> tuple[int, int]:
    """Give the bytes that the fullest rank holds without activations, and of a microbatch's activations."""
    return max(one.held_bytes(0) for one in held), max(one.activation_bytes or 0 for one in held)
