"""Whether every stage can cut the model by its parallel sizes.

Megatron checks this too, but each rank for its stage only: some ranks would fail while the others wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from vtp_plugin.host.rules.context import OptionContext

_Fits = Callable[[int, int], bool]


def check_sizes(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the sizes of the model that a stage cannot cut by its parallel sizes.

    In this order: the attention heads; the query groups (a stage's size may be a multiple or a divisor of them); what
    latent attention projects to; the feed-forward sizes; the number of experts, and what they ask of a stage; the
    hidden size where a stage predicts several tokens; the sequence length under sequence and context parallelism; a
    padded vocabulary that the user fixes (on the first and the last stage, which hold the embedding and the output
    layer). Of a swiglu layer the plain feed-forward size counts, since each gate is cut alone. Sizes that are not given
    are derived as Megatron does it.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``. Missing or empty sizes are not checked.
        context: The run.

    Returns:
        One line for every size and stage that do not fit, ``value; rule; way out``; the stages in pipeline order.

    >>> from types import SimpleNamespace
    >>> print(*check_sizes(SimpleNamespace(num_attention_heads=6), OptionContext(tp_sizes=(1, 4))))
    --num-attention-heads 6; stage 1 has tensor-parallel size 4, which must divide it; use 4 or 8
    """
    return (
        *_check_heads(args, context),
        *_check_query_groups(args, context),
        *_check_latent(args, context),
        *_check_feed_forward(args, context),
        *_check_experts(args, context),
        *_check_prediction(args, context),
        *_check_sequence(args, context),
        *_check_vocabulary(args, context),
    )


def _number(args: object, attribute: str) -> int:
    """Return a size of the model; 0 if it is missing or not given."""
    return getattr(args, attribute, None) or 0


def _check_heads(args: object, context: OptionContext) -> Iterator[str]:
    heads = _number(args, "num_attention_heads")
    return _check_multiple(f"--num-attention-heads {heads}", heads, _stages(context))


def _check_query_groups(args: object, context: OptionContext) -> Iterator[str]:
    # Without the switch Megatron ignores the number, which is 1 by default, and gives every head its own group.
    if not getattr(args, "group_query_attention", False):
        return iter(())
    groups, heads = _number(args, "num_query_groups"), _number(args, "num_attention_heads")

    def fits_all(candidate: int) -> bool:
        return heads % candidate == 0 and all(_is_shared(candidate, size) for size in context.tp_sizes)

    return _check(
        f"--num-query-groups {groups}",
        groups,
        _stages(context),
        fits=_is_shared,
        rule="which must be a multiple or a divisor of it",
        # 1 group always fits. Above the heads there is none, and without heads there is no end to search up to.
        nearest=_nearest(groups, fits_all, range(groups + 1, (heads or groups) + 1)),
    )


def _check_latent(args: object, context: OptionContext) -> Iterator[str]:
    # Transformer Engine's layers are not cut here.
    if not getattr(args, "multi_latent_attention", False) or getattr(args, "transformer_impl", "") != "local":
        return
    queries = _number(args, "q_lora_rank")
    yield from _check_multiple(f"--q-lora-rank {queries}", queries, _stages(context))
    keys, positions = _number(args, "kv_lora_rank"), _number(args, "qk_pos_emb_head_dim")
    name = f"--kv-lora-rank {keys} + --qk-pos-emb-head-dim {positions} = {keys + positions}"
    yield from _check_multiple(name, keys + positions, _stages(context))


def _check_feed_forward(args: object, context: OptionContext) -> Iterator[str]:
    value, name = feed_forward_size(args)
    yield from _check_multiple(name, value, _stages(context))
    if not _number(args, "num_experts"):
        return
    stages = list(enumerate(context.etp_sizes or context.tp_sizes))
    expert = _number(args, "moe_ffn_hidden_size")
    yield from _check_multiple(f"--moe-ffn-hidden-size {expert}", expert, stages)
    shared = _number(args, "moe_shared_expert_intermediate_size")
    yield from _check_multiple(f"--moe-shared-expert-intermediate-size {shared}", shared, _stages(context))


def _check_experts(args: object, context: OptionContext) -> Iterator[str]:
    number = _number(args, "num_experts")
    sizes = context.ep_sizes or (1,) * context.num_stages
    if not number:
        if max(sizes) > 1 and hasattr(args, "num_experts"):
            shown = ",".join(map(str, sizes))
            yield f"expert-parallel sizes {shown}; the model has no experts; add --num-experts, or leave the sizes out"
        return
    yield from _check_multiple(f"--num-experts {number}", number, list(enumerate(sizes)), what="expert-parallel")
    for stage, size in _stages(context):
        if size > 1 and not getattr(args, "sequence_parallel", False):
            yield (
                f"--num-experts {number}; stage {stage} has tensor-parallel size {size}, where Megatron trains experts "
                "with sequence parallelism only; add --sequence-parallel"
            )
    if context.is_split:
        yield (
            f"--num-experts {number} with --vtp-dp-mode split; a stage with fewer replicas routes larger microbatches, "
            "and the losses of the routers are those of whole microbatches; use --vtp-dp-mode multiplex"
        )


