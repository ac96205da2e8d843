"""What crosses a boundary, and the header in front of it.

Headers: small vectors of int64 that describe the tensor behind them. What they hold, and how they cross.

A header holds the description of the whole tensor, and then the number of its type. :class:`HeaderCodec` turns both
into integers and back, for a pipeline; :class:`BridgeHeaderCodec` does so for a bridge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.boundary_plan import NO_COLLECTIVE, BoundaryPlan, CollectiveKind, Transfer, inside
from vtp_plugin.plan.boundary.endpoint import LocalBoxes, Sharding
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.util.index_boxes import Box
from vtp_plugin.util.text import TextEnum


class MessageKind(TextEnum):
    """Kinds of messages between stages; :data:`MESSAGE_FORMS` has the form of each.

    Attributes:
        ACTIVATION: output of a stage's layers: floating point, `[S, B, H]` or a slice of it
        GRADIENT: gradient of such an output: the same form
        GRIDS: int32, `[S B, 1, 3]`: of every picture or video its frames, and the rows and columns of its patches, then
            zeros; only in a U-shaped pipeline of MindSpeed-MM with two rings, in the first of them, from the edge into
            the cloud
        SHAPE_HEADER: four int64: S, B, H and the number of a type; only with variable sequence lengths
        LENGTHS: int32, `[S + 1, 1, 1]`: where the samples of a packed row end, counted up from 0; only in a U-shaped
            pipeline with packed samples, from the edge into the cloud
        POSITIONS: int32, `[S, B, 4]`: of every token its place in time, height and width, and whether it is padding;
            only in a U-shaped pipeline of MindSpeed-MM, from the edge into the cloud
        BRIDGE_HEADER: a row of int64 between two modules: length of the sequence (or of the hidden dimension), hidden
            size, the number of samples or tokens of each unit of the batch, and the number of a type
        TIED_EMBEDDING: word embedding or its gradient, floating point, `[V, H]`, between the stages of a model that
            share it, its ends and the stage of multi-token prediction; never in a U-shaped pipeline, which has them all
            on the edge
        PROBE: zeros, floating point, `[S, B, H]` or a slice of it, at start-up: they time the ways in which a boundary
            inside a site can be crossed
        WARM_UP: a single zero for every link, at start-up
    """

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
        dtype: type of the elements by torch's name; ``"floating point"`` for any floating type.
        shape: length of every dimension, None where it may be any; None for any number of dimensions.
        num_elements: number of elements; None for any.
    """

    dtype: Literal["floating point", "int32", "int64"] = "floating point"
    shape: tuple[int | None, ...] | None = None
    num_elements: int | None = None


_ROW_BY_ROW = (None, None, None)
MESSAGE_FORMS: Mapping[MessageKind, MessageForm] = MappingProxyType(
    {
        MessageKind.ACTIVATION: MessageForm(shape=_ROW_BY_ROW),
        MessageKind.GRADIENT: MessageForm(shape=_ROW_BY_ROW),
        MessageKind.GRIDS: MessageForm(dtype="int32", shape=(None, 1, 3)),
        MessageKind.SHAPE_HEADER: MessageForm(dtype="int64", num_elements=4),
        MessageKind.LENGTHS: MessageForm(dtype="int32", shape=(None, 1, 1)),
        MessageKind.POSITIONS: MessageForm(dtype="int32", shape=(None, None, 4)),
        MessageKind.BRIDGE_HEADER: MessageForm(dtype="int64", shape=(1, None)),
        MessageKind.TIED_EMBEDDING: MessageForm(shape=(None, None)),
        MessageKind.PROBE: MessageForm(shape=_ROW_BY_ROW),
        MessageKind.WARM_UP: MessageForm(num_elements=1),
    }
)
"""What each kind of message looks like; what it is stands in the documents, too."""


Whole = tuple[int, ...]
"""What describes a whole tensor: of a pipeline its shape `[S, B, H]`; of a bridge its rows, its depth and the length of
every unit of the batch, 0 for units that neither come to this rank nor leave it."""

TYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "torch.int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The largest size that a header may announce: another rank writes it, and this rank allocates the memory.

    Attributes:
        most: Most elements of the whole tensor.
        why: What limits the size, and the way out, for error messages.
    """

    most: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a rank knows of a tensor before its header has come.

    Attributes:
        dtype: Type of the tensor, as torch prints it.
        width: Length of its last dimension; None if that is not known.
        position: Boundary, direction and number, for error messages.
        sources: The ranks that send it, for error messages.
        bounds: Limits on its size.
    """

    dtype: str
    width: int | None
    position: str
    sources: str
    bounds: tuple[Bound, ...] = ()

    def require_bounded(self, sent: object, num_elements: int) -> None:
        """Go on only with a tensor that is not too large.

        Args:
            sent: What would be sent, for the error message.
            num_elements: Number of the tensor's elements.

        Raises:
            ConfigError: The tensor is larger than a bound allows.
        """
        for bound in self.bounds:
            if num_elements > bound.most:
                raise ConfigError(
                    f"{self.position}: {self.sources} would send {sent}, {num_elements} elements; {bound.most} at "
                    f"most: {bound.why}"
                )


