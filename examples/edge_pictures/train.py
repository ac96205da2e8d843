"""Train a small GPT that sees pictures over an edge and a cloud, on generated pictures, on this machine's CPU.

The whole encoder on the edge, with the language model's first and last layers:

    torchrun --nproc-per-node 3 examples/edge_pictures/train.py --sizes 1,2 --encoder 3 --language 1,2,1

Two rings, with the middle layers of the encoder in the cloud, too:

    torchrun --nproc-per-node 3 examples/edge_pictures/train.py --sizes 1,2 --encoder 1,1,1 --language 1,2,1

The same model on one rank, without the plugin, prints the same losses and norms:

    torchrun --nproc-per-node 1 examples/edge_pictures/train.py --sizes 1 --encoder 3 --language 4
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist

import vtp_plugin
from vtp_plugin.api import choose_device


def parse() -> argparse.Namespace:
    """Read the command line."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(word) for word in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, default=(1, 2), help="tensor-parallel size of every stage")
    parser.add_argument("--encoder", type=numbers, default=(3,), help="layers of the encoder, or of its parts")
    parser.add_argument("--language", type=numbers, default=(1, 2, 1), help="layers of every part of the GPT")
    parser.add_argument("--steps", type=int, default=5, help="default %(default)s")
    parser.add_argument("--microbatches", type=int, default=4, help="default %(default)s")
    return parser.parse_args()


options = parse()
is_alone = len(options.sizes) == 1
# First of all: before Megatron is imported.
if is_alone:
    choose_device("cpu")
else:
    vtp_plugin.apply(
        vtp_size_list=options.sizes,
        device="cpu",
        layerwise_disaggregated=True,
        encoder_layer_list=options.encoder if len(options.encoder) > 1 else None,
    )

from picture_model import Setup, Training, loss_of, start


def main() -> None:
    """Train, and print the loss of every step on the edge."""
    for name in ("", "absl", "megatron"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they list every process group
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    setup = Setup(
        sizes=options.sizes,
        encoder_layers=options.encoder,
        language_layers=options.language,
        num_microbatches=options.microbatches,
    )
    start(setup)
    training = Training(setup)
    for step in range(options.steps):
        sums, norm = training.step(step)
        loss = loss_of(sums)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.6f}  gradient norm {norm:.6f}", flush=True)
    training.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
