"""Pages as the commands write them, for tests and for the pictures of the documents."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from tests.rules.import_rules import ROOT
from tests.support.made_traces import U_COSTS, U, files_of, schedule_of, slowed, write
from vtp_plugin.cli.main import main

MODEL = (
    *("--num-layers", "33", "--hidden-size", "4096", "--num-attention-heads", "32", "--ffn-hidden-size", "14336"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--vocab-size", "128256", "--max-position-embeddings", "4096"),
    *("--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "96", "--bf16"),
    *("--use-distributed-optimizer", "--sequence-parallel"),
)
# Names that would do harm if they were markup: of a module, and of a folder.
HOSTILE = "<script>alert(1)</script>"
HOSTILE_FOLDER = "<img src=x onerror=alert(1)>"

COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (
        *("plan", "--vtp-size-list", "4,8,8", "--world-size", "40", "--vtp-sites", "edge,cloud,cloud"),
        *("--card-memory", "80GiB", *MODEL),
    ),
    "simulate": (
        *("simulate", "--vtp-size-list", "1,4,4", "--num-microbatches", "12", "--card-memory", "80GiB", *MODEL),
        *("--vtp-costs", "forward_ms=40,80,40", "latency_ms=5"),
    ),
    "search": (
        *("search", "--cluster", str(ROOT / "examples/clusters/unequal.toml"), "--vtp-stages", "1:4", *MODEL),
        *("--num-layers", "24"),
    ),
    "bridges": ("plan", "--bridge", "vision=1,1,3", f"{HOSTILE}=2,1,2"),
    "long": ("simulate", "--vtp-size-list", ",".join(["1"] * 16), "--vtp-force", "--num-microbatches", "64"),
    # The most stages that 64 ranks can have.
    "longest": ("simulate", "--vtp-size-list", ",".join(["1"] * 64), "--vtp-force", "--num-microbatches", "64"),
}
"""What writes each page, without `--output`."""


def run_quietly(*words: str) -> str:
    """Run a command that needs neither torch nor Megatron; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(words)
    return printed.getvalue()


def write_page_of(name: str, folder: Path) -> Path:
    """Write a page into a folder: one of `COMMANDS`, or `trace`, whose forwards of rank 1 took longer than planned."""
    path = folder / f"{name}.html"
    if name != "trace":
        run_quietly(*COMMANDS[name], "--output", str(path))
        return path
    traced = folder / HOSTILE_FOLDER
    traced.mkdir()
    write(traced, files_of(schedule_of(U, U_COSTS), U_COSTS, slowed(U_COSTS, forward={1: 15.0})))
    run_quietly("trace", str(traced), "--output", str(path))
    return path
