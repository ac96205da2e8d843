"""A small random Qwen 2.5 VL that transformers makes, and its weights as MindSpeed-MM's converters write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SIZES: Mapping[str, Any] = {
    "vision": {"depth": 5, "hidden_size": 96, "intermediate_size": 60, "num_heads": 12, "out_hidden_size": 96}
    | {"patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1, 4], "tokens_per_second": 2},
    "text": {"num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 72, "num_attention_heads": 12}
    | {"num_key_value_heads": 6, "vocab_size": 72, "max_position_embeddings": 512, "rms_norm_eps": 3e-6}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 50000.0},
}
"""Layers of both parts divide by no number of stages; heads, groups and words do by 2 and 3."""
WORDS: dict[str, Any] = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}
# The rows of lists that MindSpeed-MM's document has, in small, and others.
LISTS = {
    "as documented": ([[1, 2, 1], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 2, 2], [0, 0, 0]]),
    "layers of text on the edge": ([[2, 2], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]]),
    "one ring": ([[4, 0], [1, 0], [0, 0]], [[0, 0], [2, 1], [1, 0]]),
}
Tensors = dict[str, Any]


def make_vision(folder: Path, *, dtype: Any = torch.float32, is_tied: bool = False, max_shard: str = "5GB") -> Any:
    """Make a model, save it in a folder as it would be published, and return it."""
    import transformers

    torch.manual_seed(7)
    words = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**SIZES["text"], **words, "tie_word_embeddings": is_tied},
        vision_config=SIZES["vision"],
        tie_word_embeddings=is_tied,
        **WORDS,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            middle = 1.0 if "norm" in name or "ln_q" in name else 0.0
            weight.copy_(middle + torch.randn(weight.shape) * (0.2 if weight.dim() == 1 else weight[0].numel() ** -0.5))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard)
    return model.float().eval()


def logits_of_pictures(model: Any, seed: int = 3) -> Any:
    """Compute the logits of two samples with pictures of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    grids = torch.tensor([[1, 4, 6], [1, 8, 4]])
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 2 * 2, generator=generator)
    length = 16
    tokens = torch.randint(3, 60, (2, length), generator=generator)
    for row, count in enumerate((grids.prod(1) // 4).tolist()):
        tokens[row, 2] = WORDS["vision_start_token_id"]
        tokens[row, 3 : 3 + count] = WORDS["image_token_id"]
    with torch.no_grad():
        return model(input_ids=tokens, pixel_values=pixels, image_grid_thw=grids).logits


_NAMES = {
    r"visual\.blocks\.(\d+)\.norm1\.": r"image_encoder.encoder.blocks.layers.\1.input_layernorm.",
    r"visual\.blocks\.(\d+)\.norm2\.": r"image_encoder.encoder.blocks.layers.\1.pre_mlp_layernorm.",
    r"visual\.blocks\.(\d+)\.attn\.qkv\.": r"image_encoder.encoder.blocks.layers.\1.self_attention.linear_qkv.",
    r"visual\.blocks\.(\d+)\.attn\.proj\.": r"image_encoder.encoder.blocks.layers.\1.self_attention.linear_proj.",
    r"visual\.blocks\.(\d+)\.mlp\.down_proj\.": r"image_encoder.encoder.blocks.layers.\1.mlp.linear_fc2.",
    r"visual\.blocks\.(\d+)\.mlp\.(gate|up)_proj\.": r"image_encoder.encoder.blocks.layers.\1.mlp.\2.",
    r"visual\.patch_embed\.": "image_encoder.encoder.patch_embed.",
    r"visual\.merger\.ln_q\.": "image_encoder.projector.layernorm.",
    r"visual\.merger\.mlp\.0\.": "image_encoder.projector.encoder.linear_fc1.",
    r"visual\.merger\.mlp\.2\.": "image_encoder.projector.encoder.linear_fc2.",
    r"model\.embed_tokens\.": "text_decoder.embedding.word_embeddings.",
    r"model\.norm\.": "text_decoder.decoder.final_layernorm.",
    r"lm_head\.": "text_decoder.output_layer.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"text_decoder.decoder.layers.\1.input_layernorm.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"text_decoder.decoder.layers.\1.pre_mlp_layernorm.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"text_decoder.decoder.layers.\1.self_attention.linear_proj.",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"text_decoder.decoder.layers.\1.self_attention.\2.",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.": r"text_decoder.decoder.layers.\1.mlp.linear_fc2.",
    r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.": r"text_decoder.decoder.layers.\1.mlp.\2.",
}
_BY_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
_BY_ROWS = re.compile(r".*(linear_qkv|linear_fc1)\.(weight|bias)|text_decoder\.(output_layer|embedding\.w.*)\.weight")
_GATED = re.compile(r".*\.layers\.\d+\.mlp\.linear_fc1\.(weight|bias)")


def whole_tensors(published: Mapping[str, Any], *, heads: int, groups: int) -> Tensors:
    """Return the tensors of MindSpeed-MM's model for those of a published one.

    Args:
        published: tensors by the names that files have.
        heads: number of the vision tower's heads.
        groups: number of the language model's query groups.
    """
    found: Tensors = {}
    for name, value in published.items():
        (new,) = (re.sub(old, new, name) for old, new in _NAMES.items() if re.match(old, name))
        found[new] = value
    for name in [name for name in found if ".mlp.gate." in name]:
        other = found.pop(name.replace(".gate.", ".up."))
        found[name.replace(".gate.", ".linear_fc1.")] = torch.cat([found.pop(name), other])
    for name in [name for name in found if ".self_attention.q." in name]:
        parts = [found.pop(name.replace(".q.", f".{each}.")) for each in "qkv"]
        found[name.replace(".q.", ".linear_qkv.")] = _by_group(parts, groups)
    for name in [name for name in found if name.startswith("image_encoder") and ".linear_qkv." in name]:
        found[name] = _by_group(found[name].chunk(3), heads)
    return found


def _by_group(parts: Sequence[Any], groups: int) -> Any:
    """Put queries, keys and values of each group together."""
    cut = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(cut, dim=1).reshape(-1, *parts[0].shape[1:])


def part_of(name: str, value: Any, rank: int, tp_size: int) -> Any:
    """Return a rank's part of a tensor."""
    if _GATED.fullmatch(name):
        return torch.cat([half.chunk(tp_size)[rank] for half in value.chunk(2)])
    if _BY_ROWS.fullmatch(name):
        return value.chunk(tp_size)[rank].clone()
    return value.chunk(tp_size, dim=1)[rank].clone() if _BY_COLUMNS.fullmatch(name) else value.clone()


def chunks_of(tensors: Tensors, vision: Sequence[Sequence[int]], text: Sequence[Sequence[int]]) -> list[list[Tensors]]:
    """Share out tensors among chunks and stages as ``hf_to_mm_ldt`` does; the layers of each are counted from 0.

    Args:
        tensors: those of MindSpeed-MM's model.
        vision: numbers of layers of the vision tower, a row for every chunk.
        text: those of the language model.
    """
    made: list[list[Tensors]] = [[{} for _ in row] for row in text]
    seen = [(chunk, stage) for chunk, row in enumerate(vision) for stage, count in enumerate(row) if count]
    first_text = next(chunk for chunk, row in enumerate(text) if any(row))
    ends = {
        "image_encoder.encoder.patch_embed.": seen[0],
        "image_encoder.projector.": seen[-1],
        "text_decoder.embedding.": (first_text, 0),
        "text_decoder.decoder.final_layernorm.": (len(text) - 1, 0),
        "text_decoder.output_layer.": (len(text) - 1, 0),
    }
    for begin, rows in (("image_encoder.encoder.blocks.layers.", vision), ("text_decoder.decoder.layers.", text)):
        number = 0
        for chunk, row in enumerate(rows):
            for stage, count in enumerate(row):
                for layer in range(count):
                    old, new = f"{begin}{number + layer}.", f"{begin}{layer}."
                    found = {name.replace(old, new): value for name, value in tensors.items() if name.startswith(old)}
                    made[chunk][stage] |= found
                number += count
    for begin, (chunk, stage) in ends.items():
        made[chunk][stage] |= {name: value for name, value in tensors.items() if name.startswith(begin)}
    return made


def write_tree(
    folder: Path, made: Sequence[Sequence[Tensors]], *, tp_size: int, iteration: str = "release", **besides: Any
) -> None:
    """Write a tree.

    Args:
        folder: where to.
        made: the tensors of every chunk, and in it of every stage.
        tp_size: number of ranks of a stage.
        iteration: what the note beside the files says.
        besides: what every file holds besides weights, as those of a run do.
    """
    inner = folder / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    for stage in range(len(made[0])):
        for rank in range(tp_size):
            place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(made[0]) > 1 else "")
            (inner / place).mkdir(parents=True)
            held = [
                {name: part_of(name, value, rank, tp_size) for name, value in chunk[stage].items()} for chunk in made
            ]
            names = ["model"] if len(held) == 1 else [f"model{number}" for number in range(len(held))]
            saved = {**dict(zip(names, held, strict=True)), "checkpoint_version": 3.0, **besides}
            torch.save(saved, inner / place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)
