"""The vision tower of a model that sees pictures: its sizes, and its parameters besides those of its layers.

Its layers are those of a GPT whose linear layers all have biases. In front of them squares of pixels become vectors,
behind them a projector makes a token of the language model of each square of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.gpt_parameters import ParameterRow, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower(GPTModel):
    """Sizes of a vision tower, with its projector.

    Attributes:
        channels: number of colours of a pixel.
        frames: number of pictures of a video that become one vector.
        patch: width of the squares of pixels that become one vector.
        merge: width of the squares of vectors that become one token.
        out: width of a token.
        num_predicting: none has multi-token prediction.
        vocab: it knows no words.
        num_positions: positions are rotations.
        is_gated: all are.
        has_bias: all linear layers have one.
        has_qkv_bias: see the base.
        has_norm_bias: all have RMSNorm.
        has_query_norm: see the base.
        is_tied: see the base.
    """

    channels: int
    frames: int
    patch: int
    merge: int
    out: int
    num_predicting: int = 0
    vocab: int = 0
    num_positions: int = 0
    is_gated: bool = True
    has_bias: bool = True
    has_qkv_bias: bool = True
    has_norm_bias: bool = False
    has_query_norm: bool = False
    is_tied: bool = False

    @property
    def merged(self) -> int:
        """Width of a square of vectors."""
        return self.hidden * self.merge * self.merge


PATCHES: Final = ParameterRow(
    name="patch_embed.proj.weight", parts=("hidden",), width=("channels", "frames", "patch", "patch")
)
"""What makes vectors of squares of pixels."""
PROJECTOR_NORM: Final = ParameterRow(name="layernorm.weight", parts=("hidden",))
"""The norm before the projector."""
_FIRST: Final = ParameterRow(name="encoder.linear_fc1.weight", parts=("merged",), width="merged", cut="rows")
_SECOND: Final = ParameterRow(name="encoder.linear_fc2.weight", parts=("out",), width="merged", cut="columns")
PROJECTOR: Final = (
    (_FIRST, replace(_FIRST, name="encoder.linear_fc1.bias", width="")),
    (_SECOND, replace(_SECOND, name="encoder.linear_fc2.bias", width="", cut=None)),
)
"""The two linear layers of the projector, each with its weight and its bias."""


def tower_parameter(name: str) -> ParameterRow:
    """Return the row of a parameter of a layer, which a tower stores under the name that it has in the model.

    >>> tower_parameter("input_layernorm.weight").key
    'input_layernorm.weight'
    """
    return replace(parameter(name), stored_as="")
