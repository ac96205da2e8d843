"""``apply()`` and ``revert()`` with the real Megatron, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

import vtp_plugin
from tests.support.hosts import PYTHON_PATH
from vtp_plugin.errors import LayoutError, PatchError
from vtp_plugin.runtime.health.failure_hook import FailureHook

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
ended = []
vtp_plugin.api.current_session().start.ending.callback(ended.append, "the start")  # the script destroys nothing itself
vtp_plugin.revert()
assert held() + other.held() == before, held() + other.held()
assert ended == ["the start"]
print("done", len(lines))
"""


def run_python(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **WORLD_OF_ONE, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHON_PATH, **(env or {})},
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("way", [pytest.param("apply in the script", marks=pytest.mark.full), "run"])
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


# Without a list: everything that the script can see is compared with what it sees without the plugin.
UNIFORM = """
import gc
import sys
import threading
import torch.distributed as dist
import megatron.training.arguments as arguments
from vtp_plugin.host.versions import find_host
from vtp_plugin.config import VtpConfig
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.registry import platform_records
from vtp_plugin.host.patching import apply_records
from vtp_plugin.session import Session
import vtp_plugin

def refuse(*args, **kwargs):
    raise AssertionError("a store was opened")

def look():
    args = arguments.parse_args()
    parsed = dict(vars(args))
    return parsed, dict(vars(arguments.validate_args(args))), sys.excepthook, threading.active_count()

dist.TCPStore = refuse
session = Session(VtpConfig(device="cpu"))
session.choose_platform()
applied = apply_records(platform_records(session, load_host(find_host()[0].name)), find_host()[1].version)
sys.argv += ["--distributed-backend", "gloo"]
stock = look()
applied.revert()
session.platform.uninstall()
vtp_plugin.apply()
ours = look()
for what, then, now in zip(("parsed", "validated", "exception hook", "threads"), stock, ours):
    differences = {k: (then.get(k), now.get(k)) for k in then | now if str(then.get(k)) != str(now.get(k))} \
        if isinstance(then, dict) else then != now
    assert not differences, (what, differences)
assert type(ours[0]["tensor_model_parallel_size"]) is int
vtp_plugin.revert()
print("the same", len(ours[0]), len(ours[1]))
"""


