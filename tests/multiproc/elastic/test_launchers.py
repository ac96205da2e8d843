"""The commands of docs/guides/lost-cards.md are run as they are printed there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.multiproc.faults.elastic import MODEL, STEP
from tests.rules.launcher_commands import environment, filled
from tests.support.hosts import ROOT, example_script
from tests.support.pace import pace
from tests.support.pool import free_port
from vtp_plugin.cli import main
from vtp_plugin.elastic.cards import FAULT_FILE_VARIABLE
from vtp_plugin.elastic.progress import FAILED_STARTS, MARKER, MOST_EQUAL
from vtp_plugin.plan.launch.launch_commands import ELASTIC, KEEPER, LOOP, SLURM, STATIC

FIT = ["--vtp-size-list", "auto", "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--vtp-timeout-s", "60"]
# Of a script that asks Megatron for nothing: a model whose list can be fitted.
SMALL = shlex.split(
    "--num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --vtp-device cpu --dataloader-type single"
)
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'tokenizer.model'"


def shell(
    text: str, folder: Path, variables: Mapping[str, object], name: str = "log", path: Path | None = None
) -> subprocess.Popen[bytes]:
    """Run lines in a shell, in an empty folder; programs in ``path`` come first."""
    env = environment(**variables)
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    with (folder / name).open("ab") as log:
        return subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait(process: subprocess.Popen[bytes], limit_s: float = 200.0) -> int:
    try:
        return process.wait(timeout=limit_s * pace())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def keeper(address: str) -> Iterator[str]:
    """Keep a rendezvous by the printed command; give its first line."""
    process = subprocess.Popen(
        ["bash", "-c", filled(KEEPER)],
        env=environment(KEEPER=address),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=60 * pace())
        assert not rest and process.returncode == 0, rest


def test_the_keeper_listens_on_its_address_and_no_other() -> None:
    port = free_port()
    with keeper(f"127.0.0.2:{port}") as line:
        assert f"the rendezvous listens on 127.0.0.2 port {port}, until this process ends; whoever reaches" in line
        store = dist.TCPStore("127.0.0.2", port, is_master=False, wait_for_workers=False)
        store.set("a", "b")
        assert store.get("a") == b"b"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5.0)


def failing(folder: Path) -> list[str]:
    """Write a script that needs a file which is not there, and give it with flags."""
    (folder / "script.py").write_text('print(open("tokenizer.model").read())\n')
    return [str(folder / "script.py"), *SMALL, *FIT, "--save", str(folder / "ck"), "--load", str(folder / "ck")]


def require_stopped(folder: Path, reason: str) -> None:
    """The marker says why, how often, and how to go on."""
    said, way_out = (folder / "ck" / MARKER).read_text().splitlines()
    assert said == f"{reason}; {MOST_EQUAL} starts ended like this before their first step"
    assert way_out == "No later start continues while this file is here: fix that, then remove it."
    assert not (folder / "ck" / FAILED_STARTS).exists()


def test_the_loop_of_the_shell_ends(tmp_path: Path) -> None:
    """Starts have failed in one way; the loop's first one does so again. What the file says helps."""
    words, folder = failing(tmp_path), tmp_path / "ck"
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert wait(shell(f"python -m vtp_plugin run {' '.join(words)}", tmp_path, alone)) == 1
    (found,) = (file := json.loads((folder / FAILED_STARTS).read_text()))["reasons"].items()
    assert found[1][0] == 1 and not (folder / MARKER).exists()
    file["reasons"][found[0]][0] = MOST_EQUAL - 1
    (folder / FAILED_STARTS).write_text(json.dumps(file))
    loop = filled(LOOP, words, folder)
    assert wait(shell(loop, tmp_path, {"DEVICES": 1, "PORT": free_port()})) == 0, (tmp_path / "log").read_text()[-3000:]
    require_stopped(tmp_path, MISSING)
    assert f"{MISSING}; {MOST_EQUAL} starts ended like this before their first step; no restart cures this" in re.sub(
        r"\n\[vtp rank 0\] +", " ", (tmp_path / "log").read_text()
    )
    (tmp_path / "tokenizer.model").write_text("all is well")
    (folder / MARKER).unlink()
    assert wait(shell(loop, tmp_path, {"DEVICES": 1, "PORT": free_port()}, "second")) == 0
    assert "all is well" in (tmp_path / "second").read_text() and not (folder / MARKER).exists()


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/tokenizer"], r"\w+: .*nowhere"),
        (["--data-path", "/nowhere/data", "--split", "100,0,0"], r"\w+: .*nowhere"),
    ],
    ids=["tokenizer", "data"],
)
def test_what_megatron_does_not_find_ends_the_loop(tmp_path: Path, extra: Sequence[str], reason: str) -> None:
    model = [*MODEL]
    if "--data-path" in extra:
        model.remove("--mock-data")
    words = [example_script(), *model, *FIT, *extra, "--train-iters", "4"]
    folder = tmp_path / "ck"
    loop = filled(LOOP, [*words, "--save", str(folder), "--load", str(folder)], folder)
    assert wait(shell(loop, tmp_path, {"DEVICES": 2, "PORT": free_port()}), 400.0) == 0
    said, _ = (folder / MARKER).read_text().splitlines()
    assert re.fullmatch(rf"{reason}.*; {MOST_EQUAL} starts ended like this before their first step", said), said


