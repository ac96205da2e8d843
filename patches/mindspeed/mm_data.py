"""What MindSpeed-MM reads: the files of a rank that reads data, and the batches that come from them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.host.rules.checks.batch import most_tokens


def problems_of_files(args: argparse.Namespace) -> Iterator[str]:
    """Say what a rank that reads data will not find: the tokenizer, before others wait for this rank.

    Args:
        args: after :func:`read_model`.
    """
    data = getattr(args.mm, "data", None)
    if data is None:
        yield "no --mm-data on a rank that reads data (in a U-shape the edge, else all); give its JSON file"
        return
    path = getattr(getattr(data.dataset_param, "preprocess_parameters", None), "model_name_or_path", None)
    # Else it may be the name of a model in a cache.
    if isinstance(path, str) and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        yield (
            f"model_name_or_path {path} of --mm-data {args.mm_data} is not there; a rank that reads data needs the "
            "tokenizer and the processor in it; correct the JSON file"
        )


def require_batch(args: argparse.Namespace, batch: Mapping[str, Any]) -> None:
    """Refuse a batch that stages could not pass on, before one of them takes memory for it.

    Args:
        args: arguments of the run.
        batch: what MindSpeed-MM's loader gives.

    Raises:
        ConfigError: it has pictures and videos.
        LayoutError: it has another form than tensors between stages, or more tokens than any may have.
    """
    require_one_kind(batch)
    shape, expected = tuple(batch["input_ids"].shape), (args.micro_batch_size, args.seq_length)
    if not has_own_lengths(args) and shape != expected:
        raise LayoutError(
            f"a batch of {shape} tokens; between stages all have {expected}, --micro-batch-size and --seq-length; add "
            "--variable-seq-lengths, for batches of their own lengths, or pad all samples to --seq-length and drop the "
            "last batch if it is smaller"
        )
    most = most_tokens(args)
    if most is not None and math.prod(shape) > most:
        raise LayoutError(
            f"a batch of {shape} tokens; {most} at most, by --micro-batch-size and what the arguments say of lengths; "
            "raise --seq-length"
        )


def require_one_kind(batch: Mapping[str, Any]) -> None:
    """Refuse a batch of which MindSpeed-MM would read one half.

    Raises:
        ConfigError: it has pictures and videos.
    """
    if batch.get("video_grid_thw") is not None and batch.get("image_grid_thw") is not None:
        raise ConfigError(
            "a batch with pictures and videos; MindSpeed-MM reads either; put them into different batches"
        )


def has_own_lengths(args: argparse.Namespace) -> bool:
    """Tell whether batches have lengths of their own; MindSpeed declares the flag."""
    return getattr(args, "variable_seq_lengths", False)
