"""Whether every stage can cut the model by its parallel sizes.

Megatron checks this too, but each rank for its stage only: some ranks would fail while the others wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.host.rules.rule import OptionContext

# Sizes that are named as a way out.
_LARGEST_NAMED = 64
# Sizes up to this pad a vocabulary alike, whichever of them is in a list.
_LARGEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A size of the model that a stage cuts by one of its parallel sizes.

    Attributes:
        name: the flag and its value.
        stage: index of the stage.
        axis: which of its sizes cuts it: TP, EP or ETP.
        size: that size.
        fits: tells whether a size can cut the value.
        is_shared: whether a size that is a multiple of the value fits, too.
    """

    name: str
    stage: int
    axis: str
    size: int
    fits: Callable[[int], bool]
    is_shared: bool = False


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
        Lines of the form ``value: rule; way out``: one for all that a size of stages does not divide, with the sizes
        that would divide it, then those about experts and context parallelism.

    >>> from types import SimpleNamespace
    >>> print(*check_sizes(SimpleNamespace(num_attention_heads=6), OptionContext(tp_sizes=(1, 4))))
    --num-attention-heads 6: stage 1 has TP 4, which does not divide it; TP sizes that divide this model: 1, 2, 3, 6
    """
    cuts = (
        *_cut_heads(args, context),
        *_cut_latent(args, context),
        *_cut_feed_forward(args, context),
        *_cut_experts(args, context),
        *_cut_prediction(args, context),
        *_cut_sequence(args, context),
        *_cut_vocabulary(args, context),
    )
    return (*_misfits(cuts), *_check_experts(args, context), *_check_chunks(args, context))


def _misfits(cuts: Sequence[_Cut]) -> Iterator[str]:
    """Write a line for each size that does not cut all that it must, with the stages that have it."""
    wrong: dict[tuple[str, int, tuple[str, ...]], list[int]] = {}
    for axis, stage in dict.fromkeys((cut.axis, cut.stage) for cut in cuts):
        odd = [cut for cut in cuts if (cut.axis, cut.stage) == (axis, stage) and not cut.fits(cut.size)]
        if odd:
            wrong.setdefault((axis, odd[0].size, tuple(cut.name for cut in odd)), []).append(stage)
    for (axis, size, names), stages in wrong.items():
        own = [cut for cut in cuts if cut.axis == axis and cut.stage == stages[0]]
        choices = [one for one in range(1, _LARGEST_NAMED + 1) if all(cut.fits(one) for cut in own)]
        is_shared = all(cut.is_shared for cut in own if cut.name in names)
        rule = "is neither a divisor nor a multiple of" if is_shared else "does not divide"
        who = f"stage {stages[0]} has" if len(stages) == 1 else f"stages {', '.join(map(str, stages))} have"
        yield (
            f"{', '.join(names)}: {who} {axis} {size}, which {rule} {'it' if len(names) == 1 else 'them'}; "
            f"{axis} sizes that divide this model: {', '.join(map(str, choices))}"
        )


def _number(args: object, attribute: str) -> int:
    """Return a size of the model; 0 if it is missing or not given."""
    return getattr(args, attribute, None) or 0


def _cut_heads(args: object, context: OptionContext) -> Iterator[_Cut]:
    heads, groups = _number(args, "num_attention_heads"), _number(args, "num_query_groups")
    yield from _divided(f"--num-attention-heads {heads}", heads, _stages(context))
    # Without the switch Megatron ignores the number, which is 1 by default, and gives every head its own group.
    if not getattr(args, "group_query_attention", False) or not groups:
        return
    for stage, size in _stages(context):
        yield _Cut(
            name=f"--num-query-groups {groups}",
            stage=stage,
            axis="TP",
            size=size,
            fits=lambda size: groups % size == 0 or size % groups == 0,
            is_shared=True,
        )


def _cut_latent(args: object, context: OptionContext) -> Iterator[_Cut]:
    # Transformer Engine's layers are not cut here.
    if not getattr(args, "multi_latent_attention", False) or getattr(args, "transformer_impl", "") != "local":
        return
    queries = _number(args, "q_lora_rank")
    yield from _divided(f"--q-lora-rank {queries}", queries, _stages(context))
    keys, positions = _number(args, "kv_lora_rank"), _number(args, "qk_pos_emb_head_dim")
    name = f"--kv-lora-rank {keys} + --qk-pos-emb-head-dim {positions} = {keys + positions}"
    yield from _divided(name, keys + positions, _stages(context))


def _cut_feed_forward(args: object, context: OptionContext) -> Iterator[_Cut]:
    value, name = feed_forward_size(args)
    yield from _divided(name, value, _stages(context))
    if not _number(args, "num_experts"):
        return
    expert = _number(args, "moe_ffn_hidden_size")
    etp_sizes = context.etp_sizes or context.tp_sizes
    axis = "ETP" if context.etp_sizes else "TP"
    yield from _divided(f"--moe-ffn-hidden-size {expert}", expert, list(enumerate(etp_sizes)), axis)
    shared = _number(args, "moe_shared_expert_intermediate_size")
    yield from _divided(f"--moe-shared-expert-intermediate-size {shared}", shared, _stages(context))


def _cut_experts(args: object, context: OptionContext) -> Iterator[_Cut]:
    number = _number(args, "num_experts")
    sizes = context.ep_sizes or (1,) * context.num_stages
    return _divided(f"--num-experts {number}", number, list(enumerate(sizes)), "EP")


def _check_experts(args: object, context: OptionContext) -> Iterator[str]:
    number = _number(args, "num_experts")
    sizes = context.ep_sizes or (1,) * context.num_stages
    if not number:
        if max(sizes) > 1 and hasattr(args, "num_experts"):
            shown = ",".join(map(str, sizes))
            yield f"expert-parallel sizes {shown}; the model has no experts; add --num-experts, or leave the sizes out"
        return
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


def _cut_prediction(args: object, context: OptionContext) -> Iterator[_Cut]:
    # A layer of multi-token prediction has a projection to the hidden size, which is cut. Where a layout places it is
    # not known here.
    if not _number(args, "mtp_num_layers") or getattr(args, "pipeline_model_parallel_layout", None):
        return iter(())
    stage = 0 if context.is_u_shaped else context.num_stages - 1
    hidden = _number(args, "hidden_size")
    return _divided(f"--hidden-size {hidden} with --mtp-num-layers", hidden, [_stages(context)[stage]])


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


def _sequence(args: object, context: OptionContext) -> tuple[int, str, list[tuple[int, int, Callable[[int], int]]]]:
    """Return the sequence length, its name in messages, and of every stage tp, cp, and what a tp size asks of it."""
    is_sharded = bool(getattr(args, "sequence_parallel", False))
    flag = "--seq-length" if _number(args, "seq_length") else "--encoder-seq-length"
    length = _number(args, "seq_length") or _number(args, "encoder_seq_length")
    stages = []
    for tp, cp in zip(context.tp_sizes, context.cp_sizes or (1,) * context.num_stages, strict=True):
        # Context parallelism gives each rank two chunks of the sequence, so that causal attention is balanced.
        # Sequence parallelism cuts what a rank then has.
        chunks = 2 * cp if cp > 1 else 1

        def step(size: int, cp: int = cp, chunks: int = chunks) -> int:
            return math.lcm(chunks, cp * size if is_sharded else 1)

        stages.append((tp, cp, step))
    return length, f"{flag} {length}" + (" with --sequence-parallel" if is_sharded else ""), stages


def _cut_sequence(args: object, context: OptionContext) -> Iterator[_Cut]:
    """Yield what tensor-parallel sizes cut of the sequence, where context parallelism alone could cut it."""
    length, name, stages = _sequence(args, context)
    for stage, (tp, _, step) in enumerate(stages):
        if length and not length % step(1):
            yield _Cut(
                name=name, stage=stage, axis="TP", size=tp, fits=lambda size, step=step: length % step(size) == 0
            )


def _check_chunks(args: object, context: OptionContext) -> Iterator[str]:
    """Find the stages whose context-parallel size does not cut the sequence, whatever their tensor-parallel size is."""
    length, name, stages = _sequence(args, context)
    whole = math.lcm(*(step(tp) for tp, _, step in stages))
    choices = " or ".join(str(choice) for choice in nearest_multiples(length, whole))
    for stage, (tp, cp, step) in enumerate(stages):
        if length % step(1):
            tensor = f"TP {tp} and " if step(tp) != step(1) else ""
            yield f"{name}: stage {stage} has {tensor}CP {cp}, so {step(tp)} must divide it; use {choices}"


def _cut_vocabulary(args: object, context: OptionContext) -> Iterator[_Cut]:
    stages = _stages(context)
    # Only these hold the embedding and the output layer.
    ends = [stages[0], stages[-1]] if len(stages) > 1 else stages
    padded = _number(args, "padded_vocab_size")
    if padded:
        return _divided(f"--padded-vocab-size {padded}", padded, ends)
    if getattr(args, "pad_vocab_size", True):
        return iter(())
    plain = _number(args, "vocab_size")
    return _divided(f"--vocab-size {plain} with --no-pad-vocab-size", plain, ends)


def _stages(context: OptionContext) -> list[tuple[int, int]]:
    return list(enumerate(context.tp_sizes))


def _divided(name: str, value: int, stages: Sequence[tuple[int, int]], axis: str = "TP") -> Iterator[_Cut]:
    """Yield a cut of a value by the size of every stage, which must divide it. A value of 0 is unknown."""
    for stage, size in stages if value else ():
        yield _Cut(name=name, stage=stage, axis=axis, size=size, fits=lambda size: value % size == 0)


def problems_of_size(args: object, size: int, *, cp: int = 1, ep: int = 1, etp: int | None = None) -> tuple[str, ...]:
    """Say why no stage can have a tensor-parallel size; empty if it can.

    Any stage may become the first or the last one when others are lost, so it must also cut the vocabulary.

    Args:
        args: Megatron's arguments, as for :func:`check_sizes`.
        size: tensor-parallel size.
        cp: context-parallel size of every stage.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_attention_heads=12)
    >>> problems_of_size(args, 3), len(problems_of_size(args, 5))
    ((), 1)
    """
    etp_sizes = () if etp is None else (etp,)
    return check_sizes(args, OptionContext(tp_sizes=(size,), cp_sizes=(cp,), ep_sizes=(ep,), etp_sizes=etp_sizes))


def lcm_of_sizes(ends: int, problems: Callable[[int], Sequence[str]]) -> int:
    """Return the least common multiple of all sizes that a stage of a model can have, up to 16.

    Args:
        ends: a multiple of the sizes of the first and the last stage, which may be larger.
        problems: says why no stage can have a size, as :func:`problems_of_size`.

    >>> from functools import partial
    >>> from types import SimpleNamespace
    >>> lcm_of_sizes(2, partial(problems_of_size, SimpleNamespace(num_attention_heads=12)))
    12
    """
    return math.lcm(ends, *(size for size in range(1, _LARGEST + 1) if not problems(size)))


def nearest_multiples(value: int, step: int) -> tuple[int, ...]:
    """Return the multiples next to a value that is none, on both sides.

    >>> nearest_multiples(6, 4), nearest_multiples(3, 4)
    ((4, 8), (4,))
    """
    below = value // step * step
    return tuple(choice for choice in (below, below + step) if choice > 0)
