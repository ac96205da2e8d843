"""Weights that MindSpeed-MM's converter wrote: a file for every rank of the run that it was asked for, and no other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vtp_plugin.checkpoint.format.resolver import read_tracker
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.util.own_command import own_command

_HEAD = "text_decoder.output_layer."
_CHUNK = "model"
_WAY_OUT = (
    "make a checkpoint of it with {command} checkpoint import --mm {folders} --like MODEL --to NEW, and "
    "load that with --ckpt-format torch_dist (docs/guides/mindspeed-mm.md)"
)


def problems_of_converted(load: str | None, layout: PipelineLayout, *, is_u_shaped: bool) -> Iterator[str]:
    """Say why converted weights cannot be loaded by these stages.

    Args:
        load: folder of checkpoints that the run looks into.
        layout: who is where.
        is_u_shaped: the run is.
    """
    found = None if load is None or "://" in load else _converted_file(Path(load))
    if found is None:
        return
    file, stored = found
    if _is_of_its_u(file, stored):
        yield (
            f"{file} is of MindSpeed-MM's hf_to_mm_ldt, which writes a tree for each side of its own U, in its own "
            f"chunks; no layout of the plugin has these; {_WAY_OUT.format(command=own_command(), folders='EDGE CLOUD')}"
        )
    elif is_u_shaped or len(set(layout.tp_sizes)) > 1:
        sizes = ",".join(map(str, layout.tp_sizes))
        yield (
            f"{file} is of MindSpeed-MM's hf_to_mm, which writes a file for each rank of a uniform run; "
            f"--vtp-size-list {sizes}{' in a U-shape' if is_u_shaped else ''} has other ranks; "
            f"{_WAY_OUT.format(command=own_command(), folders=load)}"
        )


def _converted_file(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Give one of the files that a converter wrote, and what it holds; None if there is none."""
    # The converter knows no iterations.
    if read_tracker(folder) != "release":
        return None
    for file in sorted(folder.glob("release/mp_rank_*/model_optim_rng.pt")):
        try:
            # Mapped: only names are read, and no weights. A run stores its arguments, which are no plain values.
            stored = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None  # the checks of checkpoints say what is wrong with it
        return (file, stored) if isinstance(stored, dict) and "args" not in stored else None
    return None


def _is_of_its_u(file: Path, stored: Mapping[str, Any]) -> bool:
    """Tell whether a file's chunks are those of a U: the first stage has the head, and others end with nothing."""
    chunks = [stored[name] for name in sorted(stored) if name.startswith(_CHUNK)]
    if len(chunks) < 2:
        return False
    # "mp_rank_01_002" is rank 1 of stage 2.
    is_first_stage = int(file.parent.name.split("_")[3]) == 0
    return any(name.startswith(_HEAD) for name in chunks[-1]) if is_first_stage else not chunks[-1]
