"""`padded-vocabulary`, tokenizer side: one padded vocabulary for all stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    targets={
        "<0.17": "megatron.training.tokenizer.tokenizer:_vocab_size_with_padding",
        ">=0.17": "megatron.core.tokenizers.utils.build_tokenizer:vocab_size_with_padding",
    },
    id="padded-vocabulary",
    when=Moment.LIST,
)
def _pad(
    session: Session, original: Callable[..., int], orig_vocab_size: int, args: Any, logging_enabled: bool = True
) -> int:
    """Run `vocab_size_with_padding` with a multiple that all stages can split.

    Why: it pads to a multiple of this stage's size, so stages would disagree about the vocabulary.

    Remove when: the padded vocabulary is computed from all stages.
    """
    # A copy: `args` must keep saying this stage's size.
    padded_args = copy.copy(args)
    padded_args.tensor_model_parallel_size = session.planned.layout.vocab_multiple()
    return original(orig_vocab_size, padded_args, logging_enabled)
