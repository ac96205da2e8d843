"""How the vocabulary is padded."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

from vtp_plugin.checkpoint.format.resolver import asked_at_start
from vtp_plugin.checkpoint.hf.hf_model import read_note
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.checks.divisibility import lcm_of_sizes, problems_of_size
from vtp_plugin.host.versions import is_in
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.choose_checkpoint import written_again
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.session import Session
from vtp_plugin.util import log

_DIVISOR = "--make-vocab-size-divisible-by"
_UNTRAINED = "which are untrained and count in the softmax, so the loss rises"


def note_vocabulary(session: Session, args: argparse.Namespace) -> None:
    """Log how all layouts in which this run may resume get the same padded vocabulary.

    How a uniform run does is a detail, for those who compare.
    """
    layout = session.planned.layout
    multiple = args.make_vocab_size_divisible_by * layout.vocab_multiple()
    log.debug(
        f"padded vocabulary: a multiple of {multiple}; a uniform run with tensor-parallel size 1 pads the same with "
        f"{_DIVISOR} {multiple}"
    )
    asked = asked_at_start(args)
    resumes = asked.load_dir == args.load and asked.resolve() is not None
    if args.save is not None and not resumes and session.is_active and not getattr(args, "padded_vocab_size", None):
        for note in _note_of_others(layout, args):
            log.info(note)


def _note_of_others(layout: PipelineLayout, args: argparse.Namespace) -> list[str]:
    ends, divisor = layout.vocab_multiple(), args.make_vocab_size_divisible_by
    others = lcm_of_sizes(ends, functools.partial(problems_of_size, args, cp=args.context_parallel_size))
    if divisor * ends % others == 0:
        return []
    factor = others // math.gcd(divisor * ends, others)
    return [
        f"checkpoints of this run resume at the same loss only with TP sizes that divide {divisor * ends}; for all "
        f"sizes that this model can have, up to 16, start with {_DIVISOR} {divisor * factor}, now: it cannot be "
        "changed later"
    ]


def require_padding(session: Session, host: MegatronHost, load_dir: str | None, args: Any, stored: Any) -> None:
    """Say that a checkpoint has another padded vocabulary, which Megatron fits by leaving out words, or adding some.

    Args:
        session: session of this run; it knows whether the plugin reads the optimizer itself.
        host: the family of the Megatron that runs.
        load_dir: folder of the checkpoint.
        args: Megatron's.
        stored: those of the run that wrote it.

    Raises:
        ConfigError: the optimizer is stored by bucket, so that only the same padded vocabulary can resume.
    """
    there, here = getattr(stored, "padded_vocab_size", None), getattr(args, "padded_vocab_size", None)
    if there is None or here is None or there == here or load_dir is None or read_note(load_dir) is not None:
        return
    ends = session.planned.layout.vocab_multiple()
    # Fits keep to the flag that newer Megatrons have.
    flag = f"--padded-vocab-size {there}" if is_in(host.version, ">=0.15") else f"{_DIVISOR} {there // ends}"
    other = f"use TP sizes of which the first and the last divide {there}"
    keeps = f"give {flag}" if there % ends == 0 else other
    said = f"checkpoint {load_dir} has a padded vocabulary of {there} tokens, and this run one of {here}"
    new = f"{here - there} tokens are new, {_UNTRAINED}" if here > there else f"{there - here} tokens are dropped"
    if session.loading.stored_optimizer is not None:
        raise ConfigError(
            f"{said}; an optimizer that is stored by bucket loads with the same number only; {keeps}, or "
            f"{written_again(session)} (then {new})"
        )
    if args.rank in session.planned.reporting_ranks.values():
        log.warning(f"{said}: in the word embedding and the output layer {new}; to keep the loss, {keeps}")


@replaces(
    "megatron.training.vocab_utils:calculate_padded_vocab_size",
    id="padded-vocabulary/builder",
    when=Moment.LIST,
    unneeded={"<0.18": "the tokenizer alone pads the vocabulary; model builders take what it says"},
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
    """Run `calculate_padded_vocab_size` with a multiple that all stages can split, not with this stage's size.

    Why: model builders pad by this stage's size when the tokenizer did not.

    Remove when: with `padded-vocabulary`.
    """
    multiple = session.planned.layout.vocab_multiple()
    return original(vocab_size, make_vocab_size_divisible_by, multiple, logging_enabled)
