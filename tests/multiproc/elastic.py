"""Runs under real agents of torchrun that lose cards and agents: one process that keeps the rendezvous, and nodes.

Each agent has a node's name and a session of its own, so that a test can end it with all its ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.import_rules import ROOT
from tests.pace import pace
from tests.pool import free_port
from vtp_plugin.runtime.life.cards import FAULT_FILE_VARIABLE

STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("open", flush=True)
time.sleep(3600)
"""
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 250 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --vtp-device cpu "
    "--attention-dropout 0 --hidden-dropout 0 --save-interval 4 --dataloader-type single --lr-decay-iters 100"
)
STEP = re.compile(r"iteration +(\d+)/.*?consumed samples: +(\d+).*?lm loss: (\S+)")
_LIST = re.compile(r"fitted: --vtp-size-list (\S+), layers")
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step as a run logs it: the list in which it ran, its number, the samples so far, the loss."""

    sizes: str
    iteration: int
    samples: int
    loss: float


@dataclass(slots=True)
class Cluster:
    """Nodes that run one script.

    Attributes:
        folder: for logs, checkpoints and the fault file.
        flags: of the run, after the model's.
        nodes: the fewest and the most, as torchrun takes them.
    """

    folder: Path
    flags: Sequence[str]
    nodes: str = "1:2"
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        self.port = free_port()
        words = [sys.executable, "-c", STORE, str(self.port)]
        self.keeper = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.keeper.stdout is not None and self.keeper.stdout.readline() == "open\n"
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.agents:
            self.lose(name)
        assert self.keeper is not None and self.keeper.stdout is not None
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    def start(self, name: str, num_cards: int) -> None:
        """Start a node; one that was lost comes back."""
        launcher = (
            f"--nnodes {self.nodes} --nproc-per-node {num_cards} --max-restarts 5 --rdzv-backend c10d --rdzv-id run"
        )
        # The store is the keeper's. Two agents on one machine would both take themselves for its host.
        conf = "is_host=0,last_call_timeout=3,join_timeout=200,keep_alive_interval=1,keep_alive_max_attempt=3"
        words = [sys.executable, "-m", "torch.distributed.run", *launcher.split(), "--rdzv-conf", conf]
        words += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", "127.0.0.1"]
        words += ["-m", "vtp_plugin", "run", "examples/pretrain_gpt.py", *MODEL, *self.flags, "--vtp-node", name]
        words += ["--save", str(self.folder / "ck"), "--load", str(self.folder / "ck")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env[FAULT_FILE_VARIABLE] = str(self.faults)
        with self.log(name).open("ab") as log:
            self.agents[name] = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lose(self, name: str) -> None:
        """End a node at once, with all its ranks."""
        agent = self.agents[name]
        for pid in [*_below(agent.pid), agent.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def rank(self, name: str, local_rank: int) -> int:
        """Return the process of a rank."""
        for pid in _below(self.agents[name].pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if b"LOCAL_RANK=%d" % local_rank in words and parent == self.agents[name].pid:
                    return pid
        raise AssertionError(f"{name} has no rank {local_rank}")

    def steps(self) -> list[Step]:
        """Read what the run has logged: by attempt, in the order of the lists that were fitted."""
        lines = sorted(self._stamped())
        found, sizes = [], "?"
        for _, line in lines:
            if fit := _LIST.search(line):
                sizes = fit[1]
            if step := STEP.search(line):
                found.append(Step(sizes, int(step[1]), int(step[2]), float(step[3])))
        return found

    def _stamped(self) -> list[tuple[str, str]]:
        """Give the lists and steps of all logs with their times; a list has that of the line before."""
        stamped, last = [], ""
        for name in self.agents:
            for line in self.log(name).read_text(errors="replace").splitlines():
                if stamp := re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\]", line):
                    last = stamp[1]
                if _LIST.search(line) or STEP.search(line):
                    stamped.append((last, line))
        return stamped

    def wait_for(self, sizes: str, num_steps: int, *, above: int = 0) -> None:
        """Wait until a list has run so many steps, with numbers above one."""
        deadline_s = time.monotonic() + _LIMIT_S * pace()
        while time.monotonic() < deadline_s:
            if len({s.iteration for s in self.steps() if s.sizes == sizes and s.iteration > above}) >= num_steps:
                return
            time.sleep(0.3)
        raise AssertionError(f"{num_steps} steps in {sizes} did not come:\n{self.tail()}")

    def finish(self, name: str) -> int:
        """Wait for the end of an agent and return its exit status."""
        return self.agents[name].wait(timeout=_LIMIT_S * pace())

    def tail(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text(errors='replace')[-6000:]}" for name in self.agents)


def _below(pid: int) -> list[int]:
    """List the processes that a process has started, and theirs."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [found for child in own for found in (*_below(child), child)]
