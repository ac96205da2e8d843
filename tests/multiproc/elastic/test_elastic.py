"""A run loses cards and agents, goes on with those that are left, and computes what a run does that lost nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.lost_cards import FIRST, draw, run_once
from tests.multiproc.cases.script_cases import Scripts
from tests.multiproc.faults.elastic import Cluster, undisturbed
from tests.multiproc.faults.fault_log import read_log, require_losses, require_samples
from tests.multiproc.faults.faulty_gpt import LOG
from tests.multiproc.faults.hosts_apart import Network, why_not
from tests.support.pace import pace
from tests.support.pool import Pool
from vtp_plugin.elastic.progress import MARKER

FIT = ("--vtp-size-list", "auto", "--vtp-timeout-s", str(int(40 * pace())))
NUM_STEPS = 40
FIRST_OF_THREE = "--vtp-size-list 2,1 --make-vocab-size-divisible-by 768 --decoder-first-pipeline-num-layers 3"
ADAPTED = ["--transformer-impl", "local", "--vtp-lora-rank", "4", "--vtp-lora-alpha", "64"]
U_SHAPE = "--layerwise-disaggregated-training --num-layer-list 1,2,1 --vtp-sites edge,cloud"


@functools.cache
def losses(pool: Pool, first: str, num_replicas: int) -> dict[int, float]:
    """Return the losses of a run that stays in its first list."""
    return undisturbed(pool, first, NUM_STEPS, num_replicas=num_replicas)


def require_same(pool: Pool, cluster: Cluster, first: str, num_replicas: int = 1) -> None:
    """The run has done all its steps as the run that nothing happened to."""
    steps = cluster.steps()
    assert {step.iteration for step in steps} == {*range(1, NUM_STEPS + 1)}
    require_losses(steps, losses(pool, first, num_replicas))


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("optimizer", ["plain", "distributed", "adapters"])
def test_a_card_then_an_agent_are_lost(scripts: Scripts, tmp_path: Path, optimizer: str) -> None:
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    # Megatron 0.12 has no place for a tied embedding in the distributed optimizer of so narrow a model.
    untied = ["--untie-embeddings-and-output-weights"] if optimizer == "distributed" else []
    flags += [*untied, "--use-distributed-optimizer"] if untied else []
    adapted = ADAPTED if optimizer == "adapters" else []
    flags += [*adapted, "--vtp-lora-save-base"] if adapted else []
    with Cluster(tmp_path, flags) as cluster:
        cluster.start("b", 2)
        cluster.start("a", 2)
        cluster.wait_for("2,2", 6)
        cluster.faults.write_text("b 1 absent\n")
        os.kill(cluster.rank("b", 1), signal.SIGKILL)
        cluster.wait_for("2,1", 6)
        assert "this rank is spare (b, local rank 1): its device is absent" in cluster.log("b").read_text()
        cluster.lose("b")
        assert cluster.finish("a") == 0, cluster.tail()
        assert list(dict.fromkeys(step.sizes for step in cluster.steps())) == ["2,2", "2,1", "2"]
        first = ["--vtp-size-list", "2,2", "--make-vocab-size-divisible-by", "768", *untied, *adapted]
        require_same(scripts, cluster, shlex.join(first))
        trained = losses(scripts, shlex.join(first), 1)
        assert trained[1] - trained[NUM_STEPS] > 0.01 * trained[1]


@pytest.mark.full
@pytest.mark.needs("scripts_here")
def test_three_do_not_divide(scripts: Scripts, tmp_path: Path) -> None:
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
        require_same(scripts, cluster, "--vtp-size-list 4,4 --make-vocab-size-divisible-by 128 --sequence-parallel")
        text = cluster.log("a").read_text() + cluster.log("b").read_text()
        assert re.search(r"b has 3 devices, but no stage can have tensor-parallel size 3: --num-query-groups 4", text)


@pytest.mark.full
@pytest.mark.needs("scripts_here")
def test_a_kill_without_a_fault_gives_the_same_list(scripts: Scripts, tmp_path: Path) -> None:
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
            scripts,
            cluster,
            "--vtp-size-list 1,2 --make-vocab-size-divisible-by 768 --decoder-first-pipeline-num-layers 1",
        )


def _orphans(folder: Path) -> list[int]:
    """Find processes of a run that still live."""
    mark, found = f"{LOG}={folder}/".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.full
@pytest.mark.needs("our_example")
def test_an_agent_comes_back(scripts: Scripts, tmp_path: Path) -> None:
    """Its ranks count their restarts from zero. Each sample counts once; no process and no file is left."""
    before = {*os.listdir("/dev/shm")}
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    alerts = tmp_path / "alerts"
    flags += ["--tensorboard-dir", str(tmp_path / "board"), "--vtp-on-loss", f'echo "$VTP_LOSS" >> {alerts}']
    with Cluster(tmp_path, flags, script="tests/multiproc/faults/faulty_gpt.py", pause_s=0.25) as cluster:
        cluster.start("a", 2)
        cluster.start("b", 2)
        cluster.wait_for("2,2", 5)
        cluster.lose("b")
        cluster.wait_for("2", 5)
        last = max(step.iteration for step in cluster.steps())
        cluster.start("b", 2)
        cluster.wait_for("2,2", 3, above=last)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        require_same(scripts, cluster, "--vtp-size-list 2,2 --make-vocab-size-divisible-by 768")
        text = cluster.log("a").read_text() + cluster.log("b").read_text()
        pattern = r"lost with TP sizes (\S+): (\d+) steps? and (\d+) samples are repeated"
        lost = sorted(re.findall(pattern, text))
        assert [sizes for sizes, _, _ in lost] == ["2", "2,2"]
        board = EventAccumulator(str(tmp_path / "board"))
        board.Reload()
        for number, name in ((1, "steps"), (2, "samples")):
            written = [scalar.value for scalar in board.Scalars(f"vtp lost/{name}")]
            assert sorted(written) == sorted(float(entry[number]) for entry in lost)
        assert all(8 * int(steps) == int(samples) for _, steps, samples in lost)
        said = r"the attempt with TP sizes 2,2 ended .*\n(.*\n)*the attempt with TP sizes 2 ended .*\n"
        assert re.fullmatch(said, alerts.read_text())
        require_samples(read_log(tmp_path / "faults.jsonl"))
    deadline_s = time.monotonic() + 10.0 * pace()
    while _orphans(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not _orphans(tmp_path)
    assert {*os.listdir("/dev/shm")} <= before


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize(
    ("stages", "number", "lists", "replicas", "first"),
    [
        ("2:2", ["--vtp-data-parallel-size", "2"], ["2,1", "1,1"], ["2", "2"], "--decoder-first-pipeline-num-layers 3"),
        ("1:1", [], ["2", "2"], ["2", "1"], ""),
    ],
    ids=["the stage shrinks in both", "one replica less"],
)
def test_replicas(
    scripts: Scripts, tmp_path: Path, stages: str, number: list[str], lists: list[str], replicas: list[str], first: str
) -> None:
    """A card of one of two replicas is lost."""
    flags = [*FIT, "--vtp-stages", stages, *number, "--train-iters", str(NUM_STEPS)]
    num_cards = 3 if number else 2
    with Cluster(tmp_path, flags) as cluster:
        cluster.start("a", num_cards)
        cluster.start("b", num_cards)
        cluster.wait_for(lists[0], 5)
        cluster.faults.write_text(f"b {num_cards - 1} absent\n")
        os.kill(cluster.rank("b", num_cards - 1), signal.SIGKILL)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        text = cluster.log("a").read_text() + cluster.log("b").read_text()
        found = re.findall(r"chosen: --vtp-size-list (\S+), layers \S+, (\d) replica", text)
        assert found == [*zip(lists, replicas, strict=True)]
        require_same(
            scripts, cluster, f"--vtp-size-list {lists[0]} --make-vocab-size-divisible-by 768 {first}", num_replicas=2
        )


@pytest.mark.full
@pytest.mark.needs("our_example")
def test_a_u_shape_loses_cloud_then_edge(tmp_path: Path) -> None:
    words = f"{U_SHAPE} --vtp-stages 2:2 --vtp-data-parallel-size 1 --train-iters 4000"
    flags = [*FIT, *shlex.split(words)]
    with Cluster(tmp_path, flags) as cluster:
        cluster.start("e", 1, "--vtp-site", "edge")
        cluster.start("c", 2, "--vtp-site", "cloud")
        cluster.wait_for("1,2", 5)
        cluster.faults.write_text("c 1 absent\n")
        os.kill(cluster.rank("c", 1), signal.SIGKILL)
        cluster.wait_for("1,1", 5)
        cluster.lose("e")
        assert cluster.finish("c") != 0
        line = "site edge has no device left; the edge holds the data and both ends of the model"
        assert line in cluster.log("c").read_text()
        assert line in (tmp_path / "ck" / MARKER).read_text()
        steps = [step for step in cluster.steps() if step.iteration <= NUM_STEPS]
        assert [*dict.fromkeys(step.sizes for step in steps)] == ["1,2", "1,1"]
    first = f"--vtp-size-list 1,2 --make-vocab-size-divisible-by 768 {U_SHAPE}"
    require_losses(steps, losses(first, 1))


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("is_looped", [False, True], ids=["restarts", "loop"])
def test_static_torchrun(scripts: Scripts, tmp_path: Path, is_looped: bool) -> None:
    """It restarts its ranks; or a shell starts it again. Then a start that nothing can cure ends the loop."""
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    with Cluster(
        tmp_path, flags, nodes="1", is_static=True, is_looped=is_looped, max_restarts=0 if is_looped else 5
    ) as cluster:
        cluster.start("a", 3)
        cluster.wait_for("2,1", 5)
        cluster.faults.write_text("a 0 hanging\n")
        os.kill(cluster.rank("a", 0), signal.SIGKILL)
        assert cluster.finish("a") == 0, cluster.tail()
        assert list(dict.fromkeys(step.sizes for step in cluster.steps())) == ["2,1", "2"]
        require_same(scripts, cluster, FIRST_OF_THREE)
        assert "the launcher ended" not in cluster.log("a").read_text()
        if is_looped:
            cluster.start("a", 3, "--global-batch-size", "9")
            assert cluster.finish("a") == 0, cluster.tail()
            assert (tmp_path / "ck" / MARKER).read_text().startswith("--global-batch-size 9; 1 replica of")


@pytest.mark.full
@pytest.mark.needs("scripts_here")
def test_too_few_cards_wait_for_a_machine(tmp_path: Path) -> None:
    """Nothing is left beside the checkpoint that would keep the next start from going on."""
    flags = [*FIT, "--vtp-stages", "2:2", "--vtp-data-parallel-size", "1", "--train-iters", "6"]
    with Cluster(tmp_path, flags, max_restarts=0) as cluster:
        cluster.start("a", 1)
        deadline_s, said = time.monotonic() + 60.0 * pace(), ""
        while "for more devices: a machine that comes back" not in said and time.monotonic() < deadline_s:
            time.sleep(0.2)
            said = re.sub(r"\n\[vtp rank 0\] +", " ", cluster.log("a").read_text())
        assert "1 devices; 1 replica of at least 2 stages (--vtp-stages 2:2)" in said, cluster.tail()
        cluster.start("b", 1)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        assert {(step.sizes, step.attempt) for step in cluster.steps()} == {("1,1", 1)}
        assert not (tmp_path / "ck" / MARKER).exists()


@pytest.mark.full
@pytest.mark.needs("our_example")
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_a_cable_is_pulled(scripts: Scripts, tmp_path: Path) -> None:
    """Hosts of their own: one is cut off, the other goes on; plugged in and started again, it comes back."""
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", str(NUM_STEPS)]
    script = "tests/multiproc/faults/faulty_gpt.py"
    with Network() as network, Cluster(tmp_path, flags, script=script, pause_s=0.25, network=network) as cluster:
        cluster.start("b", 2)
        cluster.start("a", 2)
        cluster.wait_for("2,2", 6)
        network.plug("b", is_in=False)
        cluster.wait_for("2", 4)
        cluster.lose("b")
        network.plug("b", is_in=True)
        last = max(step.iteration for step in cluster.steps())
        cluster.start("b", 2)
        cluster.wait_for("2,2", 3, above=last)
        assert cluster.finish("a") == cluster.finish("b") == 0, cluster.tail()
        require_same(scripts, cluster, "--vtp-size-list 2,2 --make-vocab-size-divisible-by 768")
        require_samples(read_log(tmp_path / "faults.jsonl"))


@pytest.mark.full
@pytest.mark.needs("scripts_here")
def test_a_checkpoint_of_another_model_ends_every_start(tmp_path: Path) -> None:
    """No restart cures that: the first start says so, once, and so does each later one, at once."""
    flags = [*FIT, "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1", "--train-iters", "4"]
    with Cluster(tmp_path, flags, nodes="1:1") as cluster:
        cluster.start("a", 2)
        assert cluster.finish("a") == 0, cluster.tail()
    cluster.log("a").unlink()
    with Cluster(tmp_path, [*flags, "--hidden-size", "96"], nodes="1:1") as cluster:
        cluster.start("a", 2)
        assert cluster.finish("a") != 0
        text = cluster.log("a").read_text()
        said = re.sub(r"\n\[vtp rank \d\] +", " ", text)
        told = r"error: checkpoint \S+ is of another model \(--hidden-size 48, here 96\); give"
        assert re.search(rf"\[vtp rank 0\] {told}", said), text
        assert not re.search(rf"\[vtp rank 1\] {told}", said), text
        assert text.count("Traceback") == 1, text  # the agent's own, at its end
        assert (tmp_path / "ck" / MARKER).exists(), text


# A rank is killed while it saves, and its card is bad from then on; then one fails in the optimizer, and all are back.
SEED, NUM_FAULTS = 1, 2


@pytest.mark.needs("our_example")
def test_a_run_goes_on_after_faults(scripts: Scripts, tmp_path: Path) -> None:
    """Each strikes in its phase; losses and samples are right, and no process and no file is left."""
    faults = draw(SEED)[:NUM_FAULTS]
    struck = tmp_path / "struck"
    struck.mkdir()
    losses = undisturbed(scripts, FIRST, 40)
    run_once(SEED, struck, tmp_path / "results.jsonl", losses, NUM_FAULTS)
    *trials, end = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert [trial["outcome"] for trial in trials] == ["went on"] * NUM_FAULTS
    phases = ["start-up" if fault.phase == "restart" else fault.phase for fault in faults]
    assert [trial["struck"] for trial in trials] == phases
    assert end["run"]["steps"] >= 4
    assert {name: end["run"][name] for name in ("problem", "orphans", "files")} == {
        "problem": "",
        "orphans": [],
        "files": [],
    }
