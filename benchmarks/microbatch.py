"""What one microbatch costs a rank to send and to receive: the plugin's communicator beside Megatron's own.

    python -m benchmarks.microbatch                   # uniform 1,1 and, of the plugin alone, 1,2
    python -m benchmarks.microbatch --rounds 20

It needs a Megatron that has a communicator class, 0.15 or newer.
The first stage sends an activation and takes the gradient that comes back, by Megatron's functions, over gloo on
loopback; the tensor is small, so that what counts is what Python does. Measured is the processor's time of rank 0, all
its threads; the variants take turns in one process, and each round starts the ranks anew. Printed are medians over the
rounds in microseconds a microbatch, and of the ratios to Megatron the mean with its 95 % interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vtp_plugin
from benchmarks.step_time import mean_with_interval
from benchmarks.turns import in_turn, measure_in_turn
from vtp_plugin.api import current_session

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (16, 1, 32)
VARIANTS: dict[str, dict[str, Any]] = {
    "Megatron 1,1": {"vtp_size_list": [1, 1]},
    "plugin 1,1": {"vtp_size_list": [1, 1], "force": True},
    "plugin 1,2, rank0": {"vtp_size_list": [1, 2], "transport": "rank0"},
    "plugin 1,2, sliced": {"vtp_size_list": [1, 2], "transport": "sliced"},
}
STEP = 8
"""Microbatches of a step, after which all sends are waited for."""
NUM_TURNS = 10
FIGURE = "CPU, us"


def main() -> None:
    """Measure and print; told to measure in turn, start the ranks that do, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="plugin 1,1", help="with --turns")
    parser.add_argument("--turns", help="measure when told so over this address, see turns.py")
    parser.add_argument("--rounds", type=int, default=10, help="each with processes of its own")
    parser.add_argument("--microbatches", type=int, default=200, help="of every variant in every turn")
    options = parser.parse_args()
    settings = VARIANTS[options.variant]
    if not options.turns:
        _compare(options)
    elif "RANK" not in os.environ:
        world_size = sum(settings["vtp_size_list"])
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        command = [sys.executable, *launcher, "-m", "benchmarks.microbatch", *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        with _microbatches(settings) as run:
            run(options.microbatches)

            def measure() -> dict[str, float]:
                dist.barrier()
                begin_s = time.process_time()
                run(options.microbatches)
                return {FIGURE: 1e6 * (time.process_time() - begin_s) / options.microbatches}

            measure_in_turn(options.turns, measure)
        dist.destroy_process_group()


def _compare(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.microbatch", *sys.argv[1:]]
    programs = [(ROOT, [*command, "--variant", name]) for name in VARIANTS]
    rounds = [in_turn(programs, NUM_TURNS) for _ in range(options.rounds)]
    print(
        f"an activation {list(SHAPE)} sent, its gradient received; {options.rounds} rounds of {NUM_TURNS} turns of "
        f"{options.microbatches} microbatches"
    )
    print(f"{'variant':20} {FIGURE:>8} {'ratio':>7} {'95 %':>16}")
    for index, name in enumerate(VARIANTS):
        median = statistics.median(found[index][FIGURE] for found in rounds)
        mean, low, high = mean_with_interval([found[index][FIGURE] / found[0][FIGURE] for found in rounds])
        print(f"{name:20} {median:8.0f} {mean:7.3f} {low:7.3f} to {high:5.3f}")


@contextmanager
def _microbatches(settings: dict[str, Any]) -> Iterator[Callable[[int], None]]:
    """Open the stages of one variant; give a function that lets some microbatches cross, and their gradients back."""
    vtp_plugin.apply(device="cpu", **settings)
    # After apply(), so that the names are the patched ones.
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(settings["vtp_size_list"]))
    try:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=SHAPE[-1],
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=len(settings["vtp_size_list"]),
            pipeline_dtype=torch.float32,
        )
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        communicator = P2PCommunicator(group, config)
        is_first = parallel_state.is_pipeline_first_stage()
        session, tensor = current_session(), torch.ones(SHAPE)

        def run(number: int) -> None:
            for index in range(1, number + 1):
                if is_first:
                    communicator.send_forward_recv_backward(tensor, SHAPE, is_last_stage=False)
                else:
                    communicator.recv_forward(SHAPE, is_first_stage=False)
                    communicator.send_backward(tensor, is_first_stage=False)
                if session is not None and index % STEP == 0:
                    session.pipelines.finish_step()

        yield run
    finally:
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()


if __name__ == "__main__":
    main()
