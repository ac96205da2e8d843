"""Pretrain a GPT with megatron.training: a complete script, as short as it can be.

It knows nothing of vtp_plugin. Start it under the plugin:

    torchrun --nproc-per-node 3 -m vtp_plugin run examples/pretrain_gpt.py --vtp-size-list 1,2 [Megatron's arguments]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import flatten_batch_for_packed_sequences, get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Read a microbatch ``[B, S]`` on tensor-parallel rank 0 and share it inside the stage.

    Middle stages need none of it, but the lengths of packed samples.
    """
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    is_whole, is_packed = needs_samples(get_model_config(model), vp_stage), has_packed_samples()
    if not is_whole and not is_packed:
        return {}
    is_reader = parallel_state.get_tensor_model_parallel_rank() == 0
    data = next(data_iterator) if is_reader else None
    batch = {}
    if is_whole:
        batch |= tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
        batch |= tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)
    if is_whole and has_masks():
        batch |= tensor_parallel.broadcast_data(["attention_mask"], data, torch.bool)
    if is_packed:
        batch |= tensor_parallel.broadcast_data(["cu_seqlens", "max_seqlen"], data, torch.int32)
    return flatten_batch_for_packed_sequences(batch)


def needs_samples(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Tell whether a chunk holds the embedding, the loss, or layers that predict further tokens."""
    layout, num_predicted = config.pipeline_model_parallel_layout, config.mtp_num_layers
    predicts = mtp_on_this_rank(layout, num_predicted, ignore_virtual=False, vp_stage=vp_stage)
    return predicts or is_first_or_last_pipeline_stage(vp_stage)


def has_packed_samples() -> bool:
    """Tell whether the samples of a row do not see each other."""
    return get_args().sft or get_args().dataloader_inter_document_masking


def has_masks() -> bool:
    """Tell whether the data set makes attention masks; packed samples have lengths instead."""
    return get_args().create_attention_mask_in_dataloader and not has_packed_samples()


def packed_params(batch: dict[str, torch.Tensor]) -> PackedSeqParams | None:
    """Tell the attention where samples end."""
    if "cu_seqlens" not in batch:
        return None
    ends, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
    update_seqlen_stats_from_cu_seqlens(ends)  # for the FLOP/s of the log
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum the losses that count; Megatron divides by the number of tokens."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple:
    """Run one microbatch through this rank's part of the model."""
    batch = get_batch(data_iterator, model)
    tokens, positions, mask = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    counted = {"labels": batch.get("labels"), "loss_mask": batch.get("loss_mask")}
    output = model(tokens, positions, mask, **counted, packed_seq_params=packed_params(batch))
    return output, partial(loss_func, batch.get("loss_mask"))


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build train, validation and test sets from ``--data-path``, or random ones with ``--mock-data``."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=has_masks(),
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def is_built_here() -> bool:
        is_needed = has_packed_samples() or needs_samples(core_transformer_config_from_args(args), vp_stage)
        return is_needed and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, config).build()


def embedding_ranks(ranks: list[int]) -> list[int]:
    """Give the ranks of a pipeline with the word embedding: its ends where it is tied, and what predicts."""
    ends = {ranks[0]} if get_args().untie_embeddings_and_output_weights else {ranks[0], ranks[-1]}
    return sorted({*ends, *get_mtp_ranks(ranks, core_transformer_config_from_args(get_args()))})


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model_config = gpt_config_from_args(args)
    model_config.rope_scaling_factor = args.rope_scaling_factor  # which Megatron leaves at 8
    config = pretrain_cfg_container_from_args(args, model_config)
    kind = ModelType.encoder_or_decoder
    pretrain(config, datasets_provider, kind, forward_step, get_embedding_ranks=embedding_ranks)
