"""Runs under real agents of torchrun that lose cards and agents: one process that keeps the rendezvous, and nodes.

Each agent has a node's name and a session of its own, so that a test can end it with all its ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.multiproc.cases.script_cases import launch, num_ranks, succeeded
from tests.multiproc.faults.faulty_gpt import ARMED, LOG, NODE, PAUSE
from tests.multiproc.faults.hosts_apart import Network
from tests.rules import launcher_commands as launchers
from tests.support.hosts import ROOT, TREE
from tests.support.pace import pace
from tests.support.pool import Pool, free_port
from vtp_plugin.elastic.cards import FAULT_FILE_VARIABLE
from vtp_plugin.plan.launch.launch_commands import ELASTIC, KEEPER, LOOP, STATIC

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 250 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --vtp-device cpu "
    "--attention-dropout 0 --hidden-dropout 0 --save-interval 4 --dataloader-type single --lr-decay-iters 100"
)
STEP = re.compile(r"iteration +(\d+)/.*?consumed samples: +(\d+).*?lm loss: (\S+)")
# Of a Megatron-LM tree, if one is named: NVIDIA's, as it is.
SCRIPT = f"{TREE}/pretrain_gpt.py" if TREE else "examples/pretrain_gpt.py"
_LIST = re.compile(r"chosen: --vtp-size-list (\S+), layers")
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step as a run logs it: which attempt, its list, the step's number, the samples so far, the loss."""

    attempt: int
    sizes: str
    iteration: int
    samples: int
    loss: float


def undisturbed(pool: Pool, first: str, num_steps: int, *, num_replicas: int = 1) -> dict[int, float]:
    """Return the losses, by step, of a run that stays in its first list; other lists begin with other weights.

    Args:
        pool: runs scripts.
        first: the flags that the first list was given.
        num_steps: of the run.
        num_replicas: of every stage.
    """
    words = shlex.split(first)
    # A fork of a worker cannot start workers for data.
    arguments = [*MODEL, "--train-iters", str(num_steps), "--num-workers", "0", *words, "--vtp-force"]
    options = {"arguments": arguments, "script": SCRIPT, "hooks": ["all_documents"]}
    options["timeout_s"] = (200.0 + 2.0 * num_steps) * pace()
    runs = succeeded(launch(pool, num_ranks(words[1], num_replicas), options))
    return {int(found[1]): float(found[3]) for found in STEP.finditer("".join(run.output for run in runs))}


@dataclass
class Cluster:
    """Nodes that run one script.

    Attributes:
        folder: for logs, checkpoints and the fault file.
        flags: of the run, after the model's.
        nodes: the fewest and the most, as torchrun takes them.
        script: that they run.
        max_restarts: of each agent.
        is_static: torchrun has fixed nodes, whose first one keeps the store.
        is_looped: a shell starts torchrun again when it fails.
        pause_s: of each forward, in a script that takes one.
        network: hosts apart; None for one host.
    """

    folder: Path
    flags: Sequence[str]
    nodes: str = "1:2"
    script: str = SCRIPT
    max_restarts: int = 5
    is_static: bool = False
    is_looped: bool = False
    pause_s: float = 0.0
    network: Network | None = None
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        self.port = free_port()
        if not (self.folder / "tmp").exists():
            # Short, for the names of sockets, and there until nobody looks at what was left.
            scratch = tempfile.mkdtemp(prefix="vtp-")
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            (self.folder / "tmp").symlink_to(scratch)
        if self.is_static:
            return self
        self.keeper = subprocess.Popen(
            ["bash", "-c", f"exec {launchers.filled(KEEPER)}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env=launchers.environment(KEEPER=self._rendezvous),
        )
        assert self.keeper.stdout is not None and "listens on" in self.keeper.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.agents:
            self.lose(name)
        if self.keeper is None:
            return
        assert self.keeper.stdout is not None
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()

    @property
    def _rendezvous(self) -> str:
        return f"{self.network.keeper if self.network else '127.0.0.1'}:{self.port}"

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    def start(self, name: str, num_cards: int, *flags: str) -> None:
        """Start a node, with flags of its own; one that was lost comes back."""
        words = [self.script, *MODEL, *self.flags, "--vtp-node", name, *flags]
        words += ["--save", str(self.folder / "ck"), "--load", str(self.folder / "ck")]
        command, changed = ELASTIC, {"--max-restarts 100": f"--max-restarts {self.max_restarts}"}
        if self.is_looped:
            command, changed = LOOP, {"--max-restarts 3": f"--max-restarts {self.max_restarts}"}
        elif self.is_static:
            command = STATIC
        else:
            own = self.network.address(name) if self.network else "127.0.0.1"
            # The store is the keeper's. Two agents on one machine would both take themselves for its host.
            waits = "last_call_timeout=3,join_timeout=200,keep_alive_interval=1,keep_alive_max_attempt=3"
            changed |= {"2:3": self.nodes, "is_host=0": f"is_host=0,{waits} --local-addr {own}"}
        text = launchers.filled(command, [*map(shlex.quote, words)], self.folder / "ck", changed)
        words = ["bash", "-c", text]
        words = [*(self.network.inside(name) if self.network else ()), *words]
        env = launchers.environment(DEVICES=num_cards, NODES=self.nodes, NODE=[*self.agents, name].index(name))
        env |= {"FIRST": "127.0.0.1", "PORT": str(self.port), "KEEPER": self._rendezvous, PAUSE: str(self.pause_s)}
        env["TMPDIR"] = str((self.folder / "tmp").resolve())
        env |= {FAULT_FILE_VARIABLE: str(self.faults), NODE: name}
        env |= {ARMED: str(self.folder / "armed.json"), LOG: str(self.folder / "faults.jsonl")}
        if self.network:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        with self.log(name).open("ab") as log:
            self.agents[name] = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lose(self, name: str) -> None:
        """End a node at once, with all its ranks."""
        agent = self.agents[name]
        for pid in [agent.pid, *_below(agent.pid)]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def stop(self) -> None:
        """Let agents end their ranks, and wait for them."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(agent.pid, signal.SIGTERM)  # the shell and torchrun; its ranks have groups of their own
        for agent in self.agents.values():
            agent.wait(timeout=_LIMIT_S * pace())

    def rank(self, name: str, local_rank: int) -> int:
        """Return the process of a rank."""
        mark = b"LOCAL_RANK=%d" % local_rank
        for pid in _below(self.agents[name].pid):
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if mark in _environment(pid) and mark not in _environment(parent):
                    return pid
        raise AssertionError(f"{name} has no rank {local_rank}")

    def steps(self) -> list[Step]:
        """Read what the run has logged: by attempt, in the order of the lists that were fitted."""
        lines = sorted(self._stamped())
        found, sizes, attempt = [], "?", 0
        for _, line in lines:
            if fit := _LIST.search(line):
                sizes, attempt = fit[1], attempt + 1
            if step := STEP.search(line):
                found.append(Step(attempt, sizes, int(step[1]), int(step[2]), float(step[3])))
        return found

    def _stamped(self) -> list[tuple[str, str]]:
        """Give the lists and steps of all logs with their times; a list has that of the line before."""
        stamped, last = [], ""
        for name in self.agents:
            for line in self.log(name).read_text(errors="replace").splitlines():
                if stamp := re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]", line):
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


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _below(pid: int) -> list[int]:
    """List the processes that a process has started, and theirs."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [found for child in own for found in (*_below(child), child)]
