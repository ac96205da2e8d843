"""The made samples for MindSpeed-MM hold what its tests are to show."""

from __future__ import annotations

import pytest
import torch

from tests.mindspeed.mm import samples


def test_padding_is_on_either_side_and_pictures_are_unequal() -> None:
    made = samples.MadeSamples()
    first = [made[index] for index in range(20)]  # what five steps of two microbatches of two read
    sides = {(int(sample["attention_mask"][0]), int(sample["attention_mask"][-1])) for sample in first}
    assert sides == {(0, 1), (1, 0), (1, 1)}
    assert {len(sample["image_grid_thw"]) for sample in first} == {1, 2, 3}
    assert len({tuple(grid) for sample in first for grid in sample["image_grid_thw"].tolist()}) == len(samples.GRIDS)


@pytest.mark.parametrize("name", samples.KINDS)
def test_there_is_a_token_for_every_four_patches(name: str) -> None:
    kind = samples.KINDS[name]
    made = samples.MadeSamples(kind=kind)
    parts = {
        "pictures": (samples.PICTURE, "pixel_values", "image_grid_thw"),
        "videos": (samples.VIDEO, "pixel_values_videos", "video_grid_thw"),
    }
    for sample in (made[index] for index in range(len(made))):
        for seen in kind.seen:
            token, pixels, grid = parts[seen]
            tokens = int((sample["input_ids"] == token).sum())
            assert tokens * samples.MERGE**2 == len(sample[pixels]) == int(sample[grid].prod(1).sum())
        assert sample["input_ids"].shape == sample["labels"].shape == (samples.SEQUENCE,)
        assert bool((sample["labels"] >= 0).any()) and int(sample["input_ids"].max()) < kind.vocabulary


def test_videos_have_frames_and_rates_of_their_own() -> None:
    made = samples.MadeSamples(kind=samples.KINDS["videos"])
    first = [made[index] for index in range(20)]
    assert {len(sample["video_grid_thw"]) for sample in first} == {1, 2, 3}
    assert {int(grid[0]) for sample in first for grid in sample["video_grid_thw"]} == {2, 3, 4}
    assert all(len(sample["second_per_grid_ts"]) == len(sample["video_grid_thw"]) for sample in first)
    assert {rate for sample in first for rate in sample["second_per_grid_ts"]} == set(samples.SECONDS)
    assert not any("image_grid_thw" in sample for sample in first)


def test_planted_samples_have_values_that_nothing_else_has() -> None:
    made = samples.MadeSamples(kind=samples.KINDS["planted"])
    for sample in (made[index] for index in range(20)):
        ids = sample["labels"][sample["labels"] >= 0]
        assert int(ids.min()) >= samples.FIRST_PLANTED and float(sample["pixel_values"].min()) > 100


def test_replicas_share_a_batch() -> None:
    whole = list(samples.Loader(samples.MadeSamples(), 2, 0, 1))
    halves = [list(samples.Loader(samples.MadeSamples(), 2, replica, 2)) for replica in range(2)]
    dealt = [batch for pair in zip(*halves, strict=True) for batch in pair]
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(whole, dealt, strict=True))
