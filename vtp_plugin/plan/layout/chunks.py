"""The chunks of a model: the layers of each, and whether it has the embedding or the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.u_layers import layers_of_chunk

Kept = tuple[tuple[int, int], ...]
"""What a rank keeps at a time of each of its chunks: how many activations, and of how many microbatches only what the
gradients of weights need, which wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of a model that Megatron builds as one module.

    Attributes:
        layers: numbers of its layers in the model.
        is_first: whether it has the embedding.
        is_last: whether it has the head, and the layers of multi-token prediction.
        is_whole: whether the pipeline has one stage, so that no weight is shared between stages.
    """

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool
    is_whole: bool


def u_chunks(layers: Sequence[int]) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage of a U-shape.

    Args:
        layers: number of layers of the edge's first part, of every cloud stage, and of the edge's last part.

    >>> [[chunk.layers for chunk in chunks] for chunks in u_chunks((1, 2, 1))]
    [[(0,), (3,)], [(1, 2)]]
    """
    return tuple(
        tuple(
            Chunk(
                layers=tuple(layers_of_chunk(layers, stage=stage, chunk=chunk)),
                is_first=(stage, chunk) == (0, 0),
                is_last=(stage, chunk) == (0, 1),
                is_whole=False,
            )
            # The cloud's second chunk has no layers.
            for chunk in ((0, 1) if stage == 0 else (0,))
        )
        for stage in range(len(layers) - 1)
    )


def plain_chunks(
    num_layers: int,
    num_stages: int,
    num_chunks: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage of a plain or interleaved pipeline.

    Args:
        num_layers: number of layers of the model.
        num_stages: number of stages of the pipeline.
        num_chunks: number of chunks of every stage.
        first: number of layers of the first stage, if it differs from the stages between.
        last: number of layers of the last stage, if it differs from the stages between.
        layers: number of layers of every stage, instead of `first` and `last`.

    Raises:
        ConfigError: the layers cannot be shared out evenly.

    >>> [[chunk.layers for chunk in chunks] for chunks in plain_chunks(4, 2, 2)]
    [[(0,), (2,)], [(1,), (3,)]]
    >>> [chunk.layers for (chunk,) in plain_chunks(4, 3, first=1, last=1)]
    [(0,), (1, 2), (3,)]
    >>> [chunk.layers for (chunk,) in plain_chunks(4, 2, layers=(3, 1))]
    [(0, 1, 2), (3,)]
    """
    given = {"first": first, "last": last}
    flags = [f"--decoder-{end}-pipeline-num-layers {number}" for end, number in given.items() if number is not None]
    numbers = [number for number in given.values() if number is not None]
    rest, num_rest = num_layers - sum(numbers), num_stages - len(numbers)
    if layers is None and (num_rest < 0 or min(numbers, default=1) < 1 or _is_odd(rest, num_rest)):
        named = ", ".join([f"--num-layers {num_layers}", *flags])
        if num_stages == 1:
            raise ConfigError(f"{named}; the only stage has all layers; leave the number of its layers out")
        stages = f"{num_stages} stages"
        if flags:
            stages = f"{rest} layers are left for the {num_rest} other stages, which"
        raise ConfigError(
            f"{named}; {stages} must hold equal numbers, and every stage at least one; change --num-layers, "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, or give the layers of all "
            "stages by --pipeline-model-parallel-layout"
        )
    counts = [rest // num_rest if num_rest else 0] * num_stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    counts = counts if layers is None else list(layers)
    if any(count % num_chunks for count in counts):
        raise ConfigError(f"stages of {counts} layers; each has {num_chunks} chunks; give every chunk as many layers")
    chunks: list[list[Chunk]] = [[] for _ in range(num_stages)]
    start = 0
    for chunk in range(num_chunks):
        for stage, count in enumerate(counts):
            layers = tuple(range(start, start + count // num_chunks))
            start += len(layers)
            is_last = (stage, chunk) == (num_stages - 1, num_chunks - 1)
            chunks[stage].append(
                Chunk(layers=layers, is_first=not stage + chunk, is_last=is_last, is_whole=num_stages == 1)
            )
    return tuple(map(tuple, chunks))


def _is_odd(num_layers: int, num_stages: int) -> bool:
    """Tell whether stages cannot have equal numbers of layers, at least one each; no stage takes no layer."""
    return num_layers < num_stages or num_layers % num_stages > 0 if num_stages else num_layers != 0
