"""Which layers the stages of a U-shaped pipeline hold, also in the notation of Megatron's pipeline layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.errors import ConfigError, LayoutError


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
