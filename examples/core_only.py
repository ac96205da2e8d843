"""Train a small GPT on megatron-core alone: no megatron.training, and none of its command line.

Two stages, of one and of two tensor-parallel ranks, on this machine's CPU:

    torchrun --nproc-per-node 3 examples/core_only.py --sizes 1,2

With one size for all stages Megatron is left alone. With the same seed it prints the same losses, to float32 rounding:

    torchrun --nproc-per-node 2 examples/core_only.py --sizes 1,1

``--device cuda`` was run on one GPU that the ranks shared (see ``tests/support/devices.py``);
``--device npu`` was never run.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator

import torch

import vtp_plugin

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
SEED = 1234
VOCAB_SIZE = 264  # divisible by the size of every stage that holds the embedding or the head, up to four
SEQ_LENGTH = 32
MICRO_BATCH_SIZE = 2
NUM_MICROBATCHES = 4


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2", help="tensor-parallel size of every stage (default %(default)s)")
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="default %(default)s")
    return parser.parse_args()


options = parse()
if options.device == "npu":
    # It maps torch.cuda onto NPUs and patches Megatron for them.
    importlib.import_module("mindspeed.megatron_adaptor")
# First of all: before Megatron is imported, and before init_process_group().
vtp_plugin.apply(vtp_size_list=options.sizes, device=options.device)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig


def start(num_stages: int) -> None:
    """Join the other ranks, make Megatron's groups, and seed."""
    if options.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(BACKENDS[options.device])
    # No tensor-parallel size here: the plugin gives each stage its own.
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    # Dropout and weights made on the device draw from these generators, one for each tensor-parallel rank.
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    # use_cpu_initialization draws whole weights from this one and keeps the rank's part. So the seed may depend on the
    # stage, and must not depend on the tensor-parallel rank.
    torch.manual_seed(SEED + 100 * parallel_state.get_pipeline_model_parallel_rank())


def build_model(num_stages: int) -> DistributedDataParallel:
    """Build this rank's part of the model: its stage's layers, and the embedding or the head where the model ends."""
    config = TransformerConfig(
        num_layers=2 * num_stages,
        hidden_size=96,
        num_attention_heads=12,  # the size of every stage divides it
        # The size of this rank's stage.
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32,  # of what crosses between stages; Megatron's pipeline needs it
        use_cpu_initialization=True,  # weights that do not depend on the sizes
        hidden_dropout=0.0,  # masks would differ, since each tensor-parallel rank draws its own
        attention_dropout=0.0,
        batch_p2p_comm=False,
        finalize_model_grads_func=finalize_model_grads,  # without it replicas and tied embeddings are not summed
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),  # embedding
        post_process=parallel_state.is_pipeline_last_stage(),  # head and loss
        share_embeddings_and_output_weights=True,
    )
    if options.device != "cpu":
        model.cuda()
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, ddp_config, model)


def batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels ``[B, S]`` of every microbatch; the first and the last stage make the same ones.

    Each sample counts up from a random token, so there is something to learn.
    """
    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(SEED + 1000 * step + replica)
    for _ in range(NUM_MICROBATCHES):
        start = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, 1), generator=generator)
        text = (start + torch.arange(SEQ_LENGTH + 1)) % VOCAB_SIZE
        if options.device != "cpu":
            text = text.cuda()
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def forward_step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module) -> tuple:
    """Run one microbatch through this rank's part of the model."""
    tokens, labels = next(iterator)
    positions = torch.arange(SEQ_LENGTH, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_func


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses ``[B, S]`` of one microbatch; only the last stage calls this."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def main() -> None:
    """Train, and print the loss of every step on one rank of the last stage."""
    num_stages = len(options.sizes.split(","))
    start(num_stages)
    model = build_model(num_stages)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0), [model])
    model.config.grad_scale_func = optimizer.scale_loss
    prints = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    for step in range(options.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        if prints and parallel_state.get_data_parallel_rank() == 0:
            loss = sum(report["loss"].item() for report in reports) / len(reports)
            print(f"step {step + 1}  loss {loss:.7f}  gradient norm {grad_norm:.7f}", flush=True)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
