"""Adapters beside PEFT on the published model in one process: what runs compute, and what goes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiproc.cases.hf_cases import LAYOUTS, LOGITS, LOSS, TRAINING, noted
from tests.multiproc.cases.script_cases import Scripts, losses
from tests.support.hf_models import KINDS, imported, load, logits_of, loss_of, make, run_json, tensors_of, torch
from vtp_plugin.cli import main

peft = pytest.importorskip("peft", "0.19", reason="the adapters are compared with PEFT's: vtp-plugin[lora]")
pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.filterwarnings("ignore::FutureWarning")]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SGD = ["--optimizer", "sgd", "--lr", "3e-3", "--min-lr", "3e-3", "--weight-decay", "0", "--sgd-momentum", "0.9"]
FIRST, LAST = 3, 7
"""The first two steps change nothing, the second one stores gradients; five steps of SGD follow."""


def make_adapters(model: Any, folder: Path, targets: Sequence[str], layers: Sequence[int] | None = None) -> Any:
    """Give a model adapters of PEFT's whose factors are both random, and save them."""
    config = peft.LoraConfig(
        r=5,
        lora_alpha=15,
        target_modules=[name for name in targets if name not in OF_EXPERTS],
        target_parameters=[f"mlp.{name}" for name in targets if name in OF_EXPERTS] or None,
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape) / 16
    adapted.save_pretrained(folder)
    return adapted


def export_peft(source: Path, target: Path, like: Path) -> dict[str, Any]:
    """Export the adapters of a checkpoint, and read them."""
    main(["checkpoint", "export", "--from", str(source), "--peft", str(target), "--like", str(like)])
    return tensors_of(target)


def factors_of(adapted: Any, *, are_gradients: bool = False) -> dict[str, Any]:
    """Give the factors of a model of PEFT's, or their gradients, under their names in its file."""
    return {
        name.replace(".default.", "."): (weight.grad if are_gradients else weight.data).clone()
        for name, weight in adapted.named_parameters()
        if "lora_" in name
    }


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare tensor by tensor, by the norm of each: how far the worst element is off depends on the processor."""
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert value.abs().max() > 0, name
        off = ((found[name] - value).norm() / value.norm()).item()
        assert off <= tolerance, f"{name} is off by {off:.1e}"


@pytest.mark.parametrize(
    ("name", "place", "targets", "layers", "extra"),
    [
        ("llama-3", "1,2", ALL, None, []),
        pytest.param("qwen-3", "2,1,3", ALL, None, ["--sequence-parallel"], marks=pytest.mark.full),
        pytest.param("qwen-2", "1,2 U", ALL, None, ["--sequence-parallel"], marks=pytest.mark.full),
        pytest.param("llama-3-tied", "1,2", ("q_proj", "v_proj"), [1, 2, 4], [], marks=pytest.mark.full),
        pytest.param("mistral", "1,2 U", ("v_proj", "up_proj"), None, [], marks=pytest.mark.full),
        pytest.param("qwen-3-moe", "2,1,3", ALL[:4], None, [], marks=pytest.mark.full),
        pytest.param("mixtral", "1,2 U", ("q_proj", "o_proj"), None, [], marks=pytest.mark.full),
        pytest.param("mixtral", "1,2", (*ALL[:4], *OF_EXPERTS), None, [], marks=pytest.mark.full),
        pytest.param("qwen-3-moe", "2,1,3", ("v_proj", OF_EXPERTS[1]), None, [], marks=pytest.mark.full),
    ],
)
def test_a_run_computes_what_peft_computes(
    scripts: Scripts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    place: str,
    targets: Sequence[str],
    layers: list[int] | None,
    extra: list[str],
) -> None:
    published, kind = tmp_path / "published", KINDS[name]
    base = make(kind, published)
    flags = imported(published, tmp_path / "start", capsys)
    plain = load(published)
    adapted = make_adapters(base, tmp_path / "peft", targets, layers)
    like = ("--like", published)
    told = run_json(capsys, "import", "--peft", tmp_path / "peft", *like, "--to", tmp_path / "adapters")
    words = [*flags, *TRAINING, *LAYOUTS[place].flags, *extra, *SGD, "--train-iters", str(LAST)]
    words += [*LAYOUTS[place].expert_flags, "--sequence-parallel"] if kind.has_experts else []
    words += [word for flag in told["flags"] for word in flag.split()]
    folders = ["--pretrained-checkpoint", str(tmp_path / "start"), "--load", str(tmp_path / "adapters")]
    words += [*folders, "--save", str(tmp_path / "saved")]
    runs = scripts.train(LAYOUTS[place].sizes, words, hooks=["note_logits", "store_gradients", "note_lora"])
    assert all(run.facts["base is as it was"] for run in runs)
    tokens, labels, logits = (noted(runs, part) for part in ("tokens", "labels", "logits"))
    np.testing.assert_allclose(logits[0], logits_of(adapted, tokens[0]), rtol=0, atol=LOGITS)
    assert np.abs(logits[0] - logits_of(plain, tokens[0])).max() > 100 * LOGITS, "the adapters change nothing"
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], 3e-3, momentum=0.9)
    for step in range(2, LAST + 1):  # by Megatron's numbers, two microbatches each
        optimizer.zero_grad()
        loss: Any = sum(loss_of(adapted, tokens[at], labels[at]) / 2 for at in (2 * step - 2, 2 * step - 1))
        assert abs(losses(runs)[step - 1] - loss.item()) <= LOSS * max(1.0, loss.item())
        loss.backward()
        if step == FIRST - 1:
            gradients = export_peft(tmp_path / "saved" / "iter_0000002", tmp_path / "gradients", published)
            assert_close(gradients, factors_of(adapted, are_gradients=True))
        else:
            optimizer.step()
    start = tensors_of(tmp_path / "peft")
    assert all(
        (value - start[key]).abs().max() > 1e-4 * value.abs().max() for key, value in factors_of(adapted).items()
    )
    trained = tmp_path / "saved" / f"iter_{LAST:07}"
    assert_close(export_peft(trained, tmp_path / "trained", published), factors_of(adapted))

    # PEFT loads what was trained; merged, it is the same to rounding; imported again, the same tensors.
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "trained").eval()
    wanted = logits_of(loaded, tokens[0])
    np.testing.assert_allclose(wanted, logits_of(adapted, tokens[0]), rtol=0, atol=LOGITS)
    run_json(capsys, "export", "--from", tmp_path / "start", "--merge", trained, "--hf", tmp_path / "merged", *like)
    np.testing.assert_allclose(logits_of(load(tmp_path / "merged"), tokens[0]), wanted, rtol=0, atol=LOGITS)
    before, merged = tensors_of(published), tensors_of(tmp_path / "merged")
    for key, value in before.items():
        is_target = any(f".{target}." in key for target in targets) or any(
            ".experts." in key and (".w2." in key or ".down_proj." in key) == ("down" in target)
            for target in targets
            if target in OF_EXPERTS
        )
        is_layer = layers is None or any(f".layers.{layer}." in key for layer in layers)
        assert torch.equal(merged[key], value) != (is_target and is_layer and key.endswith("weight")), key
    run_json(capsys, "import", "--peft", tmp_path / "trained", *like, "--to", tmp_path / "again")
    again = export_peft(tmp_path / "again", tmp_path / "again_as_peft", published)
    for key, value in tensors_of(tmp_path / "trained").items():
        assert torch.equal(again[key], value)
