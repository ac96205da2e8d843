"""Reads the config.json of a published model: fields that are known, and what each means."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.hf.all_families import FAMILIES
from vtp_plugin.checkpoint.hf.hf_model import HIGH, LOW, ORIGINAL, HFModel, VisionPart
from vtp_plugin.checkpoint.hf.tensor_rows import Family, VisionFields
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import Experts, VisionTower
from vtp_plugin.util.typed_json import inside, open_file, read_json

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
_HOW, _GENERATION, _RETURNED = "how transformers computes", "for generation", "what transformers returns"
_LABELS, _TOOL, _LENGTH = "for classification", "a note of a tool", "a length for the tokenizer"
HARMLESS: Final = {
    **dict.fromkeys(
        (
            *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
            *("_experts_implementation", "_flash_attn_2_enabled", "attn_implementation", "cache_implementation"),
            *("chunk_size_feed_forward", "gradient_checkpointing", "use_bfloat16", "use_flash_attention"),
            *("use_flash_attn", "torchscript", "pretraining_tp"),
        ),
        _HOW,
    ),
    **dict.fromkeys(
        (
            *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty"),
            *("do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id"),
            *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty"),
            *("max_length", "max_new_tokens", "min_length", "min_p", "no_repeat_ngram_size", "num_beam_groups"),
            *("num_beams", "num_return_sequences", "pad_token_id", "penalty_alpha", "prefix", "remove_invalid_values"),
            *("renormalize_logits", "repetition_penalty", "sep_token_id", "suppress_tokens", "task_specific_params"),
            *("temperature", "top_k", "top_p", "typical_p", "unk_token_id", "use_cache"),
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        (
            *("keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "output_scores"),
            *("return_dict", "return_dict_in_generate"),
        ),
        _RETURNED,
    ),
    **dict.fromkeys(
        (
            *("classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
            "tf_legacy_loss",
        ),
        _LABELS,
    ),
    **dict.fromkeys(("model_max_length", "max_sequence_length"), _LENGTH),
    **dict.fromkeys(("transformers.js_config", "is_llama_config", "is_decoder", "model_name"), _TOOL),
    **dict.fromkeys(("_name_or_path", "name_or_path", "_commit_hash", "_from_model_config"), "where it came from"),
    "initializer_range": "before training",
    "max_window_layers": "not used, since use_sliding_window is false",
    "tokenizer_class": "for the tokenizer",
    "transformers_version": "who wrote it",
}
"""Fields that change nothing, of every family."""
HARMLESS_PREFIXES: Final = {"unsloth_": _TOOL}
"""Beginnings of names of fields that change nothing."""
FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("attention_bias", "bias", "lm_head_bias", "mlp_bias", "qkv_bias", "use_bias"), (False,)),
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "tie_encoder_decoder"), (False,)),
    **dict.fromkeys(("rope_interleaved", "use_mrope", "use_qk_norm", "use_sliding_window"), (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "auto_map", "cross_attention_hidden_size"), (None,)),
    **dict.fromkeys(("clip_qkv", "final_logit_softcapping", "sliding_window"), (None,)),
    **dict.fromkeys(("pruned_heads", "quantization", "quantization_config"), (None, {})),
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "layer_types": ("full_attention",),
    "num_nextn_predict_layers": (0, None),
    "partial_rotary_factor": (1.0,),
}
"""Fields that change what is computed, of every family, with the values that pass; of a list, of each entry."""
LISTS: Final = frozenset({"layer_types", "mlp_only_layers"})
"""Those of them that are lists."""


def fixed_fields(family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a family's config that must have certain values, with these."""
    return {**{name: values for name, values in FIXED.items() if name not in family.harmless}, **family.fixed}


def known_fields(family: Family) -> dict[str, str]:
    """Return all fields of a family's config that are known, with what becomes of them."""
    fixed = {name: f"must be {shown(values)}" for name, values in fixed_fields(family).items()}
    experts = {} if family.experts is None else dict.fromkeys(sorted(family.experts.names), "experts")
    prefixes = {f"{prefix}*": reason for prefix, reason in HARMLESS_PREFIXES.items()}
    return {**HARMLESS, **prefixes, **family.harmless, **experts, **READ, **fixed, **_of_pictures(family)}


