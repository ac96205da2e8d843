"""Runs of ms-swift's own script of a rank, forked from one process that has imported what they need.

python -m tests.swift.ranks CASES.json        one run after another; each list of ranks ends before the next begins

Each case is an object: its `name`, `folder`, `script` and the `words` behind it, the number of `ranks`, `environment`.
The output of a rank is in `FOLDER/rankN.log`; the exit codes of all runs are printed as one JSON object.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.support.pace import pace
from tests.swift.runs import free_port

_LIMIT_S = 240
_MODULES = (
    "transformer_engine.pytorch",
    "swift.megatron",
    "swift.megatron.pipelines.train.sft",
    "swift.megatron.trainers",
    "swift.megatron.utils",
    "swift.megatron.callbacks",
    "swift.template",
    "mcore_bridge",
    "datasets",
    "modelscope",
    "vtp_plugin.session",
    "vtp_plugin.patches.hosts",
    "vtp_plugin.patches.registry",
)


def main() -> None:
    """Run the cases of a file."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="ascii"))
    for module in _MODULES:
        importlib.import_module(module)
    print(json.dumps({case["name"]: _run(case) for case in cases}))


def _run(case: dict[str, Any]) -> list[int]:
    """Fork the ranks of a case, and return their exit codes; -1 where one had to be ended."""
    port = free_port()
    processes: list[int] = []
    for rank in range(case["ranks"]):
        process = os.fork()
        if process == 0:
            _be_rank(case, rank, port)
        processes.append(process)
    codes, end = dict[int, int](), time.monotonic() + _LIMIT_S * pace()
    while len(codes) < len(processes):
        time.sleep(0.05)
        if time.monotonic() > end:
            for process in {*processes} - {*codes}:
                os.kill(process, signal.SIGKILL)
        for process in {*processes} - {*codes}:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
    return [codes[process] for process in processes]


def _be_rank(case: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run ms-swift's script as a launcher would start it, and end the process."""
    folder, world = Path(case["folder"]), str(case["ranks"])
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **case["environment"]}
    sys.argv = [case["script"], *case["words"]]
    code = 0
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
