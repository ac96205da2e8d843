"""Bytes that a router and the experts that it feeds keep, where every expert gets as many tokens as any other.

Read in megatron/core/transformer/moe of 0.19: ``moe_utils.py``, ``router.py``, ``token_dispatcher.py`` (all-to-all
and all-gather) and ``experts.py`` (SequentialMLP). Routing is seldom so even: these are the bytes of an average rank.
"""

from __future__ import annotations

from dataclasses import dataclass

_FULL_BYTES, _INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens find their experts, in Megatron's names.

    Attributes:
        topk: experts of a token.
        has_sigmoid: scores are sigmoids, not a softmax.
        is_pre_softmax: a softmax is taken over all experts, before the best are chosen.
        num_groups: of experts, of which a token uses a few; 0 without.
        group_topk: groups of a token.
        has_aux_loss: experts are balanced by a loss.
        is_gathered: ranks gather all tokens, and each takes out those of its experts.
    """

    topk: int
    has_sigmoid: bool = False
    is_pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 1
    has_aux_loss: bool = False
    is_gathered: bool = False


def routed_bytes(routing: Routing, num_experts: int, num_tokens: int, etp: int, row_bytes: int) -> int:
    """Give what a layer of routed experts keeps on one rank.

    Args:
        routing: how tokens find their experts.
        num_experts: of the whole layer.
        num_tokens: of this rank, before it sends them.
        etp: ranks that share an expert: each has the tokens of all.
        row_bytes: that an expert keeps of a token, its input included.

    >>> routed_bytes(Routing(topk=4), 12, 27, 2, 2 * (64 + 6 * 13))
    66960
    """
    chosen = num_tokens * routing.topk
    if routing.is_gathered:
        # For every gathered token and expert of this rank its weight and whether it goes there, which makes as much as
        # all experts of the rank's own tokens; for every row whose it is, and its weight.
        total = num_tokens * etp * num_experts * (_FULL_BYTES + 1) + chosen * etp * (_INDEX_BYTES + _FULL_BYTES)
        return total + _router(routing, num_experts, num_tokens) + chosen * etp * row_bytes
    # For every token and expert where the token goes, for every row whose it is; for every row its weight.
    total = num_tokens * num_experts * _INDEX_BYTES + chosen * _INDEX_BYTES + chosen * etp * _FULL_BYTES
    return total + _router(routing, num_experts, num_tokens) + chosen * etp * row_bytes


def _router(routing: Routing, num_experts: int, num_tokens: int) -> int:
    scores, best = num_tokens * num_experts * _FULL_BYTES, num_tokens * routing.topk
    total = best * _INDEX_BYTES
    if routing.has_sigmoid:
        total += scores
        if routing.topk > 1:  # scores are divided by their sum
            total += (best + num_tokens) * _FULL_BYTES
    else:
        total += scores if routing.is_pre_softmax else best * _FULL_BYTES
    if routing.num_groups:
        in_groups = routing.num_groups * (routing.topk // routing.group_topk) + routing.group_topk
        total += num_tokens * (in_groups * _INDEX_BYTES + num_experts)
    if routing.has_aux_loss:
        total += scores + best * _INDEX_BYTES + (num_tokens * _FULL_BYTES if routing.has_sigmoid else 0)
    return total