@dataclass(frozen=True, slots=True)
class HeaderCodec:
    """Headers of a pipeline: S, B and H of the whole tensor, and the number of its type.

    >>> codec = HeaderCodec()
    >>> codec.encode((8, 2, 4), "torch.bfloat16", "boundary 0->1, forward, microbatch 0")
    (8, 2, 4, 1)
    >>> codec.decode([(8, 2, 4, 1)], Expected(dtype="torch.bfloat16", width=4, position="", sources="rank 0"))
    (8, 2, 4)
    """

    kind: ClassVar[MessageKind] = MessageKind.SHAPE_HEADER
    NUM_DIMENSIONS: ClassVar[int] = 3

    @property
    def length(self) -> int:
        """Integers of one header."""
        return self.NUM_DIMENSIONS + 1

    def encode(self, whole: Whole, dtype: str, position: str) -> tuple[int, ...]:
        """Return the header of this rank's part of a tensor.

        Args:
            whole: Description of the whole tensor: `[S, B, H]`.
            dtype: Its type, as torch prints it; one of :data:`TYPES`.
            position: Boundary, direction and number, for error messages.

        Raises:
            ConfigError: A header cannot describe such a tensor.
        """
        return (*self._facts(whole, position), TYPES.index(dtype))

    def decode(self, lines: Sequence[Sequence[int]], expected: Expected) -> Whole:
        """Return the description of the whole tensor that the headers announce, one header from each sending replica.

        Raises:
            ConfigError: The headers announce something else than this rank expects, or differ. To receive such a tensor
                would end the process inside the backend.
        """
        (*shape, code), *others = map(list, lines)
        if any(other != [*shape, code] for other in others):
            raise ConfigError(
                f"{expected.position}: of {expected.sources} one replica would send its part of {shape}, another of "
                f"{[other[:-1] for other in others]}, but one microbatch joins their samples; give all replicas as "
                "many samples of one length"
            )
        sent, width = _type_of(code), expected.width
        if sent != expected.dtype or min(shape) < 1 or (width is not None and shape[-1] != width):
            raise ConfigError(
                f"{expected.position}: {expected.sources} would send {sent} {shape}, expected is {expected.dtype} [S, "
                f"B, {width or 'H'}]; give all stages one pipeline_dtype and hidden size"
            )
        expected.require_bounded(f"{sent} {shape}", math.prod(shape))
        return tuple(shape)

    def _facts(self, whole: Whole, position: str) -> Whole:
        if len(whole) != self.NUM_DIMENSIONS:
            raise ConfigError(
                f"{position}: the tensor to send has the shape {whole}, not [S, B, H]; return an activation of three "
                "dimensions from the stage"
            )
        return whole


class ShareHeader(NamedTuple):
    """What a header of a bridge says of one share of the batch: rows, depth, type, and the length of every unit."""

    rows: int
    depth: int
    dtype: str
    widths: tuple[int, ...]

    def __str__(self) -> str:
        """Show type, rows, columns and lengths."""
        return f"{self.dtype} {[self.rows, self.depth, *self.widths]}"


