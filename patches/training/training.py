"""U5: set-up of a run on stages with different numbers of chunks, only the first with data. S1: a log for each site."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from vtp_plugin import log
from vtp_plugin.patches.training.models.dist_utils import keep_full_chunks
from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="U5",
            target="megatron.training.training:get_model",
            build=functools.partial(keep_full_chunks, session),
            why="as U4, for scripts with a model provider",
            versions=">=0.19,<0.20",
            remove_when="with U1",
        ),
        PatchRecord(
            id="U5b",
            target="megatron.training.training:build_train_valid_test_data_iterators",
            build=functools.partial(_build_iterators, session),
            why="it is called once for each chunk and talks to all ranks: with different numbers of chunks that hangs; "
            "and it calls the script's provider, which opens data, on every rank",
            versions=">=0.19,<0.20",
            remove_when="the number of calls is the same on all ranks, and only ranks that read data call the provider",
        ),
    )


def site_records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the record for runs on several sites."""
    return (
        PatchRecord(
            id="S1",
            target="megatron.training.training:training_log",
            build=functools.partial(_log_on_site, session),
            why="one rank of the world prints the line of an iteration, which only its site sees",
            versions=">=0.19,<0.20",
            remove_when="Megatron knows sites",
        ),
    )


def _log_on_site(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first rank of a site that has no writer print a line too: number and time, but no loss."""
    from megatron.training.global_vars import get_args, get_timers

    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        rank, planned = dist.get_rank(), session.planned
        is_reporter = rank in planned.reporting_ranks.values()
        if not is_reporter or planned.site_of(rank) == planned.site_of(planned.writer_rank):
            return original(*args, **kwargs)
        options: Any = get_args()
        timers: Any = get_timers()
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        iteration, is_first = bound.arguments["iteration"], bound.arguments["is_first_iteration"]
        # Before Megatron reads the same timer, which sets it back.
        if iteration % options.log_interval == 0 or is_first:
            elapsed_s = timers("interval-time").elapsed(reset=False, barrier=False)
            elapsed_ms = 1e3 * elapsed_s / (1 if is_first else options.log_interval)
            log.info(f"iteration {iteration}/{options.train_iters} | elapsed time per iteration (ms): {elapsed_ms:.1f}")
        return original(*args, **kwargs)

    return training_log


def _build_iterators(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Callable[..., Any]) -> Any:
        if session.planned.own.stage == 0:
            return original(provider)
        pipeline = session.running.require_schedule_runner()
        for _ in range(len(pipeline.placement.vstages(0)) - pipeline.num_chunks):
            original(_no_data)
        return original(_no_data)

    return build_train_valid_test_data_iterators


def _no_data(num_samples: list[int]) -> tuple[None, None, None]:
    """Stand in for the script's provider: no training, validation or test set, here.

    Whether there are any, and so what the run does, the ranks hear from rank 0 all the same.
    """
    return None, None, None


# Megatron then calls it on all tensor-parallel ranks.
_no_data.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
