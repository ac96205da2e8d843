"""What packed samples ask of the stages: rows in which no sample sees another, with their lengths on every stage."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.host.rules.context import OptionContext

_FLAGS = {"sft": "--sft", "dataloader_inter_document_masking": "--dataloader-inter-document-masking"}


def check_packed(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find what packed samples do not work with.

    Args:
        args: Megatron's arguments as parsed.
        context: The run.

    Returns:
        One line for every problem, ``value; rule; way out``; none without packed samples.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(sft=True, micro_batch_size=2)
    >>> print(*check_packed(args, OptionContext(tp_sizes=(1, 4))))
    --micro-batch-size 2 with --sft; Megatron joins the samples to one row, and its pipeline expects several; use 1
    """
    flag = packing_flag(args)
    return tuple(_problems(args, context, flag)) if flag else ()


def packing_flag(args: object) -> str:
    """Return the flag that packs samples; the empty string if none does.

    >>> from types import SimpleNamespace
    >>> packing_flag(SimpleNamespace(sft=True)), packing_flag(SimpleNamespace(sft=False))
    ('--sft', '')
    """
    return next((flag for name, flag in _FLAGS.items() if getattr(args, name, False)), "")


def _problems(args: object, context: OptionContext, flag: str) -> Iterator[str]:
    size = getattr(args, "micro_batch_size", None) or 1
    if size > 1 and context.num_stages > 1:
        yield (
            f"--micro-batch-size {size} with {flag}; Megatron joins the samples to one row, and its pipeline expects "
            "several; use 1"
        )
    if context.has_unequal_cp:
        yield (
            f"{flag} with {context.size_list}; samples are padded for the context-parallel size, so stages of "
            "different ones would read different rows; give every stage one size with --context-parallel-size"
        )
    if context.is_split:
        yield (
            f"{flag} with --vtp-dp-mode split; a stage with fewer replicas joins the rows of several; use "
            "--vtp-dp-mode multiplex"
        )
    if context.num_rings > 1:
        yield (
            f"{flag} with --vtp-encoder-layer-list; the lengths of rows would cross with what the encoder sends, too, "
            "which has no such rows; keep the encoder on the edge (leave the list out)"
        )
    if context.is_u_shaped and max(context.cp_sizes, default=1) > 1:
        yield (
            f"{flag} in a U-shape with context-parallel size {max(context.cp_sizes)}; lengths of rows that are cut "
            "have not been sent to a cloud; use --context-parallel-size 1"
        )
