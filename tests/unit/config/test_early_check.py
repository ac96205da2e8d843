"""What is certainly wrong with a command line is found at once; what may be right is left to the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.hosts import PYTHON_PATH
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import check_command_line
from vtp_plugin.errors import ConfigError

TORCHRUN = {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}
SCRIPT = "# Start it with --vtp-size-list 1,2.\nimport argparse\nparser = argparse.ArgumentParser()\n"


def check(words: str, source: str, folder: Path, environment: Mapping[str, str] = TORCHRUN, **given: object) -> None:
    script = folder / "script.py"
    script.write_text(source)
    check_command_line([str(script), *words.split()], VtpConfig(**given), environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--vtp-size-lst 1,2", "--vtp-size-lst is unknown; do you mean --vtp-size-list?"),
        ("--vtp-size-lis 1,2", "--vtp-size-lis is unknown; do you mean --vtp-size-list?"),
        ("--vpt-size-list=1,2", "--vpt-size-list is unknown; do you mean --vtp-size-list?"),
        ("-vtp-size-list 1,2", "-vtp-size-list is unknown; do you mean --vtp-size-list?"),
        ("--vtp-xp-list 1,2", "do you mean --vtp-cp-list or --vtp-dp-list or --vtp-ep-list?"),
        ("--vtp-size-list 1,2 --vtp-transport sliecd", "transport 'sliecd' is unknown; use one of auto"),
        ("--vtp-size-list 1,2 --vtp-transport sliecd", "; do you mean sliced?"),
        ("--vtp-size-list 1;2", "vtp_size_list '1;2' has the entry '1;2'"),
        ("--vtp-size-list 0,2", "vtp_size_list '0,2' has the entry '0'"),
        ("--vtp-size-list 1,2 --vtp-timeout-s soon", "argument --vtp-timeout-s: invalid float value: 'soon'"),
        ("--vtp-size-list", "argument --vtp-size-list: expected one argument"),
        ("--vtp-size-list 1 2", "--vtp-size-list 1 2 has a space; it takes one word; write --vtp-size-list 1,2"),
        ("--vtp-size-list 1, 2, 2 --lr 1", "it takes one word; write --vtp-size-list 1,2,2"),
        ("--vtp-size-list 1,2 --vtp-dp-list=1 2", "--vtp-dp-list 1 2 has a space; it takes one word; write --vtp-dp"),
        ("--vtp-size-list 1,2 --num-layer-list 1,2,1", "--num-layer-list is for --layerwise-disaggregated-training"),
        ("--vtp-stages 2:4", "--vtp-stages 2:4 needs --vtp-size-list auto"),
        ("--vtp-size-list auto --vtp-stages 4:2", "vtp_stages 4:2 begins above its end"),
        ("--vtp-size-list 2,2", "needs 4 processes, or a multiple"),
        ("--vtp-size-list=1,1,2 --context-parallel-size 1", "needs 4 processes, or a multiple"),
        ("--vtp-size-list 1,2 --context-parallel-size=1 --context-parallel-size=2", "needs 6 processes, or a multiple"),
        ("--vtp-size-list 1,1 --vtp-cp-list 1,1", "needs 2 processes, or a multiple"),
        ("--vtp-size-list 1,2 --vtp-dp-list 1,2", "these stages need 5 processes"),
    ],
)
def test_what_is_certainly_wrong_is_rejected(tmp_path: Path, words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(words, SCRIPT, tmp_path)
    assert text in str(caught.value)
    assert caught.value.is_final


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ("--vtp-size-list 1,2 --num-layers 4 --context-parallel-size 2 --context-parallel-size=1", SCRIPT),
        ("--vtp-size-list auto --vtp-stages 1:2", SCRIPT),
        # Near no flag of ours: the script's parser knows it, or says that it does not.
        ("--vtp-size-list 1,2 --vtp-something-else 3", SCRIPT),
        # Flags of the script.
        ("--vtp-size-lst 1,2", f'{SCRIPT}parser.add_argument("--vtp-size-lst")\n'),
        ("--vtp-size-lst 1,2", f"{SCRIPT}class Options:\n    vtp_size_lst: str\n"),
        ("--vtp-size-list 1;2", f"{SCRIPT}parser.add_argument(\n    '--vtp-size-list', type=str\n)\n"),
        # Behind a "--" stands what is no flag, and help is shown whatever else is wrong.
        ("-- --vtp-size-lst 1,2", SCRIPT),
        ("--help --vtp-size-lst 1,2", SCRIPT),
        # The number of processes may yet be right.
        ("--vtp-size-list 1,1 --yaml-cfg x.yaml", SCRIPT),
        ("--vtp-size-list 2,2 --use-checkpoint-args", SCRIPT),
        ("--vtp-size-list 2,2 --context-parallel-size two", SCRIPT),
        ("--lr 1", SCRIPT),
    ],
)
def test_what_may_be_right_is_left_to_the_run(tmp_path: Path, words: str, source: str) -> None:
    check(words, source, tmp_path)


def test_another_context_parallel_size_may_be_the_default_of_a_script(tmp_path: Path) -> None:
    words = "--vtp-size-list 1,2 --vtp-dp-list 1,1"
    check(words, SCRIPT, tmp_path, {**TORCHRUN, "WORLD_SIZE": "6"})
    with pytest.raises(ConfigError, match="these stages need 3 processes"):
        check(f"{words} --context-parallel-size 1", SCRIPT, tmp_path, {**TORCHRUN, "WORLD_SIZE": "6"})


def test_a_module_beside_the_script_may_declare_a_flag(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(f'{SCRIPT}parser.add_argument("--vtp-size-lst")\n')
    check("--vtp-size-lst 1,2", "import beside\n", tmp_path)


def test_apply_counts_what_it_was_given_and_no_processes(tmp_path: Path) -> None:
    check("--vtp-cp-list 1,2", SCRIPT, tmp_path, {}, size_list=(1, 2))
    check("--vtp-size-list 2,2", SCRIPT, tmp_path, {})
    with pytest.raises(ConfigError, match="apply\\(\\) was given size_list=1,2, the command line says 2,1"):
        check("--vtp-size-list 2,1", SCRIPT, tmp_path, {}, size_list=(1, 2))


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start ``run`` in a process that prints what it imports."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vtp_plugin", "run", *words],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **TORCHRUN, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_neither_torch_nor_megatron_is_imported_and_one_rank_speaks(tmp_path: Path, local_rank: int) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it must not run')\n")
    files = [tmp_path / str(rank) / "error.json" for rank in range(2)]
    for file in files:
        file.parent.mkdir()
    if local_rank == 1:  # torchrun would end rank 0 once this one has ended: it waits until rank 0 has spoken
        threading.Timer(3.0, files[0].touch).start()
    place = {"LOCAL_RANK": str(local_rank), "RANK": str(local_rank), "TORCHELASTIC_ERROR_FILE": str(files[local_rank])}
    done = start(str(script), "--vtp-size-lst", "1,2", **place)
    assert done.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "vtp_plugin.config.resolve" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "megatron", "numpy")}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    line = "vtp_plugin: error: --vtp-size-lst is unknown; do you mean --vtp-size-list?"
    assert said == ([line] if local_rank == 0 else [])
    assert done.stdout == "" and files[local_rank].exists(), "torchrun's summary names rank 0 as the cause"
