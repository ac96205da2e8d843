"""A job that runs a Megatron training script under the plugin, as ``python -m vtp_plugin run SCRIPT ...`` would.

megatron.training keeps its arguments, tokenizer, timers, microbatch calculator, random states and signal handlers in
module globals. So every run happens in a fork of the worker, which has imported Megatron but never used it: nothing is
left to reset, the exit code and the printed lines are those of a real process, and a run that fails costs no worker.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import runpy
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import megatron.training.training as training
from megatron.core.datasets import gpt_dataset
from megatron.training import arguments as megatron_arguments

import vtp_plugin
from tests.group_queries.recorder import refusing_unknown_callers
from tests.multiproc import hooks as known_hooks
from tests.multiproc.cases.script_cases import EXAMPLE, ScriptRun, Step
from tests.multiproc.hooks.in_place import Hook, after
from tests.multiproc.jobs import variants
from tests.support.devices import DEVICE
from tests.support.pool import TIMEOUT_S
from tests.support.pool_worker import _die_with

# Imported once in the worker, so that the runs need not do it; some hosts lack some of them.
for _name in (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "megatron.legacy.model",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "torch.distributed.checkpoint",
    *(module.name for module in pkgutil.walk_packages(vtp_plugin.__path__, "vtp_plugin.", onerror=lambda _name: None)),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


def _read_help_once() -> None:
    """Keep what Megatron finds in its sources as the help of its flags: a third of a second, for each rank of a run."""
    with contextlib.suppress(ImportError):
        from megatron.training.argument_utils import ArgumentGroupFactory

        read = ArgumentGroupFactory._get_field_docstrings
        known: dict[type, dict[str, str]] = {}

        def remembered(self: Any, cls: type) -> dict[str, str]:
            if cls not in known:
                known[cls] = read(self, cls)
            return dict(known[cls])

        ArgumentGroupFactory._get_field_docstrings = remembered
        megatron_arguments.add_megatron_arguments(argparse.ArgumentParser())


_read_help_once()

# The dataset that Megatron makes up has 100,000 documents; building its index takes longer than training here.
gpt_dataset.MockGPTLowLevelDataset.size = 100


class _Notes:
    """What a run collects, in the process that runs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[float] = []
        self.facts: dict[str, Any] = {}


