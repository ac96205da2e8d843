"""H7: start value of the tied embedding on the last stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.session import Session


def records(session: Session, host: MegatronHost) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H7",
            target="megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            build=wrap_with(_setup, session, host),
            why="without an embedding group Megatron leaves the last stage's copy at zero; also the first point where "
            "a model meets its groups, so a configuration made for another stage is refused here",
            remove_when="with H6",
        ),
    )


def _setup(session: Session, host: MegatronHost, original: Callable[[Any], None], chunk: Any) -> None:
    """Run `setup_embeddings_and_output_layer`, then give the last stage the first one's word embedding.

    Megatron all-reduces between the ends for that, which needs slices of one size.
    """
    is_u_shaped = session.config.layerwise_disaggregated
    if is_u_shaped:
        refuse(host.problems_of_layers(session.config.num_layer_list, chunk.config))
    module = session.modules.get(chunk.pp_group) if session.modules else None
    if module is not None and chunk.share_embeddings_and_output_weights:
        raise ConfigError(
            f"the word embedding is shared by the ends of a module with stages of tp {module.sizes}, which hold "
            "different slices of it; set share_embeddings_and_output_weights=False"
        )
    if session.is_planned:
        session.planned.check_model_config(chunk.config.tensor_model_parallel_size, chunk.config.context_parallel_size)
    original(chunk)
    if not chunk.share_embeddings_and_output_weights:
        return
    if is_u_shaped:
        _tie_chunks(session, chunk)
    tied = session.running.tied_weight if session.is_running else None
    if tied is not None and (chunk.pre_process if tied.is_first else chunk.post_process):
        weight = chunk.shared_embedding_or_output_weight()
        with torch.no_grad():
            # As in Megatron, which may have drawn the values on the host.
            weight.data = weight.data.to(session.planned.platform.device())
            tied.copy_from_first(weight.data)


def _tie_chunks(session: Session, chunk: Any) -> None:
    """Give the edge's last chunk the word embedding of its first one, which is built before it."""
    if chunk.pre_process:
        session.embedding = weakref.ref(chunk.shared_embedding_or_output_weight())
    elif chunk.post_process:
        embedding = session.embedding() if session.embedding is not None else None
        if embedding is None:
            raise ConfigError(
                "the edge's last model chunk was built before its first one, whose word embedding it shares; build the "
                "chunks in the order of their numbers, as Megatron's get_model does"
            )
        # A copy, not the same memory: each chunk has its gradient buffer, and H6 adds up the two gradients.
        chunk.shared_embedding_or_output_weight().data = embedding.data.clone()
