"""Counts what a GPT of Transformer Engine's layers keeps of a microbatch: ``... NAME=FLAGS NAME=FLAGS ...``.

Megatron's own parser reads the flags, its own builder makes the model, on one rank; a stand-in computes Transformer
Engine's part. For each name a line says the bytes of the storages that autograd saved, weights left out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from tests.support import engine_stand_in

engine_stand_in.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.training.arguments import (  # noqa: E402
    add_megatron_arguments,
    core_transformer_config_from_args,
    validate_args,
)

from tests.multiproc.hooks.held import Held, balanced_routers  # noqa: E402
from tests.multiproc.jobs.core_job import cpu_only  # noqa: E402


def main() -> None:
    """Count all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.nn.functional.dropout = _dropout
    balanced_routers({})
    with cpu_only():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        for case in sys.argv[1:]:
            name, _, flags = case.partition("=")
            words = shlex.split(flags)
            engine_stand_in.Layer.keeps_eight_bits = "--fp8-format" in words
            print("held", name, _count([word for word in words if word not in ("--fp8-format", "hybrid")]))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Compute it as on a CUDA device, where the mask has a byte for each number."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _count(words: list[str]) -> int:
    args = add_megatron_arguments(argparse.ArgumentParser()).parse_args(words)
    args.rank, args.world_size = 0, 1
    validate_args(args)
    config = core_transformer_config_from_args(args)
    config.use_cpu_initialization = True
    model = _model(args, config)
    length, size = args.seq_length, args.micro_batch_size
    tokens = torch.randint(args.vocab_size, (size, length))
    positions = torch.arange(length).expand_as(tokens)
    with Held(model.parameters()) as held:
        model(tokens, positions, None, labels=tokens)
    return held.num_bytes


def _model(args: Any, config: Any) -> torch.nn.Module:
    is_engine = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=is_engine)
    model = GPTModel(
        config,
        layers,
        args.vocab_size,
        args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, is_engine) if args.mtp_num_layers else None,
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.1)
    return model.to(config.params_dtype).train()


if __name__ == "__main__":
    main()
