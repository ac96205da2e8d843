"""A rank of ``benchmarks.checkpoint``: runs the example, and notes the time and the memory of its save or load."""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import vtp_plugin
from vtp_plugin.checkpoint.save.atomic_dir import sync
from vtp_plugin.config import VtpConfig
from vtp_plugin.host.patching import apply_records
from vtp_plugin.host.versions import find_host
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.registry import platform_records
from vtp_plugin.session import Session

_SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "pretrain_gpt.py"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.002
_POLL_S = 0.05


def run_rank(how: str, what: str, notes: str, *words: str) -> None:
    """Run the script with the words as its arguments: ``how`` it saves or loads, as ``benchmarks.checkpoint`` says.

    Args:
        how: a list's name there.
        what: save or load.
        notes: folder for what this rank notes.
        words: arguments of the script.
    """
    sys.argv = [str(_SCRIPT), *words]
    if how in ("stock", "synced"):
        _run_on_cpu()
        sys.argv += ["--distributed-backend", "gloo"]
    else:
        vtp_plugin.apply()
    from megatron.training import checkpointing, training

    # Looked up when called: the plugin replaces it where it is defined once it knows the list.
    name = f"{what}_checkpoint"

    def act(*args: Any, **kwargs: Any) -> Any:
        result = getattr(checkpointing, name)(*args, **kwargs)
        if how == "synced":
            _sync_all()
        return result

    after = _wait_for_background if how == "background" else lambda: 0.0
    setattr(training, name, lambda *args, **kwargs: _noted(Path(notes), lambda: act(*args, **kwargs), after))
    runpy.run_path(str(_SCRIPT), run_name="__main__")


def _run_on_cpu() -> None:
    """Let stock Megatron start on a CPU, with nothing else of the plugin."""
    session = Session(VtpConfig(device="cpu"))
    session.choose_platform()
    host, megatron = find_host()
    apply_records(platform_records(session, load_host(host.name)), megatron.version)


def _sync_all() -> None:
    """Sync the files and folders of the checkpoints when all ranks have written."""
    from megatron.training import get_args

    dist.barrier()
    if dist.get_rank() == 0:
        folder = Path(get_args().save)
        for path in (*folder.rglob("*"), folder):
            sync(path)


def _wait_for_background() -> float:
    """Wait until a checkpoint is there that is written in the background; return how long a step waits for that."""
    from megatron.training.async_utils import is_empty_async_queue, maybe_finalize_async_save

    while True:
        time.sleep(_POLL_S)
        begin_s = time.perf_counter()
        maybe_finalize_async_save(blocking=False)
        if is_empty_async_queue():
            return time.perf_counter() - begin_s


def _noted(notes: Path, act: Callable[[], Any], after: Callable[[], float]) -> Any:
    """Act on all ranks at once, and write down what it took here, with the seconds of what comes after it."""
    peak_bytes, is_over = _resident_bytes(), threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not is_over.wait(_SAMPLE_S):
            peak_bytes = max(peak_bytes, _resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    dist.barrier()
    watcher.start()
    begin_s, begin_bytes = time.perf_counter(), _read_bytes()
    result = act()
    dist.barrier()
    seconds = time.perf_counter() - begin_s
    seconds += after()
    is_over.set()
    watcher.join()
    read_bytes = _read_bytes() - begin_bytes
    note = {"seconds": seconds, "read_bytes": read_bytes, "peak_bytes": peak_bytes, "kept_bytes": _resident_bytes()}
    (notes / f"{dist.get_rank()}.json").write_text(json.dumps(note))
    return result


def _read_bytes() -> int:
    """Return what this process has read, from the disk or from the file cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
