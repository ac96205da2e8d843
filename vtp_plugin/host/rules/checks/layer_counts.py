"""What of MindSpeed-MM's lists no stage can hold: embedding and head are built with the first and the last layer."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.plan.layout.layer_lists import LIST_NAME, LayerLists, num_layers, show_rows

_JSON = "change the JSON of the model"


def check_counts(lists: LayerLists, vision: int | None, text: int | None) -> Iterator[str]:
    """Say which lists hold other numbers of layers than the model has: the last layer would bring no head along.

    Args:
        lists: layers, chunk by chunk, stage by stage.
        vision: ``num_layers`` of the vision tower; None if there is none.
        text: ``num_layers`` of the language model, likewise.

    >>> print(*check_counts(LayerLists(((2, 0),), ((1, 2),)), 2, 4))
    pipeline_num_layers 1,2 of text_decoder has 3 layers; its num_layers is 4; change the JSON of the model
    """
    for name, rows, wanted in (("vision_encoder", lists.vision, vision), ("text_decoder", lists.text, text)):
        if wanted is not None and (found := num_layers(rows)) != wanted:
            yield f"{LIST_NAME} {show_rows(rows)} of {name} has {found} layers; its num_layers is {wanted}; {_JSON}"


def check_places(lists: LayerLists, *, is_u_shaped: bool) -> Iterator[str]:
    """Say which layers lie where MindSpeed-MM cannot have them.

    Args:
        lists: layers of both models: a row for every chunk of a stage, with a number for every stage.
        is_u_shaped: the first stage holds both ends; the others have one chunk.

    >>> next(check_places(LayerLists(((1, 1),), ((0, 4),)), is_u_shaped=False))[:70]
    'pipeline_num_layers 0,4 of text_decoder begins behind stage 0; what th'
    >>> print(*check_places(LayerLists(((1, 1),), ((2, 2),)), is_u_shaped=False))
    pipeline_num_layers 1,1 of vision_encoder: stage 1 has layers of it behind the first ones of text_decoder (2,2), \
which take its outputs; change the JSON of the model
    """
    vision, text = show_rows(lists.vision), show_rows(lists.text)
    chunks = [(chunk, stage) for chunk, row in enumerate(lists.text) for stage in range(len(row))]
    if is_u_shaped:
        if not (lists.text[0][0] and lists.text[1][0]):
            yield (
                f"{LIST_NAME} {text} of text_decoder in a U-shape; the edge has the embedding with the first layers "
                f"and the head with the last ones; give it one layer of each at least, such as 1,2 / 1,0; {_JSON}"
            )
        chunks = [(chunk, stage) for chunk, stage in chunks if chunk == 0 or stage == 0]
    else:
        if not lists.text[0][0]:
            yield (
                f"{LIST_NAME} {text} of text_decoder begins behind stage 0; what the vision encoder ({vision}) gives "
                "has other forms than what crosses between stages of unequal size; give stage 0 all of the vision "
                f"encoder and a layer of text_decoder; {_JSON}"
            )
        if not lists.text[-1][-1]:
            yield f"{LIST_NAME} {text} of text_decoder; the last stage has the head with the last layers; {_JSON}"
    begun = False
    for chunk, stage in chunks:
        if begun and lists.vision[chunk][stage]:
            yield (
                f"{LIST_NAME} {vision} of vision_encoder: stage {stage} has layers of it behind the first ones of "
                f"text_decoder ({text}), which take its outputs; {_JSON}"
            )
        begun = begun or lists.text[chunk][stage] > 0
        if not is_u_shaped and not lists.vision[chunk][stage] and not lists.text[chunk][stage]:
            yield f"{LIST_NAME} {vision} of vision_encoder and {text} of text_decoder: stage {stage} has none; {_JSON}"
