"""Batch sizes on stages of different data-parallel sizes: which are refused, and what each stage's arguments become."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vtp_plugin.host.versions import capability
from vtp_plugin.plan.layout.replica_map import ReplicaMap

# Than the arguments say, such as with pictures in a text.
_TIMES_LONGER = 16


def check_batches(args: object, replicas: ReplicaMap, version: str = "") -> tuple[str, ...]:
    """Find batches of training, ramp-up or evaluation that a stage cannot cut into whole microbatches.

    Args:
        args: Megatron's arguments as parsed; the microbatch size holds for the stage with most replicas.
        replicas: which replicas of the stages work together.
        version: version of Megatron, which may ignore a ramp-up; empty if it is not known.

    Returns:
        One line for every such batch.
    """
    return tuple(line for batch in _batches(args, version) for line in replicas.check_batch(*batch))


def own_batches(args: object, replicas: ReplicaMap, stage: int) -> dict[str, int]:
    """Return the batch arguments of one stage: the stages differ in them, or Megatron would derive them differently.

    Args:
        args: Megatron's arguments as parsed.
        replicas: which replicas of the stages work together.
        stage: this rank's.

    >>> from types import SimpleNamespace
    >>> from vtp_plugin.plan.layout.replica_map import DpMode
    >>> args = SimpleNamespace(micro_batch_size=2, global_batch_size=None)
    >>> own_batches(args, ReplicaMap(dp_sizes=(1, 2), mode=DpMode.SPLIT), 0)
    {'micro_batch_size': 4, 'global_batch_size': 4}
    """
    given = {name: getattr(args, name, None) for name in ("micro_batch_size", "eval_micro_batch_size")}
    sizes = {name: replicas.micro_batch(stage, size) for name, size in given.items() if size}
    size = given["micro_batch_size"]
    if size and not getattr(args, "global_batch_size", None):
        sizes["global_batch_size"] = replicas.batch_unit(size)
    return sizes


def describe_batches(batch: int, size: int, replicas: ReplicaMap) -> str:
    """Write one line for each stage: how it cuts the global batch.

    Args:
        batch: samples of a step.
        size: size of a microbatch on the stage with most replicas.
        replicas: which replicas of the stages work together.

    >>> print(describe_batches(8, 2, ReplicaMap(dp_sizes=(1, 2))))
    stage 0: data-parallel size 1 * micro batch size 2 * 4 microbatches = 8
    stage 1: data-parallel size 2 * micro batch size 2 * 2 microbatches = 8
    """
    sizes = [(dp, replicas.micro_batch(stage, size)) for stage, dp in enumerate(replicas.dp_sizes)]
    return "\n".join(
        f"stage {stage}: data-parallel size {dp} * micro batch size {micro} * "
        f"{batch // (dp * micro)} microbatches = {batch}"
        for stage, (dp, micro) in enumerate(sizes)
    )


def final_batch(args: Any) -> int:
    """Return the samples of a step once batches grow no more.

    Args:
        args: Megatron's arguments, validated.

    >>> from types import SimpleNamespace
    >>> final_batch(SimpleNamespace(global_batch_size=4, step_batch_size_schedule="0:768 2.5B:1.5K"))
    1500
    """
    *_, last = (args.global_batch_size, *_scheduled(getattr(args, "step_batch_size_schedule", None)))
    return last


def _scheduled(schedule: str | None) -> Iterator[int]:
    """Yield the batches of a schedule of steps, ``THRESHOLD:BATCH`` each; what has another form Megatron refuses."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    for entry in (schedule or "").replace(",", " ").split():
        found = re.fullmatch(r"[^:]+:(\d+(?:\.\d*)?)([KMBT]?)", entry, flags=re.IGNORECASE)
        if found:
            yield int(float(found[1]) * units.get(found[2].upper(), 1))


def _batches(args: object, version: str) -> Iterator[tuple[str, int, int]]:
    """Yield the flag, the samples and the microbatch size of every batch that was given."""
    size = getattr(args, "micro_batch_size", None)
    if not size:
        return
    batch = getattr(args, "global_batch_size", None)
    if batch:
        yield "--global-batch-size", batch, size
    if not version or capability("ramp_up").has(version):
        for number in (getattr(args, "rampup_batch_size", None) or ())[:2]:
            yield "--rampup-batch-size", int(number), size
    for number in _scheduled(getattr(args, "step_batch_size_schedule", None)):
        yield "--step-batch-size-schedule", number, size
    eval_size = getattr(args, "eval_micro_batch_size", None) or size
    eval_batch = getattr(args, "eval_global_batch_size", None) or batch
    if eval_batch and (eval_batch, eval_size) != (batch, size):
        yield "--eval-global-batch-size", eval_batch, eval_size


def most_tokens(options: Any) -> int | None:
    """Say how many tokens a microbatch may have, where samples have lengths of their own; None if that is not known.

    Args:
        options: Megatron's arguments.

    >>> from types import SimpleNamespace
    >>> most_tokens(SimpleNamespace(seq_length=12, max_position_embeddings=None, micro_batch_size=2))
    384
    """
    length, size = (
        max(getattr(options, name, None) or 0 for name in names)
        for names in (
            ("seq_length", "decoder_seq_length", "max_position_embeddings"),
            ("micro_batch_size", "eval_micro_batch_size"),
        )
    )
    return _TIMES_LONGER * length * size or None
