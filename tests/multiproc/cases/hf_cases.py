"""Runs of published models, small ones that transformers makes: their flags, their layouts, and what they note."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.multiproc.cases.presets import Layout
from tests.multiproc.cases.script_cases import ScriptRun
from tests.support.hf_models import SIZES, Kind, vocab_flag

LOGITS, LOSS, GRADIENT = 1e-4, 1e-5, 1e-4
SEQ = 66
TRAINING = f"""
    {vocab_flag(SIZES["vocab_size"])} --seq-length {SEQ} --micro-batch-size 1 --global-batch-size 2 --train-iters 5
    --save-interval 2 --no-save-optim --no-save-rng --clip-grad 0 --lr 1e-3 --min-lr 1e-3
    --no-rope-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
""".split()


LAYOUTS = {
    "1,2": Layout(sizes="1,2", expert_flags=("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1")),
    "2,1,3": Layout(sizes="2,1,3", expert_flags=("--vtp-ep-list", "2,1,3", "--vtp-etp-list", "1,1,1")),
    "1,2 U": Layout(
        sizes="1,2",
        flags=("--layerwise-disaggregated-training", "--num-layer-list", "2,2,2"),
        expert_flags=("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"),
    ),
}


def words_of(kind: Kind, layout: Layout, flags: Sequence[str], folder: Path, *extra: str) -> list[str]:
    """Give the words of a run that loads the import in ``folder/start`` and saves to ``folder/saved``."""
    words = [*flags, *TRAINING, *layout.flags, "--load", str(folder / "start"), "--save", str(folder / "saved")]
    if kind.has_experts:
        words += [*layout.expert_flags, "--sequence-parallel"]
    return [*words, *extra]


def noted(runs: Sequence[ScriptRun], name: str) -> list[np.ndarray[Any, Any]]:
    """Give the notes of all microbatches; ranks that share the vocabulary have one part of the logits each."""
    of_ranks = [run.facts[name] for run in runs if run.facts[name]]
    if name != "logits":
        return of_ranks[0]
    return [np.concatenate(parts, axis=-1) for parts in zip(*of_ranks, strict=True)]
