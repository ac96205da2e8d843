"""What ``checkpoint reshard`` costs, and ``cp`` of the same files; a part of ``benchmarks.checkpoint``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from vtp_plugin.checkpoint.save.atomic_dir import sync

_SAMPLE_S = 0.005


def copy_and_sync(source: Path, target: Path) -> float:
    """Copy a folder, and wait until the disk has all of it; return the seconds."""
    begin_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        sync(path)
    return time.perf_counter() - begin_s


def main() -> None:
    """Write a checkpoint again, and print as JSON what that took beyond the imports."""
    import torch.distributed.checkpoint

    import vtp_plugin.checkpoint.tools.rewrite_optimizer
    from vtp_plugin.cli import main as run

    del torch, vtp_plugin
    source, target = sys.argv[1:]
    before = peak_bytes = _held_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not is_over.wait(_SAMPLE_S):
            peak_bytes = max(peak_bytes, _held_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin_s = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run(["checkpoint", "reshard", "--from", source, "--to", target])
    seconds = time.perf_counter() - begin_s
    is_over.set()
    watcher.join()
    if not any(Path(target).glob("iter_*/vtp_manifest.json")):
        sys.exit("nothing was written")
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes - before}))


def _held_bytes() -> int:
    """Return the memory of this process without pages of files, which the kernel may take back at any time."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0 if found is None else int(found.group(1)) << 10