def run_script(
    arguments: Sequence[str],
    by_rank: Mapping[int, Sequence[str]] | None = None,
    *,
    how: Literal["run", "brief", "apply", "stock", "plain"] = "run",
    apply_kwargs: Mapping[str, Any] | None = None,
    script: str = EXAMPLE,
    hooks: Sequence[str] = (),
    folders: Mapping[int, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ScriptRun:
    """Run the script in a fork of this process and return what came of it.

    Args:
        arguments: of the script.
        by_rank: further arguments of single ranks.
        how: under ``vtp_plugin run``, or ``run --brief``; with ``vtp_plugin.apply(**apply_kwargs)`` in front, as a
            script itself would; stock Megatron without the plugin, on the CPU platform alone; or plain, as it stands.
        apply_kwargs: of ``apply()``.
        script: the script.
        hooks: names of :data:`HOOKS`, each with words behind it that it gets, too; called before the script starts
            with the dictionary of facts; what a hook returns is called when the script has ended well.
        folders: working directories of single ranks.
        timeout_s: for the whole run.
    """
    arguments = [*arguments, *(by_rank or {}).get(int(os.environ["RANK"]), ())]
    with tempfile.TemporaryDirectory(prefix="vtp-run-") as folder:
        output, results = Path(folder) / "output", Path(folder) / "results"
        parent = os.getpid()
        gc.freeze()  # the collector in the fork then copies none of this process's pages
        pid = os.fork()
        if pid == 0:
            start = {
                "run": lambda: _run_command(script, arguments),
                "brief": lambda: _run_command("--brief", [script, *arguments]),
                "apply": lambda: _run_with_apply(script, arguments, apply_kwargs or {}),
                "stock": lambda: _run_stock(script, arguments),
                "plain": lambda: _run_plain(script, arguments),
            }[how]
            os.chdir((folders or {}).get(int(os.environ["RANK"]), os.curdir))
            hooks = ["fork_results_queue", *hooks] if "--save" in arguments else hooks
            hooks = ["move_to_device", *hooks] if DEVICE != "cpu" and _is_stock(how, arguments) else hooks
            _be_a_process(parent, output, results, start, hooks)
        exit_code = _wait(pid, timeout_s)
        # A checkpoint save starts helpers of 450 MB, which outlive a process that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        notes = (
            pickle.loads(results.read_bytes()) if results.exists() else {"steps": [], "evaluations": [], "facts": {}}
        )
        return ScriptRun(exit_code=exit_code, output=output.read_text(errors="replace"), **notes)


def _is_stock(how: str, arguments: Sequence[str]) -> bool:
    """Tell whether Megatron runs as it is: without the plugin, or with a list of equal sizes."""
    sizes = arguments[arguments.index("--vtp-size-list") + 1] if "--vtp-size-list" in arguments else ""
    return how == "stock" or (len({*sizes.split(",")}) == 1 and "--layerwise-disaggregated-training" not in arguments)


def _run_command(first: str, others: Sequence[str]) -> None:
    from vtp_plugin.cli import main

    words = ["run", first, *others]
    sys.argv = ["vtp_plugin", *words]
    main(words)


def _run_with_apply(script: str, arguments: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    vtp_plugin.apply(**kwargs)
    _run_plain(script, arguments)


def _run_plain(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _run_stock(script: str, arguments: Sequence[str]) -> None:
    """Run Megatron with what makes it start on a CPU, and nothing of the plugin's own."""
    if DEVICE != "cpu":
        return _run_plain(script, arguments)
    from vtp_plugin.config import VtpConfig
    from vtp_plugin.host.patching import apply_records
    from vtp_plugin.host.versions import find_host
    from vtp_plugin.patches.hosts import load_host
    from vtp_plugin.patches.registry import platform_records
    from vtp_plugin.session import Session

    session = Session(VtpConfig(device="cpu"))
    session.choose_platform()
    host, megatron = find_host()
    apply_records(platform_records(session, load_host(host.name)), megatron.version)
    _run_plain(script, [*arguments, "--distributed-backend", "gloo"])


def _be_a_process(
    parent: int, output: Path, results: Path, start: Callable[[], None], hooks: Sequence[str]
) -> NoReturn:
    """Do in a fork what a fresh interpreter does with a script, up to its exit code."""
    code = 70
    try:
        os.setpgid(0, 0)
        _die_with(parent)
        atexit._clear()
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        notes = _Notes()
        _collect(notes)
        code = _exit_code_of(start, hooks, notes)
        partial = results.with_suffix(".partial")
        partial.write_bytes(
            pickle.dumps({"steps": notes.steps, "evaluations": notes.evaluations, "facts": notes.facts})
        )
        partial.rename(results)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code_of(start: Callable[[], None], hooks: Sequence[str], notes: _Notes) -> int:
    try:
        with refusing_unknown_callers():
            afterwards = [HOOKS[name](notes.facts, *words) for name, *words in map(str.split, hooks)]
            start()
            for finish in filter(None, afterwards):
                finish()
    except SystemExit as leave:
        if leave.code is not None and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
            return 1
        return leave.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _collect(notes: _Notes) -> None:
    """Note what Megatron's loop gets from its steps and evaluations, at full precision and without averaging."""

    @after(training, "train_step")
    def note_step(result: Any, *_args: Any, **_kwargs: Any) -> None:
        losses, grad_norm, num_zeros = result[0], result[5], result[6]
        if grad_norm is not None:  # else it is of a step after which the run ends, before the optimizer's
            loss = float(losses["lm loss"]) if "lm loss" in losses else None
            zeros = None if num_zeros is None else float(num_zeros)
            notes.steps.append(Step(loss=loss, grad_norm=float(grad_norm), num_zeros=zeros))

    @after(training, "evaluate")
    def note_evaluation(result: Any, *_args: Any, **_kwargs: Any) -> None:
        if result[0] and "lm loss" in result[0]:
            notes.evaluations.append(float(result[0]["lm loss"]))


def _wait(pid: int, timeout_s: float) -> int | None:
    """Wait for a child; one that is late writes its stacks and is killed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if (code := _poll(pid)) is not None:
            return code
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _hooks() -> Iterator[tuple[str, Hook]]:
    """Yield the hooks in tests/multiproc/hooks, by their names: all functions that get the facts."""
    names = [one.name for one in pkgutil.iter_modules(known_hooks.__path__)]
    modules = [importlib.import_module(f"{known_hooks.__name__}.{name}") for name in names]
    for module in (*modules, variants):
        for name, hook in vars(module).items():
            if isinstance(hook, types.FunctionType) and next(iter(inspect.signature(hook).parameters), "") == "facts":
                yield name, hook


HOOKS = dict(_hooks())
