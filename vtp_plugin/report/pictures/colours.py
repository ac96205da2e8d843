"""The colours of what ranks do, in pictures of simulated steps, of traces, and of layouts that a search found."""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, str] = {
    "forward": "#3f6ca8",
    "backward": "#b4540a",
    "weights": "#6b5a14",
    "loss": "#8da7d6",
    "pack": "#2f7d78",
    "post": "#5aa39e",
    "send": "#1f5753",
    "message": "#c9a227",
    "finish": "#8f7115",
    "gradients": "#9a3f73",
    "optimizer": "#6b4a9b",
    "log": "#5d6570",
    "plan": "#8a5a44",
    "save": "#3d8b3d",
    "evaluate": "#6f8f3d",
    "trace": "#c0392b",
}
"""Colour of what a rank does; where it waits nothing is drawn."""

LATER_CHUNKS: Mapping[str, str] = {"forward": "#2f7d78", "backward": "#9a3f73", "weights": "#5f4b8b"}
"""Colour of what a rank computes for its second chunk and those behind it, where a picture tells them apart."""
