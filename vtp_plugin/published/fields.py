"""Reads a ``config.json``: every field is read, fixed to what Megatron computes, or known to be harmless."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.published.family import Family
from vtp_plugin.published.model import Model
from vtp_plugin.published.positions import HIGH, LOW, ORIGINAL
from vtp_plugin.published.table import FAMILIES

CONFIG: Final = "config.json"
GUIDE: Final = "docs/hugging-face.md"
READ: Final = {
    "architectures": "the class must be that of the family",
    "attention_dropout": "--attention-dropout",
    "dtype": "weights keep their type",
    "head_dim": "--kv-channels; default: hidden_size over num_attention_heads",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "max_position_embeddings": "--max-position-embeddings",
    "model_type": "chooses the family",
    "num_attention_heads": "--num-attention-heads",
    "num_hidden_layers": "--num-layers",
    "num_key_value_heads": "--num-query-groups; default: num_attention_heads",
    "rms_norm_eps": "--norm-epsilon",
    "rope_parameters": "as rope_theta and rope_scaling, since transformers 5",
    "rope_scaling": "none, or that of Llama 3: --use-rope-scaling --rope-scaling-factor",
    "rope_theta": "--rotary-base, a whole number",
    "tie_word_embeddings": "--untie-embeddings-and-output-weights where false",
    "torch_dtype": "as dtype, before transformers 5",
    "vocab_size": "rows of the embedding, without padding",
}
"""Fields that are carried over, of every family."""
HARMLESS: Final = {
    "_attn_implementation_autoset": "how transformers computes",
    "_name_or_path": "where it came from",
    "bos_token_id": "for generation",
    "eos_token_id": "for generation",
    "initializer_range": "before training",
    "pad_token_id": "for generation",
    "transformers_version": "who wrote it",
    "use_cache": "for generation",
}
"""Fields that change nothing, of every family."""
FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "auto_map": (None,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
"""Fields that change what is computed, of every family, with the values that pass."""
_LLAMA3: Final = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": ORIGINAL}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a published model.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    file = folder / CONFIG
    try:
        read = json.loads(file.read_text())
    except OSError:
        raise ConfigError(
            f"{file} is missing or cannot be read; it says what the model is; give the folder of a model as it is "
            "published"
        ) from None
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"{file} is no JSON object; it says what the model is; download it again")
    return {str(name): value for name, value in read.items()}


def family_of(config: Mapping[str, Any], file: Path) -> Family:
    """Find the family of a config.

    Args:
        config: as it was read.
        file: from which.

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


