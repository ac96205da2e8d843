"""The made samples for MindSpeed-MM hold what its tests are to show."""

from __future__ import annotations

import torch

from tests.mindspeed.mm import samples


def test_padding_is_on_either_side_and_pictures_are_unequal() -> None:
    made = samples.MadeSamples()
    first = [made[index] for index in range(20)]  # what five steps of two microbatches of two read
    sides = {(int(sample["attention_mask"][0]), int(sample["attention_mask"][-1])) for sample in first}
    assert sides == {(0, 1), (1, 0), (1, 1)}
    assert {len(sample["image_grid_thw"]) for sample in first} == {1, 2}
    assert len({tuple(grid) for sample in first for grid in sample["image_grid_thw"].tolist()}) == len(samples.GRIDS)


def test_there_is_a_token_for_every_four_patches() -> None:
    made = samples.MadeSamples()
    for sample in (made[index] for index in range(len(made))):
        tokens = int((sample["input_ids"] == samples.PICTURE).sum())
        assert tokens * samples.MERGE**2 == len(sample["pixel_values"]) == int(sample["image_grid_thw"].prod(1).sum())
        assert sample["input_ids"].shape == sample["labels"].shape == (samples.SEQUENCE,)
        assert bool((sample["labels"] >= 0).any()) and int(sample["input_ids"].max()) < samples.VOCABULARY


def test_replicas_share_a_batch() -> None:
    whole = list(samples.Loader(samples.MadeSamples(), 2, 0, 1))
    halves = [list(samples.Loader(samples.MadeSamples(), 2, replica, 2)) for replica in range(2)]
    dealt = [batch for pair in zip(*halves, strict=True) for batch in pair]
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(whole, dealt, strict=True))
