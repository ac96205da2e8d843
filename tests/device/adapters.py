"""Train mcore-bridge's adapters (LoRA) on a small GPT of Transformer Engine's layers; ``test_adapters.py`` starts it.

    torchrun --nproc-per-node 3 tests/device/adapters.py --sizes 1,2 --device cuda

Nobody of us has the devices: it has never run with mcore-bridge.
"""

from __future__ import annotations

import argparse
import importlib
import os
import zlib
from collections.abc import Iterator

import torch

import vtp_plugin

BACKENDS = {"cuda": "nccl", "npu": "hccl"}
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SEED = 1234
VOCAB_SIZE = 256
SEQ_LENGTH = 32
MICRO_BATCH_SIZE = 2
NUM_MICROBATCHES = 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sizes", default="1,2", help="tensor-parallel size of every stage")
parser.add_argument("--device", choices=BACKENDS, default="cuda")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()
if options.device == "npu":
    importlib.import_module("mindspeed.megatron_adaptor")
vtp_plugin.apply(vtp_size_list=options.sizes, device=options.device)

# It patches Megatron and PEFT.
from mcore_bridge import LoraParallelLinear  # pyright: ignore[reportMissingImports]
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from peft import LoraConfig, inject_adapter_in_model

from vtp_plugin.adapters import targets_of_chunks


def start(num_stages: int) -> None:
    """Join the other ranks, make Megatron's groups, and seed."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(BACKENDS[options.device])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED + 100 * parallel_state.get_pipeline_model_parallel_rank())


def build_model(num_stages: int) -> GPTModel:
    """Build this rank's part of the model, frozen but for its adapters."""
    config = TransformerConfig(
        num_layers=2 * num_stages,
        hidden_size=128,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=num_stages,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        init_method_std=0.1,  # what a frozen head gives is so large that adapters can change the loss
        hidden_dropout=0.0,
        attention_dropout=0.0,
        batch_p2p_comm=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    (targets,) = targets_of_chunks([model], TARGETS)
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    draw(model)
    return model


def draw(model: GPTModel) -> None:
    """Set the first halves of the adapters to what depends on their names only; the second halves are zero."""
    tp, tp_rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    found = 0
    for name, module in model.named_modules():
        if not isinstance(module, LoraParallelLinear):
            continue
        found += 1
        _, _, index, *rest = name.split(".")
        where = f"{model.decoder.layers[int(index)].layer_number} {rest}"
        weight = module.lora_A["default"].weight
        num_parts = tp if module.is_parallel_a else 1
        whole = torch.randn(
            weight.shape[0],
            weight.shape[1] * num_parts,
            generator=torch.Generator().manual_seed(zlib.crc32(where.encode())),
        )
        with torch.no_grad():
            weight.copy_(0.1 * whole.chunk(num_parts, dim=1)[tp_rank % num_parts])
            assert not module.lora_B["default"].weight.any(), f"{name}: the second half is not zero"
    assert found == len(TARGETS) * len(model.decoder.layers), f"{found} adapters of mcore-bridge"


def batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels ``[B, S]`` of every microbatch: samples that count up from a random byte."""
    generator = torch.Generator().manual_seed(SEED + step)
    for _ in range(NUM_MICROBATCHES):
        first = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, 1), generator=generator)
        text = ((first + torch.arange(SEQ_LENGTH + 1)) % VOCAB_SIZE).cuda()
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def forward_step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module) -> tuple:
    """Run one microbatch through this rank's part of the model."""
    tokens, labels = next(iterator)
    positions = torch.arange(SEQ_LENGTH, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_func


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses ``[B, S]`` of one microbatch."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def main() -> None:
    """Train, print the loss of every step on one rank, and see that adapters alone have moved."""
    num_stages = len(options.sizes.split(","))
    start(num_stages)
    bare = build_model(num_stages)
    config = bare.config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, bare))
    before = {name: parameter.detach().clone() for name, parameter in bare.named_parameters()}
    # Without clipping: a norm may count the halves that all ranks of a stage hold more than once.
    optimizer_config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.grad_scale_func = optimizer.scale_loss
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
        optimizer.step()
        if prints:
            print(f"step {step + 1}  loss {sum(r['loss'].item() for r in reports) / len(reports):.7f}", flush=True)
    for name, parameter in bare.named_parameters():
        has_moved = not torch.equal(parameter, before[name])
        assert has_moved == (".lora_" in name), f"{name} has {'' if has_moved else 'not '}moved"
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
