"""H3, model builder side: one padded vocabulary for all stages."""

from __future__ import annotations

from collections.abc import Callable

from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H3b",
            target="megatron.training.vocab_utils:calculate_padded_vocab_size",
            unneeded={"<0.18": "the tokenizer alone pads the vocabulary; model builders take what it says"},
            build=wrap_with(_pad, session),
            why="model builders pad by this stage's size when the tokenizer did not",
            remove_when="with H3",
            aliases=(
                "megatron.training.models.gpt:calculate_padded_vocab_size",
                "megatron.training.models.hybrid:calculate_padded_vocab_size",
            ),
        ),
    )


def _pad(
    session: Session,
    original: Callable[..., int],
    vocab_size: int,
    make_vocab_size_divisible_by: int,
    tensor_model_parallel_size: int,
    logging_enabled: bool = True,
) -> int:
    """Run `calculate_padded_vocab_size` with a multiple that all stages can split, not with this stage's size."""
    multiple = session.planned.layout.vocab_multiple()
    return original(vocab_size, make_vocab_size_divisible_by, multiple, logging_enabled)
