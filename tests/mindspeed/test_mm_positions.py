"""What of a microbatch crosses into the cloud of MindSpeed-MM's model, and what it makes of it; without its tree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.comm.audit import require_allowed

pytest.importorskip("megatron.core")
from vtp_plugin.patches.mindspeed import multimodal

ARGS = SimpleNamespace(seq_length=5, micro_batch_size=2)
SECRET = 417
BATCH = {
    "input_ids": torch.full((2, 5), SECRET),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    "labels": torch.full((2, 5), SECRET),
    "pixel_values": torch.full((8, 24), float(SECRET)),
    "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for MindSpeed-MM's function, and what it was called with."""
    found: dict[str, Any] = {}

    def prepare(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found.update(given)
        return torch.zeros(1), torch.arange(30).view(3, 2, 5)

    module: Any = ModuleType(multimodal._POSITIONS)
    module.prepare_positionsids_mask_for_llm = prepare
    monkeypatch.setitem(sys.modules, multimodal._POSITIONS, module)
    for parent in ("mindspeed_mm", "mindspeed_mm.models", "mindspeed_mm.models.vision"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    return found


def test_positions_and_mask_arrive_and_nothing_else(seen: dict[str, Any]) -> None:
    companion = multimodal.positions(ARGS)  # pyright: ignore[reportArgumentType]
    sent = companion.read(BATCH)
    require_allowed(MessageKind.POSITIONS, sent)
    assert tuple(sent.shape) == companion.shape and not bool((sent == SECRET).any())
    given = companion.give(sent)
    assert torch.equal(given["position_ids"], torch.arange(30).view(3, 2, 5))
    assert torch.equal(given["attention_mask"], BATCH["attention_mask"])
    assert given["input_ids"].shape == (2, 5) and not given["input_ids"].any()
    assert given.keys() == {"input_ids", "attention_mask", "position_ids"}
    assert torch.equal(seen["image_grid_thw"], BATCH["image_grid_thw"])


def test_pictures_and_videos_in_one_batch_are_refused(seen: dict[str, Any]) -> None:
    companion = multimodal.positions(ARGS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="pictures and videos"):
        companion.read({**BATCH, "video_grid_thw": torch.tensor([[2, 2, 2]])})


def test_a_batch_of_another_form_is_refused(seen: dict[str, Any]) -> None:
    companion = multimodal.positions(ARGS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LayoutError, match=r"a batch of \(1, 5\) tokens"):
        companion.read({name: values[:1] for name, values in BATCH.items()})


@pytest.mark.parametrize("tensor", [torch.zeros(5, 2, 4), torch.zeros(5, 2, 3, dtype=torch.int32)])
def test_other_forms_do_not_leave_as_positions(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="is no positions"):
        require_allowed(MessageKind.POSITIONS, tensor)


def plain(text: Sequence[int]) -> list[str]:
    """Say what of a plain pipeline of two stages does not fit."""
    decoder = SimpleNamespace(pipeline_num_layers=text)
    tower = SimpleNamespace(pipeline_num_layers=[2, 0], num_attention_heads=4)
    model = SimpleNamespace(text_decoder=decoder, image_encoder=SimpleNamespace(vision_encoder=tower))
    args: Any = SimpleNamespace(mm=SimpleNamespace(model=model), virtual_pipeline_model_parallel_size=None)
    layout: Any = SimpleNamespace(num_stages=2, tp_sizes=(1, 2), dp_sizes=(1, 1))
    return list(multimodal.problems(args, layout, is_u_shaped=False))


def test_a_text_decoder_that_begins_behind_stage_0_is_refused() -> None:
    assert not plain([1, 3])
    (line,) = plain([0, 4])
    assert "begins behind stage 0" in line and "give stage 0 all of the vision encoder" in line


@pytest.mark.parametrize("is_packed", [True, False])
def test_packed_samples_in_a_u_are_refused(is_packed: bool) -> None:
    decoder = SimpleNamespace(pipeline_num_layers=[[1, 2], [1, 0]], model_id="qwen2_5_lm")
    args: Any = SimpleNamespace(
        mm=SimpleNamespace(model=SimpleNamespace(text_decoder=decoder)),
        virtual_pipeline_model_parallel_size=None,
        variable_seq_lengths=False,
        sft=is_packed,
    )
    layout: Any = SimpleNamespace(num_stages=2, tp_sizes=(1, 2), dp_sizes=(1, 1))
    found = list(multimodal.problems(args, layout, is_u_shaped=True))
    assert len(found) == is_packed and all(line.startswith("--sft in a U-shape with MindSpeed-MM; ") for line in found)