def _of_pictures(family: Family) -> dict[str, str]:
    if (vision := family.vision) is None:
        return {}
    fixed = {name: f"must be {shown(values)}" for name, values in vision.fixed.items()}
    own = {**vision.harmless, **vision.read, **fixed}
    sections = {"rope_scaling": "mrope_section of text_decoder, and no scaling"}
    return {**sections, **vision.beside, **{f"vision_config: {name}": meaning for name, meaning in own.items()}}


def is_known(name: str, known: Mapping[str, str]) -> bool:
    """Tell whether a field is known, by its name or by how that begins."""
    return name in known or name.startswith(tuple(HARMLESS_PREFIXES))


def passed_over(names: Iterable[str], family: Family) -> Iterator[str]:
    """Yield those of a config's fields that change nothing, whatever they say.

    >>> from vtp_plugin.checkpoint.hf.all_families import FAMILIES
    >>> [*passed_over(["hidden_size", "unsloth_fixed", "max_length", "rope_interleaved"], FAMILIES["llama"])]
    ['max_length', 'unsloth_fixed']
    """
    read = READ.keys() | fixed_fields(family).keys() | (family.experts.names if family.experts else set())
    harmless = HARMLESS.keys() | family.harmless.keys()
    for name in sorted(names):
        if name not in read and (name in harmless or name.startswith(tuple(HARMLESS_PREFIXES))):
            yield name


def shown(values: tuple[Any, ...]) -> str:
    """Write the values that a field may have."""
    return " or ".join(map(json.dumps, values)) or "[]"


