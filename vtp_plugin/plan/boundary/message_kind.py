"""The closed list of what the plugin sends between stages; its channels let nothing else through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from vtp_plugin.util.text_enum import TextEnum


class MessageKind(TextEnum):
    """Kinds of messages between stages; :data:`MESSAGE_FORMS` describes each."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    GRIDS = "grids"
    SHAPE_HEADER = "shape header"
    LENGTHS = "lengths"
    POSITIONS = "positions"
    BRIDGE_HEADER = "bridge header"
    TIED_EMBEDDING = "tied embedding"
    PROBE = "probe"
    WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """Form of the tensors of one kind of message.

    Attributes:
        says: what the tensor holds, and when it crosses, for people.
        dtype: type of the elements; a floating type may be any.
        shape: length of every dimension, None where it may be any; None for any number of dimensions.
        num_elements: number of elements; None for any.
    """

    says: str
    dtype: Literal["floating point", "int32", "int64"] = "floating point"
    shape: tuple[int | None, ...] | None = None
    num_elements: int | None = None

    def fits(self, dtype: str, shape: Sequence[int], num_elements: int) -> bool:
        """Whether a tensor has this form.

        Args:
            dtype: ``"floating point"`` for every floating type, otherwise torch's name of the type.
            shape: shape of the tensor.
            num_elements: number of its elements.

        >>> form = MessageForm(says="of every token four numbers", dtype="int32", shape=(None, None, 4))
        >>> form.fits("int32", (9, 2, 4), 72), form.fits("int32", (9, 2, 1), 18), form.fits("int64", (9, 2, 4), 72)
        (True, False, False)
        """
        has_shape = self.shape is None or (
            len(shape) == len(self.shape)
            and all(wanted in (None, length) for wanted, length in zip(self.shape, shape, strict=True))
        )
        return dtype == self.dtype and has_shape and self.num_elements in (None, num_elements)


_ROW_BY_ROW = (None, None, None)
MESSAGE_FORMS: Mapping[MessageKind, MessageForm] = MappingProxyType(
    {
        MessageKind.ACTIVATION: MessageForm(
            shape=_ROW_BY_ROW, says="output of a stage's layers: floating point, `[S, B, H]` or a slice of it"
        ),
        MessageKind.GRADIENT: MessageForm(shape=_ROW_BY_ROW, says="gradient of such an output: the same form"),
        MessageKind.GRIDS: MessageForm(
            dtype="int32",
            shape=(None, 1, 3),
            says="int32, `[S B, 1, 3]`: of every picture or video its frames, and the rows and columns of its patches, "
            "then zeros; only in a U-shaped pipeline of MindSpeed-MM with two rings, in the first of them, from the "
            "edge into the cloud",
        ),
        MessageKind.SHAPE_HEADER: MessageForm(
            dtype="int64",
            num_elements=4,
            says="four int64: S, B, H and the number of a type; only with variable sequence lengths",
        ),
        MessageKind.LENGTHS: MessageForm(
            dtype="int32",
            shape=(None, 1, 1),
            says="int32, `[S + 1, 1, 1]`: where the samples of a packed row end, counted up from 0; only in a "
            "U-shaped pipeline with packed samples, from the edge into the cloud",
        ),
        MessageKind.POSITIONS: MessageForm(
            dtype="int32",
            shape=(None, None, 4),
            says="int32, `[S, B, 4]`: of every token its place in time, height and width, and whether it is "
            "padding; only in a U-shaped pipeline of MindSpeed-MM, from the edge into the cloud",
        ),
        MessageKind.BRIDGE_HEADER: MessageForm(
            dtype="int64",
            shape=(1, None),
            says="a row of int64 between two modules: length of the sequence (or of the hidden dimension), "
            "hidden size, the number of samples or tokens of each unit of the batch, and the number of a type",
        ),
        MessageKind.TIED_EMBEDDING: MessageForm(
            shape=(None, None),
            says="word embedding or its gradient, floating point, `[V, H]`, between the stages of a model "
            "that share it, its ends and the stage of multi-token prediction; never in a U-shaped pipeline, "
            "which has them all on the edge",
        ),
        MessageKind.PROBE: MessageForm(
            shape=_ROW_BY_ROW,
            says="zeros, floating point, `[S, B, H]` or a slice of it, at start-up: they time the ways in which a "
            "boundary inside a site can be crossed",
        ),
        MessageKind.WARM_UP: MessageForm(num_elements=1, says="a single zero for every link, at start-up"),
    }
)
"""What each kind of message looks like; `scripts/make_docs.py` puts what it says into the documents."""
