"""The description of a model family: its rows, and what the fields of its ``config.json`` mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vtp_plugin.checkpoint.hf.tensor_rows import TensorRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Where a family's config says how many experts there are.

    Attributes:
        number: names of the field with the experts of a layer, the newest first.
        ffn: name of the field with the inner size of an expert.
        normalised: name of the field that says whether a token's weights add up to 1; None where they always do.
    """

    number: tuple[str, ...]
    ffn: str
    normalised: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """All of them, with that of the experts of a token."""
        return frozenset({*self.number, self.ffn, "num_experts_per_tok"} | ({self.normalised} - {None}))  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFields:
    """What the fields of a family's ``vision_config`` mean.

    Attributes:
        defaults: what transformers takes for a field that a config leaves out.
        read: fields that are carried over, and what becomes of them.
        fixed: fields that change what is computed, with the values that MindSpeed-MM computes.
        harmless: fields of it alone that change nothing, with the reason.
        beside: fields beside it that are of pictures, and what becomes of them.
        defaults_beside: what transformers takes for these.
    """

    defaults: Mapping[str, Any]
    read: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    harmless: Mapping[str, str]
    beside: Mapping[str, str]
    defaults_beside: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one class of transformers computes.

    Attributes:
        model_type: ``model_type`` in the config of its models.
        architecture: name of the class.
        rows: which Hugging Face tensors make which Megatron tensors.
        defaults: what transformers takes for a field that a config leaves out.
        fixed: fields of this family alone that change what is computed, with the values that Megatron computes; of a
            list, of each entry.
        harmless: fields of this family alone that change nothing, with the reason.
        has_qkv_bias: queries, keys and values have biases.
        has_query_norm: queries and keys have norms of their own.
        experts: where the config speaks of experts; None of a dense family.
        vision: where the config speaks of pictures; None of a family that sees none.
        fused: rows that replace those with the same Megatron keys, where all experts of a layer lie in one tensor.
    """

    model_type: str
    architecture: str
    rows: tuple[TensorRow, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    has_qkv_bias: bool = False
    has_query_norm: bool = False
    experts: ExpertFields | None = None
    vision: VisionFields | None = None
    fused: tuple[TensorRow, ...] = ()