def _check_prediction(args: object, context: OptionContext) -> Iterator[str]:
    # A layer of multi-token prediction has a projection to the hidden size, which is cut. Where a layout places it is
    # not known here.
    if not _number(args, "mtp_num_layers") or getattr(args, "pipeline_model_parallel_layout", None):
        return iter(())
    stage = 0 if context.is_u_shaped else context.num_stages - 1
    hidden = _number(args, "hidden_size")
    return _check_multiple(f"--hidden-size {hidden} with --mtp-num-layers", hidden, [_stages(context)[stage]])


def feed_forward_size(args: object) -> tuple[int, str]:
    """Return the size and its name in messages; if it is not given, Megatron derives it from the hidden size.

    >>> from types import SimpleNamespace
    >>> feed_forward_size(SimpleNamespace(hidden_size=96, swiglu=True))
    (256, '--ffn-hidden-size 256 (from --hidden-size 96)')
    """
    given = _number(args, "ffn_hidden_size")
    if given:
        return given, f"--ffn-hidden-size {given}"
    hidden = _number(args, "hidden_size")
    # Megatron keeps the parameter count of a gated layer near that of a plain one, in steps of 64.
    size = int((4 * hidden * 2 / 3) / 64) * 64 if getattr(args, "swiglu", False) else 4 * hidden
    return size, f"--ffn-hidden-size {size} (from --hidden-size {hidden})"


def _check_sequence(args: object, context: OptionContext) -> Iterator[str]:
    is_sharded = bool(getattr(args, "sequence_parallel", False))
    cp_sizes = context.cp_sizes or (1,) * context.num_stages
    # Context parallelism gives each rank two chunks of the sequence, so that causal attention is balanced. Sequence
    # parallelism cuts what a rank then has.
    chunks = [2 * cp if cp > 1 else 1 for cp in cp_sizes]
    slices = [cp * tp if is_sharded else 1 for cp, tp in zip(cp_sizes, context.tp_sizes, strict=True)]
    steps = [math.lcm(*pair) for pair in zip(chunks, slices, strict=True)]
    flag = "--seq-length" if _number(args, "seq_length") else "--encoder-seq-length"
    length = _number(args, "seq_length") or _number(args, "encoder_seq_length")
    choices = " or ".join(str(choice) for choice in nearest_multiples(length, math.lcm(*steps)))
    for stage, (tp, cp, step) in enumerate(zip(context.tp_sizes, cp_sizes, steps, strict=True)):
        if not length % step:
            continue
        name = f"{flag} {length}" + (" with --sequence-parallel" if is_sharded else "")
        sizes = [f"tensor-parallel size {tp}"] if is_sharded else []
        sizes += [f"context-parallel size {cp}"] if cp > 1 else []
        rule = "which must divide it" if cp == 1 else f"so {step} must divide it"
        yield f"{name}; stage {stage} has {' and '.join(sizes)}, {rule}; use {choices}"


def _check_vocabulary(args: object, context: OptionContext) -> Iterator[str]:
    stages = _stages(context)
    # Only these hold the embedding and the output layer.
    ends = [stages[0], stages[-1]] if len(stages) > 1 else stages
    padded = _number(args, "padded_vocab_size")
    if padded:
        return _check_multiple(f"--padded-vocab-size {padded}", padded, ends)
    if getattr(args, "pad_vocab_size", True):
        return iter(())
    plain = _number(args, "vocab_size")
    return _check_multiple(f"--vocab-size {plain} with --no-pad-vocab-size", plain, ends)


def _stages(context: OptionContext) -> list[tuple[int, int]]:
    return list(enumerate(context.tp_sizes))


def _is_shared(groups: int, size: int) -> bool:
    return groups % size == 0 or size % groups == 0


def _check_multiple(
    name: str, value: int, stages: Sequence[tuple[int, int]], *, what: str = "tensor-parallel"
) -> Iterator[str]:
    return _check(
        name,
        value,
        stages,
        fits=lambda value, size: value % size == 0,
        rule="which must divide it",
        nearest=nearest_multiples(value, math.lcm(*(size for _, size in stages))),
        what=what,
    )


def _check(
    name: str,
    value: int,
    stages: Sequence[tuple[int, int]],
    *,
    fits: _Fits,
    rule: str,
    nearest: tuple[int, ...],
    what: str = "tensor-parallel",
) -> Iterator[str]:
    """Write one line for every stage that the value does not fit. A value of 0 is unknown and fits."""
    choices = " or ".join(str(choice) for choice in nearest) or "other sizes in --vtp-size-list"
    for stage, size in stages:
        if value and not fits(value, size):
            yield f"{name}; stage {stage} has {what} size {size}, {rule}; use {choices}"


def nearest_multiples(value: int, step: int) -> tuple[int, ...]:
    """Return the multiples next to a value that is none, on both sides.

    >>> nearest_multiples(6, 4), nearest_multiples(3, 4)
    ((4, 8), (4,))
    """
    below = value // step * step
    return tuple(choice for choice in (below, below + step) if choice > 0)


def _nearest(value: int, fits: Callable[[int], bool], above: Iterable[int]) -> tuple[int, ...]:
    """Return the nearest values that fit, on both sides, if there are any."""
    below = next((choice for choice in range(value - 1, 0, -1) if fits(choice)), None)
    beyond = next((choice for choice in above if fits(choice)), None)
    return tuple(choice for choice in (below, beyond) if choice is not None)