_LLAMA3: Final = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_max_position_embeddings": ORIGINAL}
_MAX_SHOWN: Final = 60


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number; Python takes True for one, and JSON's reader takes Infinity."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def short(value: Any) -> str:
    """Write a value as JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class Fields:
    """Reads fields of a config.

    Args:
        config: the config.
        defaults: values of the fields that it leaves out.
        file: path of the config, for errors.
        has_sections: whether positions are times, heights and widths, each with a section of the channels.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], file: Path, *, has_sections: bool = False
    ) -> None:
        # The base of positions stands in one of three places, so its default comes last.
        self._rope_theta: Any = defaults.get("rope_theta")
        self._has_sections = has_sections
        self._fields = {**{name: value for name, value in defaults.items() if name != "rope_theta"}, **config}
        self._file = file

    def __repr__(self) -> str:
        return f"<{len(self._fields)} fields of {self._file}>"

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of several names that is there."""
        return next((name for name in names if name in self._fields), names[0])

    def number(self, name: str, default: int | None = None) -> int:
        """Read a whole number above 0."""
        return self._read(name, default, "a whole number above 0", lambda value: type(value) is int and value > 0)

    def real(self, name: str, default: float | None = None) -> float:
        """Read a number that is not below 0."""
        return float(self._read(name, default, "a number", lambda value: is_number(value) and value >= 0))

    def truth(self, name: str) -> bool:
        """Read true or false."""
        return self._read(name, False, "true or false", lambda value: type(value) is bool)

    def mapping(self, name: str) -> dict[str, Any]:
        """Read an object; empty where there is none."""
        return self._read(name, {}, "an object or null", lambda value: isinstance(value, dict))

    def texts(self, name: str, default: list[str]) -> list[str]:
        """Read a list of texts."""
        return self._read(
            name,
            default,
            "a list of texts",
            lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        )

    def numbers(self, name: str) -> tuple[int, ...]:
        """Read a list of whole numbers that are not negative."""
        kind = "a list of whole numbers"
        found = self._read(name, None, kind, lambda value: isinstance(value, list | tuple))
        if not all(type(each) is int and each >= 0 for each in found):
            raise self._wrong(name, found, kind)
        return tuple(found)

    def sections(self, channels: int) -> tuple[int, ...]:
        """Read the sections of a head's channels whose positions are times, heights and widths.

        Args:
            channels: number of a head's channels.
        """
        places = (self.mapping(name) for name in ("rope_parameters", "rope_scaling"))
        found: Any = next((each["mrope_section"] for each in places if "mrope_section" in each), None)
        is_right = isinstance(found, list) and len(found) == 3 and all(type(each) is int and each > 0 for each in found)
        if not is_right or 2 * sum(found) != channels:
            raise self._wrong("mrope_section", found, f"three whole numbers above 0, {channels // 2} together")
        return tuple(found)

    def _read(self, name: str, default: Any, kind: str, is_right: Callable[[Any], bool]) -> Any:
        value = self._fields.get(name)
        value = default if value is None else value
        if not is_right(value):
            raise self._wrong(name, value, kind)
        return value

    def _wrong(self, name: str, value: Any, kind: str) -> ConfigError:
        found = "missing" if value is None else short(value)
        return ConfigError(f"{self._file}: {name} is {found}; it must be {kind}; download it again")

    def positions(self) -> tuple[int, float | None]:
        """Return the base of the rotary positions, and the factor of their scaling, from old fields or new ones."""
        scalings = {name: found for name in ("rope_parameters", "rope_scaling") if (found := self.mapping(name))}
        places = [("rope_theta", self._fields), *((f"{name}: rope_theta", found) for name, found in scalings.items())]
        bases = {self._base(name, found["rope_theta"]) for name, found in places if found.get("rope_theta") is not None}
        factors = {self._factor(name, found) for name, found in scalings.items()}
        if len(bases) > 1 or len(factors) > 1:
            raise ConfigError(
                f"{self._file}: rope_theta, rope_scaling and rope_parameters say different things; one of them is "
                "enough; remove the wrong one"
            )
        return next(iter(bases), int(self._rope_theta)), next(iter(factors), None)

    def _base(self, name: str, base: Any) -> int:
        if not is_number(base) or base <= 0:
            raise self._wrong(name, base, "a number above 0")
        if base != int(base):
            raise ConfigError(
                f"{self._file}: {name} is {short(base)}; Megatron's --rotary-base is a whole number; take another model"
            )
        return int(base)

    def _factor(self, name: str, scaling: Mapping[str, Any]) -> float | None:
        """Read one of the two fields."""
        left = {key: value for key, value in scaling.items() if key != "rope_theta"}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        if self._has_sections:
            left.pop("mrope_section", None)
            kind = "default" if kind == "mrope" else kind
        if left.pop("partial_rotary_factor", 1.0) == 1.0:
            if kind == "default" and not left:
                return None
            factor = left.pop("factor", None)
            if kind == "llama3" and left == _LLAMA3 and is_number(factor) and factor > 0:
                return float(factor)
        numbers = ", ".join(f"{key} {value:g}" for key, value in _LLAMA3.items())
        raise ConfigError(
            f"{self._file}: {name} is {short(scaling)}; Megatron has no scaling of positions but llama3 with any "
            f"factor and {numbers}; take another model"
        )


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
    refuse(f"{file}: {problem}; download it again" for problem in _problems_of_vision(tower, hidden))
    return VisionPart(
        tower=tower,
        sections=text.sections(channels),
        window=fields.number("window_size"),
        whole_layers=fields.numbers("fullatt_block_indexes"),
        tokens_per_second=fields.number("tokens_per_second"),
        picture_word=beside.number("image_token_id"),
        start_word=beside.number("vision_start_token_id"),
    )


def _problems_of_vision(tower: VisionTower, hidden: int) -> Iterator[str]:
    if tower.hidden % tower.heads:
        yield f"hidden_size of {_VISION} is {tower.hidden}, and num_heads {tower.heads}; all heads have one size"
    if tower.out != hidden:
        yield f"out_hidden_size of {_VISION} is {tower.out}, and hidden_size {hidden}; a picture's tokens are as wide"


CONFIG: Final = "config.json"
"""The name of the file that says what a model is."""
_NAMES: Final = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    CONFIG,
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "vocab.json",
)
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file of a model, which lies in its folder.

    A link is followed to a file of the folder. In the cache of Hugging Face, where a model's folder is
    ``REPOSITORY/snapshots/REVISION`` and full of links, it is followed to the files of ``REPOSITORY/blobs``, too.

    Args:
        folder: folder of the model.
        name: name of the file, perhaps from another file of the model.

    Raises:
        ConfigError: it is no such name, or a link to elsewhere.
    """
    path, parts = folder / name, Path(name).parts
    revision, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_cache = revision.parent.name == _SNAPSHOTS and target.parent == revision.parent.parent / _BLOBS
    if is_cache and ".." not in parts and not Path(name).is_absolute():
        return path
    try:
        return inside(folder, name)
    except ValueError as error:
        raise ConfigError(
            f"{folder}: {error}; a model's files lie in its folder, or in {_BLOBS} of its repository in Hugging Face's "
            "cache; put the file itself there, or remove it"
        ) from None


