"""examples/pretrain_gpt.py; the edge writes down what it sends and reads, and is held at a step until it may go on."""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch

from tests.multiproc.hooks.leak_watch import Watch, memory_of
from tests.multiproc.link.two_networks import FOLDER_VARIABLE
from tests.support.hosts import ROOT

HELD_AT = 3
PIECE_BYTES = 16


def main() -> None:
    """Train; on the edge, write `known.json` at the end, and wait for the file `go` at one step."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    if os.environ["RANK"] != "0":
        runpy.run_path(str(ROOT / "examples/pretrain_gpt.py"), run_name="__main__")
        return
    samples: list[dict[str, torch.Tensor]] = []
    _hold(folder)
    _keep(samples)
    watch = Watch(home=[0])
    try:
        with watch:
            runpy.run_path(str(ROOT / "examples/pretrain_gpt.py"), run_name="__main__")
    finally:
        sent = [each.values for each in watch.outgoing if each.how == "send" and isinstance(each.values, torch.Tensor)]
        known = {
            "activation": _pieces([values for values in sent if values.is_floating_point()]),
            "token": _pieces([sample["tokens"] for sample in samples]),
            "label": _pieces([sample["labels"] for sample in samples]),
        }
        (folder / "known.json").write_text(json.dumps(known))


def _pieces(tensors: list[torch.Tensor]) -> list[str]:
    """Give 16 bytes out of the middle of each tensor that has no zeros there."""
    found: list[str] = []
    for values in tensors:
        data = memory_of(values)
        middle = len(data) // 2 // PIECE_BYTES * PIECE_BYTES
        piece = data[middle : middle + PIECE_BYTES]
        if len(piece) == PIECE_BYTES and len(set(piece)) > 2:
            found.append(piece.hex())
    return found


def _hold(folder: Path) -> None:
    original, number = training.train_step, 0

    def held(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        if number == HELD_AT:
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.1)
        return original(*args, **kwargs)

    training.train_step = held


def _keep(samples: list[dict[str, torch.Tensor]]) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    def kept(self: GPTDataset, idx: int | None) -> dict[str, torch.Tensor]:
        samples.append(original(self, idx))
        return samples[-1]

    GPTDataset.__getitem__ = kept


if __name__ == "__main__":
    main()
