"""`empty-chunks`: the cloud's second chunks, which are empty, are not kept; the edge's are drawn from its own key.

`cpu-initialization`: what is drawn on the CPU moves to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.tensor_parallel.layers import drawing_edge
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
    id="empty-chunks",
    when=Moment.U_SHAPE,
    unneeded={
        "<0.18": "models are built by megatron.training.training:get_model alone, which `empty-chunks/get-model` "
        "carries"
    },
    aliases=("megatron.training.models:build_virtual_pipeline_stages",),
)
@replaces(
    "megatron.training.training:get_model",
    id="empty-chunks/get-model",
    when=Moment.U_SHAPE,
    why="as `empty-chunks`, for scripts with a model provider",
)
def _keep_full_chunks(
    session: Session, host: MegatronHost, original: Callable[..., list[Any]], *args: Any, **kwargs: Any
) -> list[Any]:
    """Build the chunks of this rank's stage, as `original` does, and keep two on the edge, one on the cloud.

    Why: Megatron builds as many chunks on every stage; an empty one has no entry in a checkpoint, and loading fails.
    What is drawn for the edge meanwhile follows from its own key (--vtp-edge-seed).

    Remove when: with `last-stage`.
    """
    with drawing_edge(session):
        built = original(*args, **kwargs)
    chunks = built[: session.running.require_schedule_runner().num_chunks]
    host.enter_chunk(0)  # not one that is gone
    return chunks


@replaces(
    "megatron.training.models.dist_utils:_wrap_with_mp_wrapper",
    id="cpu-initialization",
    when=Moment.PLATFORM,
    unneeded={"<0.18": "models are built by megatron.training.training:get_model alone, which moves them"},
)
def _move_to_device(original: Callable[..., list[Any]], model_list: list[Any], config: Any, *args: Any) -> list[Any]:
    """Move chunks that were drawn on the CPU onto this rank's device, then wrap them as `original` does.

    Why: its caller leaves a model that --use-cpu-initialization drew on the CPU, though its data are on the device;
    training.training:get_model moves it.

    Remove when: it moves what was drawn on the CPU.
    """
    if config.use_cpu_initialization:
        for chunk in model_list:
            chunk.cuda()
    return original(model_list, config, *args)
