"""The processes that run the layouts of ``certify``: kept between runs, and started anew after one that failed."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vtp_plugin
from vtp_plugin.api import choose_device, current_session
from vtp_plugin.certify.compare import RankNumbers, finite
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.host.mindspeed import has_mindspeed, import_adaptor
from vtp_plugin.runtime.health.redaction import describe_error, names_a_path
from vtp_plugin.util.text import one_line
from vtp_plugin.util.typed_json import read_typed

if TYPE_CHECKING:
    from torch.distributed import Store

    from vtp_plugin.session import Session

_TRAINER: Final = "vtp_plugin.patches.certified_run"
_GRACE_S = 15.0  # after the first failure, for the other ranks to say which rank it was
_START_S = 240.0  # to import torch and Megatron
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a run on one rank.

    Attributes:
        numbers: what it saw; None if it failed.
        line: why it failed, without paths; empty if it did not.
        after_s: seconds until then.
    """

    numbers: RankNumbers | None = None
    line: str = ""
    after_s: float = 0.0


class Workers:
    """One process for each rank of this supervisor; all supervisors call the same methods in the same order.

    Args:
        ranks: global ranks of this supervisor's processes.
        store: where supervisors and processes meet; its server outlives the processes.
        environment: variables of every process: where the store is, and what the launcher has set.
        device: of the processes.
        timeout_s: longest time for one run, in seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        store: Store,
        environment: Mapping[str, str],
        device: str,
        timeout_s: float,
    ) -> None:
        self._ranks = ranks
        self._store = store
        self._environment = environment
        self._device = device
        self._timeout_s = timeout_s
        self._number = 0
        self._processes: dict[int, _Process] = {}

    def run(self, job: CertifiedRun, folder: str = "") -> list[Answer]:
        """Run a layout on its ranks, all supervisors together.

        Returns:
            The answers of its ranks, in their order, equal on all supervisors.
        """
        self._number += 1
        key = f"certify/{self._number}"
        own = [rank for rank in self._ranks if rank < job.num_ranks]
        begin_s = time.monotonic()
        for rank in own:
            if rank not in self._processes:
                self._processes[rank] = _Process(rank, self._environment, self._device)
            self._processes[rank].post((job, folder, key))
        found = self._collect(own, begin_s)
        for rank in own:
            self._store.set(f"{key}/{rank}", json.dumps(finite(asdict(found[rank]))))
        answers = [read_typed(Answer, self._store.get(f"{key}/{rank}")) for rank in range(job.num_ranks)]
        if any(answer.numbers is None for answer in answers):
            self.stop()
        return answers

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.stop()
        self._processes.clear()

    def _collect(self, ranks: Sequence[int], begin_s: float) -> dict[int, Answer]:
        """Wait for the answers of some ranks; once one has failed, for those of the others only a little."""
        found: dict[int, Answer] = {}
        deadline_s = begin_s + self._timeout_s + (_START_S if self._number == 1 else 0)
        while waiting := [rank for rank in ranks if rank not in found]:
            connections = [self._processes[rank].connection for rank in waiting]
            connection.wait(connections, timeout=_POLL_S)
            for rank in waiting:
                answer = self._processes[rank].answer()
                if answer is not None:
                    found[rank] = Answer(numbers=answer[0], line=answer[1], after_s=time.monotonic() - begin_s)
                    if answer[0] is None:
                        deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline_s:
                for rank in waiting:
                    line = f"no end within {time.monotonic() - begin_s:.0f} s"
                    found.setdefault(rank, Answer(line=line, after_s=time.monotonic() - begin_s))
        return found


class _Process:
    """This side of one process."""

    def __init__(self, rank: int, environment: Mapping[str, str], device: str) -> None:
        # A process that has begun with a GPU cannot be forked; on CPUs a fork saves seconds of imports.
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu" and not has_mindspeed():  # whose adaptor comes before Megatron
            multiprocessing.set_forkserver_preload([_TRAINER])
        self.output = tempfile.NamedTemporaryFile(prefix="vtp-certify-", suffix=".log")  # noqa: SIM115
        self.connection, theirs = context.Pipe()
        target = (theirs, rank, dict(environment), device, self.output.name)
        self._process: Any = context.Process(target=serve, args=target, daemon=False)
        self._process.start()
        theirs.close()

    def post(self, message: object) -> None:
        """Give it a job."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(message)

    def answer(self) -> tuple[RankNumbers | None, str] | None:
        """Return what it answered, or how it died; None if it still works."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        else:
            if self._process.exitcode is None:
                return None
        self._process.join()
        lines = Path(self.output.name).read_text(errors="replace").splitlines()
        said = [line for line in lines if "vtp" in line and ("rror" in line or "rank" in line)]
        return None, shown(said[-1] if said else f"its process ended with {self._process.exitcode}")

    def stop(self) -> None:
        """End it, and what it has started, such as writers of a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()
        self.output.close()


def shown(line: str) -> str:
    """Give a line as a report may have it: without paths, which may hold names.

    >>> shown("no such file: /home/me/x, rank 1"), shown("rank 1 has died")
    ('no such file: (path), rank 1', 'rank 1 has died')
    """
    line = one_line(line, most=400)
    words = (re.sub(r"[^\s,;:()'\"]*[/\\\\][^\s,;:()'\"]*", "(path)", word) for word in line.split(" "))
    return " ".join(word for word in words if not names_a_path(word))


def serve(theirs: Any, rank: int, environment: Mapping[str, str], device: str, output: str) -> None:
    """Take jobs from the supervisor until it is gone; what the libraries print goes into a file."""
    os.setsid()
    _end_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment, RANK=str(rank))
    os.environ.setdefault("LOCAL_RANK", str(rank))  # where no launcher has said it
    sys.argv = ["certify"]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_START_S))
    while True:
        try:
            job, folder, key = theirs.recv()
        except EOFError:
            return
        try:
            answer = (_run_one(job, folder, dist.PrefixStore(key, store), device), "")
        except Exception as error:
            answer = (None, shown(describe_error(error)))
        theirs.send(answer)


def _run_one(job: CertifiedRun, folder: str, store: Any, device: str) -> RankNumbers:
    import torch.distributed as dist

    from vtp_plugin.platform.detect import detect

    platform = detect(device)  # type: ignore[arg-type]
    os.environ["WORLD_SIZE"] = str(job.num_ranks)
    choose_device(device)  # type: ignore[arg-type]
    if has_mindspeed():
        import_adaptor()
    if device != "cpu":
        module = platform.module()
        module.set_device(int(os.environ.get("LOCAL_RANK", "0")) % module.device_count())
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=300)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=job.num_ranks, timeout=timeout)
    try:
        return importlib.import_module(_TRAINER).train(job, applied, folder)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def applied(run: CertifiedRun) -> Iterator[Session]:
    """Apply the plugin for a run inside a block, and take it back."""
    has_layouts = importlib.import_module(_TRAINER).HAS_LAYOUTS
    vtp_plugin.apply(
        vtp_size_list=list(run.sizes),
        vtp_dp_list=run.dp_list if len(set(run.dp_list)) > 1 else None,
        transport=run.transport,
        timeout_s=60.0,
        schedule="planned" if run.is_planned or run.u_layers else "stock",
        split_backward=run.is_split,
        layerwise_disaggregated=bool(run.u_layers),
        num_layer_list=None if has_layouts else run.u_layers or None,
        log_level="ERROR",
    )
    try:
        session = current_session()
        assert session is not None
        yield session
    finally:
        vtp_plugin.revert()


def _end_with_parent() -> None:
    """End this process, and what it has started, when its parent is gone, even while it hangs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
