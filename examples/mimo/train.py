"""Train a small vision encoder and a GPT, each on its own grid of ranks, on generated pictures, on this machine's CPU.

On three ranks, for a laptop: one for the encoder, two for the language model, in tensor parallelism:

    torchrun --nproc-per-node 3 examples/mimo/train.py --vision 1,1,1 --language 2,1,1 --vtp-bridges

The encoder with three replicas, the language model with two, of two tensor-parallel ranks each:

    torchrun --nproc-per-node 7 examples/mimo/train.py --vision 1,1,3 --language 2,1,2 --vtp-bridges

It trains the same model on rank 0 alone, too, and prints the largest difference. Without ``--vtp-bridges`` Megatron's
own bridge joins the grids, where it can: one number of replicas must divide the other. A language model whose stages
have tensor-parallel sizes of their own:

    torchrun --nproc-per-node 13 examples/mimo/train.py --vision 1,1,4 --language 1,1,1 --stages 1,4,4 --vtp-bridges
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from mimo_sizes import Sizes

import vtp_plugin
from vtp_plugin.api import choose_device

SAMPLES = 12  # of one microbatch, over all replicas


def parse() -> argparse.Namespace:
    """Read the command line."""

    def sizes(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vision", type=sizes, default=[1, 1, 1], help="tp,pp,dp of the encoder (pp is 1)")
    parser.add_argument("--language", type=sizes, default=[2, 1, 1], help="tp,pp,dp of the language model")
    parser.add_argument(
        "--stages",
        metavar="TP[:DP],...",
        help="sizes of every stage of the language model, if they differ; dp is that of --language unless given",
    )
    parser.add_argument("--steps", type=int, default=5, help="default %(default)s")
    parser.add_argument("--microbatches", type=int, default=3, help="default %(default)s")
    parser.add_argument("--vtp-bridges", action="store_true", help="let the plugin's bridge join the grids")
    parser.add_argument(
        "--vtp-schedule",
        choices=("stock", "planned"),
        default="stock",
        help="planned: the plugin's order (default: stock)",
    )
    parser.add_argument(
        "--vtp-in-flight", metavar="N,N,...", help="planned: most microbatches in flight on every stage"
    )
    return parser.parse_args()


def read_sizes() -> list[Sizes]:
    """Read how the encoder and the language model are spread, and check that as many ranks were started."""
    vision, language = (Sizes(tp=tp, pp=pp, dp=dp) for tp, pp, dp in (options.vision, options.language))
    if options.stages:
        stages = (stage.partition(":") for stage in options.stages.split(","))
        language = Sizes(stages=tuple((int(tp), 1, int(own or language.dp)) for tp, _, own in stages))
    needed, started = vision.num_ranks + language.num_ranks, int(os.environ.get("WORLD_SIZE", "1"))
    if started != needed:
        sys.exit(f"{started} ranks; these sizes take {vision.num_ranks} and {language.num_ranks}; start {needed}")
    return [vision, language]


options = parse()
both_sizes = read_sizes()
# First of all: before Megatron is imported.
if options.vtp_bridges:
    vtp_plugin.apply(device="cpu", bridges=True, schedule=options.vtp_schedule, in_flight=options.vtp_in_flight)
else:
    choose_device("cpu")

from mimo_model import LANGUAGE, VISION, draw_batch, named_parts
from mimo_steps import Alone, Spread, use_gloo


def draw_batches(step: int) -> list[dict[str, Any]]:
    """Draw the microbatches of a step; without the plugin every sample has one picture, else none, one or two."""
    return [
        draw_batch(
            100 * step + microbatch,
            [(sample + microbatch) % 3 if options.vtp_bridges else 1 for sample in range(SAMPLES)],
        )
        for microbatch in range(options.microbatches)
    ]


def whole_weights(run: Spread | Alone) -> dict[str, torch.Tensor]:
    """Put the weights of all ranks together."""
    has_model = not isinstance(run, Alone) or run.is_here
    parts = [(*named, part.detach(), axis) for *named, part, axis in named_parts(run.model)] if has_model else []
    # Of equal copies the first replica's are taken.
    is_kept = isinstance(run, Alone) or (run.groups.dp.rank() == 0 and run.groups.cp.rank() == 0)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, parts if is_kept else [])
    found: dict[str, list[torch.Tensor]] = {}
    axes: dict[str, int | None] = {}
    for name, part, axis in (entry for some in everything for entry in some):
        found.setdefault(name, []).append(part)
        axes[name] = axis
    return {name: some[0] if axes[name] is None else torch.cat(some, dim=axes[name]) for name, some in found.items()}


def train(run: Spread | Alone) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train; returns loss and norm of every step, and the weights at the end, on all ranks."""
    results = []
    for step in range(options.steps):
        is_here = not isinstance(run, Alone) or run.is_here
        loss, num_words, norm = run.step(draw_batches(step)) if is_here else (0.0, 0.0, 0.0)
        sums = torch.tensor([loss, num_words, norm], dtype=torch.float64)
        dist.all_reduce(sums[:2])
        dist.all_reduce(sums[2:], op=dist.ReduceOp.MAX)
        results.append(torch.stack([sums[0] / sums[1], sums[2]]))
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {results[-1][0]:.6f}  gradient norm {results[-1][1]:.6f}", flush=True)
    weights = whole_weights(run)
    run.close()
    return results, weights


def main() -> None:
    """Train in both ways and compare."""
    for name in ("", "absl", "megatron"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they list every process group
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if not options.vtp_bridges:
        use_gloo()
    sizes = dict(zip((VISION, LANGUAGE), both_sizes, strict=True))
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"vision {sizes[VISION]}\nlanguage {sizes[LANGUAGE]}", flush=True)
    spread = train(Spread(sizes))
    if is_first:
        print("all on rank 0", flush=True)
    alone = train(Alone())
    pairs = [*zip(spread[0], alone[0], strict=True), *((spread[1][name], alone[1][name]) for name in alone[1])]
    difference = max(((ours - theirs).abs() / theirs.abs().max()).max().item() for ours, theirs in pairs)
    if is_first:
        print(f"largest relative difference of losses, norms and weights: {difference:.1e}", flush=True)
    dist.destroy_process_group()
    vtp_plugin.revert()


if __name__ == "__main__":
    main()
