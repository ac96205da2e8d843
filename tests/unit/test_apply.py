"""``apply()`` and ``revert()`` with the real Megatron, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rules import ROOT

WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
FLAGS = (
    *("--vtp-size-list", "1", "--vtp-force", "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--max-position-embeddings", "8", "--micro-batch-size", "1", "--global-batch-size", "1"),
    *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
)
TAKING = """
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func as choose

class Hooks:
    finalize = staticmethod(finalize_model_grads)
    def step(self, schedule=choose):
        return schedule

def held():
    return finalize_model_grads, vars(Hooks)["finalize"].__func__, choose, Hooks.step.__defaults__[0]
"""
CHECKING = """
import other
import sys
import vtp_plugin
from megatron.training.arguments import parse_args, validate_args

def is_ours(function):
    return hasattr(function, "__vtp_record__")

before = held() + other.held()
assert not any(map(is_ours, before)), before
{apply}
validate_args(parse_args())
assert all(map(is_ours, held() + other.held())), held() + other.held()
lines = [place for status in vtp_plugin.status() for place in status.aliases_outside]
for name in ("finalize_model_grads", "Hooks.finalize", "choose", "Hooks.step (default schedule)"):
    assert "script.py:" + name in lines and "other:" + name in lines, lines
vtp_plugin.revert()
assert held() + other.held() == before, held() + other.held()
print("done", len(lines))
"""


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **WORLD_OF_ONE, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("way", ["apply in the script", "run"])
def test_a_script_and_a_module_of_its_own_may_take_names_first(tmp_path: Path, way: str) -> None:
    """The script's imports stand before ``apply()``, or after the one of ``run`` and before the list is known."""
    (tmp_path / "other.py").write_text(TAKING)
    apply = "vtp_plugin.apply()" if way == "apply in the script" else ""
    (tmp_path / "script.py").write_text(TAKING + CHECKING.format(apply=apply))
    command = () if way == "apply in the script" else ("-m", "vtp_plugin", "run")
    done = run_python(tmp_path, *command, "script.py", *FLAGS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search("^done ", done.stdout, re.MULTILINE), done.stdout
    assert "not replaced: script.py:before[0] (finalize_model_grads)" in " ".join(done.stderr.split())
