"""PEFT's directory as it is read: what is no adapter of the plugin's is one line, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import KINDS, SMALL, make, torch
from vtp_plugin.checkpoint.tools.peft import PEFT_CONFIG, PEFT_WEIGHTS, plan_import_peft
from vtp_plugin.errors import ConfigError

safetensors = pytest.importorskip("safetensors.torch")
HIDDEN, NUM_LAYERS, RANK = 48, 2, 3
_PREFIX = "base_model.model.model.layers.{layer}."


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama-3", "mixtral")}
    for name, folder in folders.items():
        make(KINDS[name], folder, **SMALL)
    return folders


def write(folder: Path, tensors: dict[str, Any], **changed: Any) -> Path:
    """Write a directory as PEFT 0.21 does, with tensors of every layer under names with ``{layer}``."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["o_proj"], **changed}
    (folder / PEFT_CONFIG).write_text(json.dumps(config))
    held = {
        (_PREFIX + name).format(layer=layer): torch.ones(shape)
        for layer in range(NUM_LAYERS)
        for name, shape in tensors.items()
    }
    safetensors.save_file(held, folder / PEFT_WEIGHTS)
    return folder


PLAIN = {"self_attn.o_proj.lora_A.weight": (RANK, 96), "self_attn.o_proj.lora_B.weight": (HIDDEN, RANK)}
OF_EXPERTS = {"mlp.experts.lora_A.weight": (6 * RANK, 96), "mlp.experts.lora_B.weight": (HIDDEN, 6 * RANK)}


def test_plain_adapters_are_read(published: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_import_peft(write(tmp_path, PLAIN), published["llama-3"], tmp_path / "to")
    assert plan.lora is not None and (plan.lora.rank, plan.lora.targets) == (RANK, ("o_proj",))


@pytest.mark.parametrize(
    ("model", "tensors", "changed", "said"),
    [
        ("llama-3", PLAIN, {"use_dora": True}, "use_dora is True; the plugin's adapters add a product alone"),
        ("llama-3", PLAIN, {"use_rslora": True}, "use_rslora is True"),
        ("llama-3", PLAIN, {"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ("llama-3", PLAIN, {"rank_pattern": {"o_proj": 8}}, "rank_pattern is {'o_proj': 8}"),
        (
            "llama-3",
            PLAIN,
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa'; some such starts change the base",
        ),
        ("llama-3", PLAIN, {"lora_dropout": 2}, "lora_dropout 2; it is a share below 1"),
        ("llama-3", PLAIN, {"r": 4}, "o_proj.lora_A.weight has the shape (3, 96), and (4, 96) is expected"),
        ("llama-3", dict([*PLAIN.items()][:1]), {}, "o_proj.lora_B.weight is missing"),
        (
            "llama-3",
            {"mlp.experts.0.up_proj.lora_A.weight": (3, 48)},
            {},
            "is beside no matrix that the plugin's adapters",
        ),
        (
            "llama-3",
            {**PLAIN, **OF_EXPERTS},
            {"target_parameters": ["mlp.experts.down_proj"]},
            "target_parameters has 'mlp.experts.down_proj'; the plugin's adapters are for",
        ),
        (
            "mixtral",
            OF_EXPERTS,
            {"target_parameters": ["mlp.router.weight"]},
            "target_parameters has 'mlp.router.weight'",
        ),
        ("mixtral", OF_EXPERTS, {}, "experts.lora_A.weight is beside no matrix"),
        (
            "mixtral",
            {**OF_EXPERTS, "mlp.experts.lora_B.weight": (HIDDEN, 7)},
            {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []},
            "experts.lora_B.weight has the shape (48, 7), and (48, ",
        ),
        (
            "mixtral",
            OF_EXPERTS,
            {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"], "target_modules": []},
            "experts.base_layer.lora_A.weight is missing",
        ),
    ],
)
def test_what_is_no_adapter_of_the_plugins(
    published: dict[str, Path],
    tmp_path: Path,
    model: str,
    tensors: dict[str, Any],
    changed: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_import_peft(write(tmp_path, tensors, **changed), published[model], tmp_path / "to")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "to").exists()
