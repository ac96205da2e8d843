"""`sinkhorn-routing`: sinkhorn shares out the tokens of a microbatch, not those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.core.transformer.moe.router:TopKRouter.sinkhorn_load_balancing", id="sinkhorn-routing", when=Moment.LIST
)
def _balance(
    session: Session, original: Callable[..., tuple[torch.Tensor, torch.Tensor]], router: Any, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `sinkhorn_load_balancing` on the tokens of all ranks that share a microbatch, and give those of this rank.

    Why: it balances the tokens of a rank, which sequence and context parallelism cut, so stages of other sizes would
    send tokens to other experts; quantile balancing gathers the logits for this.

    Remove when: Megatron gathers the logits here, too.

    With a uniform list it runs unchanged. So it does in evaluation, where Megatron balances nothing.

    Args:
        session: session of this rank.
        original: Megatron's method.
        router: router of a layer.
        logits: logits of this rank's tokens `[T, E]`.

    Returns:
        Probabilities and chosen experts, each `[T, E]`.
    """
    group: Any = getattr(router, "tp_cp_group", None) or parallel_state.get_tensor_and_context_parallel_group()
    if not router.training or group.size() == 1 or not session.pipelines.are_unequal():
        return original(router, logits)
    rows = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(rows, logits.detach().contiguous(), group=group)
    # The gradient flows through the tokens of this rank only; the others' come back on their own ranks.
    rows[group.rank()] = logits
    scores, chosen = original(router, torch.cat(rows))
    own = slice(group.rank() * len(logits), (group.rank() + 1) * len(logits))
    return scores[own], chosen[own]