@dataclass(frozen=True, slots=True)
class BridgeHeaderCodec(HeaderCodec):
    """Headers of a bridge, one for every share of the batch: rows, depth, lengths of the share's units, type.

    Attributes:
        num_units: Number of units of the whole batch.
        units_a_share: Number of units in one share of the source, and so in one header.
        own_units: Units that this rank sends or wants.

    >>> codec = BridgeHeaderCodec(num_units=6, units_a_share=3, own_units=range(2, 4))
    >>> lines = [(8, 4, 5, 5, 5, 0), (8, 4, 7, 7, 7, 0)]
    >>> codec.decode(lines, Expected(dtype="torch.float32", width=None, position="", sources="ranks 0, 1"))
    (8, 4, 0, 0, 5, 7, 0, 0)
    """

    kind: ClassVar[MessageKind] = MessageKind.BRIDGE_HEADER
    num_units: int
    units_a_share: int
    own_units: range

    @property
    def length(self) -> int:
        """Integers of one header."""
        return 2 + self.units_a_share + 1

    def decode(self, lines: Sequence[Sequence[int]], expected: Expected) -> Whole:
        """Return the description of the whole tensor; argument and error are those of :meth:`HeaderCodec.decode`."""
        shares = [self.parse(line) for line in lines]
        known = {share[:3] for share in shares}
        rows, depth, dtype = min(known)
        if len(known) > 1 or dtype != expected.dtype or min(rows, depth) < 1:
            said = " and ".join(f"{t} of {r} rows and {d} columns" for r, d, t in sorted(known))
            raise ConfigError(
                f"{expected.position}: {expected.sources} would send {said}, expected is one shape of "
                f"{expected.dtype}; give both modules one hidden size, sequence length and type (comm_dtype)"
            )
        widths = [0] * self.num_units
        first_share = self.own_units.start // self.units_a_share
        for number, share in enumerate(shares, first_share):
            widths[number * self.units_a_share : (number + 1) * self.units_a_share] = share.widths
        # Where this rank gets a part of a share, the share's other units do not matter.
        kept = [width if unit in self.own_units else 0 for unit, width in enumerate(widths)]
        if min(kept) < 0:
            raise ConfigError(
                f"{expected.position}: {expected.sources} would send units of the lengths {kept}; none is below 0; "
                "start the ranks of both modules with one version"
            )
        expected.require_bounded(f"{dtype} {[rows, depth, *kept]}", rows * depth * sum(kept))
        return (rows, depth, *kept)

    @staticmethod
    def parse(line: Sequence[int]) -> ShareHeader:
        """Return one header with its fields named.

        >>> print(BridgeHeaderCodec.parse((8, 4, 5, 7, 0)))
        torch.float32 [8, 4, 5, 7]
        """
        rows, depth, *widths, code = line
        return ShareHeader(rows, depth, _type_of(code), tuple(widths))

    def _facts(self, whole: Whole, position: str) -> Whole:
        rows, depth, *widths = whole
        return (rows, depth, *widths[self.own_units.start : self.own_units.stop])


def _type_of(code: int) -> str:
    return TYPES[code] if 0 <= code < len(TYPES) else f"type {code}"


def plan_header(plan: BoundaryPlan, length: int, shares: Sequence[Sequence[int]] = ()) -> BoundaryPlan:
    """Plan how a small vector gets to every destination rank of `plan`, over links that `plan` uses.

    If leaders carry the plan, they broadcast the vector; otherwise every destination gets it from the first rank that
    sends it anything, so `plan` must send something to each. Where several replicas send, each has a vector of its own,
    and a destination gets those of all replicas that send it anything, to compare them.

    Args:
        plan: Plan of the tensor that follows.
        length: Number of the vector's elements.
        shares: Ranks of every sending replica; empty for a single one. With several the tensor is `[shares, length]`.

    >>> from vtp_plugin.plan.boundary.strategies.slices import plan_sliced
    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> print(plan_header(plan_sliced(replicated((6,), (0, 1)), replicated((6,), (2, 3, 4))), 3).describe())
    0 -> 2 [0:3]
    0 -> 3 [0:3]
    1 -> 4 [0:3]
    """
    shares = shares if len(shares) > 1 else (plan.src.ranks,)
    has_rows = len(shares) > 1
    shape = (len(shares), length) if has_rows else (length,)
    rows: list[Box] = [
        ((share, share + 1), (0, length)) if has_rows else ((0, length),) for share in range(len(shares))
    ]
    share_of = {rank: share for share, ranks in enumerate(shares) for rank in ranks}
    has_leaders = STRATEGIES[plan.strategy].has_leaders
    columns = plan.dst.columns if has_leaders else [(rank,) for rank in plan.dst.ranks]
    transfers: list[Transfer] = []
    boxes: dict[int, tuple[Box, ...]] = {}
    for leader, *others in columns:
        # The first rank of every share that sends anything.
        sources = {share_of[transfer.src]: transfer.src for transfer in reversed(plan.receives_of(leader))}
        transfers += [Transfer(src=sources[share], dst=leader, boxes=(rows[share],)) for share in sorted(sources)]
        boxes |= dict.fromkeys((leader, *others), tuple(rows[share] for share in sorted(sources)))
    holdings = [LocalBoxes(rank=rank, boxes=(rows[share_of[rank]],)) for rank in plan.src.ranks]
    return BoundaryPlan(
        src=Sharding(shape=shape, holdings=tuple(holdings)),
        dst=Sharding(shape=shape, holdings=tuple(LocalBoxes(rank=rank, boxes=boxes[rank]) for rank in plan.dst.ranks)),
        start=NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=inside(CollectiveKind.BROADCAST, plan.dst) if has_leaders else NO_COLLECTIVE,
        strategy="header",
    )
