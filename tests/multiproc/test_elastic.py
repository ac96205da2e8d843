"""A run loses cards and agents, goes on with those that are left, and computes what the run does that lost nothing."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rules import ROOT
from tests.multiproc.elastic import MODEL, STEP, Cluster
from tests.pace import pace

FIT = ("--vtp-size-list", "auto", "--vtp-timeout-s", str(int(40 * pace())))
NUM_STEPS = 40
TOLERANCE = 1e-5


@functools.cache
def undisturbed(first: str) -> dict[int, float]:
    """Return the losses, by step, of a run that stays in its first list; other lists begin with other weights.

    Args:
        first: the flags that the first list was given.
    """
    words = shlex.split(first)
    num_ranks = sum(map(int, words[1].split(",")))
    launcher = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "vtp_plugin", "run"]
    words = [*launcher, "examples/pretrain_gpt.py", *MODEL, "--train-iters", str(NUM_STEPS), *words, "--vtp-force"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300.0 * pace(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {int(found[1]): float(found[3]) for found in STEP.finditer(done.stdout)}


def require_same(cluster: Cluster, first: str) -> None:
    """Every step that was logged, also one that was computed twice, has the loss and the samples of its number.

    Megatron logs the second step after a checkpoint was loaded with the mean of the two.
    """
    expected = undisturbed(first)
    steps = cluster.steps()
    assert {step.iteration for step in steps} == {*range(1, NUM_STEPS + 1)}
    start = 1
    for before, step in itertools.pairwise([None, *steps]):
        assert step is not None and step.samples == 8 * step.iteration
        if before is None or step.iteration != before.iteration + 1 or step.sizes != before.sizes:
            start = step.iteration
        loss = expected[step.iteration]
        if 1 < start == step.iteration - 1:
            loss = (loss + expected[start]) / 2
        assert abs(step.loss - loss) <= TOLERANCE * loss, (step, loss)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_a_card_then_an_agent_are_lost(tmp_path: Path, optimizer: str) -> None:
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    if optimizer == "distributed":
        flags += ["--use-distributed-optimizer"]
    with Cluster(tmp_path, flags) as cluster:
        cluster.start("b", 2)
        cluster.start("a", 2)
        cluster.wait_for("2,2", 6)
        cluster.faults.write_text("b 1 absent\n")
        os.kill(cluster.rank("b", 1), signal.SIGKILL)
        cluster.wait_for("2,1", 6)
        assert "this rank is spare (b, local rank 1): its card is absent" in cluster.log("b").read_text()
        cluster.lose("b")
        assert cluster.finish("a") == 0, cluster.tail()
        assert list(dict.fromkeys(step.sizes for step in cluster.steps())) == ["2,2", "2,1", "2"]
        require_same(cluster, "--vtp-size-list 2,2 --make-vocab-size-divisible-by 768")


@pytest.mark.full
def test_three_do_not_divide(tmp_path: Path) -> None:
    """12 heads in 4 groups and sequence parallelism: of eight cards seven are left, and all seven go on."""
    flags = [*FIT, "--vtp-stages", "2:3", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    with Cluster(tmp_path, [*flags, "--sequence-parallel"]) as cluster:
        cluster.start("a", 4)
        cluster.start("b", 4)
        cluster.wait_for("4,4", 6)
        cluster.faults.write_text("b 2 hanging\n")
        os.kill(cluster.rank("b", 2), signal.SIGKILL)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        assert list(dict.fromkeys(step.sizes for step in cluster.steps())) == ["4,4", "4,2,1"]
        require_same(cluster, "--vtp-size-list 4,4 --make-vocab-size-divisible-by 128 --sequence-parallel")
        text = cluster.log("a").read_text() + cluster.log("b").read_text()
        assert re.search(r"b has 3 cards, but no stage can have tensor-parallel size 3: --num-query-groups 4", text)


@pytest.mark.full
def test_a_kill_without_a_fault_gives_the_same_list(tmp_path: Path) -> None:
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    with Cluster(tmp_path, flags, nodes="2") as cluster:
        cluster.start("a", 1)
        cluster.start("b", 2)
        cluster.wait_for("1,2", 6)
        os.kill(cluster.rank("a", 0), signal.SIGKILL)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        assert {step.sizes for step in cluster.steps()} == {"1,2"}
        assert len(cluster.steps()) > NUM_STEPS
        require_same(
            cluster,
            "--vtp-size-list 1,2 --make-vocab-size-divisible-by 768 --decoder-first-pipeline-num-layers 1",
        )
