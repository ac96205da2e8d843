"""Reads a ``config.json``: each field is read, fixed to what Megatron computes, or known to be harmless."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.hf.all_families import FAMILIES
from vtp_plugin.checkpoint.hf.field_readers import Fields, short
from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.known_fields import LISTS, fixed_fields, is_known, known_fields, shown
from vtp_plugin.checkpoint.hf.model_family import Family
from vtp_plugin.checkpoint.hf.read_vision import read_vision, text_fields, vision_family
from vtp_plugin.checkpoint.hf.side_files import CONFIG, file_of
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import Experts
from vtp_plugin.util.untrusted_files import read_json

GUIDE: Final = "docs/guides/hugging-face.md"
# Far above all models that there are: a few bytes would make a list of names that takes all memory.
_MAX_PARTS: Final = 100_000


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a published model.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    file = file_of(folder, CONFIG)
    try:
        read = read_json(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is missing or cannot be read; it says what the model is; give the folder of a model as it is "
            "published"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; it says what the model is; give the folder of a model as it is "
            "published"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON object ({error}); it says what the model is; download it again") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{file} is no JSON object; it says what the model is; download it again")
    return read


def family_of(config: Mapping[str, Any], file: Path) -> Family:
    """Find the family of a config.

    Args:
        config: the config.
        file: path of the config, for errors.

    Raises:
        ConfigError: it is unknown.
    """
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{file}: model_type is {name!r}; known are {', '.join(sorted(FAMILIES))}; {GUIDE} says how to add a family"
        )
    return family


def read_model(config: Mapping[str, Any], file: Path) -> HFModel:
    """Read the model that a config describes.

    Args:
        config: the config.
        file: path of the config, for errors.

    Raises:
        ConfigError: the family or a field is unknown, or has a value that Megatron does not compute.
    """
    family = family_of(config, file)
    vision, own = family.vision, config
    if vision is not None:
        own = text_fields(config, vision, file)
        seen = Fields(config, {}, file).mapping("vision_config")
        refuse(f"{file}: vision_config: {problem}" for problem in _problems(seen, vision_family(family, vision)))
    fields = Fields(own, family.defaults, file, has_sections=vision is not None)
    refuse(f"{file}: {problem}" for problem in (*_problems(own, family), *_problems_of_class(family, fields)))
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    base, factor = fields.positions()
    experts = family.experts
    made = HFModel(
        family=family.model_type,
        num_layers=fields.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=fields.number("num_key_value_heads", heads),
        kv_channels=fields.number("head_dim", hidden // heads),
        ffn=fields.number("intermediate_size"),
        vocab=fields.number("vocab_size"),
        max_positions=fields.number("max_position_embeddings"),
        epsilon=fields.real("rms_norm_eps"),
        rotary_base=base,
        rope_factor=factor,
        is_tied=fields.truth("tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias,
        has_query_norm=family.has_query_norm,
        experts=None
        if experts is None
        else Experts(
            number=fields.number(fields.first(experts.number)), ffn=fields.number(experts.ffn), shared_ffn=0, layers=()
        ),
        topk=0 if experts is None else fields.number("num_experts_per_tok"),
        is_topk_normalised=experts is None or experts.normalised is None or fields.truth(experts.normalised),
        dropout=fields.real("attention_dropout", 0.0),
        vision=None
        if vision is None
        else read_vision(config, vision, file, channels=fields.number("head_dim", hidden // heads), hidden=hidden),
    )
    if (count := made.num_layers * max(made.num_experts, made.groups)) > _MAX_PARTS:
        raise ConfigError(
            f"{file}: num_hidden_layers times experts or key-value heads is {count}; at most {_MAX_PARTS} are read; "
            "download it again"
        )
    if made.heads % made.groups:
        raise ConfigError(
            f"{file}: num_attention_heads is {made.heads}, and num_key_value_heads {made.groups}; every group has as "
            "many heads; download it again"
        )
    if made.experts is None:
        return made
    # Not before their number is known to be small.
    return replace(made, experts=replace(made.experts, layers=(True,) * made.num_layers))


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Say which fields are unknown or have a value that Megatron does not compute."""
    known = known_fields(family)
    for name in sorted(name for name in config if not is_known(name, known)):
        yield (
            f"{name} is {short(config[name])}, and no field of {family.model_type} that is known; it may change what "
            f"is computed; remove it from the file if transformers' {family.architecture} does not read it ({GUIDE})"
        )
    for name, values in fixed_fields(family).items():
        value = {**family.defaults, **config}.get(name)
        if (name in config or name in family.defaults) and not _is_computed(name, value, values):
            yield (
                f"{name} is {short(value)}; only {shown(values)} is computed as transformers does; take another model"
            )


def _problems_of_class(family: Family, fields: Fields) -> Iterator[str]:
    """Say which class a config is of, if it is another one."""
    found = fields.texts("architectures", [family.architecture])
    if found and family.architecture not in found:
        yield (
            f"architectures is {short(found)}; {family.architecture} is expected; take the model for causal language, "
            f'or set the field to ["{family.architecture}"] where the weights are such a model\'s'
        )


def _is_computed(name: str, value: Any, values: tuple[Any, ...]) -> bool:
    """Tell whether a field says what Megatron computes; where that is false or nothing, null says so, too."""
    # Python takes 0 for False, and JSON does not.
    passing = [(each, type(each)) for each in map(_real, values)]
    if value is None and (name in LISTS or None in values or False in [each for each, kind in passing if kind is bool]):
        return True
    entries = value if name in LISTS and isinstance(value, list) else None if name in LISTS else [value]
    return entries is not None and all((entry, type(entry)) in passing for entry in map(_real, entries))


def _real(value: Any) -> Any:
    return float(value) if type(value) is int else value
