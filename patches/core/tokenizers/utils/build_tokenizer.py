"""H3, tokenizer side: one padded vocabulary for all stages."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H3",
            target="megatron.core.tokenizers.utils.build_tokenizer:vocab_size_with_padding",
            build=functools.partial(_pad, session),
            why="it pads to a multiple of its stage's size, so stages would disagree about the vocabulary",
            versions=">=0.19,<0.20",
            remove_when="the padded vocabulary is computed from all stages",
        ),
    )


def _pad(session: Session, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
        padded_args = copy.copy(args)
        padded_args.tensor_model_parallel_size = session.planned.layout.vocab_multiple()
        return original(orig_vocab_size, padded_args, logging_enabled)

    return vocab_size_with_padding
