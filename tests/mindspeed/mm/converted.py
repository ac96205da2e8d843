"""A tiny Qwen2.5-VL made by transformers, and MindSpeed-MM's own converter run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.mindspeed.mm import samples


def write_hugging_face(folder: Path, model: Mapping[str, Any]) -> None:
    """Write the model of a JSON file of MindSpeed-MM as Hugging Face does, with weights of its own.

    Args:
        folder: where to.
        model: the JSON file.
    """
    import transformers

    text, image = model["text_decoder"], model["image_encoder"]
    vision = image["vision_encoder"]
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "intermediate_size": text["ffn_hidden_size"],
            "num_hidden_layers": text["num_layers"],
            "num_key_value_heads": text["num_query_groups"],
            "rope_scaling": {"type": "mrope", "mrope_section": text["mrope_section"]},
            "rms_norm_eps": text["layernorm_epsilon"],
            **{name: text[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "rope_theta")},
        },
        vision_config={
            "depth": vision["num_layers"],
            "intermediate_size": vision["ffn_hidden_size"],
            "num_heads": vision["num_attention_heads"],
            "out_hidden_size": image["vision_projector"]["hidden_size"],
            "window_size": vision["window_attn_size"],
            "tokens_per_second": vision["tokens_per_second"],
            **{name: vision[name] for name in ("hidden_size", "patch_size", "fullatt_block_indexes")},
        },
        image_token_id=model["img_context_token_id"],
        video_token_id=samples.VIDEO,
        vision_start_token_id=model["vision_start_token_id"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    made = transformers.Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            # Biases and norms, too: transformers makes them zeros and ones, which could be swapped unseen.
            weight.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.1 * torch.randn(weight.shape))
    made.save_pretrained(folder)


def convert(
    command: str,
    source: Path,
    folder: Path,
    vision: Sequence[Sequence[int]],
    text: Sequence[Sequence[int]],
    *,
    tp_size: int = 1,
) -> None:
    """Run MindSpeed-MM's converter.

    Args:
        command: of the converter: hf_to_mm, hf_to_mm_ldt.
        source: what Hugging Face wrote.
        folder: where its tree goes.
        vision: layers of the vision tower, a row for every chunk of the stages.
        text: layers of the language model.
        tp_size: tensor-parallel size of all stages.
    """
    tree = os.environ["VTP_MINDSPEED_MM"]
    words = {
        "mm_dir": folder,
        "hf_config.hf_dir": source,
        "parallel_config.vit_pp_layers": [list(row) for row in vision],
        "parallel_config.llm_pp_layers": [list(row) for row in text],
        "parallel_config.tp_size": tp_size,
    }
    done = subprocess.run(
        [sys.executable, "-m", "checkpoint.convert_cli", "Qwen2_5_VLConverter", command]
        + [part for name, value in words.items() for part in (f"--cfg.{name}", str(value))],
        capture_output=True,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tree, *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
