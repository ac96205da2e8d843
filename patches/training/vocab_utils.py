"""H3, model builder side: one padded vocabulary for all stages."""

from __future__ import annotations

import functools
from collections.abc import Callable

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H3b",
            target="megatron.training.vocab_utils:calculate_padded_vocab_size",
            build=functools.partial(_pad, session),
            why="model builders pad by their stage's size when the tokenizer did not",
            versions=">=0.19,<0.20",
            remove_when="with H3",
            aliases=(
                "megatron.training.models.gpt:calculate_padded_vocab_size",
                "megatron.training.models.hybrid:calculate_padded_vocab_size",
            ),
        ),
    )


def _pad(session: Session, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def calculate_padded_vocab_size(
        vocab_size: int,
        make_vocab_size_divisible_by: int,
        tensor_model_parallel_size: int,
        logging_enabled: bool = True,
    ) -> int:
        multiple = session.planned.layout.vocab_multiple()
        return original(vocab_size, make_vocab_size_divisible_by, multiple, logging_enabled)

    return calculate_padded_vocab_size