def read_model(config: Mapping[str, Any], file: Path) -> Model:
    """Read what a config says of its model.

    Args:
        config: as it was read.
        file: from which.

    Raises:
        ConfigError: the family or a field is unknown, or has a value that Megatron does not compute.
    """
    family = family_of(config, file)
    refuse(f"{file}: {problem}" for problem in _problems(config, family))
    fields = _Fields(config, family.defaults, file)
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    base, factor = fields.positions()
    experts = family.experts
    made = Model(
        family=family.model_type,
        num_layers=fields.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=fields.number("num_key_value_heads", heads),
        head_dim=fields.number("head_dim", hidden // heads),
        ffn=fields.number("intermediate_size"),
        vocab=fields.number("vocab_size"),
        max_positions=fields.number("max_position_embeddings"),
        epsilon=fields.real("rms_norm_eps"),
        rotary_base=base,
        rope_factor=factor,
        is_tied=fields.truth("tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias,
        has_query_norm=family.has_query_norm,
        num_experts=0 if experts is None else fields.number(fields.first(experts.number)),
        topk=0 if experts is None else fields.number("num_experts_per_tok"),
        expert_ffn=0 if experts is None else fields.number(experts.ffn),
        is_topk_normalised=experts is None or experts.normalised is None or fields.truth(experts.normalised),
        dropout=fields.real("attention_dropout", 0.0),
    )
    if made.heads % made.groups:
        raise ConfigError(
            f"{file}: num_attention_heads is {made.heads}, and num_key_value_heads {made.groups}; every group has as "
            "many heads; download it again"
        )
    return made


def known_fields(family: Family) -> dict[str, str]:
    """Return all fields of a family's config that are known, with what becomes of them."""
    fixed = {name: f"must be {_shown(values)}" for name, values in {**FIXED, **family.fixed}.items()}
    experts = {} if family.experts is None else dict.fromkeys(sorted(family.experts.names), "experts")
    return {**HARMLESS, **family.harmless, **experts, **READ, **fixed}


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Say which fields are unknown or have a value that Megatron does not compute."""
    known, fixed = known_fields(family), {**FIXED, **family.fixed}
    for name in sorted(config.keys() - known.keys()):
        yield (
            f"{name} is {_short(config[name])}, and no field of {family.model_type} that is known; it may change what "
            f"is computed; {GUIDE} says which are known"
        )
    for name, values in fixed.items():
        value = config.get(name, family.defaults.get(name, values[0] if values else ()))
        entries = [*map(_real, value if isinstance(value, list) else [value] if values else [])]
        # Python takes 0 for False, and JSON does not.
        if any((entry, type(entry)) not in [(each, type(each)) for each in map(_real, values)] for entry in entries):
            yield (
                f"{name} is {_short(value)}; only {_shown(values)} is computed as transformers does; take another model"
            )
    if family.architecture not in (found := config.get("architectures") or [family.architecture]):
        yield f"architectures is {_short(found)}; {family.architecture} is expected; take the model for causal language"


def _real(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _shown(values: tuple[Any, ...]) -> str:
    return " or ".join(map(json.dumps, values)) or "[]"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Fields:
    """Reads fields of a config.

    Args:
        config: that has them.
        defaults: of those that it leaves out.
        file: that they come from.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], file: Path) -> None:
        # The base of positions stands in one of three places, so its default comes last.
        self._rope_theta = defaults["rope_theta"]
        self._fields = {**{name: value for name, value in defaults.items() if name != "rope_theta"}, **config}
        self._file = file

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of several names that is there."""
        return next((name for name in names if name in self._fields), names[0])

    def number(self, name: str, default: int | None = None) -> int:
        """Read a whole number above 0."""
        return self._read(name, default, "a whole number above 0", lambda value: type(value) is int and value > 0)

    def real(self, name: str, default: float | None = None) -> float:
        """Read a number that is not below 0."""
        found = self._read(name, default, "a number", lambda value: type(value) in (int, float) and value >= 0)
        return float(found)

    def truth(self, name: str) -> bool:
        """Read true or false."""
        return self._read(name, False, "true or false", lambda value: type(value) is bool)

    def _read(self, name: str, default: Any, kind: str, is_right: Callable[[Any], bool]) -> Any:
        value = self._fields.get(name)
        value = default if value is None else value
        if not is_right(value):
            shown = "missing" if value is None else _short(value)
            raise ConfigError(f"{self._file}: {name} is {shown}; it must be {kind}; download it again")
        return value

    def positions(self) -> tuple[int, float | None]:
        """Return the base of the rotary positions, and the factor of their scaling, from old fields or new ones."""
        scalings = {name: found for name in ("rope_parameters", "rope_scaling") if (found := self._fields.get(name))}
        bases = {self._fields["rope_theta"] for name in ("rope_theta",) if self._fields.get(name) is not None}
        bases |= {found["rope_theta"] for found in scalings.values() if "rope_theta" in found}
        factors = {self._factor(name, found) for name, found in scalings.items()}
        if len(bases) > 1 or len(factors) > 1:
            raise ConfigError(
                f"{self._file}: rope_theta, rope_scaling and rope_parameters say different things; one of them is "
                "enough; remove the wrong one"
            )
        base = next(iter(bases), self._rope_theta)
        if type(base) not in (int, float) or base != int(base):
            raise ConfigError(
                f"{self._file}: rope_theta is {_short(base)}; Megatron's --rotary-base is a whole number; take another "
                "model"
            )
        return int(base), next(iter(factors), None)

    def _factor(self, name: str, scaling: Mapping[str, Any]) -> float | None:
        """Read one of the two fields."""
        left = {key: value for key, value in scaling.items() if key != "rope_theta"}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        if left.pop("partial_rotary_factor", 1.0) == 1.0:
            if kind == "default" and not left:
                return None
            factor = left.pop("factor", None)
            if kind == "llama3" and left == _LLAMA3 and type(factor) in (int, float):
                return float(factor)
        numbers = ", ".join(f"{key} {value:g}" for key, value in _LLAMA3.items())
        raise ConfigError(
            f"{self._file}: {name} is {_short(scaling)}; Megatron has no scaling of positions but llama3 with any "
            f"factor and {numbers}; take another model"
        )
