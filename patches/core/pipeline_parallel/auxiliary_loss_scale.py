"""The scale of auxiliary losses, as those of routers, where stages have different numbers of replicas."""

from __future__ import annotations

from vtp_plugin.session import Session


def microbatches_for_auxiliary_losses(session: Session, num_microbatches: float) -> float:
    """Return the number by which Megatron shall divide other losses than the model's: of routers, of prediction.

    Its `forward_step` divides them by this stage's microbatches, and multiplies those of routers by its
    context-parallel size. But the gradients of all stages are averaged as those of the stage with the loss, so they
    shall weigh as there: microbatches count `gradient_share` times.

    Args:
        session: session of this rank.
        num_microbatches: microbatches of this stage.
    """
    own = session.pipelines.own
    if own is not None and (share := own.gradient_share) != 1.0:
        return num_microbatches * share
    return num_microbatches