def carried_files(folder: Path) -> tuple[Path, ...]:
    """Return the config, the generation config and the files of the tokenizer that are there.

    Raises:
        ConfigError: one is a link to elsewhere.
    """
    return tuple(file_of(folder, name) for name in _NAMES if os.path.lexists(folder / name))


def copy_carried(folder: Path, target: Path) -> list[Path]:
    """Copy the config, the generation config and the files of the tokenizer.

    Args:
        folder: folder of the model.
        target: the folder to copy to; it exists.

    Returns:
        The copies.

    Raises:
        ConfigError: one is a link to elsewhere, or no file.
    """
    copies = [target / file.name for file in carried_files(folder)]
    for copy in copies:
        try:
            source = open_file(folder / copy.name)
        except OSError as error:
            raise ConfigError(
                f"{folder / copy.name} cannot be read: {error.strerror}; it is carried along; put a file "
                "there, or remove it"
            ) from None
        with source, copy.open("wb") as written:
            shutil.copyfileobj(source, written)
    return copies


_MAX_NUMBER: Final = 1 << 40
_MAX_BYTES: Final = 256 << 20


def known_words(folder: Path) -> tuple[int, str] | None:
    """Return how many words the tokenizer of a folder knows, those that were added included, and the file that says so.

    Files that are missing or damaged say nothing.

    Args:
        folder: folder with the files of the tokenizer.
    """
    found: list[tuple[int, str]] = []
    for name, numbers in _READERS.items():
        try:
            read = [each for each in numbers(read_json(folder / name, _MAX_BYTES)) if type(each) is int]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        found += [(1 + each, name) for each in read if 0 <= each < _MAX_NUMBER]
    return max(found, default=None)


def _of_tokenizer(read: Any) -> Iterator[Any]:
    words = read["model"].get("vocab", {})
    yield from words.values() if isinstance(words, dict) else [len(words) - 1]  # of unigrams, a list
    yield from (each["id"] for each in read.get("added_tokens") or ())


def _of_config(read: Any) -> Iterator[Any]:
    yield from map(int, read.get("added_tokens_decoder", {}))


_READERS: Final = {
    "tokenizer.json": _of_tokenizer,
    "added_tokens.json": lambda read: read.values(),
    "vocab.json": lambda read: read.values(),
    "tokenizer_config.json": _of_config,
}


GUIDE: Final = "docs/guides/hugging-face.md"
# Far above all models that there are: a few bytes would make a list of names that takes all memory.
_MAX_PARTS: Final = 100_000


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a published model.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    file = file_of(folder, CONFIG)
    return read_object(file, "the model is", "give the folder of a model as it is published", "download it again")


def read_object(file: Path, what: str, where: str, again: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        file: path of the file.
        what: what it says, for errors.
        where: way out if there is no such file.
        again: way out if it is damaged.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    try:
        read = read_json(file)
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing or cannot be read; it says what {what}; {where}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; it says what {what}; {where}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON object ({error}); it says what {what}; {again}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{file} is no JSON object; it says what {what}; {again}")
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
