"""Other names of tensors that transformers accepts for a model's class, and tensors that it ignores."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.rope import frequencies

EMBEDDING: Final = "model.embed_tokens.weight"
"""The tensor with the words."""
HEAD: Final = "lm_head.weight"
"""The tensor of the output layer."""
_BASE: Final = "model."
_OF_BASE: Final = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")
# As transformers calls the parts of a model that sees pictures, and as it writes them.
_NESTED: Final = {"model.language_model.": _BASE, "model.visual.": "visual."}
_FREQUENCIES: Final = "rotary_emb.inv_freq"
# Relative and absolute, of half precision: enough to tell bases apart.
_TOLERANCE: Final = (1e-2, 1e-7)


def respelt(names: Collection[str], model: HFModel) -> dict[str, str]:
    """Return the names of a model's class for those that a file has, as transformers finds them.

    A file of the class without output layer has no ``model.`` before its names. Where the output layer is the
    embedding, the file may hold it under either name. The language model beside a vision tower may be named as such.

    >>> model = HFModel(family="llama", num_layers=1, hidden=4, heads=4, groups=2, kv_channels=1, ffn=8, vocab=16,
    ...     max_positions=64, epsilon=1e-5, rotary_base=10000, is_tied=True)
    >>> respelt(["lm_head.weight", "norm.weight"], model)
    {'model.norm.weight': 'norm.weight', 'model.embed_tokens.weight': 'lm_head.weight'}
    """
    has_base = any(name.startswith(_BASE) for name in names)
    found = {_BASE + name if name.startswith(_OF_BASE) and not has_base else name: name for name in names}
    if model.vision is not None:
        found = {_unnested(name): stored for name, stored in found.items()}
    if model.is_tied and HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(HEAD)
    return found


def _unnested(name: str) -> str:
    """Return the name that a tensor has in files for the one that it has in transformers' class."""
    return next((short + name[len(long) :] for long, short in _NESTED.items() if name.startswith(long)), name)


def is_frequencies(name: str) -> bool:
    """Tell whether a tensor has the frequencies of positions, which transformers recomputes from the config."""
    return name.endswith(_FREQUENCIES)


def are_frequencies(values: Sequence[float], model: HFModel) -> bool:
    """Tell whether frequencies are those that follow from a model's config."""
    relative, absolute = _TOLERANCE
    expected = frequencies(model.kv_channels, model.rotary_base, model.rope_factor or 1.0)
    return len(values) == len(expected) and all(
        math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute)
        for found, wanted in zip(values, expected, strict=True)
    )
