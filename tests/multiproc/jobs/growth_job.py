"""Jobs that train many small steps and count what a process, and the run's store, hold meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, count_threads, cpu_only, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.api import _Holder

_TRIM = ctypes.CDLL("libc.so.6").malloc_trim


class Held(NamedTuple):
    """What there is at one moment: in the store, in this process, and in its folders."""

    num_keys: int
    num_descriptors: int
    num_threads: int
    num_files: int
    num_objects: int
    num_bytes: int


def grow_core(case: Case, marks: Sequence[int], options: Mapping[str, Any], folder: str) -> list[Held]:
    """Train a case without megatron.training.

    Args:
        case: what is trained.
        marks: steps after which is counted; the last one ends the run.
        options: of ``apply()``, besides those of the case.
        folder: for what the run writes.
    """
    rank = init_gloo()
    with (
        _in_folder(Path(folder) / str(rank)) as count,
        cpu_only()
        if case.execution.plugin == "stock"
        else applied(case, force=case.execution.plugin == "forced", **options),
    ):
        _report_every_step()
        with model_parallel(case), closing(Trainer(case)) as trainer:

            def train(step: int) -> None:
                for _ in range(case.checks.num_evaluations):
                    trainer.evaluate(step % 7)
                trainer.step(step % 7)

            return count(train, marks)


def grow_pictures(case: Any, marks: Sequence[int], options: Mapping[str, Any], folder: str) -> list[Held]:
    """Train an encoder and a language model in a U with two rings; arguments as of :func:`grow_core`."""
    from tests.multiproc.jobs.picture_job import _training

    rank = init_gloo()
    with _in_folder(Path(folder) / str(rank)) as count, _training(case, **options) as run:
        return count(lambda step: run.step(step % 7), marks)


def grow_modules(case: Any, marks: Sequence[int], options: Mapping[str, Any], folder: str) -> list[Held]:
    """Train modules that bridges join; arguments as of :func:`grow_core`, but for the options."""
    from tests.multiproc.jobs.mimo_job import _applied, _make, draw_batches

    rank = init_gloo()
    with _in_folder(Path(folder) / str(rank)) as count, _applied(case):
        run = _make(case)
        try:
            return count(lambda step: run.step(draw_batches(case, step % 7)), marks)
        finally:
            run.close()


def _report_every_step() -> None:
    """Compare real and planned times after every step, as with ``--log-interval 1``."""
    session = _Holder.session
    if session is None:
        return
    plan = session.plan

    def plan_and_learn(**sizes: Any) -> None:
        plan(**sizes)
        session.learn(log_interval_steps=1)

    session.plan = plan_and_learn


Count = Callable[[Callable[[int], object], Sequence[int]], list[Held]]


@contextmanager
def _in_folder(folder: Path) -> Iterator[Count]:
    """Work in a new folder, also for temporary files, and give what counts."""
    folder.mkdir(parents=True)
    before, temporary = os.getcwd(), tempfile.tempdir
    os.chdir(folder)
    tempfile.tempdir = str(folder)
    try:
        yield _count
    finally:
        os.chdir(before)
        tempfile.tempdir = temporary


def _count(train: Callable[[int], object], marks: Sequence[int]) -> list[Held]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    found: list[Held] = []
    for step in range(marks[-1]):
        train(step)
        if step + 1 not in marks:
            continue
        gc.collect()
        _TRIM(0)
        dist.barrier()
        found.append(
            Held(
                num_keys=store.num_keys(),
                num_descriptors=len(os.listdir("/proc/self/fd")),
                num_threads=count_threads(),
                num_files=sum(len(files) for _, _, files in os.walk(os.curdir)),
                num_objects=len(gc.get_objects()),
                num_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            )
        )
        dist.barrier()
    return found
