"""Runs of ms-swift for tests: their words, what they log and what they export."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import ROOT

STAND_IN = ROOT / "tests" / "swift" / "stand_in"
DOOR = ROOT / "vtp_plugin" / "cli" / "door" / "vtp_swift.py"
STEPS = 5
_WORDS = {
    "template": "chatml",
    "torch_dtype": "float32",
    "fp16": "false",
    "bf16": "false",
    "tuner_type": "full",
    "micro_batch_size": "2",
    "global_batch_size": "8",
    "train_iters": str(STEPS),
    "lr": "1e-1",
    "adam_eps": "1",  # else Adam divides what rounding left of a small gradient by the size of that gradient
    "lr_decay_style": "constant",
    "max_length": "96",
    "ddp_backend": "gloo",
    "logging_steps": "1",
    "add_version": "false",
    "check_model": "false",
    "dataloader_num_workers": "0",
    "dataset_num_proc": "1",
    "load_from_cache_file": "false",
    "split_dataset_ratio": "0",
    "masked_softmax_fusion": "false",
    "bias_activation_fusion": "false",
    "gradient_accumulation_fusion": "false",
    "cross_entropy_loss_fusion": "false",
    "attention_backend": "local",
    "no_save_optim": "true",
    "no_save_rng": "true",
    "save_safetensors": "false",
    "save_steps": "100",
}


def environment(folder: Path, sizes: Sequence[int] = ()) -> dict[str, str]:
    """Return what the processes of a run need: no network, one thread, the stand-in for Transformer Engine."""
    flags = f"--vtp-size-list {','.join(map(str, sizes))} --vtp-device cpu" if sizes else ""
    return {
        "PYTHONPATH": f"{ROOT}:{STAND_IN}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "MODELSCOPE_CACHE": str(folder / "hub"),
        "VTP_FLAGS": flags,
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `sft` or `pt`.

    Attributes:
        name: name of its folder.
        sizes: tensor-parallel size of every stage.
        model: kind of the model, as of `tests.swift.small_model`.
        dp: number of replicas.
        command: ``sft`` or ``pt``.
        words: flags besides, or other values, without hyphens; None leaves a flag out.
        vtp: flags of the plugin besides.
        script: the program of a rank, where it is not ms-swift's.
        before, behind: its words before and behind the others.
        without: what the plugin does not do, as of `tests/swift/without.py`.
    """

    name: str
    sizes: tuple[int, ...]
    model: str = "qwen2"
    dp: int = 1
    command: str = "sft"
    words: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    vtp: str = ""
    script: str = ""
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    without: str = ""

    def argv(self, models: Path, folder: Path) -> list[str]:
        """Return the words behind the script."""
        given = {
            "model": str(models / self.model),
            "model_type": self.model.partition("-")[0],
            "dataset": str(models / "data.jsonl"),
            "external_plugins": str(ROOT / "tests" / "swift" / "without.py" if self.without else DOOR),
            "output_dir": str(folder / self.name),
            **_WORDS,
            **self.words,
        }
        words = [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name}", *([value] if value else []))
        ]
        return [*self.before, *words, *self.behind]


@dataclass(frozen=True)
class Done:
    """What came of a run: the exit codes of its ranks, its folder."""

    codes: list[int]
    folder: Path

    def logged(self, name: str = "loss") -> list[float]:
        """Return a number of every step that was logged."""
        lines = (self.folder / "logging.jsonl").read_text(encoding="utf-8").splitlines()
        return [row[name] for row in map(json.loads, lines) if name in row]

    def log(self, rank: int = 0) -> str:
        """Return what a rank wrote."""
        return (self.folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")

    def weights(self, step: int = STEPS, suffix: str = "") -> dict[str, Any]:
        """Return the tensors of what a step has exported, by name."""
        from safetensors.torch import load_file

        files = sorted((self.folder / f"checkpoint-{step}{suffix}").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def assert_alike(done: Done, like: Done, *, first: int = 0) -> None:
    """Compare the losses and gradient norms of a run with those of another one, from its step `first` on."""
    assert set(done.codes) == {0}, "\n".join(done.log(rank)[-3000:] for rank in range(len(done.codes)))
    for name in ("loss", "grad_norm"):
        expected = like.logged(name)[first:]
        assert len(expected) == STEPS - first
        assert done.logged(name) == pytest.approx(expected, rel=1e-5), name


def assert_same_export(done: Done, like: Done, model: Path | None, suffix: str = "") -> None:
    """Compare exported tensors: they differ by at most 1e-5 of what training moved.

    Args:
        done: the run.
        like: another one.
        model: folder of the weights with which both began; None for adapters, whose second factors began with zeros.
        suffix: end of the name of what was exported.
    """
    from safetensors.torch import load_file

    found, expected = done.weights(suffix=suffix), like.weights(suffix=suffix)
    assert found.keys() == expected.keys() and len(found) > 20
    begun = {} if model is None else load_file(model / "model.safetensors")
    moved = max(
        (tensor - begun[name]).abs().max().item() if begun else tensor.abs().max().item()
        for name, tensor in expected.items()
        if begun or "lora_B" in name
    )
    differ = max((found[name] - expected[name]).abs().max().item() for name in found)
    assert moved > 1e-3 and differ <= 1e-5 * moved, (differ, moved)


def _environment(run: Run, folder: Path) -> dict[str, str]:
    own = environment(folder, run.sizes)
    return own | {"VTP_FLAGS": f"{own['VTP_FLAGS']} {run.vtp}", "WITHOUT": run.without}


def run_all(runs: Sequence[Run], models: Path, folder: Path) -> dict[str, Done]:
    """Run some runs, one after another, and give what came of them by name."""
    import importlib.util

    package = importlib.util.find_spec("swift")
    assert package is not None and package.origin is not None
    scripts = Path(package.origin).parent / "cli" / "_megatron"
    cases = [
        {
            "name": run.name,
            "folder": str(folder / run.name),
            "script": run.script or str(scripts / f"{run.command}.py"),
            "words": run.argv(models, folder),
            "ranks": sum(run.sizes) * run.dp,
            "environment": _environment(run, folder),
        }
        for run in runs
    ]
    file = folder / "cases.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(cases), encoding="ascii")
    done = subprocess.run(
        [sys.executable, "-m", "tests.swift.ranks", str(file)],
        env={**os.environ, **environment(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return {run.name: Done(codes[run.name], folder / run.name) for run in runs}
