"""Qwen 2.5 VL, as MindSpeed-MM builds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.tensor_rows import (
    ATTENTION,
    DENSE,
    ENDS,
    QKV_BIAS,
    UNUSED_WINDOW,
    Family,
    Place,
    TensorRow,
    VisionFields,
)
from vtp_plugin.plan.model.gpt_model import LAYERS, PATCHES, PROJECTOR, PROJECTOR_NORM, VisionTower, tower_parameter


def _tower(model: HFModel) -> VisionTower:
    assert model.vision is not None
    return model.vision.tower


_TEXT: Final = Place("text_decoder.", LAYERS, lambda model: model)
_VISION: Final = Place("image_encoder.encoder.", "blocks.layers", _tower)
_PROJECTOR: Final = Place("image_encoder.projector.", "", _tower)


def _in_block(hf_names: tuple[str, ...], name: str) -> TensorRow:
    names = tuple(f"visual.blocks.{{layer}}.{each}" for each in hf_names)
    return TensorRow(hf_names=names, parameter=tower_parameter(name), place=_VISION)


_BLOCK: Final = (
    _in_block(("norm1.weight",), "input_layernorm.weight"),
    _in_block(("norm2.weight",), "pre_mlp_layernorm.weight"),
    *(
        _in_block(tuple(f"{name}.{leaf}" for name in names), f"{ours}.{leaf}")
        for names, ours in (
            (("attn.qkv",), "self_attention.linear_qkv"),
            (("attn.proj",), "self_attention.linear_proj"),
            (("mlp.gate_proj", "mlp.up_proj"), "mlp.linear_fc1"),
            (("mlp.down_proj",), "mlp.linear_fc2"),
        )
        for leaf in ("weight", "bias")
    ),
)
_AROUND: Final = (
    TensorRow(hf_names=("visual.patch_embed.proj.weight",), parameter=PATCHES, place=_VISION),
    TensorRow(hf_names=("visual.merger.ln_q.weight",), parameter=PROJECTOR_NORM, place=_PROJECTOR),
    *(
        TensorRow(hf_names=(f"visual.merger.mlp.{number}.{leaf}",), parameter=parameter, place=_PROJECTOR)
        for number, parameters in zip((0, 2), PROJECTOR, strict=True)
        for leaf, parameter in zip(("weight", "bias"), parameters, strict=True)
    ),
)
QWEN2_5_VL: Final = Family(
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    rows=(*(replace(row, place=_TEXT) for row in (*ENDS, *ATTENTION, QKV_BIAS, *DENSE)), *_AROUND, *_BLOCK),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8},
    harmless={
        **UNUSED_WINDOW,
        **dict.fromkeys(("attention_bias", "qkv_bias"), "its class has biases, whatever it says"),
        **dict.fromkeys(("video_token_id", "vision_end_token_id", "vision_token_id"), "for the processor"),
    },
    has_qkv_bias=True,
    vision=VisionFields(
        defaults={
            "depth": 32,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": (7, 15, 23, 31),
        },
        read={
            "depth": "num_layers of vision_encoder",
            "hidden_size": "hidden_size of vision_encoder",
            "intermediate_size": "ffn_hidden_size of vision_encoder",
            "num_heads": "num_attention_heads of vision_encoder",
            "in_channels": "in_channels of vision_encoder",
            "patch_size": "patch_size of vision_encoder",
            "spatial_merge_size": "spatial_merge_size of vision_encoder",
            "temporal_patch_size": "temporal_patch_size of vision_encoder",
            "tokens_per_second": "tokens_per_second of vision_encoder",
            "window_size": "window_attn_size of vision_encoder",
            "out_hidden_size": "hidden_size of vision_projector",
            "fullatt_block_indexes": "fullatt_block_indexes of vision_encoder",
        },
        fixed={"hidden_act": ("silu",)},
        harmless={
            **dict.fromkeys(("in_chans", "spatial_patch_size"), "not read by transformers"),
            **dict.fromkeys(("dtype", "torch_dtype"), "weights keep their type"),
            "rope_parameters": "its positions have one base",
        },
        beside={
            "image_token_id": "img_context_token_id",
            "vision_start_token_id": "vision_start_token_id",
            "text_config": "the fields of the language model, which may also stand beside it",
            "vision_config": "the fields of the vision tower",
        },
        defaults_beside={"image_token_id": 151655, "vision_start_token_id": 151652},
    ),
)