@pytest.mark.full
@pytest.mark.needs("scripts_here")
def test_a_spare_rank_holds_the_folder_of_a_run_of_one(tmp_path: Path) -> None:
    """The launcher's rank 0 has no card, and so no seat; the only rank saves into the folder that it has taken."""
    folder, faults = tmp_path / "ck", tmp_path / "faults"
    faults.write_text("a 0 absent\n")
    words = [example_script(), *MODEL, *FIT, "--train-iters", "4", "--vtp-node", "a", "--save", str(folder)]
    variables = {"DEVICES": 2, "PORT": free_port(), FAULT_FILE_VARIABLE: faults}
    assert wait(shell(filled(LOOP, words, folder), tmp_path, variables)) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not (folder / FAILED_STARTS).exists()


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize(
    "flags",
    [
        ("--vtp-size-list", "2,1", "--nodes", "2,1"),
        # Each node has a replica of both stages, so its ranks are not consecutive.
        pytest.param(
            ("--have", "2,2", "--vtp-stages", "2", "--vtp-data-parallel-size", "2", *MODEL), marks=pytest.mark.full
        ),
    ],
    ids=["unequal", "side by side"],
)
def test_two_nodes_start_what_plan_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    main(["plan", *flags])
    commands = re.findall(r"^(node \d): .*\n((?:    .*\n)+)", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in commands] == ["node 0", "node 1"]
    words = " ".join([example_script(), *MODEL, "--train-iters", "2"])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    agents = [shell(text.replace("SCRIPT FLAGS", words), tmp_path, variables, name) for name, text in commands]
    assert [wait(agent) for agent in agents] == [0, 0], (tmp_path / "node 0").read_text()[-3000:]
    # The last stage, which reports the loss, is on the second node.
    assert [found[1] for found in STEP.finditer((tmp_path / "node 1").read_text())] == ["1", "2"]
    assert not STEP.search((tmp_path / "node 0").read_text())


SRUN = """#!/bin/sh
export SLURM_NODEID=0 SLURM_NNODES=1
exec "$@"
"""
SCONTROL = """#!/bin/sh
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> "$QUEUE" ;;
esac
"""


@pytest.mark.full
def test_the_job_of_slurm_ends(tmp_path: Path) -> None:
    """Stand-ins for Slurm: a job that was queued again starts again."""
    words, folder, queue = failing(tmp_path), tmp_path / "ck", tmp_path / "queue"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = filled(
        SLURM, words, folder, {"DEVICES=8 PORT=29500": f"DEVICES=1 PORT={free_port()}", "restarts 100": "restarts 1"}
    )
    variables = {"SLURM_JOB_NODELIST": "one", "SLURM_JOB_ID": 7, "QUEUE": queue}
    for number in range(1, 5):
        assert wait(shell(job, tmp_path, variables, path=programs)) == 0, (tmp_path / "log").read_text()[-3000:]
        is_queued = queue.exists() and len(queue.read_text().splitlines()) == number
        assert is_queued == (number < 4), number
    require_stopped(tmp_path, MISSING)


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("command", [STATIC, ELASTIC])
def test_two_machines_train(tmp_path: Path, command: str) -> None:
    """Each starts the printed command. Elastic torchrun waits half a minute for a third one."""
    port, agents = free_port(), []
    address = f"127.0.0.1:{port}"
    variables = {"NODES": 2, "DEVICES": 1, "FIRST": "127.0.0.1", "PORT": port, "KEEPER": address}
    variables |= {"PET_LOCAL_ADDR": "127.0.0.1"}  # two agents on one machine
    with keeper(address) if command == ELASTIC else contextlib.nullcontext():
        for number, name in enumerate("ab"):
            words = [example_script(), *MODEL, *FIT, "--train-iters", "3", "--vtp-node", name]
            words += ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
            text = filled(command, words)
            agents.append(shell(text, tmp_path, {**variables, "NODE": number}, name))
        assert [wait(agent, 300.0) for agent in agents] == [0, 0], (tmp_path / "a").read_text()[-3000:]
    printed = (tmp_path / "a").read_text() + (tmp_path / "b").read_text()
    assert [found[1] for found in STEP.finditer(printed)] == ["1", "2", "3"]
    assert "chosen: --vtp-size-list 1,1" in printed
