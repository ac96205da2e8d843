"""Which layers the stages of a U-shaped pipeline hold, also in the notation of Megatron's pipeline layout."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.errors import ConfigError, LayoutError


def parse_layer_list(text: str) -> tuple[int, ...]:
    """Read numbers of layers: the edge's first part, every cloud stage, the edge's last part.

    Raises:
        ConfigError: an entry is not a positive whole number.

    >>> parse_layer_list("1,3,3,1")
    (1, 3, 3, 1)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise LayoutError(
            f"--num-layer-list {text!r}: every entry is the number of layers of one part, at least 1; write the edge's "
            "first part, every cloud stage, the edge's last part, such as 1,3,3,1"
        )
    return tuple(int(word) for word in words)


def check_layers(layers: Sequence[int], *, num_stages: int, num_layers: int, option: str) -> None:
    """Refuse parts that do not fit the stages or the model.

    Args:
        layers: of every part.
        num_stages: pipeline stages, the edge included.
        num_layers: of the model.
        option: flag that gave them, for error messages.

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
    if min(layers) < 1:
        raise ConfigError(f"{option} has a part without layers ({shown}); give every part at least one")
    if sum(layers) != num_layers:
        raise ConfigError(f"{option} has {sum(layers)} layers ({shown}), --num-layers is {num_layers}; make both equal")


def layout_of(layers: Sequence[int]) -> str:
    """Write Megatron's pipeline layout: first chunks of all stages, then their second ones, the cloud's empty.

    >>> layout_of((1, 3, 3, 1))
    'Et|ttt|ttt|tL||'
    """
    parts = ["t" * part for part in layers]
    num_stages = len(layers) - 1
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L", *[""] * (num_stages - 1)])
