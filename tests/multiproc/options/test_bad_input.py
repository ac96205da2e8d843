"""Bad input at process level: one clear line on every rank, every rank exits non-zero, nothing hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import packaging
import pytest

from tests.hang.ranks import Run, Server, run
from tests.support.fake_trees import lay_megatron, lay_torch
from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.lines import error_line
from vtp_plugin.host.versions import HOSTS

WORLD = 3
TIMEOUT_S = 6.0


def start(whole: Run, arguments: dict[int, list[str]]) -> None:
    for rank in range(WORLD):
        whole.start(
            rank, f"--timeout-s={TIMEOUT_S * whole.pace}", "--num-steps=1", *arguments.get(rank, arguments.get(-1, []))
        )


def assert_refused(whole: Run, pattern: str, may_trace: Collection[int] = ()) -> list[str]:
    """All ranks end with status 1 and an error line that matches; there is no traceback."""
    whole.ended(range(WORLD), (TIMEOUT_S + 20.0) * whole.pace)
    lines = [whole.ranks[rank].error_line() for rank in range(WORLD)]
    for rank, line in enumerate(lines):
        assert whole.ranks[rank].status() == 1, whole.ranks[rank].text()
        assert re.match(rf"\[vtp rank {rank}\] error: ", line), whole.ranks[rank].text()[-2000:]
        assert re.search(pattern, line), line
        assert "Traceback" not in whole.ranks[rank].text() or rank in may_trace
    return lines


# The arguments of rank -1 are those of all ranks that are not named. The text must be the same on all ranks.
SAME_ON_ALL = {
    "the list does not fit the world": ({-1: ["--vtp-size-list=2,2"]}, r"2,2|2\+2"),
    "the list does not fit the pipeline": (
        {-1: ["--pipeline-size=3"]},
        r"--pipeline-model-parallel-size 3 contradicts",
    ),
    "the tensor size is not the largest": ({-1: ["--tensor-size=3"]}, r"--tensor-model-parallel-size 3 contradicts"),
    "lists differ": ({2: ["--vtp-size-list=2,1"]}, r"vtp_size_list is 1,2 on rank 0, 1 and 2,1 on rank 2"),
    "versions differ": (
        {1: ["--pretend-version=0.0.9"]},
        r"vtp_plugin version is .* on rank 0, 2 and 0\.0\.9 on rank 1",
    ),
    "one rank finds an error": ({2: ["--pipeline-size=3"]}, r"rank 2: --pipeline-model-parallel-size 3 contradicts"),
    "an entry is zero": ({-1: ["--vtp-size-list=1,0"]}, r"'1,0' has the entry '0', which is not a positive"),
    "apply twice": ({-1: ["--apply-again=other"]}, r"apply\(\) was called before with other arguments"),
    "apply too late": ({-1: ["--apply-again=late"]}, r"parallel_state is already initialised"),
}
CHOSEN = (
    "the list does not fit the world",
    "lists differ",
    "versions differ",
    "one rank finds an error",
    "apply twice",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CHOSEN else pytest.mark.full) for case in SAME_ON_ALL]
)
def test_all_ranks_refuse_with_one_text(rank_server: Server, tmp_path: Path, case: str) -> None:
    arguments, pattern = SAME_ON_ALL[case]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start(whole, arguments)
        lines = assert_refused(whole, pattern)
    texts = {re.sub(r"; this rank .*|; before that, .*", "", re.sub(r"^\[vtp rank \d\] ", "", line)) for line in lines}
    assert len(texts) == 1, texts


@pytest.mark.full
def test_applying_again_with_the_same_arguments_changes_nothing(rank_server: Server, tmp_path: Path) -> None:
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start(whole, {-1: ["--apply-again=same"]})
        whole.ended(range(WORLD), 300.0)
        assert [whole.ranks[rank].status() for rank in range(WORLD)] == [0] * WORLD, whole.ranks[0].text()


def test_a_config_of_another_stage_is_refused(rank_server: Server, tmp_path: Path) -> None:
    """Found when the model is built, on the ranks of stage 1 only; rank 0 is told."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start(whole, {1: ["--config-tensor-size=1"], 2: ["--config-tensor-size=1"]})
        # Rank 0 may find its connection closed before it is told why.
        pattern = r"tensor_model_parallel_size=1, but stage 1 has 2; build the config with"
        assert_refused(whole, pattern, may_trace=[0])


def test_stages_that_would_send_another_type_are_refused(rank_server: Server, tmp_path: Path) -> None:
    """The bytes would not fit the receiver's, and end its process inside gloo."""
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        start(whole, {0: ["--pipeline-dtype=bfloat16"]})
        assert_refused(whole, r"pipeline_dtype is torch.bfloat16 on rank 0 and torch.float32 on rank 1, 2")


