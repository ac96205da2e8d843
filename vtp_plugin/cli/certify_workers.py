"""The processes that run the layouts of ``certify``: one for each rank of a run, as a launcher would start them."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vtp_plugin.api import choose_device
from vtp_plugin.certify.compare import RankNumbers, finite
from vtp_plugin.certify.layouts import FOLDER, CertifiedRun
from vtp_plugin.host.mindspeed import has_mindspeed, import_adaptor
from vtp_plugin.runtime.health.redaction import names_a_path
from vtp_plugin.util.text import one_line
from vtp_plugin.util.typed_json import read_typed

if TYPE_CHECKING:
    from torch.distributed import Store

_PROBE: Final = "vtp_plugin.patches.certified.certified_run"
# What every rank imports, so that forks need not.
_PRELOADED: Final = (_PROBE, "megatron.core.tokenizers.text", "vtp_plugin.cli.run", "vtp_plugin.patches.activation")
_GRACE_S = 15.0  # after the first failure, for the other ranks to say which rank it was
_START_S = 240.0  # to import torch and Megatron
_POLL_S = 0.2


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


@dataclass(slots=True, kw_only=True)
class Workers:
    """Runs a script with a process for each rank of this supervisor; all supervisors call it in the same order.

    Attributes:
        ranks: global ranks of this supervisor's processes.
        store: where the supervisors meet.
        environment: variables of every process, what the launcher has set among them.
        device: of the processes.
        timeout_s: longest time for one run, in seconds.
        script: what is run.
        folder: of the checkpoints; all take that of rank 0's supervisor.
        number: of the runs until now.
    """

    ranks: Sequence[int]
    store: Store
    environment: Mapping[str, str]
    device: str
    timeout_s: float
    script: str
    folder: str
    number: int = 0

    def __post_init__(self) -> None:
        """Take the folder of rank 0's supervisor."""
        if 0 in self.ranks:
            self.store.set("certify/folder", self.folder)
        self.folder = self.store.get("certify/folder").decode()

    @property
    def trace(self) -> str:
        """The folder where a list's last run has written what it did, and when."""
        return f"{self.folder}/trace-{self.number}"

    def run(self, job: CertifiedRun) -> list[Answer]:
        """Run a layout on its ranks, all supervisors together.

        Returns:
            The answers of its ranks, in their order, equal on all supervisors.
        """
        from vtp_plugin.runtime.health.meeting_store import serve

        self.number += 1
        key, address = f"certify/{self.number}", self.environment["MASTER_ADDR"]
        own = [rank for rank in self.ranks if rank < job.num_ranks]
        server = serve(address, 0, self.timeout_s + _START_S) if 0 in own else None
        if server is not None:
            self.store.set(f"{key}/port", str(server.port))
        *words, fed = [self.script, *(word.replace(FOLDER, self.folder) for word in (*job.words, job.fed))]
        words += ["--vtp-device", self.device] * ("--vtp-device" not in words)
        words += ["--vtp-trace", self.trace, "--vtp-trace-steps", "1-3"] * job.is_traced
        environment = {**self.environment, "MASTER_PORT": self.store.get(f"{key}/port").decode()}
        begin_s = time.monotonic()
        job = replace(job, words=tuple(words), fed=fed)
        processes = {rank: _Process(job, rank, environment, self.device) for rank in own}
        try:
            found = self._collect(processes, begin_s)
        finally:
            for process in processes.values():
                process.stop()
        for rank in own:
            self.store.set(f"{key}/{rank}", json.dumps(finite(asdict(found[rank]))))
        return [read_typed(Answer, self.store.get(f"{key}/{rank}")) for rank in range(job.num_ranks)]

    def _collect(self, processes: Mapping[int, _Process], begin_s: float) -> dict[int, Answer]:
        """Wait for the answers of some ranks; once one has failed, for those of the others only a little."""
        found: dict[int, Answer] = {}
        deadline_s = begin_s + self.timeout_s + (_START_S if self.number == 1 else 0)
        while waiting := [rank for rank in processes if rank not in found]:
            connection.wait([processes[rank].connection for rank in waiting], timeout=_POLL_S)
            for rank in waiting:
                answer = processes[rank].answer()
                if answer is not None:
                    found[rank] = Answer(numbers=answer[0], line=answer[1], after_s=time.monotonic() - begin_s)
                    if answer[0] is None:
                        deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline_s:
                after_s = time.monotonic() - begin_s
                return {
                    rank: Answer(line=f"no end within {after_s:.0f} s", after_s=after_s) for rank in waiting
                } | found
        return found


class _Process:
    """This side of one process."""

    def __init__(self, job: CertifiedRun, rank: int, environment: Mapping[str, str], device: str) -> None:
        # A process that has begun with a GPU cannot be forked; on CPUs a fork saves seconds of imports.
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu" and not has_mindspeed():  # whose adaptor comes before Megatron
            multiprocessing.set_forkserver_preload([*_PRELOADED])
        self._output = tempfile.NamedTemporaryFile(prefix="vtp-certify-", suffix=".log")  # noqa: SIM115
        self.connection, theirs = context.Pipe()
        target = (theirs, job, rank, dict(environment), device, self._output.name)
        self._process: Any = context.Process(target=be_rank, args=target, daemon=False)
        self._process.start()
        theirs.close()

    def answer(self) -> tuple[RankNumbers | None, str] | None:
        """Return what it saw, or how it ended; None if it still works."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv(), ""
            if self._process.exitcode is None:
                return None
        self._process.join()
        lines = Path(self._output.name).read_text(errors="replace").splitlines()
        said = [line for line in lines if "rror:" in line]
        said = [line for line in said if "[vtp" in line or "vtp_plugin:" in line] or said
        return None, shown(
            said[-1] if said else f"its process ended with {self._process.exitcode} before the last step"
        )

    def stop(self) -> None:
        """End it, and what it has started, such as writers of a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._output.close()


def shown(line: str) -> str:
    """Give a line as a report may have it: without paths, which may hold names.

    >>> shown("no such file: /home/me/x, rank 1"), shown("rank 1 has died")
    ('no such file: (path), rank 1', 'rank 1 has died')
    """
    line = one_line(line, most=400)
    words = (re.sub(r"[^\s,;:()'\"]*[/\\\\][^\s,;:()'\"]*", "(path)", word) for word in line.split(" "))
    return " ".join(word for word in words if not names_a_path(word))


def be_rank(
    theirs: Any, job: CertifiedRun, rank: int, environment: Mapping[str, str], device: str, output: str
) -> None:
    """Be one rank of a script, watched, up to its end; what it prints goes into a file."""
    os.setsid()
    _end_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(job.num_ranks))
    os.environ.setdefault("LOCAL_RANK", str(rank % int(environment.get("CERTIFY_NUM_DEVICES", job.num_ranks))))
    import torch

    torch.set_num_threads(1)
    choose_device(device)  # type: ignore[arg-type]
    if has_mindspeed():
        import_adaptor()
    probe = importlib.import_module(_PROBE).Probe(job)
    probe.install()
    sys.argv = ["vtp_plugin", "run", *job.words]
    try:
        runpy.run_module("vtp_plugin", run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif error.code:
            print(error.code, file=sys.stderr, flush=True)
        if not isinstance(error, SystemExit) or error.code:
            os._exit(1)
    if probe.numbers is not None:
        theirs.send(probe.numbers)
    os._exit(0)


def _end_with_parent() -> None:
    """End this process, and what it has started, when its parent is gone, even while it hangs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
