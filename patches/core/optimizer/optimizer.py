"""`shared-loss-scale`: one loss scale for all weights of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads",
    id="shared-loss-scale",
    when=Moment.LIST,
    why="experts with groups of their own have an optimizer, and a loss scale, of their own, which follows their "
    "overflows alone; but the loss has the first optimizer's, so their gradients would be divided by another number "
    "than on a stage that has them in the first one",
    remove_when="the optimizers of a rank share a loss scale",
)
def _prepare(session: Session, original: Callable[[Any], bool], chain: Any) -> bool:
    """Run `ChainedOptimizer.prepare_grads`; on unequal stages all scales are the first's, and follow all overflows."""
    members = (getattr(optimizer, "grad_scaler", None) for optimizer in chain.chained_optimizers)
    scalers = [scaler for scaler in members if scaler is not None]
    if len(scalers) < 2 or not session.pipelines.are_unequal():
        return original(chain)
    before = scalers[0].state_dict()
    for scaler in scalers[1:]:
        # Stored by a run that let them part.
        scaler.load_state_dict(before)
    is_infinite = original(chain)
    for scaler in scalers:
        # Each has been told what its own gradients are like.
        scaler.load_state_dict(before)
        scaler.update(is_infinite)
    return is_infinite
