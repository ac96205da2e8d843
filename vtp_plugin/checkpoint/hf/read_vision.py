"""Reads what a ``config.json`` says of pictures: its ``vision_config``, and the fields beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.hf.field_readers import Fields, short
from vtp_plugin.checkpoint.hf.model_family import Family, VisionFields
from vtp_plugin.checkpoint.hf.vision_part import VisionPart
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.vision_tower import VisionTower

_TEXT, _VISION, _TIED = "text_config", "vision_config", "tie_word_embeddings"
_OF_WHOLE: Final = ("model_type", "architectures")


def text_fields(config: Mapping[str, Any], vision: VisionFields, file: Path) -> dict[str, Any]:
    """Return the fields of the language model, which stand in a config beside those of pictures, or in their own part.

    Args:
        config: the config.
        vision: what its other fields mean.
        file: path of the config, for errors.

    Raises:
        ConfigError: one says what another one contradicts.
    """
    inner = Fields(config, {}, file).mapping(_TEXT)
    tied = [each[_TIED] for each in (config, inner) if each.get(_TIED) is not None]
    if any(each != tied[0] for each in tied):
        raise ConfigError(
            f"{file}: {_TIED} is {' and '.join(map(short, tied))}, beside {_TEXT} and in it; transformers 4 computes "
            "with one and transformers 5 with the other; correct the wrong one"
        )
    own = {name: value for name, value in config.items() if name not in vision.beside}
    whole = {name: config[name] for name in _OF_WHOLE if name in config}
    inside = {name: value for name, value in inner.items() if name not in vision.beside and name not in _OF_WHOLE}
    return {**own, **inside, **whole}


def vision_family(family: Family, vision: VisionFields) -> Family:
    """Return what the fields of ``vision_config`` mean, as if it were a config of its own."""
    harmless = {**family.harmless, **vision.harmless, **vision.read}
    return replace(family, defaults=vision.defaults, fixed=vision.fixed, harmless=harmless, vision=None)


def read_vision(
    config: Mapping[str, Any], vision: VisionFields, file: Path, *, channels: int, hidden: int
) -> VisionPart:
    """Read the part that sees.

    Args:
        config: the whole config.
        vision: what its fields mean.
        file: path of the config, for errors.
        channels: number of channels of a head of the language model.
        hidden: width between the layers of the language model.

    Raises:
        ConfigError: a field is missing or has a wrong value.
    """
    beside = Fields(config, vision.defaults_beside, file)
    fields = Fields(beside.mapping(_VISION), vision.defaults, file)
    text = Fields({**config, **beside.mapping(_TEXT)}, {}, file)
    heads, width = fields.number("num_heads"), fields.number("hidden_size")
    tower = VisionTower(
        num_layers=fields.number("depth"),
        hidden=width,
        heads=heads,
        groups=heads,
        kv_channels=width // heads,
        ffn=fields.number("intermediate_size"),
        channels=fields.number("in_channels"),
        frames=fields.number("temporal_patch_size"),
        patch=fields.number("patch_size"),
        merge=fields.number("spatial_merge_size"),
        out=fields.number("out_hidden_size"),
    )
    refuse(f"{file}: {problem}; download it again" for problem in _problems(tower, hidden))
    return VisionPart(
        tower=tower,
        sections=text.sections(channels),
        window=fields.number("window_size"),
        whole_layers=fields.numbers("fullatt_block_indexes"),
        tokens_per_second=fields.number("tokens_per_second"),
        picture_word=beside.number("image_token_id"),
        start_word=beside.number("vision_start_token_id"),
    )


def _problems(tower: VisionTower, hidden: int) -> Iterator[str]:
    if tower.hidden % tower.heads:
        yield f"hidden_size of {_VISION} is {tower.hidden}, and num_heads {tower.heads}; all heads have one size"
    if tower.out != hidden:
        yield f"out_hidden_size of {_VISION} is {tower.out}, and hidden_size {hidden}; a picture's tokens are as wide"
