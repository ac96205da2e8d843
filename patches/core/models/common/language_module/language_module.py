"""`embedding-start-value`: start value of the word embedding on the stages that hold a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.checkpoint.hf.hf_model import problem_of_factor
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.rule import LAYER_RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.util import log


@replaces(
    "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
    id="embedding-start-value",
    when=Moment.STAGES,
)
def _setup(session: Session, host: MegatronHost, original: Callable[[Any], None], chunk: Any) -> None:
    """Run `setup_embeddings_and_output_layer`, then give the other copies of the word embedding the first one's values.

    Why: without an embedding group Megatron leaves other stages' copies at zero; also the first point where a model
    meets its groups, so a configuration made for another stage is rejected here, and so are positions that are not
    those of the flags.

    Remove when: with `finalize-model-grads`.

    Megatron all-reduces between the stages for that, which needs slices of one size.
    """
    is_u_shaped = session.config.layerwise_disaggregated
    if is_u_shaped:
        told = host.u_layers(session.config.num_layer_list, chunk.config, session.config.num_rings)
        refuse(host.refusals(LAYER_RULES, told))
    pipeline = session.pipelines.of(getattr(chunk, "pp_group", None))
    if pipeline is not None:
        if pipeline.plan.ends.are_bridged and copies_embedding(chunk):
            raise ConfigError(
                f"several stages of a module hold the word embedding, and stages of tp {pipeline.plan.sizes} hold "
                "different slices of it; set share_embeddings_and_output_weights=False, and mtp_num_layers=None"
            )
        pipeline.plan.check_model_config(pipeline.stage, chunk.config)
    if session.has_arguments:
        refuse(_problems_of_positions(chunk))
    original(chunk)
    if pipeline is None or not copies_embedding(chunk):
        return
    if getattr(chunk, "mtp_process", False):
        _note_prediction(pipeline, host)
    if is_u_shaped:
        _tie_chunks(pipeline, chunk)
    elif not pipeline.plan.ends.are_stock and _holds_copy(chunk):
        stages = embedding_stages(pipeline.plan.layout.num_stages, host, chunk)
        refuse(_problems_of_copies(pipeline, host, stages, chunk))
        if pipeline.tied_weight is not None and len(stages) > 1:
            weight = chunk.shared_embedding_or_output_weight()
            with torch.no_grad():
                # As in Megatron, which may have drawn the values on the host.
                weight.data = weight.data.to(session.choose_platform().device())
                pipeline.tied_weight.copy_from_first(weight.data, stages)


def _problems_of_positions(chunk: Any) -> Iterator[str]:
    """Say where positions are stretched otherwise than the flags say: no script of NVIDIA's hands on the factor."""
    from megatron.training import get_args

    args, positions = get_args(), getattr(chunk, "rotary_pos_emb", None)
    if getattr(args, "use_rope_scaling", False) and hasattr(positions, "inv_freq"):
        yield from problem_of_factor(positions.inv_freq.tolist(), args.rotary_base, args.rope_scaling_factor)


def _note_prediction(pipeline: Pipeline, host: MegatronHost) -> None:
    """Warn, on the first rank of the stage that predicts, of what depends on its size in Megatron itself."""
    layout, stage = pipeline.plan.layout, pipeline.stage
    note = host.note_of_prediction(layout.tp_sizes[stage])
    if note and not layout.is_uniform and dist.get_rank() == layout.rank_of(stage, 0):
        log.warning(note)


def copies_embedding(model: Any) -> bool:
    """Tell whether a model holds its word embedding in several places: for the output layer, or for prediction."""
    shares = getattr(model, "share_embeddings_and_output_weights", False)
    return bool(shares or getattr(getattr(model, "config", None), "mtp_num_layers", None))


def tied_embedding(chunk: Any) -> torch.nn.Parameter | None:
    """Return the copy of a word embedding that several stages hold; None where a chunk has none."""
    return chunk.shared_embedding_or_output_weight() if copies_embedding(chunk) and _holds_copy(chunk) else None


def embedding_stages(num_stages: int, host: MegatronHost, model: Any) -> list[int]:
    """List the stages that hold the word embedding: the first one, and those with a copy.

    Args:
        num_stages: number of stages of the pipeline.
        host: the family of the Megatron that runs.
        model: a model chunk of this rank.
    """
    if not copies_embedding(model):
        return [0]
    last = [num_stages - 1] if model.share_embeddings_and_output_weights else []
    return sorted({0, *last, *host.mtp_stages(model.config, num_stages)})


def _holds_copy(chunk: Any) -> bool:
    is_output = chunk.post_process and chunk.share_embeddings_and_output_weights
    return chunk.pre_process or getattr(chunk, "mtp_process", False) or is_output


def _problems_of_copies(pipeline: Pipeline, host: MegatronHost, stages: list[int], chunk: Any) -> Iterator[str]:
    """Say why the copies of the word embedding cannot be kept equal, or what leaves prediction cannot be read."""
    tied, sizes = pipeline.tied_weight, pipeline.plan.layout.tp_sizes
    if len(stages) > 1 and (tied is None or not tied.reaches(stages)):
        yield (
            f"stages {', '.join(map(str, stages))} hold the word embedding; the plugin, as Megatron, keeps it equal on "
            "the first and the last one only unless told otherwise; give initialize_model_parallel, or pretrain, a "
            "get_embedding_ranks that returns those of all"
        )
    if getattr(chunk, "mtp_process", False) and pipeline.stage == 0 and not chunk.pre_process:
        yield (
            "multi-token prediction in another chunk of stage 0 than the embedding; its copy would not be summed; put "
            "m into another stage, such as the last one"
        )
    if not getattr(chunk.config, "mtp_standalone", False):
        return
    first = min(host.mtp_stages(chunk.config, len(sizes)), default=0)
    layout = pipeline.plan.layout
    cuts = {"context parallelism on stages of cp": layout.cp_sizes}
    if chunk.config.sequence_parallel:
        cuts["sequence parallelism on stages of tp"] = sizes
    for what, of_stages in cuts.items():
        if len(set(tail := of_stages[first:])) > 1:
            yield (
                f"multi-token prediction before the last stage with {what} {tail}; each rank joins its slices of both "
                f"predictions, so other sizes would cut them elsewhere; give these stages the same size, or leave out "
                f"{what.partition(' on ')[0]}"
            )


def _tie_chunks(pipeline: Pipeline, chunk: Any) -> None:
    """Give the edge's last chunk the word embedding of its first one, which is built before it."""
    if chunk.pre_process:
        pipeline.remember_embedding(chunk.shared_embedding_or_output_weight())
    elif chunk.post_process:
        embedding = pipeline.embedding
        if embedding is None:
            raise ConfigError(
                "the edge's last model chunk was built before its first one, whose word embedding it shares; build the "
                "chunks in the order of their numbers, as Megatron's get_model does"
            )
        # A copy, not the same memory: each chunk has its gradient buffer, and `finalize-model-grads` adds up the two.
        chunk.shared_embedding_or_output_weight().data = embedding.data.clone()
