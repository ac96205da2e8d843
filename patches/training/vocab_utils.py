"""`padded-vocabulary`, model builder side: one padded vocabulary for all stages."""

from __future__ import annotations

from collections.abc import Callable

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.training.vocab_utils:calculate_padded_vocab_size",
    id="padded-vocabulary/builder",
    when=Moment.LIST,
    unneeded={"<0.18": "the tokenizer alone pads the vocabulary; model builders take what it says"},
    why="model builders pad by this stage's size when the tokenizer did not",
    remove_when="with `padded-vocabulary`",
    aliases=(
        "megatron.training.models.gpt:calculate_padded_vocab_size",
        "megatron.training.models.hybrid:calculate_padded_vocab_size",
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
