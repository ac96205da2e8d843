"""The known fields of a ``config.json``: read, fixed to what Megatron computes, or harmless."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from vtp_plugin.checkpoint.hf.model_family import Family

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
