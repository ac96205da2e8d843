"""A tiny Qwen2.5-VL as the JSON files of MindSpeed-MM describe it, and the flags of a run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mindspeed.mm import own_data, samples
from vtp_plugin.plan.layout.layer_lists import num_layers, read_rows

VISION_LAYERS, TEXT_LAYERS = 2, 4
FLAGS = shlex.split(f"""
    --use-mcore-models --tokenizer-type NullTokenizer --vocab-size {samples.VOCABULARY}
    --make-vocab-size-divisible-by 1 --seq-length {samples.SEQUENCE} --micro-batch-size 2
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-gradient-accumulation-fusion --lr 1e-3 --lr-decay-style constant --weight-decay 0
    --clip-grad 1.0 --train-iters 5 --seed 42 --num-workers 0 --log-interval 1 --eval-interval 100 --eval-iters 0
    --distributed-backend gloo --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
""")


def write_files(
    folder: Path,
    vision: Sequence[Any],
    text: Sequence[Any],
    *,
    num_text: int = TEXT_LAYERS,
    is_bf16: bool = False,
    has_switch: bool = False,
    is_frozen: bool = False,
    is_projector_frozen: bool = False,
    is_tied: bool = False,
    is_recomputed: bool = False,
    has_own_data: bool = False,
) -> list[str]:
    """Write the JSON files and return the flags that name them.

    Args:
        folder: where to.
        vision: layers of the vision tower, per stage; or a row for every chunk. The last one has full attention.
        text: layers of the language model, per stage.
        num_text: how many it has in sum; lists may be wrong on purpose.
        is_bf16: in bf16, as MindSpeed-MM's own files, else in fp32.
        has_switch: ask for MindSpeed-MM's own layerwise-disaggregated training.
        is_frozen: the vision tower is not trained.
        is_projector_frozen: nor is what makes language embeddings of its outputs.
        is_tied: the head's weight is the word embedding's, as in the model of 3 billion parameters.
        is_recomputed: every layer computes its activations again in the backward pass.
        has_own_data: MindSpeed-MM's own data pipeline reads pictures and texts, in the place of made samples.
    """
    model = _model(list(vision), list(text), is_bf16)
    model["text_decoder"]["num_layers"] = num_text
    model["image_encoder"]["vision_encoder"]["freeze"] = is_frozen
    model["image_encoder"]["vision_projector"]["freeze"] = is_projector_frozen
    model["text_decoder"]["untie_embeddings_and_output_weights"] = not is_tied
    if is_recomputed:
        for part in (model["image_encoder"]["vision_encoder"], model["text_decoder"]):
            part |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if has_own_data:
        model["image_encoder"]["vision_encoder"] |= {
            "patch_size": own_data.PATCH,
            "window_attn_size": 4 * own_data.PATCH,
        }
    if has_switch:
        model["patch"] = {"layerwise_disaggregated_training": True}
    tree = Path(os.environ["VTP_MINDSPEED_MM"])
    tool = json.loads((tree / "mindspeed_mm" / "tools" / "tools.json").read_text())
    tool["profile"]["profile_type"] = "dynamic"  # the other kind asks torch_npu's profiler even when it is off
    data = own_data.write() if has_own_data else _DATA
    for name, content in {"model": model, "data": data, "tool": tool}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    return [word for name in ("model", "data", "tool") for word in (f"--mm-{name}", str(folder / f"{name}.json"))]


def _model(vision: list[Any], text: list[Any], is_bf16: bool) -> dict[str, Any]:
    precision = {"bf16": is_bf16, "params_dtype": "bf16" if is_bf16 else "fp32"}
    seeing = num_layers(read_rows(vision))
    full = {"num_layers": seeing, "fullatt_block_indexes": sorted({1, seeing - 1})}
    return {
        "model_id": "qwen2_5vl",
        "img_context_token_id": samples.PICTURE,
        "vision_start_token_id": samples.VISION_START,
        "image_encoder": {
            "vision_encoder": {**_VISION, **precision, **full, "pipeline_num_layers": vision},
            "vision_projector": {**_PROJECTOR, **precision},
        },
        "text_decoder": {**_TEXT, **precision, "pipeline_num_layers": text},
        "text_encoder": None,
        "video_encoder": None,
    }


_VISION = {
    "model_id": "qwen2vit",
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "llm_hidden_size": 32,
    "gated_linear_unit": True,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": samples.MERGE,
    "temporal_patch_size": 2,
    "layernorm_epsilon": 1e-06,
    "normalization": "RMSNorm",
    "fp16": False,
    "activation_func": "silu",
    "freeze": False,
    "use_fused_rotary_pos_emb": False,
    "post_layer_norm": False,
    "intermediate_size": 48,
    "tokens_per_second": 2,
    "window_attn_size": 8,
    "attention_mask_type": "general",
}
_PROJECTOR = {
    **{"model_id": "lnmlp", "num_layers": 1, "gated_linear_unit": False, "bias_activation_fusion": False},
    **{"add_bias_linear": True, "input_size": 32, "hidden_size": 64, "ffn_hidden_size": 128},
    **{"activation_func": "gelu", "freeze": False, "layernorm_epsilon": 1e-06, "normalization": "RMSNorm"},
}
_TEXT = {
    "model_id": "qwen2_5_lm",
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "seq_length": samples.SEQUENCE,
    "max_position_embeddings": 128,
    "vocab_size": samples.VOCABULARY,
    "rope_theta": 1000000.0,
    "disable_bias_linear": True,
    "attention_dropout": 0.0,
    "init_method_std": 0.01,
    "hidden_dropout": 0.0,
    "position_embedding_type": "mrope",
    "normalization": "RMSNorm",
    "activation_func": "silu",
    "use_fused_rotary_pos_emb": False,
    "attention_softmax_in_fp32": True,
    "parallel_output": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "mrope_section": [2, 3, 3],
    "rope_scaling": None,
    "gated_linear_unit": True,
    "layernorm_epsilon": 1e-06,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "use_remove_padding": False,
}
_DATA = {
    "dataset_param": {"dataset_type": "huggingface", "preprocess_parameters": {}, "basic_parameters": {}},
    "dataloader_param": {"dataloader_mode": "sampler"},
}
