"""Made samples with pictures of unequal sizes: one or two in a sample, padding at the left or at the right.

Ids below ``FIRST_WORD`` mean something; a sample is ``[text, start, picture ..., text, ...]``. What a token is followed
by depends on it, so there is something to learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 128
PADDING, VISION_START, PICTURE, VIDEO, FIRST_WORD = 0, 1, 2, 3, 4
IGNORED = -100
PATCH_VALUES = 3 * 2 * 2 * 2  # channels x frames x height x width of one patch
MERGE = 2  # patches that become one token, per side
SEQUENCE = 24
GRIDS = ((1, 4, 4), (1, 2, 6), (1, 4, 8), (1, 6, 4), (1, 2, 2))


class MadeSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many samples as asked for, each made from its number."""

    def __init__(self, count: int = 64) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Make one sample."""
        random = torch.Generator().manual_seed(1000 + index)
        grids = [GRIDS[index % len(GRIDS)]]
        if index % 3 == 1:  # two pictures
            grids = [GRIDS[4], GRIDS[(index // 3) % 2]]
        ids = []
        for grid in grids:
            ids += [*self._words(2, random), VISION_START, *[PICTURE] * (grid[1] * grid[2] // MERGE**2)]
        # Every fifth fills the sequence, the others leave some to the padding.
        ids += self._words(SEQUENCE - len(ids) - (0 if index % 5 == 0 else 1 + index % 4), random)
        padding = [PADDING] * (SEQUENCE - len(ids))
        is_left = index % 2 == 0
        padded = torch.tensor(padding + ids if is_left else ids + padding)
        labels = torch.where(padded < FIRST_WORD, torch.tensor(IGNORED), padded)
        patches = sum(t * h * w for t, h, w in grids)
        return {
            "input_ids": padded,
            "attention_mask": torch.tensor(
                [0] * len(padding) + [1] * len(ids) if is_left else [1] * len(ids) + [0] * len(padding)
            ),
            "labels": labels,
            "pixel_values": torch.randn(patches, PATCH_VALUES, generator=random),
            "image_grid_thw": torch.tensor(grids),
        }

    @staticmethod
    def _words(count: int, random: torch.Generator) -> list[int]:
        first = int(torch.randint(VOCABULARY - FIRST_WORD, (1,), generator=random))
        return [FIRST_WORD + (first + 7 * place) % (VOCABULARY - FIRST_WORD) for place in range(count)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As the collators of MindSpeed-MM: rows of text, and all pictures one after another."""
    rows = {
        name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "attention_mask", "labels")
    }
    pictures = {name: torch.cat([sample[name] for sample in samples]) for name in ("pixel_values", "image_grid_thw")}
    return {**rows, **pictures}


class Loader:
    """Gives a replica's microbatches, as Megatron deals samples out: microbatch by microbatch, replica by replica.

    Args:
        samples: all samples.
        size: samples in a microbatch.
        replica: number of this replica.
        replicas: how many there are.
    """

    def __init__(self, samples: MadeSamples, size: int, replica: int, replicas: int) -> None:
        self._samples = samples
        self._size = size
        self._replica = replica
        self._replicas = replicas

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._samples), self._size * self._replicas):
            first = start + self._size * self._replica
            yield collate([self._samples[index] for index in range(first, first + self._size)])
