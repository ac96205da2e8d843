"""The closed list of what the plugin ships between stages; nothing else has a way through its channels."""

from __future__ import annotations

from enum import StrEnum


class Cargo(StrEnum):
    """What a message between stages is.

    Attributes:
        ACTIVATION: Output of a stage's layers `[S, B, H]`, a floating-point tensor, whole or a slice of it.
        GRADIENT: Gradient of such an output, of the same shape.
        SHAPE_HEADER: `S`, `B`, `H` and the number of a type, four int64; only with variable sequence lengths.
        TIED_EMBEDDING: Word embedding `[V, H]` or its gradient, between the two ends of a model that share it. A
            U-shaped pipeline has both ends on one stage and never ships it.
        WARM_UP: A single zero for every link, at start-up.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SHAPE_HEADER = "shape header"
    TIED_EMBEDDING = "tied embedding"
    WARM_UP = "warm-up"
