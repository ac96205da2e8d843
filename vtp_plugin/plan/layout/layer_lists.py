"""The layers of a model with a vision tower, in MindSpeed-MM's lists: a row for every chunk of the stages.

``pipeline_num_layers`` of the vision tower and of the language model are such lists; a flat one is one row. A U with
one ring has two rows, one with two rings three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import ConfigError, LayoutError, refuse

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
