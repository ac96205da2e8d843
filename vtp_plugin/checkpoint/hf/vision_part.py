"""What the config of a model that sees pictures says of them, and the entries of MindSpeed-MM's JSON file for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vtp_plugin.plan.model.vision_tower import VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """The part of a model that sees, and what else its pictures need.

    Attributes:
        tower: sizes of the vision tower and the projector.
        sections: numbers of the channels whose positions are times, heights and widths.
        window: width in pixels of the windows that attention keeps to.
        whole_layers: numbers of the layers with attention to all of a picture.
        tokens_per_second: number of places in time that a second of a video has.
        picture_word: number of the word that stands where a picture does.
        start_word: number of the word before a picture.
    """

    tower: VisionTower
    sections: tuple[int, ...]
    window: int
    whole_layers: tuple[int, ...]
    tokens_per_second: int
    picture_word: int
    start_word: int

    def entries(self) -> Iterator[tuple[str, int | list[int]]]:
        """Yield the entries of MindSpeed-MM's JSON file that follow, by their paths in it."""
        tower = self.tower
        yield "text_decoder.mrope_section", [*self.sections]
        vision = {
            "num_layers": tower.num_layers,
            "hidden_size": tower.hidden,
            "ffn_hidden_size": tower.ffn,
            "num_attention_heads": tower.heads,
            "in_channels": tower.channels,
            "patch_size": tower.patch,
            "spatial_merge_size": tower.merge,
            "temporal_patch_size": tower.frames,
            "tokens_per_second": self.tokens_per_second,
            "window_attn_size": self.window,
            "fullatt_block_indexes": [*self.whole_layers],
        }
        projector = {"input_size": tower.hidden, "hidden_size": tower.out, "ffn_hidden_size": tower.merged}
        for part, entries in (("vision_encoder", vision), ("vision_projector", projector)):
            for name, value in entries.items():
                yield f"image_encoder.{part}.{name}", value
        yield "img_context_token_id", self.picture_word
        yield "vision_start_token_id", self.start_word
