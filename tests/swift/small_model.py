"""Small models of published families, and data for them, made on the spot.

python -m tests.swift.small_model FOLDER [KIND ...]
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 264
"""Rows of the embedding: 256 bytes, the special tokens and a few that pad it to a multiple of 8."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_models(folder: Path, kinds: tuple[str, ...] = ("qwen2",)) -> None:
    """Write a folder for each kind of model, and `data.jsonl`; weights are drawn from one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        write_model(folder / kind, kind)
    write_data(folder / "data.jsonl", 64)
    write_data(folder / "eval.jsonl", 16)


def write_model(folder: Path, kind: str) -> None:
    """Write weights, configuration and tokenizer of one model.

    Args:
        folder: where they go.
        kind: a family of transformers, then words with hyphens: ``tied``, or ``odd`` for a vocabulary without factors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    family, *words = kind.split("-")
    set_seed(7)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY - ("odd" in words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings="tied" in words,
        eos_token_id=258,
        pad_token_id=256,
        dtype="float32",
        initializer_range=0.2,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if family == "qwen3_moe" else {}),
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    """Make a tokenizer of single bytes, such as Qwen's without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: place for place, word in enumerate((*letters, *_SPECIAL))}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(_SPECIAL),
    )


def write_data(path: Path, count: int) -> None:
    """Write conversations of random letters, each of its own length."""
    draw = random.Random(3)
    with path.open("w", encoding="ascii") as file:
        for _ in range(count):
            question = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))
            answer = question[::-1] + "".join(draw.choices(string.ascii_lowercase, k=draw.randint(0, 5)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    write_models(Path(sys.argv[1]), tuple(sys.argv[2:]) or ("qwen2",))
