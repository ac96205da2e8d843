"""Several starts of model parallelism in one process: what they train, what they refuse, and what they leave."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _pg_map

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, count_threads, cpu_only, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.errors import VtpError

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_OTHERS: tuple[dict[str, Any], ...] = (
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 5},
    {"order": "tp-cp-ep-pp-dp"},
)


class Left(NamedTuple):
    """What this process holds: process groups, open file descriptors, threads."""

    num_groups: int
    num_descriptors: int
    num_threads: int


def left() -> Left:
    """Count what this process holds."""
    gc.collect()
    return Left(len(_pg_map), len(os.listdir("/proc/self/fd")), count_threads())


def train_in_turn(parts: Sequence[Sequence[Case]]) -> tuple[list[list[RankResult]], list[list[Left]]]:
    """Train cases one after another, each with a start of its own; the cases of a part share one ``apply()``.

    Returns:
        The results of every part, and what was held before its first case and after each.
    """
    init_gloo()
    results: list[list[RankResult]] = []
    counts: list[list[Left]] = []
    for part in parts:
        with (
            cpu_only()
            if part[0].execution.plugin == "stock"
            else applied(part[0], force=part[0].execution.plugin == "forced")
        ):
            results.append([])
            counts.append([left()])
            for case in part:
                with model_parallel(case), closing(Trainer(case)) as trainer:
                    results[-1].append(trainer.run())
                counts[-1].append(left())
                del trainer
    return results, counts


def refusals(
    case: Case, calls: Sequence[Mapping[str, Any]], *, has_started: bool
) -> tuple[list[str], RankResult, list[Left]]:
    """Start with wrong arguments, maybe after a right start, and then train a case.

    Returns:
        What each wrong start said, the result, and what was held before the wrong starts and after them.
    """
    init_gloo()
    said: list[str] = []
    with applied(case, force=False):
        if has_started:
            with model_parallel(case):
                pass
        held = [left()]
        for options in calls:
            try:
                parallel_state.initialize_model_parallel(**options)
                said.append("nothing")
            except VtpError as error:
                said.append(str(error))
        held.append(left())
        with model_parallel(case), closing(Trainer(case)) as trainer:
            try:
                parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(case.stages.sizes))
            except VtpError as error:
                said.append(str(error))
            return said, trainer.run(), held


def start_again(facts: dict[str, Any]) -> None:
    """Have a script start model parallelism once more, before it builds the model; note what wrong starts say."""
    training: Any = sys.modules["megatron.training.training"]
    original = training.initialize_megatron
    facts["said"] = []

    def initialize_megatron(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        args = training.get_args()
        sizes = {name: getattr(args, name) for name in _SIZES}
        for wrong in _OTHERS:
            parallel_state.destroy_model_parallel()
            try:
                parallel_state.initialize_model_parallel(**{**sizes, **wrong})
                facts["said"].append("nothing")
            except VtpError as error:
                facts["said"].append(str(error))
        parallel_state.initialize_model_parallel(**sizes)
        return result

    training.initialize_megatron = initialize_megatron
