"""`finalize-model-grads`: token count over the stages, scale of the gradients, gradients of a shared embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.models.common.language_module.language_module import copies_embedding, embedding_stages
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.trace.stretches import Cause


@replaces(
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    id="finalize-model-grads",
    when=Moment.STAGES,
    aliases=(
        "megatron.core.distributed:finalize_model_grads",
        "megatron.training.training:finalize_model_grads",
    ),
)
def _finalize(
    session: Session,
    host: MegatronHost,
    original: Callable[..., None],
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run `finalize_model_grads`, with the token count and the shared embedding summed outside of it.

    Why: it broadcasts the token count over the pipeline group and all-reduces the shared embedding's gradient over
    ranks of a pipeline group: the first hangs and the second mixes rows when stages differ.

    Remove when: Megatron sends the token count through the model-parallel group and knows unequal cuts.
    """
    session.pipelines.finish_step()
    with session.recorder.span(Cause.GRADIENTS):
        _finish_gradients(session, host, original, model, num_tokens, *args, **kwargs)
    session.recorder.begin(Cause.OPTIMIZER)


def _finish_gradients(
    session: Session,
    host: MegatronHost,
    original: Callable[..., None],
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Do what :func:`_finalize` is for; the arguments are the same."""
    groups = kwargs.get("pg_collection", args[0] if args else None)
    pipeline = session.pipelines.of(getattr(groups, "pp", None))
    if pipeline is None or pipeline.plan.ends.are_stock:
        original(model, num_tokens, *args, **kwargs)
        return
    if pipeline.plan.ends.are_bridged:
        # Nothing is tied in it, and the caller's groups are those of its grid.
        original(model, None, *args, **kwargs)
    else:
        original(model, None, **host.without_ends(*args, **kwargs))
    if num_tokens is None:
        _scale_as_loss_stage(pipeline, model)
    else:
        _divide_by_tokens(model, num_tokens, *_token_groups(pipeline, host, groups))
    _sum_tied_gradients(pipeline, host, model)


def _token_groups(pipeline: Pipeline, host: MegatronHost, groups: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this stage's replicas, and that of the ranks that hold the model once."""
    if pipeline.plan.ends.are_bridged:
        return groups.dp_cp, groups.mp
    return host.token_group(), parallel_state.get_model_parallel_group()


def _divide_by_tokens(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor,
    group: dist.ProcessGroup,
    model_group: dist.ProcessGroup,
) -> None:
    """Divide the gradients by the number of tokens in the loss, as Megatron does at the same point.

    Megatron broadcasts the number along a pipeline group; a rank of a narrow stage is in several.

    Args:
        model: chunks of this rank.
        num_tokens: that this rank has counted.
        group: replicas of this rank's stage.
        model_group: ranks that hold the model once.
    """
    # Only the stage with the loss has counted; the maximum over the stages is its sum over its replicas.
    dist.all_reduce(num_tokens, group=group)
    dist.all_reduce(num_tokens, op=dist.ReduceOp.MAX, group=model_group)
    # No branch on a device's tensor, for which the host would have to wait.
    scale = 1.0 / torch.clamp(num_tokens, min=1)
    for chunk in model:
        chunk.scale_gradients(scale)  # pyright: ignore[reportCallIssue]


def _scale_as_loss_stage(pipeline: Pipeline, model: list[torch.nn.Module]) -> None:
    """Divide the sum of the gradients by the number of replicas of the stage with the loss.

    Megatron has divided it by the number of this stage's replicas.
    """
    share = pipeline.gradient_share
    if share != 1.0:
        for chunk in model:
            chunk.scale_gradients(share)  # pyright: ignore[reportCallIssue]


def _sum_tied_gradients(pipeline: Pipeline, host: MegatronHost, model: list[torch.nn.Module]) -> None:
    """Add up the gradients of all copies of the word embedding, if the model has several."""
    tied = pipeline.tied_weight
    if tied is not None:
        chunk = model[0] if tied.is_first else model[-1]
        stages = embedding_stages(pipeline.plan.layout.num_stages, host, _bare(chunk))
        if len(stages) > 1 and tied.stage in stages and (gradient := _tied_gradient(chunk)) is not None:
            tied.sum_gradients(gradient, stages)
    elif pipeline.plan.context.is_u_shaped and pipeline.stage == 0:
        # In two rings the first chunk is the encoder's.
        ends = [gradient for chunk in model if (gradient := _tied_gradient(chunk)) is not None]
        if len(ends) == 2:
            # Both chunks lie on the edge: their weights stay equal if both take the sum.
            ends[0].add_(ends[1])
            ends[1].copy_(ends[0])


def _tied_gradient(chunk: Any) -> torch.Tensor | None:
    """Return the whole gradient of a chunk's word embedding; None if the model has no other copy, or trains none."""
    module = _bare(chunk)
    if not copies_embedding(module):
        return None
    weight = module.shared_embedding_or_output_weight()
    if weight is None or not weight.requires_grad:
        # A frozen weight has no bucket: fine-tuning of adapters alone. A chunk of vision layers has no such weight.
        return None
    _complete_gradient(chunk, weight)
    return weight.main_grad


def _bare(chunk: Any) -> Any:
    """Return the model inside DDP and mixed precision: as for Megatron, the first that knows whether it shares."""
    while hasattr(chunk, "module") and not hasattr(chunk, "share_embeddings_and_output_weights"):
        chunk = chunk.module
    return chunk


def _complete_gradient(chunk: Any, weight: torch.nn.Parameter) -> None:
    """Gather a gradient of which the distributed optimizer's reduce-scatter completed this rank's shard only.

    The shards of the two ends cut [V / tp, H] at different rows, so they cannot be added as they are. Megatron puts
    a shared embedding alone into a bucket, so nothing but the embedding is gathered.
    """
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    bucket_group = chunk.param_to_bucket_group[weight]
    group = bucket_group.intra_distributed_optimizer_instance_group
    if group.size() == 1:
        return
    (bucket,) = [bucket for bucket in bucket_group.buckets if weight in bucket.params]
    # A copy: the input of the gather must not alias its output.
    shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
    dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
