"""The closed list of what the plugin sends between stages; its channels let nothing else through."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vtp_plugin.util.text_enum import TextEnum


class MessageKind(TextEnum):
    """Kinds of messages between stages; :data:`MESSAGE_FORMS` describes each."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SHAPE_HEADER = "shape header"
    LENGTHS = "lengths"
    POSITIONS = "positions"
    BRIDGE_HEADER = "bridge header"
    TIED_EMBEDDING = "tied embedding"
    PROBE = "probe"
    WARM_UP = "warm-up"


MESSAGE_FORMS: Mapping[MessageKind, str] = MappingProxyType(
    {
        MessageKind.ACTIVATION: "output of a stage's layers: floating point, `[S, B, H]` or a slice of it",
        MessageKind.GRADIENT: "gradient of such an output: the same form",
        MessageKind.SHAPE_HEADER: (
            "four int64: S, B, H and the number of a type; only with variable sequence lengths, and a "
            "few when the links are measured"
        ),
        MessageKind.LENGTHS: (
            "int32, `[S + 1, 1, 1]`: where the samples of a packed row end, counted up from 0; only in a "
            "U-shaped pipeline with packed samples, from the edge into the cloud"
        ),
        MessageKind.POSITIONS: (
            "int32, `[S, B, 4]`: of every token its place in time, height and width, and whether it is "
            "padding; only in a U-shaped pipeline of MindSpeed-MM, from the edge into the cloud"
        ),
        MessageKind.BRIDGE_HEADER: (
            "a row of int64 between two modules: length of the sequence (or of the hidden dimension), "
            "hidden size, the number of samples or tokens of each unit of the batch, and the number of a type"
        ),
        MessageKind.TIED_EMBEDDING: (
            "word embedding or its gradient, floating point, `[V, H]`, between the stages of a model "
            "that share it, its ends and the stage of multi-token prediction; never in a U-shaped pipeline, "
            "which has them all on the edge"
        ),
        MessageKind.PROBE: (
            "zeros, floating point, `[S, B, H]` or a slice of it, at start-up: they time the ways in which a "
            "boundary inside a site can be crossed"
        ),
        MessageKind.WARM_UP: "a single zero for every link, at start-up",
    }
)
"""What each kind of message looks like, for people; `scripts/make_docs.py` puts it into the documents."""
