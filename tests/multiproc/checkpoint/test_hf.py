"""Published models in runs: unequal stages compute what transformers does, and what they have trained goes back."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiproc.cases.hf_cases import GRADIENT, LAYOUTS, LOGITS, LOSS, TRAINING, Layout, noted, words_of
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, losses
from tests.support.hf_models import (
    KINDS,
    LLAMA3,
    Kind,
    config_of,
    export,
    imported,
    load,
    logits_of,
    loss_of,
    make,
    tensors_of,
    torch,
    variants,
    wrong_logits,
)
from tests.support.pool import start_python

pytestmark = [pytest.mark.needs("scripts_here")]
DEFAULTS = {("llama-3", "1,2"), ("qwen-3-moe", "1,2 U")}
CASES = [
    pytest.param(kind, layout, id=f"{kind}-{layout}", marks=[] if (kind, layout) in DEFAULTS else [pytest.mark.full])
    for kind in KINDS
    for layout in LAYOUTS
]


def start(scripts: Scripts, kind: Kind, layout: Layout, flags: Sequence[str], folder: Path) -> list[ScriptRun]:
    """Train an import for five steps, of which the first two change nothing; see the hook."""
    return scripts.train(layout.sizes, words_of(kind, layout, flags, folder), hooks=["note_logits", "store_gradients"])


# NVIDIA's own scripts, which older hosts run, do not hand on the factor of this model.
@pytest.mark.needs("our_example", cases=("llama-3-tied-",))
@pytest.mark.needs("experts", cases=("qwen-3-moe-", "mixtral-"))
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_run_computes_what_transformers_computes(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, place: str
) -> None:
    kind, layout = KINDS[name], LAYOUTS[place]
    model = make(kind, tmp_path / "published")
    flags = imported(tmp_path / "published", tmp_path / "start", capsys)
    runs = start(scripts, kind, layout, flags, tmp_path)
    tokens, labels, logits = (noted(runs, part) for part in ("tokens", "labels", "logits"))
    # Logits and loss, of both microbatches of the first step.
    for at in (0, 1):
        wanted = logits_of(model, tokens[at])
        assert wanted.std() >= 1 and wanted.shape[1] >= 64
        np.testing.assert_allclose(logits[at], wanted, rtol=0, atol=LOGITS)
    # What is wrong is seen.
    if place == "1,2":
        for variant, change in variants(kind).items():
            wrong = wrong_logits(tmp_path / "published", tmp_path / variant.replace(" ", "_"), change, tokens[0])
            assert np.abs(logits[0] - wrong).max() >= 100 * LOGITS, variant
    loss = [loss_of(model, tokens[at], labels[at]) for at in range(4)]
    assert abs(losses(runs)[0] - (loss[0] + loss[1]).item() / 2) <= LOSS
    # The gradients of the second step, which the checkpoint after it holds in the place of weights.
    ((loss[2] + loss[3]) / 2).backward()
    export(tmp_path / "saved" / "iter_0000002", tmp_path / "gradients", tmp_path / "published")
    found = tensors_of(tmp_path / "gradients")
    wanted_gradients = {  # none of an expert without a token
        key: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for key, weight in model.named_parameters()
    }
    check_gradients(found, gradients_as_published(model, wanted_gradients, tmp_path / "as_published"))
    # Two steps later transformers computes what the run computes.
    export(tmp_path / "saved" / "iter_0000004", tmp_path / "trained", None)
    trained = load(tmp_path / "trained")
    for at in (8, 9):
        np.testing.assert_allclose(logits[at], logits_of(trained, tokens[at]), rtol=0, atol=LOGITS)
    assert np.abs(logits[8] - logits_of(model, tokens[8])).max() > 100 * LOGITS


def gradients_as_published(model: Any, gradients: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let transformers write gradients as it publishes weights: newer versions keep experts together in memory."""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.grad = None
            weight.data, gradients[key] = gradients[key], weight.data
    model.save_pretrained(folder)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.data = gradients[key]
    return tensors_of(folder)


def check_gradients(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare gradients tensor by tensor, by the largest value of each."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        scale = value.abs().max()
        # A prompt may leave out an expert.
        assert scale > 0 or ".experts." in key, key
        assert (found[key] - value).abs().max() <= GRADIENT * scale, key


@pytest.mark.full
def test_positions_of_llama_3_beyond_their_original_number(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """9,216 tokens with one head and one layer; without the scaling, or with another factor, it is seen."""
    kind = KINDS["llama-3"]
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "head_dim": 64,
    }
    model = make(kind, tmp_path / "published", **sizes)
    flags = imported(tmp_path / "published", tmp_path / "start", capsys)
    words = [*flags, *TRAINING, "--seq-length", "9216", "--train-iters", "1", "--global-batch-size", "1"]
    runs = scripts.train("1", [*words, "--load", str(tmp_path / "start")], hooks=["note_logits"])
    tokens, logits = runs[0].facts["tokens"][0], runs[0].facts["logits"][0]
    assert tokens.shape == (1, 9216)
    np.testing.assert_allclose(logits, logits_of(model, tokens), rtol=0, atol=LOGITS)
    for factor in (1.0, 32.0):
        wrong = wrong_logits(tmp_path / "published", tmp_path / f"factor_{factor:g}", partial(_scale, factor), tokens)
        assert np.abs(logits - wrong).max() >= 100 * LOGITS, factor


def _scale(factor: float, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    (config.get("rope_scaling") or config["rope_parameters"])["factor"] = factor


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(scripts: Scripts, factor: float, head_dim: int) -> None:
    """To the last bit."""
    kind = replace(KINDS["llama-3"], scaling={**LLAMA3, "factor": factor})
    config = config_of(kind, head_dim=head_dim)
    wanted = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config).inv_freq
    (found,) = scripts.run(1, "tests.multiproc.hooks.hf_hooks:frequencies", {"size": head_dim, "factor": factor})
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.full
@pytest.mark.needs("engine_of_0_19")
def test_layers_of_transformer_engine_load_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By all names under which Megatron looks for them; what computes them here stands for the engine."""
    wanted = {}
    for name, kind in KINDS.items():
        model = make(kind, tmp_path / name / "published")
        imported(tmp_path / name / "published", tmp_path / name / "start", capsys)
        tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, (2, 64))
        np.save(tmp_path / name / "tokens.npy", tokens)
        wanted[name] = logits_of(model, tokens)
    printed = start_python("-m", "tests.multiproc.jobs.engine_job", *(str(tmp_path / name) for name in KINDS))
    asked = {name: keys.split() for name, _, keys in (line.partition(" ") for line in printed.splitlines())}
    for name, logits in wanted.items():
        assert [key for key in asked[name] if "linear_fc1._extra_state" in key]
        np.testing.assert_allclose(np.load(tmp_path / name / "logits.npy"), logits, rtol=0, atol=LOGITS)


@pytest.mark.full
@pytest.mark.needs("our_example")
@pytest.mark.parametrize("words", [(), ("--adapter",)], ids=["weights", "adapter"])
def test_the_example_goes_there_and_back(tmp_path: Path, words: Sequence[str]) -> None:
    """Import, ten steps in 1,2 or over an edge and a cloud, export, and tokens that transformers or PEFT generates."""
    if words:
        pytest.importorskip("peft", reason="it loads the adapter: vtp-plugin[lora]")
    printed = start_python("examples/hugging_face.py", "--out", str(tmp_path / "out"), *words)
    assert len(re.findall(r"iteration +\d+/ +10 .* lm loss: ", printed)) == 10
    assert re.search(r"^tokens: 1 2 3 4( \d+){1,8}$", printed, re.MULTILINE)