@pytest.mark.parametrize("size", [pytest.param("", marks=pytest.mark.full), "2"])
def test_a_uniform_run_notices_nothing(tmp_path: Path, size: str) -> None:
    """On a machine without accelerators the CPU mapping is the one difference, so stock Megatron gets it here too."""
    (tmp_path / "script.py").write_text(UNIFORM)
    flags = [*FLAGS[3:], "--global-batch-size", "2", *(("--tensor-model-parallel-size", size) if size else ())]
    # Megatron 0.12 asks for the second variable.
    env = {"WORLD_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = run_python(tmp_path, "script.py", *flags, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("the same ")
    assert "[vtp" not in done.stdout + done.stderr


def kept_hook(calls: list[str], name: str) -> Any:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        calls.append(f"{name}: {error}")

    return hook


def raised(error: BaseException) -> tuple[type[BaseException], BaseException, None]:
    return type(error), error, None


def test_the_exception_hook_is_a_link_of_a_chain(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys, "excepthook", kept_hook(calls, "before"))
    before = sys.excepthook
    hook = FailureHook(lambda: False, lambda: None)
    assert sys.excepthook is before
    hook.install()
    hook.install()
    sys.excepthook(*raised(ValueError("theirs")))
    sys.excepthook(*raised(PatchError("ours")))
    assert calls == ["before: theirs"] and "error: ours" in capfd.readouterr().err
    hook.remove()
    assert sys.excepthook is before


def test_the_line_of_a_watched_rank_says_what_has_failed(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Who looks for the first line of the plugin's need not look for the traceback."""
    monkeypatch.setattr(sys, "excepthook", kept_hook([], "before"))
    monitor: Any = SimpleNamespace(failure=None, describe_position=lambda error: "", post_failure=lambda error: False)
    hook = FailureHook(lambda: False, lambda: monitor)
    hook.install()
    sys.excepthook(*raised(FileNotFoundError("no data in x")))
    hook.remove()
    assert "error: this rank failed with the error above, FileNotFoundError: no data in x\n" in capfd.readouterr().err


def test_a_hook_that_somebody_set_over_ours_stays(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys, "excepthook", kept_hook(calls, "before"))
    hook = FailureHook(lambda: True, lambda: None)
    hook.install()
    ours = sys.excepthook

    def over(*error: Any) -> None:
        calls.append("over")
        ours(*error)

    sys.excepthook = over
    hook.remove()
    assert sys.excepthook is over
    sys.excepthook(*raised(PatchError("passed on")))
    assert calls == ["over", "before: passed on"] and "passed on" not in capfd.readouterr().err
    hook.leave()  # does not end this process: nothing has failed since
    again = FailureHook(lambda: False, lambda: None)
    again.install()
    sys.excepthook(*raised(ValueError("once")))
    assert calls[2:] == ["over", "before: once"]
    again.remove()
    assert sys.excepthook is over


def test_apply_sets_the_hook_with_a_list_and_for_its_own_errors(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, vtp_plugin\n"
        "mine = sys.excepthook = lambda *error: print('mine', error[1])\n"
        "vtp_plugin.apply(device='cpu')\n"
        "assert sys.excepthook is mine\n"
        "vtp_plugin.revert()\n"
        "vtp_plugin.apply(vtp_size_list=[1], device='cpu')\n"
        "assert sys.excepthook is not mine\n"
        "vtp_plugin.revert()\n"
        "assert sys.excepthook is mine\n"
        "print('kept', flush=True)\n"
        "vtp_plugin.apply(vtp_size_list='1,x')\n"
    )
    done = run_python(tmp_path, "script.py")
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "kept", done.stderr[-3000:]
    assert done.stderr.splitlines()[-1].startswith("[vtp rank 0] error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("size_list", [[1, 2], None])
def test_a_failed_apply_is_not_taken_for_a_good_one(
    monkeypatch: pytest.MonkeyPatch, size_list: list[int] | None
) -> None:
    from vtp_plugin.patches import activation

    def fail(*arguments: object) -> None:
        raise PatchError("no such target")

    with monkeypatch.context() as patched:
        patched.setattr(activation, "apply_records", fail)
        with pytest.raises(PatchError, match="no such target"):
            vtp_plugin.apply(vtp_size_list=size_list, device="cpu")
    try:
        with pytest.raises(PatchError, match="failed; call vtp_plugin.revert"):
            vtp_plugin.apply(vtp_size_list=size_list, device="cpu")
    finally:
        vtp_plugin.revert()


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"vtp_size_list": "auto", "stages": "1:2"},
            "--vtp-stages in apply.*; the layout must be chosen before .* run",
        ),
        ({"vtp_size_list": "auto", "stages": [2, 1]}, "vtp_stages 2:1 begins above its end; write the fewest"),
        (
            {"vtp_size_list": [1, 2], "stages": "1:2"},
            "--vtp-stages 1:2 needs --vtp-size-list auto; give both, or leave",
        ),
        ({"stages": "1:2"}, "--vtp-stages 1:2 needs --vtp-size-list auto; give both, or leave"),
    ],
)
def test_a_script_cannot_have_a_list_fitted(keywords: dict[str, Any], text: str) -> None:
    try:
        with pytest.raises(LayoutError, match=text):
            vtp_plugin.apply(**keywords)
    finally:
        vtp_plugin.revert()


def test_a_script_that_was_not_run_by_the_plugin_cannot_have_a_list_fitted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import vtp_plugin\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "vtp_plugin.apply()\n"
        "validate_args(parse_args())\n"
    )
    words = ["auto" if word == "1" and before == "--vtp-size-list" else word for before, word in pairwise(("", *FLAGS))]
    done = run_python(tmp_path, "script.py", *words, "--vtp-stages", "1:2", "--vtp-device", "cpu")
    assert done.returncode == 1, done.stderr[-3000:]
    line = "[vtp rank 0] error: --vtp-stages in apply(); the layout must be chosen before the script starts"
    assert done.stderr.splitlines()[-1].startswith(line) and "Traceback" not in done.stderr
