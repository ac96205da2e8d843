"""What of a microbatch crosses into the cloud of MindSpeed-MM's model, and what it makes of it; without its tree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mindspeed.test_mm_guard import NO_CHECKPOINT
from vtp_plugin.errors import ConfigError, LayoutError, PeerError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.comm.transfers import require_allowed

pytest.importorskip("megatron.core")
from vtp_plugin.patches.mindspeed import known_mm, multimodal, two_rings

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


def test_batches_of_their_own_lengths_cross_as_they_are(seen: dict[str, Any]) -> None:
    args: Any = SimpleNamespace(seq_length=64, micro_batch_size=2, variable_seq_lengths=True)
    companion = multimodal.positions(args)
    sent = companion.shaped(companion.read(BATCH))
    assert companion.shape == (None, None, 4) and tuple(sent.shape) == (5, 2, 4)
    form = companion.form(is_batched=False)
    assert form.has_variable_shapes and (form.width, form.most_tokens) == (4, 16 * 64 * 2)


def test_a_batch_beyond_the_bound_is_refused_before_positions_are_computed(seen: dict[str, Any]) -> None:
    args: Any = SimpleNamespace(seq_length=5, micro_batch_size=2, variable_seq_lengths=True)
    ids = torch.zeros(1, dtype=torch.long).expand(2, 16 * 5 + 1)
    with pytest.raises(LayoutError, match=r"a batch of \(2, 81\) tokens; 160 at most, .*; raise --seq-length"):
        multimodal.positions(args).read({"input_ids": ids})
    assert not seen


def test_other_lengths_without_the_flag_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"a batch of \(2, 7\) tokens; .* \(2, 5\), .*; add --variable-seq-lengths"):
        known_mm.require_batch(ARGS, {"input_ids": torch.zeros(2, 7)})  # pyright: ignore[reportArgumentType]


TWO_RINGS = [[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 2], [0, 0]]


def of_two_rings(vision: Any = TWO_RINGS[0], text: Any = TWO_RINGS[1]) -> Any:
    """Arguments of a U with vision layers in the cloud."""
    tower = SimpleNamespace(pipeline_num_layers=vision)
    decoder = SimpleNamespace(pipeline_num_layers=text)
    model = SimpleNamespace(text_decoder=decoder, image_encoder=SimpleNamespace(vision_encoder=tower))
    return SimpleNamespace(mm=SimpleNamespace(model=model), **vars(ARGS))


def test_in_each_of_two_rings_something_else_crosses(seen: dict[str, Any]) -> None:
    grids, positions = multimodal.companions(of_two_rings())
    assert (grids.kind, grids.chunks) == (MessageKind.GRIDS, frozenset({0}))
    assert (positions.kind, positions.chunks) == (MessageKind.POSITIONS, frozenset({1}))
    (alone,) = multimodal.companions(of_two_rings([[2, 0], [0, 0]], [[1, 1], [1, 0]]))
    assert (alone.kind, alone.chunks) == (MessageKind.POSITIONS, None)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_sizes_of_pictures_arrive_and_no_pixel(kind: str) -> None:
    companion = two_rings.grids(of_two_rings())
    sizes = torch.tensor([[1, 2, 2], [2, 2, 8]])
    sent = companion.read({**{name: BATCH[name] for name in ("input_ids", "pixel_values")}, f"{kind}_grid_thw": sizes})
    require_allowed(MessageKind.GRIDS, sent)
    assert not bool((sent == SECRET).any())
    given = companion.give(sent)
    assert torch.equal(given["image_grid_thw"], sizes)
    assert given["pixel_values"].shape == (4 + 32, 1) and not given["pixel_values"].any()
    assert given["input_ids"] is None and given.keys() == {"input_ids", "pixel_values", "image_grid_thw"}


@pytest.mark.parametrize("sizes", [None, torch.zeros(0, 3), torch.ones(11, 3)], ids=["none", "no", "more than tokens"])
def test_a_batch_without_a_picture_is_refused(sizes: Any) -> None:
    companion = two_rings.grids(of_two_rings())
    with pytest.raises(ConfigError, match="has one at least, and at most as many as tokens") as refused:
        companion.read({"input_ids": BATCH["input_ids"], "image_grid_thw": sizes})
    assert "\n" not in str(refused.value)


LARGEST = 2**31 - 1
NO_SIZES = {
    "one large picture": [[1, 30000, 30000]],
    "many large pictures": [[1, 46340, 46340]] * 10,
    "just too large": [[1, 2, 22]],
    "negative": [[1, -6, 4]],
    "twice negative": [[1, -2, -2]],
    "all negative": [[-LARGEST - 1] * 3] * 10,
    "largest": [[LARGEST] * 3],
    "an overflow to little": [[1 << 30, 1 << 30, 16]],
    "an overflow to nothing": [[1 << 22, 1 << 22, 1 << 22]],
    "no frames": [[0, 2, 2]],
    "no rows": [[1, 0, 2]],
    "no picture": [],
    "half tokens": [[1, 3, 4]],
}


@pytest.mark.parametrize("name", NO_SIZES)
def test_sizes_that_cannot_be_are_one_line(name: str) -> None:
    """Ten tokens stand for forty patches at most; who sends sizes does not choose how much memory the cloud takes."""
    companion = two_rings.grids(of_two_rings())
    rows = torch.zeros(10, 1, 3, dtype=torch.int32)
    for row, size in enumerate(NO_SIZES[name]):
        rows[row, 0] = torch.tensor(size)
    for give in (companion.give, two_rings._give):
        with pytest.raises(PeerError, match=r"^sizes of pictures that cannot be, .*; .* 40 at most, .*; ") as caught:
            give(rows)
        assert str(caught.value).isprintable() and caught.value.shared == str(caught.value)
    sizes = torch.tensor(NO_SIZES[name]).view(-1, 3)
    with pytest.raises(ConfigError, match="^a batch (of 0 pictures|whose pictures have other sizes)"):
        companion.read({"image_grid_thw": sizes})


def test_as_many_patches_as_tokens_stand_for_are_given() -> None:
    tower = SimpleNamespace(pipeline_num_layers=TWO_RINGS[0], spatial_merge_size=1)
    args = of_two_rings()
    args.mm.model.image_encoder.vision_encoder = tower
    for given, size in ((of_two_rings(), [1, 2, 20]), (args, [1, 3, 3])):
        companion = two_rings.grids(given)
        pixels = companion.give(companion.read({"image_grid_thw": torch.tensor([size])}))["pixel_values"]
        assert len(pixels) == size[1] * size[2]
    with pytest.raises(ConfigError, match="10 at most"):
        two_rings.grids(args).read({"image_grid_thw": torch.tensor([[1, 1, 11]])})
    longer: Any = SimpleNamespace(**{**vars(of_two_rings()), "variable_seq_lengths": True})
    assert len(two_rings.grids(longer).read({"image_grid_thw": torch.tensor([[1, 2, 320]])})) == 10


@pytest.mark.parametrize(("place", "value"), [(0, -1), (1, LARGEST), (2, -LARGEST - 1), (3, 2), (3, -1), (3, LARGEST)])
def test_positions_that_cannot_be_are_one_line(seen: dict[str, Any], place: int, value: int) -> None:
    companion = multimodal.positions(ARGS)  # pyright: ignore[reportArgumentType]
    sent = companion.read(BATCH)
    sent[3, 1, place] = value
    with pytest.raises(PeerError, match=r"^positions of tokens, or a mask, that cannot be, .*; .*; ") as caught:
        companion.give(sent)
    assert str(caught.value).isprintable() and caught.value.shared == str(caught.value)
    if place == 3:
        mask = BATCH["attention_mask"].clone()
        mask[1, 3] = value
        with pytest.raises(ConfigError, match="^a batch with positions or a mask of other numbers; "):
            companion.read({**BATCH, "attention_mask": mask})


@pytest.mark.parametrize("tensor", [torch.zeros(5, 2, 4), torch.zeros(5, 2, 3, dtype=torch.int32)])
def test_other_forms_do_not_leave_as_positions(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="is no positions"):
        require_allowed(MessageKind.POSITIONS, tensor)


def plain(text: Sequence[int], *, tp_sizes: tuple[int, int] = (1, 2), **options: bool) -> list[str]:
    """Say what of a plain pipeline of two stages does not fit."""
    decoder = SimpleNamespace(pipeline_num_layers=text)
    tower = SimpleNamespace(pipeline_num_layers=[2, 0], num_attention_heads=4)
    model = SimpleNamespace(text_decoder=decoder, image_encoder=SimpleNamespace(vision_encoder=tower))
    args: Any = SimpleNamespace(
        mm=SimpleNamespace(model=model), virtual_pipeline_model_parallel_size=None, **NO_CHECKPOINT, **options
    )
    layout: Any = SimpleNamespace(num_stages=2, tp_sizes=tp_sizes, dp_sizes=(1, 1))
    return list(multimodal.problems(args, layout, is_u_shaped=False))


def test_a_text_decoder_that_begins_behind_stage_0_is_refused() -> None:
    assert not plain([1, 3])
    (line,) = plain([0, 4])
    assert "begins behind stage 0" in line and "give stage 0 all of the vision encoder" in line


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 12])
def test_ranks_that_cannot_share_every_length_are_refused(size: int) -> None:
    """MindSpeed-MM pads a batch to a multiple of 8."""
    found = plain([1, 3], tp_sizes=(1, size), variable_seq_lengths=True, sequence_parallel=True)
    assert len(found) == (size in (3, 6, 12))
    assert all(f"with stage 1 of {size} ranks" in line and "leave out --sequence-parallel" in line for line in found)
    for varies, is_parallel in ((True, False), (False, True)):
        assert not plain([1, 3], tp_sizes=(1, size), variable_seq_lengths=varies, sequence_parallel=is_parallel)


def test_sequences_shared_where_pictures_enter_are_refused() -> None:
    """Seen with MindSpeed-MM alone: two ranks of one stage find norms of 10.67 where one finds 8.89."""
    (line,) = plain([1, 3], tp_sizes=(2, 1), sequence_parallel=True)
    assert line.startswith("--sequence-parallel with stage 0 of 2 ranks; ") and "give stage 0 one rank" in line


@pytest.mark.parametrize("is_packed", [True, False])
def test_packed_samples_in_a_u_are_refused(is_packed: bool) -> None:
    decoder = SimpleNamespace(pipeline_num_layers=[[1, 2], [1, 0]], model_id="qwen2_5_lm")
    args: Any = SimpleNamespace(
        mm=SimpleNamespace(model=SimpleNamespace(text_decoder=decoder)),
        virtual_pipeline_model_parallel_size=None,
        variable_seq_lengths=False,
        sft=is_packed,
        **NO_CHECKPOINT,
    )
    layout: Any = SimpleNamespace(num_stages=2, tp_sizes=(1, 2), dp_sizes=(1, 1))
    found = list(multimodal.problems(args, layout, is_u_shaped=True))
    assert len(found) == is_packed and all(line.startswith("--sft in a U-shape with MindSpeed-MM; ") for line in found)
