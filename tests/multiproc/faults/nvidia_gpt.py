"""The example with the ``get_batch`` of NVIDIA's script for Megatron 0.19: ranks make memory by the arguments' sizes.

It knows nothing of the plugin.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args

from tests.multiproc.faults.faulty_gpt import load_example


def get_batch(data_iterator: Any, model: Any) -> dict[str, Any]:
    """Read a microbatch on tensor-parallel rank 0, share it inside the stage, and take this rank's part of a row."""
    args: Any = get_args()
    if not example.is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        return {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch = next(data_iterator) if tp_rank == 0 else {}
    batch = get_batch_on_this_tp_rank(
        {key: value.cuda() for key, value in batch.items()},
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=group)
    return {key: value for key, value in batch.items() if value is not None}


if __name__ == "__main__":
    example = load_example()
    example.get_batch = get_batch
    example.datasets_provider.is_distributed = True
    args = example.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = example.pretrain_cfg_container_from_args(args, example.gpt_config_from_args(args))
    kind = example.ModelType.encoder_or_decoder
    example.pretrain(
        config, example.datasets_provider, kind, example.forward_step, get_embedding_ranks=example.embedding_ranks
    )
