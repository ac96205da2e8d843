"""Which layers each stage has: lists, chunks, and those of a U.

The layers of a model with a vision tower, in MindSpeed-MM's lists: a row for every chunk of the stages.

``pipeline_num_layers`` of the vision tower and of the language model are such lists; a flat one is one row. A U with
one ring has two rows, one with two rings three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import ConfigError, LayoutError, refuse

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
        if not flags and num_chunks == 1 and num_layers >= num_stages:
            each = math.ceil(num_layers / num_stages)
            each -= each * (num_stages - 1) >= num_layers
            raise ConfigError(
                f"{named}; {num_stages} stages cannot hold equally many layers; give "
                f"--decoder-first-pipeline-num-layers {num_layers - each * (num_stages - 1)}, or the layers of all "
                "stages by --pipeline-model-parallel-layout"
            )
        stages = f"{rest} layers are left for the {num_rest} other stages, which" if flags else f"{num_stages} stages"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRing:
    """What crosses in the first of two rings, where that is known before there is a model: activations of an encoder.

    Attributes:
        width: hidden size of the encoder.
        is_trained: some weight of the encoder is trained; else no gradient crosses.
        is_counted: the plugin counts the encoder's layers before a chunk; else the script does so.
    """

    width: int
    is_trained: bool = True
    is_counted: bool = False


def check_layers(
    layers: Sequence[int], *, num_stages: int, num_layers: int | None, option: str, least_on_edge: int = 1
) -> None:
    """Refuse parts that do not fit the stages or the model.

    Args:
        layers: number of layers of every part.
        num_stages: number of pipeline stages, the edge included.
        num_layers: number of layers of the model; None if it is not known yet.
        option: flag that gave the layers, for error messages.
        least_on_edge: least number of layers of the edge's parts; 0 where these may be embedding and head alone.

    Raises:
        ConfigError: there is no cloud, the number of parts is not P + 1, a part is empty, or the sum is wrong.
    """
    shown = ",".join(str(part) for part in layers)
    if num_stages < 2:
        raise LayoutError("--layerwise-disaggregated-training needs an edge and a cloud: give at least two stages")
    if len(layers) != num_stages + 1:
        raise LayoutError(
            f"{option} has {len(layers)} parts ({shown}), {num_stages} stages need {num_stages + 1}: the edge's first "
            "part, every cloud stage, the edge's last part"
        )
    if min(layers[1:-1]) < 1 or min(layers[0], layers[-1]) < least_on_edge:
        raise ConfigError(f"{option} has a part without layers ({shown}); give every part at least one")
    if num_layers is not None and sum(layers) != num_layers:
        raise ConfigError(f"{option} has {sum(layers)} layers ({shown}), --num-layers is {num_layers}; make both equal")


def check_two_rings(layers: Sequence[int], cp_sizes: Sequence[int], *, is_split: bool) -> None:
    """Refuse layers of an encoder that do not fit the stages, and what was not run with two rings.

    Args:
        layers: number of layers of every part of the encoder.
        cp_sizes: context-parallel size of every stage.
        is_split: replicas of a wide stage share the samples of a narrow one's microbatch.

    Raises:
        ConfigError: not one number of layers for each part, a stage has context parallelism, or microbatches are split.
    """
    check_layers(layers, num_stages=len(cp_sizes), num_layers=None, option="--vtp-encoder-layer-list")
    if max(cp_sizes) > 1:
        raise LayoutError(
            f"--vtp-encoder-layer-list with context-parallel sizes {','.join(map(str, cp_sizes))}: two rings were "
            "tested without context parallelism only; leave one of them out"
        )
    if is_split:
        raise LayoutError(
            "--vtp-encoder-layer-list with --vtp-dp-mode split: what crosses in the first ring has a row for each "
            "patch, and cannot be cut by samples; use multiplex"
        )


def layers_of_chunk(layers: Sequence[int], *, stage: int, chunk: int) -> range:
    """List the layers of a model chunk, by their numbers in the whole model from 0 on.

    >>> layers = (1, 3, 3, 1)
    >>> layers_of_chunk(layers, stage=2, chunk=0), layers_of_chunk(layers, stage=0, chunk=1)
    (range(4, 7), range(7, 8))
    >>> len(layers_of_chunk(layers, stage=2, chunk=1))
    0
    """
    num_stages = len(layers) - 1
    if chunk > 0 and stage > 0:
        return range(0)
    part = stage if chunk == 0 else num_stages
    first = sum(layers[:part])
    return range(first, first + layers[part])


def layout_of(layers: Sequence[int], *, num_predicting: int = 0, num_rings: int = 1) -> str:
    """Write Megatron's pipeline layout: first chunks of all stages, then their second ones, the cloud's empty.

    Args:
        layers: number of layers of every part.
        num_predicting: layers of multi-token prediction; they follow the edge's last part.
        num_rings: those before the last one, an encoder's, have other chunks, which are empty here.

    >>> layout_of((1, 3, 3, 1)), layout_of((1, 3, 1), num_predicting=1), layout_of((1, 3, 1), num_rings=2)
    ('Et|ttt|ttt|tL||', 'Et|ttt|tmL|', '||Et|ttt|tL|')
    """
    parts = ["t" * part for part in layers]
    num_stages = len(layers) - 1
    last = parts[-1] + "m" * num_predicting + "L"
    before = [""] * (num_stages * (num_rings - 1))
    return "|".join([*before, "E" + parts[0], *parts[1:-1], last, *[""] * (num_stages - 1)])


LIST_NAME = "pipeline_num_layers"
"""The entry of a JSON file that holds a list."""
_EXAMPLE = "for two stages [[2,0],[0,0]] and [[1,2],[1,0]]"
_EXAMPLE_OF_TWO = "for two stages [[1,2],[1,0],[0,0]] and [[0,0],[1,2],[1,0]]"
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerLists:
    """Layers of the vision tower and of the language model, chunk by chunk, stage by stage."""

    vision: Rows
    text: Rows

    def problems(self, num_stages: int, *, num_rows: int) -> Iterator[str]:
        """Say what does not fit the stages.

        Args:
            num_stages: pipeline stages.
            num_rows: chunks of a stage.

        >>> lists = LayerLists(read_rows([2, 0, 0]), read_rows([1, 3]))
        >>> print(*lists.problems(2, num_rows=1))
        pipeline_num_layers 2,0,0 of vision_encoder; 2 stages need 1 x 2 numbers; change the JSON of the model
        """
        for name, rows in (("vision_encoder", self.vision), ("text_decoder", self.text)):
            if [len(row) for row in rows] != [num_stages] * num_rows:
                yield (
                    f"{LIST_NAME} {show_rows(rows)} of {name}; {num_stages} stages need {num_rows} x {num_stages} "
                    "numbers; change the JSON of the model"
                )

    def problems_of_heads(self, tp_sizes: Sequence[int], num_heads: int) -> Iterator[str]:
        """Say which stages cannot share the heads of the vision tower.

        Args:
            tp_sizes: tensor-parallel size of every stage.
            num_heads: number of attention heads of the vision tower.

        >>> lists = LayerLists(read_rows([1, 1]), read_rows([0, 2]))
        >>> print(*lists.problems_of_heads((1, 3), 4))
        num_attention_heads 4 of vision_encoder; stage 1 holds layers of it and has tp 3; give it a size that divides 4
        """
        for stage, size in enumerate(tp_sizes):
            if num_heads % size and any(row[stage] for row in self.vision):
                yield (
                    f"num_attention_heads {num_heads} of vision_encoder; stage {stage} holds layers of it and has tp "
                    f"{size}; give it a size that divides {num_heads}"
                )


def read_rows(given: Sequence[int] | Sequence[Sequence[int]]) -> Rows:
    """Read a list of the JSON file.

    >>> read_rows([2, 0]), read_rows([[1, 2], [1, 0]])
    (((2, 0),), ((1, 2), (1, 0)))

    Raises:
        ConfigError: it is something else.
    """
    rows: Any = given
    if isinstance(given, list | tuple) and not any(isinstance(row, list | tuple) for row in given):
        rows = (given,)
    if not isinstance(rows, list | tuple) or not all(map(_is_row, rows)):
        raise ConfigError(
            f"{LIST_NAME} {given!r}; it is a list of numbers of layers, or a list of such lists, {_EXAMPLE}; change "
            "the JSON of the model"
        )
    return tuple(tuple(row) for row in rows)


def _is_row(row: object) -> bool:
    return isinstance(row, list | tuple) and bool(row) and all(type(number) is int and number >= 0 for number in row)


def show_rows(rows: Rows) -> str:
    """Write rows as text.

    >>> show_rows(((1, 2), (1, 0)))
    '1,2 / 1,0'
    """
    return " / ".join(",".join(map(str, row)) for row in rows)


def first_layer(rows: Rows, *, stage: int, chunk: int) -> int:
    """Return the number of the first layer of a chunk in the whole model, from 0 on.

    >>> rows = ((1, 2), (3, 0))
    >>> first_layer(rows, stage=1, chunk=0), first_layer(rows, stage=0, chunk=1)
    (1, 3)
    """
    return num_layers(rows[:chunk]) + sum(rows[chunk][:stage])


def num_layers(rows: Rows) -> int:
    """Return the number of layers of the whole model.

    >>> num_layers(((1, 2), (3, 0)))
    6
    """
    return sum(map(sum, rows))


def rows_of_u(lists: LayerLists) -> LayerLists:
    """Give the lists of a U as it is built: a row for each of the edge's chunks, two or three.

    >>> rows_of_u(LayerLists(((3, 0), (1, 0), (0, 0)), ((0, 0), (1, 16), (2, 0))))
    LayerLists(vision=((4, 0), (0, 0)), text=((1, 16), (2, 0)))
    >>> theirs = LayerLists(((3, 7), (1, 0), (0, 0)), ((0, 0), (0, 16), (0, 0)))
    >>> rows_of_u(theirs) == theirs, encoder_layers(theirs), ring_layers(theirs)
    (True, (3, 7, 1), (0, 16, 0))

    Raises:
        LayoutError: a chunk has layers that such a U has not, or lacks those that it must have.
    """
    if not any(number for row in lists.vision for number in row[1:]):
        return one_ring(lists)
    refuse(_problems_of_two_rings(lists), LayoutError)
    return lists


def one_ring(lists: LayerLists) -> LayerLists:
    """Give the lists of a U with one ring, of two chunks a stage, also where MindSpeed-MM writes it with three.

    The edge, stage 0, holds the whole vision tower in its first chunk.

    >>> of_three = LayerLists(((3, 0), (1, 0), (0, 0)), ((0, 0), (1, 16), (2, 0)))
    >>> one_ring(of_three)
    LayerLists(vision=((4, 0), (0, 0)), text=((1, 16), (2, 0)))

    Raises:
        LayoutError: a chunk has layers that such a U has not.
    """
    vision, text = lists.vision, lists.text
    is_of_three = len(vision) == len(text) == 3 and not any(text[0][1:])
    if is_of_three:
        vision = ((vision[0][0] + vision[1][0], *vision[1][1:]), vision[2])
        text = ((text[0][0] + text[1][0], *text[1][1:]), text[2])
    if len(vision) != 2 or len(text) != 2 or any(text[1][1:]) or any(vision[1]):
        raise LayoutError(
            f"{_shown(lists)}; a U has the vision tower and the first layers in the edge's first chunk, the last "
            f"layers in its last one, and one chunk on every cloud stage, {_EXAMPLE}; change the JSON of the model"
        )
    return LayerLists(vision, text)


def _problems_of_two_rings(lists: LayerLists) -> Iterator[str]:
    """Say which rule lists with vision layers in the cloud break; the first one."""
    vision, text = lists.vision, lists.text
    if len(vision) != 3 or len(text) != 3 or len({*map(len, (*vision, *text))}) > 1:
        rule = "with vision layers in the cloud a microbatch goes round twice; that takes three rows of one length each"
    elif any(vision[1][1:]) or any(vision[2]) or not all((*vision[0], vision[1][0])):
        rule = (
            "the first row of the vision encoder has layers on every stage, the second one its last layers on the edge"
        )
    elif any(text[0]) or any(text[2][1:]) or not all(text[1][1:]):
        rule = (
            "the second row of the text decoder has layers on every cloud stage; the edge's in the second and third "
            "row may be none, all other numbers are"
        )
    else:
        return
    yield f"{_shown(lists)}; {rule}, {_EXAMPLE_OF_TWO}; change the JSON of the model"


def _shown(lists: LayerLists) -> str:
    return f"{LIST_NAME} {show_rows(lists.vision)} of vision_encoder and {show_rows(lists.text)} of text_decoder"


def ring_layers(lists: LayerLists) -> tuple[int, ...]:
    """Return the language model's layers of the edge's first part, every cloud stage, the edge's last part.

    Args:
        lists: of :func:`rows_of_u`.

    >>> ring_layers(LayerLists(((2, 0), (0, 0)), ((1, 2), (1, 0))))
    (1, 2, 1)
    """
    *_, there, back = lists.text
    return (*there, back[0])


def encoder_layers(lists: LayerLists) -> tuple[int, ...] | None:
    """Return the vision tower's layers of the same parts, where it has a ring of its own; else None.

    Args:
        lists: of :func:`rows_of_u`.

    >>> encoder_layers(LayerLists(((2, 0), (0, 0)), ((1, 2), (1, 0)))) is None
    True
    """
    return (*lists.vision[0], lists.vision[1][0]) if len(lists.vision) == 3 else None
