"""What the plugin costs per step where it is not needed: a uniform list, side by side in one run.

    python -m benchmarks.step_time

starts four ranks of each variant by torchrun. ``--model moe`` has a mixture of 8 experts in every layer, in halves on
the ranks of a stage.

Variants, all with stages of size 2,2 and the same model: Megatron's own groups and communicator; the plugin forced on
(transfers rank to rank); the plugin forced on with the rank0 transport (through the leaders). All are alive at once and
train a few steps in turn (see ``turns.py``), so that a slow moment of the machine hits all; each round has processes of
its own. Printed are, of the time of a step and of the CPU time of all ranks in it, medians, the mean (geometric) of the
ratios of the rounds with its 95 % interval, and their range. An interval that contains 1 shows no cost. With
``--traced`` the variants are the plugin forced on without and with ``--vtp-trace``, which records every measured step;
with ``--split`` a planned order without and with split backwards; with ``--adapters`` all weights
trained, and adapters of rank 16 alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vtp_plugin
from benchmarks.turns import in_turn, measure_in_turn

SIZES = [2, 2]
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
    "add_bias_linear": False,
}
Times = tuple[float, float]
"""Of a step, in seconds: on the clock, and of CPU on all ranks."""
FIGURES = "time, ms", "CPU, ms"
VARIANTS: dict[str, dict[str, object]] = {
    "Megatron": {},
    "plugin": {"force": True},
    "plugin, rank0": {"force": True, "transport": "rank0"},
    "plugin, traced": {"force": True, "trace_steps": (2, 1_000_000)},
    "adapters": {"force": True, "lora_rank": 16},
    "planned": {"force": True, "schedule": "planned"},
    "planned, split": {"force": True, "schedule": "planned", "split_backward": True},
}
NUM_TURNS = 8
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and print; told to measure in turn, start the ranks that do, or be one of them."""
    options = _options()
    if not options.turns:
        _compare(options)
    elif "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sum(SIZES))]
        command = [sys.executable, *launcher, "-m", "benchmarks.step_time", *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
    else:
        torch.set_num_threads(1)
        dist.init_process_group(options.backend)
        _measure(options)
        dist.destroy_process_group()


def _compare(options: argparse.Namespace) -> None:
    variants = ["Megatron", "plugin", "plugin, rank0"]
    if options.traced or options.split or options.adapters:
        variants = ["plugin", "plugin, traced" if options.traced else "adapters"]
        variants = ["planned", "planned, split"] if options.split else variants
    command = [sys.executable, "-m", "benchmarks.step_time", *sys.argv[1:]]
    programs = [(ROOT, [*command, "--variant", name]) for name in variants]
    rounds = [in_turn(programs, NUM_TURNS) for _ in range(options.rounds)]
    print(
        f"{options.model}, stages 2,2, hidden {options.hidden_size}, sequence {options.seq_length}, "
        f"{options.num_microbatches} microbatches, {options.rounds} rounds of {NUM_TURNS} turns of {options.steps} "
        f"steps, {options.backend}"
    )
    print(f"{'':8} {'variant':15} {'median ms':>10} {'ratio':>7} {'95 %':>16} {'range':>16}")
    for what, (index, name) in product(FIGURES, enumerate(variants)):
        ratios = [found[index][what] / found[0][what] for found in rounds]
        mean, low, high = mean_with_interval(ratios)
        median_ms = statistics.median(found[index][what] for found in rounds)
        print(
            f"{what:8} {name:15} {median_ms:10.2f} {mean:7.3f} {low:7.3f} to {high:5.3f} "
            f"{min(ratios):7.3f} to {max(ratios):5.3f}"
        )


def _measure(options: argparse.Namespace) -> None:
    """Measure steps whenever it is this variant's turn. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        settings = dict(VARIANTS[options.variant])
        if "trace_steps" in settings:
            settings["trace"] = folders[0]
        with _training(options, settings) as step:
            # The first steps open connections and touch memory.
            for _ in range(2 + options.steps):
                step()

            def measure() -> dict[str, float]:
                medians = map(statistics.median, zip(*(_timed(step) for _ in range(options.steps)), strict=True))
                return {name: seconds * 1e3 for name, seconds in zip(FIGURES, medians, strict=True)}

            measure_in_turn(options.turns, measure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traced", action="store_true", help="what --vtp-trace costs")
    parser.add_argument("--split", action="store_true", help="what --vtp-split-backward costs")
    parser.add_argument("--adapters", action="store_true", help="a step of adapters (LoRA) beside one of all weights")
    parser.add_argument("--variant", choices=VARIANTS, default="plugin", help="with --turns")
    parser.add_argument("--turns", help="measure when told so over this address, see turns.py")
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--rounds", type=int, default=10, help="each with processes of its own")
    parser.add_argument("--steps", type=int, default=3, help="of every variant in every turn")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="gloo")
    return parser.parse_args()


def _timed(step: Callable[[], None]) -> Times:
    dist.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    elapsed_s, cpu_s = time.perf_counter() - begin_s, torch.tensor(time.process_time() - begin_cpu_s)
    dist.all_reduce(cpu_s)
    return elapsed_s, cpu_s.item()


def mean_with_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and its 95 % interval, by the normal distribution."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    error = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


@contextmanager
def _training(options: argparse.Namespace, settings: dict[str, object]) -> Iterator[Callable[[], None]]:
    """Build the model under one variant; give a function that trains one step."""
    vtp_plugin.apply(vtp_size_list=SIZES, device=options.device, **settings)  # pyright: ignore[reportArgumentType]
    # After apply(), so that the names are the patched ones.
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = EXPERTS if options.model == "moe" else {}
    sizes = {name: experts[name] for name in experts if name.endswith("_parallel_size")}
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(SIZES), **sizes)
    try:
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=options.hidden_size,
            num_attention_heads=8,
            use_cpu_initialization=True,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=len(SIZES),
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **experts,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=experts.get("num_moe_experts")),
            vocab_size=512,
            max_sequence_length=options.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [chunk])
        tokens = torch.randint(0, 512, (1, options.seq_length + 1), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(options.seq_length)[None]
        device = next(model.parameters()).device

        def forward_step(_data: object, chunk: torch.nn.Module) -> tuple:
            inputs, labels = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
            losses = chunk(inputs, positions.to(device), None, labels=labels)
            return losses, lambda losses: (losses.mean(), {})

        def step() -> None:
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[chunk],
                num_microbatches=options.num_microbatches,
                seq_length=options.seq_length,
                micro_batch_size=1,
            )
            optimizer.step()

        yield step
    finally:
        # It refers to bound methods of Megatron's DDP, whose hooks refer back where Python's collector does not look.
        config.finalize_model_grads_func = config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        for module in model.modules():
            if hasattr(module, "token_dispatcher"):
                vars(module.token_dispatcher).clear()  # tensors of the last step, with the way back to the weights
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()


if __name__ == "__main__":
    main()
