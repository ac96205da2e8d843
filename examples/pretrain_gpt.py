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
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> dict[str, torch.Tensor] | None:
    """Read a microbatch ``[B, S]`` on tensor-parallel rank 0 and share it inside the stage; None on middle stages."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None
    is_reader = parallel_state.get_tensor_model_parallel_rank() == 0
    data = next(data_iterator) if is_reader else None
    batch = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    batch |= tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)
    return batch


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum the losses that count; Megatron divides by the number of tokens."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple:
    """Run one microbatch through this rank's part of the model."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    if batch is None:
        return model(None, None, None), partial(loss_func, None)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


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
        create_attention_mask=False,
    )

    def is_built_here() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