STALE = (
    r"config\.finalize_model_grads_func was imported from Megatron before vtp_plugin\.apply\(\) and would give wrong "
    r"gradients; victim\.py or a module that it imports: from megatron\.core\.distributed import finalize_model_grads: "
    r"move vtp_plugin\.apply\(\) above that line"
)
# What a rank finds wrong when its first step begins, or when it applies the plugin: the others leave with it.
FOUND_BY_A_STEP = {
    "an original, stock schedule": (["--takes-original"], STALE),
    "an original, planned schedule": (["--takes-original", "--schedule=planned"], STALE),
    "flextron": (["--switched-on", "flextron"], r"config\.flextron with --vtp-size-list 1,2; .*; switch it off"),
    "what the planned schedule leaves out": (
        ["--schedule=planned", "--switched-on", "overlap_moe_expert_parallel_comm"],
        r"config\.overlap_moe_expert_parallel_comm with a planned schedule; .*; leave it out",
    ),
}


@pytest.mark.parametrize("case", FOUND_BY_A_STEP)
def test_what_one_rank_finds_ends_all(rank_server: Server, tmp_path: Path, case: str) -> None:
    arguments, pattern = FOUND_BY_A_STEP[case]
    others = [argument for argument in arguments if argument.startswith("--schedule")]
    with run(tmp_path, rank_server, world_size=WORLD) as whole:
        # What is wrong with a rank at its start, before the sites are compared, its own line says.
        start(whole, {-1: arguments if case == "a subclass" else others, 2: arguments})
        assert_refused(whole, pattern)
        assert "trained" not in whole.ranks[0].text()
        if "--takes-original" in arguments:
            text = " ".join(whole.ranks[2].text().split())
            assert "warning: imported from Megatron before vtp_plugin.apply() and not replaced" in text
            assert "kept[0] (finalize_model_grads)" in text


def test_one_rank_without_the_plugin(rank_server: Server, tmp_path: Path) -> None:
    """The others name it and end; it stays in torch's own start, which is not ours, and is ended by the test."""
    with run(tmp_path, rank_server, world_size=WORLD, agent_store=True) as whole:
        start(whole, {1: ["--without-plugin"]})
        whole.ended([0, 2], 120.0)  # when they end is what their line says
        for rank in (0, 2):
            assert whole.ranks[rank].status() == 1
            line = whole.ranks[rank].error_line()
            assert re.search(r"start-up: waited [\d.]+ s for rank 1 at .* runs without vtp_plugin", line), line


def run_script(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, *options, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "CUDA_VISIBLE_DEVICES": "", "RANK": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("version", ["0.13.0", "0.20.1"])
def test_an_unsupported_megatron_beside_the_script_is_refused(tmp_path: Path, version: str) -> None:
    """It hides the one that is installed, whose version says nothing then."""
    lay_megatron(tmp_path, version)
    done = run_script(tmp_path, "import vtp_plugin\nvtp_plugin.apply()\n")
    assert done.returncode == 1
    line = error_line(done.stderr)
    where = tmp_path / "megatron/core"
    assert line.startswith(f"[vtp rank 3] error: megatron-core {version} at {where} is not supported; ")
    families = " and ".join(host.versions for host in HOSTS)
    assert f"runs with {families}; run: pip install" in line
    assert "Traceback" not in done.stderr


def test_a_missing_megatron_is_refused(tmp_path: Path) -> None:
    """Without site-packages there is no Megatron, of torch what says its version, and what the plugin requires."""
    alone = tmp_path / "alone"
    lay_torch(alone, "2.7.1+cpu")
    (alone / "packaging").symlink_to(Path(packaging.__file__).parent)
    source = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(alone)!r}]\nimport vtp_plugin\nvtp_plugin.apply()\n"
    done = run_script(tmp_path, source, "-I", "-S")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("[vtp rank 3] error: Megatron is missing: there is no megatron.core; run: pip install")


SPAWNING = """
import multiprocessing
import sys

import vtp_plugin

if __name__ != "__main__":
    vtp_plugin.apply(vtp_size_list="1,x")


def child() -> None:
    print("child:", vtp_plugin.status(), "torch" in sys.modules, flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_apply_in_a_spawned_child_does_nothing(tmp_path: Path) -> None:
    """The child imports the script again: a call that would fail, were it carried out, is silent there."""
    done = run_script(tmp_path, SPAWNING)
    assert done.returncode == 0, done.stderr
    assert "child: () False" in done.stdout.splitlines()
