"""Made samples with pictures of unequal sizes: one to three in a sample, padding at the left or at the right.

Ids below ``FIRST_WORD`` mean something; a sample is ``[text, start, picture ..., text, ...]``. What a token is followed
by depends on it, so there is something to learn. Videos take the places of the pictures, or stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 128
PADDING, VISION_START, PICTURE, VIDEO, FIRST_WORD = 0, 1, 2, 3, 4
IGNORED = -100
PATCH_VALUES = 3 * 2 * 2 * 2  # channels x frames x height x width of one patch
MERGE = 2  # patches that become one token, per side
SEQUENCE = 24
GRIDS = ((1, 4, 4), (1, 2, 6), (1, 4, 8), (1, 6, 4), (1, 2, 2))
VIDEO_GRIDS = ((2, 2, 4), (3, 2, 2), (2, 4, 4), (4, 2, 2), (2, 2, 2))
SECONDS = (1.0, 0.5, 1.5)  # from one pair of a video's frames to the next
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Kind:
    """What there is in the samples.

    Attributes:
        seen: what is seen in a sample: pictures, videos, or both.
        first_word: least id of a word.
        vocabulary: number of ids.
        brightness: added to all pixels.
    """

    seen: tuple[str, ...] = ("pictures",)
    first_word: int = FIRST_WORD
    vocabulary: int = VOCABULARY
    brightness: float = 0.0


FIRST_PLANTED, NUM_PLANTED = 4000, 1000  # ids of words that nothing else in a run has for a value
KINDS = {
    "pictures": Kind(),
    "videos": Kind(seen=("videos",)),
    "mixed": Kind(seen=("pictures", "videos")),
    "planted": Kind(first_word=FIRST_PLANTED, vocabulary=FIRST_PLANTED + NUM_PLANTED, brightness=200.0),
}


class MadeSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """As many samples as asked for, each made from its number."""

    def __init__(self, count: int = 64, kind: Kind = KINDS["pictures"]) -> None:
        self._count = count
        self._kind = kind

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Make one sample."""
        random = torch.Generator().manual_seed(1000 + index)
        seen = {name: self._grids(index, name) for name in self._kind.seen}
        ids: list[int] = []
        for name, grids in seen.items():
            token = VIDEO if name == "videos" else PICTURE
            for t, h, w in grids:
                ids += [*self._words(2, random), VISION_START, *[token] * (t * h * w // MERGE**2)]
        # Every fifth fills the sequence, the others leave some to the padding.
        ids += self._words(SEQUENCE - len(ids) - (0 if index % 5 == 0 else 1 + index % 4), random)
        padding = [PADDING] * (SEQUENCE - len(ids))
        is_left = index % 2 == 0
        padded = torch.tensor(padding + ids if is_left else ids + padding)
        labels = torch.where(padded < FIRST_WORD, torch.tensor(IGNORED), padded)
        parts: dict[str, Any] = {}
        for name, grids in seen.items():
            pixels = torch.randn(sum(t * h * w for t, h, w in grids), PATCH_VALUES, generator=random)
            of_videos = name == "videos"
            parts["pixel_values_videos" if of_videos else "pixel_values"] = pixels + self._kind.brightness
            parts["video_grid_thw" if of_videos else "image_grid_thw"] = torch.tensor(grids)
            if of_videos:
                parts["second_per_grid_ts"] = [SECONDS[(index + place) % len(SECONDS)] for place in range(len(grids))]
        return {
            "input_ids": padded,
            "attention_mask": torch.tensor(
                [0] * len(padding) + [1] * len(ids) if is_left else [1] * len(ids) + [0] * len(padding)
            ),
            "labels": labels,
            **parts,
        }

    def _grids(self, index: int, name: str) -> list[Grid]:
        if len(self._kind.seen) > 1:
            return [GRIDS[4] if name == "pictures" else VIDEO_GRIDS[4]]
        grids = VIDEO_GRIDS if name == "videos" else GRIDS
        if index % 9 == 7:  # three
            return [grids[4], grids[1], grids[4]]
        return [grids[4], grids[(index // 3) % 2]] if index % 3 == 1 else [grids[index % len(grids)]]

    def _words(self, count: int, random: torch.Generator) -> list[int]:
        number = self._kind.vocabulary - self._kind.first_word
        first = int(torch.randint(number, (1,), generator=random))
        return [self._kind.first_word + (first + 7 * place) % number for place in range(count)]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """As the collators of MindSpeed-MM: rows of text, and all pictures one after another."""
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        each = [sample[name] for sample in samples]
        if isinstance(first, list):
            batch[name] = sum(each, [])
        else:
            batch[name] = torch.stack(each) if name in ("input_ids", "attention_mask", "labels") else torch.cat(each)
    return batch


class Loader:
    """Gives a replica's microbatches, as Megatron deals samples out: microbatch by microbatch, replica by replica.

    Args:
        samples: all samples.
        size: samples in a microbatch.
        replica: number of this replica.
        replicas: how many there are.
        consumed: samples that were trained before, in this order.
    """

    def __init__(self, samples: MadeSamples, size: int, replica: int, replicas: int, consumed: int = 0) -> None:
        self._samples = samples
        self._size = size
        self._replica = replica
        self._replicas = replicas
        self._consumed = consumed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(self._consumed, len(self._samples), self._size * self._replicas):
            first = start + self._size * self._replica
            yield collate([self._samples[index] for index in range(first, first + self._size)])
