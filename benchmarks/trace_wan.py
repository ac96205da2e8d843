"""A traced U-shape over an emulated line between two sites, with two planted delays that the trace has to name.

    python -m benchmarks.trace_wan                    trains, joins the trace, prints what differs from the plan
    python -m benchmarks.trace_wan --out FILE.json    also writes the joined trace; FILE.svg draws its last step

It needs root and /dev/net/tun; elsewhere it says why it cannot run, and ends. Megatron, its training loop, gloo, TCP
and the line between the sites are real; its latency and bandwidth are emulated (``benchmarks/wan``). Each chunk's
forward and backward also wait, so that two cores carry three ranks: compute is mostly sleep. The run measures its
costs in steps 2 to 4. After step 6 the forwards of rank 1 take longer, and so does what rank 0 packs. Steps 8 to 17
are traced.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.wan.link import ADDRESSES, INTERFACE, LinkUnavailableError, Site, WanLink
from vtp_plugin.cli import main as vtp

ROOT = Path(__file__).resolve().parent.parent
SITES: tuple[Site, ...] = ("edge", "cloud", "cloud")
LATENCY_MS, MBIT = 20.0, 1000.0
COMPUTE_S = 0.04
NUM_STEPS_BEFORE, TRACED = 6, "8-17"
FORWARD_DELAY_S, PACK_DELAY_S = 0.03, 0.02
ARGUMENTS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --train-iters 18 --lr 1e-3 --min-lr 1e-4 --log-interval 6
    --eval-interval 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-persist-layer-norm --make-vocab-size-divisible-by 4 --vtp-device cpu
    --vtp-size-list 1,1,1 --layerwise-disaggregated-training --num-layer-list 1,1,1,1 --vtp-replan-share inf
"""


def main() -> None:
    """Train, join, print; of a rank, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="of the command `trace`")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _train(options.words)
        return
    with tempfile.TemporaryDirectory(prefix="vtp-trace-") as folder:
        try:
            with WanLink(LATENCY_MS, MBIT) as link:
                codes = _run(link, folder)
        except LinkUnavailableError as reason:
            sys.exit(f"no figures: {reason}")
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        print(
            f"line of {LATENCY_MS:g} ms one way and {MBIT:g} Mbit/s; planted: rank 1 forward "
            f"{8e3 * FORWARD_DELAY_S:+.0f} ms and rank 0 pack {16e3 * PACK_DELAY_S:+.0f} ms in a step"
        )
        vtp(["trace", folder, *(["--out", str(options.out)] if options.out else [])])


def _run(link: WanLink, folder: str) -> list[int]:
    """Start the ranks at their sites and wait for them."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    words = [*ARGUMENTS.split(), "--vtp-trace", folder, "--vtp-trace-steps", TRACED]
    command = [sys.executable, "-m", "benchmarks.trace_wan", "--rank", "--", *words]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, site in enumerate(SITES):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(SITES)),
            "MASTER_ADDR": ADDRESSES["edge"],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        enter = functools.partial(link.enter, site)
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=enter))
    try:
        return [one.wait(timeout=500) for one in ranks]
    finally:
        for one in ranks:
            one.kill()


def _train(words: list[str]) -> None:
    """Be one rank: wait in the place of work, and after some steps a little longer."""
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.training import training

    from vtp_plugin.runtime.comm import transfers

    rank, num_steps = int(os.environ["RANK"]), 0
    train_step, pack, forward = training.train_step, transfers.Transmission._outgoing, TransformerBlock.forward

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * COMPUTE_S)
            return gradient

    def delay_s(of_rank: int, extra_s: float) -> float:
        return extra_s if rank == of_rank and num_steps > NUM_STEPS_BEFORE else 0.0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return train_step(*args, **kwargs)

    def slow_pack(self: transfers.Transmission, tensor: Any, position: str) -> Any:
        time.sleep(delay_s(0, PACK_DELAY_S))
        return pack(self, tensor, position)

    def slow_forward(self: TransformerBlock, *args: Any, **kwargs: Any) -> Any:
        time.sleep(COMPUTE_S + delay_s(1, FORWARD_DELAY_S))
        return Waiting.apply(forward(self, *args, **kwargs))

    training.train_step, TransformerBlock.forward = counting, slow_forward
    transfers.Transmission._outgoing = slow_pack
    vtp(["run", str(ROOT / "examples" / "pretrain_gpt.py"), *words])


if __name__ == "__main__":
    main()
