"""Conversations to fine-tune on, and a tokenizer for them: made here, so that nothing is fetched."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

_SPECIAL = ["<unk>", "<eos>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"]


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token for each letter, and those that Megatron's prompts name."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate([*_SPECIAL, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", additional_special_tokens=_SPECIAL[2:]
    )
    fast.save_pretrained(folder)
    return folder


def write_conversations(path: Path, num_rows: int = 40) -> Path:
    """Write rows of one to three conversations of a few words, in the form that Megatron's data set reads."""
    choose = random.Random(7)

    def words() -> str:
        return " ".join("".join(choose.choices("abcdef", k=choose.randint(1, 3))) for _ in range(choose.randint(1, 3)))

    def conversation() -> list[dict[str, str]]:
        return [{"role": role, "content": words()} for role in ("system", "user", "assistant")]

    rows = [
        {"messages": [turn for _ in range(choose.randint(1, 3)) for turn in conversation()]} for _ in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
