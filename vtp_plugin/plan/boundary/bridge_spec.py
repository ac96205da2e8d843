"""Plans of a bridge: how a tensor gets from the ranks of one module to those of another, whatever their grids.

A module's grid has tensor-parallel, context-parallel and data-parallel ranks; a bridge joins those of the source's last
stage to those of the destination's first. Both ends cut the batch into *shares*, one for each replica, and may have
different numbers of them: a plan counts the batch in *units*, which are so small that every share is a whole number of
them. How long a unit is in memory is known from the tensor where it is sent, and from a header where it arrives. So one
plan serves every microbatch, and units may differ in length, as images of different sizes do.

Plans are made for `[rows, units, depth]`: `[S, B, H]` as it is, `[tokens, H]` as `[H, tokens, 1]`. Ranks with
equal tensors divide the rows among each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import NO_COLLECTIVE, BoundaryPlan, Transfer
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, LocalBoxes, Shape, Sharding, Widths
from vtp_plugin.plan.boundary.message_kind import BridgeHeaderCodec, MessageKind, Whole
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class BridgeSpec(ChannelSpec):
    """One direction of a bridge: a channel between two modules. :meth:`between` makes it.

    Attributes:
        src_end: Endpoint of the module that sends.
        dst_end: Endpoint of the module that receives.
        num_dims: Number of dimensions of the tensors, 2 or 3.
        is_gradient: Whether gradients cross: those of ranks that use one tensor at different positions add up.

    >>> ends = BridgeEndpoint(ranks=(((0,),), ((1,),))), BridgeEndpoint(ranks=(((2,),), ((3,),), ((4,),)))
    >>> spec = BridgeSpec.between("vision -> language", *ends, num_dims=3)
    >>> spec.num_units
    6
    >>> print(spec.plan((8, 6, 4)).describe())
    0 -> 2 [0:8, 0:2, 0:4]
    0 -> 3 [0:8, 2:3, 0:4]
    1 -> 3 [0:8, 3:4, 0:4]
    1 -> 4 [0:8, 4:6, 0:4]
    """

    src_end: BridgeEndpoint
    dst_end: BridgeEndpoint
    num_dims: int
    is_gradient: bool = False

    @classmethod
    def between(cls, name: str, src: BridgeEndpoint, dst: BridgeEndpoint, *, num_dims: int) -> BridgeSpec:
        """Describe how activations cross from one module to another.

        Raises:
            ConfigError: An endpoint's way of cutting is not possible for tensors of so many dimensions.
        """
        return cls(
            name=f"bridge {name}, forward",
            src=src.endpoint(num_dims=num_dims),
            dst=dst.endpoint(num_dims=num_dims),
            strategy="divided",
            src_end=src,
            dst_end=dst,
            num_dims=num_dims,
        )

    def reversed(self) -> BridgeSpec:
        """Describe how their gradients cross back: the adjoint."""
        return replace(
            self,
            name=self.name.replace("forward", "backward"),
            src=self.dst,
            dst=self.src,
            kind=MessageKind.GRADIENT,
            src_end=self.dst_end,
            dst_end=self.src_end,
            is_gradient=True,
        )

    @functools.cached_property
    def num_units(self) -> int:
        """Number of units of the whole batch: the smallest one that every number of shares divides."""
        return math.lcm(self.src.num_replicas, self.dst.num_replicas)

    def units_of(self, rank: int) -> range:
        """Return the units of a rank's share of the batch."""
        for endpoint in (self.src, self.dst):
            if rank in endpoint.ranks:
                share = endpoint.ranks.index(rank) * endpoint.num_replicas // len(endpoint.ranks)
                per_share = self.num_units // endpoint.num_replicas
                return range(share * per_share, (share + 1) * per_share)
        raise PlanError(f"{self.name}: rank {rank} is at neither end")

    def header_codec(self, rank: int) -> BridgeHeaderCodec:
        """Return the codec that writes and reads the headers of a rank of this bridge."""
        return BridgeHeaderCodec(self.num_units, self.num_units // self.src.num_replicas, self.units_of(rank))

    def crossing(self, whole: Whole) -> tuple[Shape, Widths | None]:
        """Return the shape that the plan of a batch is made for, and the length of each unit."""
        rows, depth, *widths = whole
        return (rows, self.num_units, depth), tuple(widths)

    def batch_of(self, local: Sequence[int], rank: int, sizes: Sequence[int] | None) -> Whole:
        """Describe the batch that a tensor is a part of, as far as the sender knows it.

        Args:
            local: Shape `[rows, batch, depth]` of the part.
            rank: Rank that holds the part.
            sizes: Number of tokens of every sample, or of every unit; None cuts the share evenly.

        Raises:
            ConfigError: The share cannot be cut for the other module.
        """
        own = self.units_of(rank)
        widths = [0] * self.num_units
        widths[own.start : own.stop] = unit_widths(local[1], len(own), sizes)
        return (local[0] * self._num_row_parts(rank), local[2], *widths)

    def local_shape_of(self, batch: Whole, rank: int) -> Shape:
        """Return the shape `[rows, batch, depth]` of a rank's part of a batch; inverse of :meth:`batch_of`."""
        rows, depth, *widths = batch
        own = self.units_of(rank)
        return rows // self._num_row_parts(rank), sum(widths[own.start : own.stop]), depth

    def _num_row_parts(self, rank: int) -> int:
        endpoint, end = (self.src, self.src_end) if rank in self.src.ranks else (self.dst, self.dst_end)
        return endpoint.num_parts(is_sharded=end.is_sliced(num_dims=self.num_dims))

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Plan how one tensor crosses.

        Args:
            shape: Shape `[rows, units, depth]` of the whole tensor.
            src_sharded: Not used: the endpoints say it.
            dst_sharded: Not used.

        Raises:
            ConfigError: The sequence cannot be cut as an endpoint asks.
        """
        src, dst = self.shardings(shape)
        if self.is_gradient:
            src = replace(src, summands=self.src_end.summands)
        return STRATEGIES[self.strategy].plan(src, dst)

    def shardings(self, shape: Shape) -> tuple[Sharding, Sharding]:
        """Return the shardings of a tensor at both ends; shape and error are those of :meth:`plan`."""
        src, dst = (
            endpoint.sharding(shape, is_sharded=end.is_sliced(num_dims=self.num_dims))
            for endpoint, end in ((self.src, self.src_end), (self.dst, self.dst_end))
        )
        return src, dst

    @functools.cached_property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides evenly everywhere; its ranks and links are those of every tensor."""
        rows = math.lcm(*(2 * len(endpoint.ranks) for endpoint in (self.src, self.dst)))
        return self.plan((rows, self.num_units, 1))

    @property
    def prototype(self) -> BoundaryPlan:
        """The probe itself: bridges are few."""
        return self.probe

    @property
    def participants(self) -> tuple[int, ...]:
        """All ranks of both ends, those that send only a header among them."""
        return tuple(sorted(self.members))

    @property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of receiving ranks that complete their copies by an all-gather."""
        return self.probe.finish.groups

    def plan_header(self, length: int) -> BoundaryPlan:
        """Plan the headers: a receiving rank gets that of each share of the source from which it gets units.

        Args:
            length: Integers of one header. The tensor is `[shares of the source, length]`: one row is one header.
        """
        shares = [endpoint.shares for endpoint in (self.src, self.dst)]
        ours, theirs = (self.num_units // len(one) for one in shares)
        rows = {rank: (share,) for share, ranks in enumerate(shares[0]) for rank in ranks}
        for share, ranks in enumerate(shares[1]):
            sources = tuple(range(share * theirs // ours, -(-(share + 1) * theirs // ours)))
            rows |= dict.fromkeys(ranks, sources)
        src, dst = (
            Sharding(
                shape=(len(shares[0]), length),
                holdings=tuple(
                    LocalBoxes(rank=rank, boxes=tuple(((row, row + 1), (0, length)) for row in rows[rank]))
                    for rank in endpoint.ranks
                ),
            )
            for endpoint in (self.src, self.dst)
        )
        transfers = [
            Transfer(src=shares[0][row][index % len(shares[0][row])], dst=rank, boxes=(((row, row + 1), (0, length)),))
            for ranks in shares[1]
            for index, rank in enumerate(ranks)
            for row in rows[rank]
        ]
        return BoundaryPlan(
            src=src, dst=dst, start=NO_COLLECTIVE, transfers=tuple(transfers), finish=NO_COLLECTIVE, strategy="header"
        )


def unit_widths(length: int, num_units: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut a replica's share of the batch into units.

    Args:
        length: Length of the share along the batch, in samples or tokens.
        num_units: Number of units of the share.
        sizes: Number of tokens of every sample, or of every unit; None cuts evenly.

    Raises:
        ConfigError: The samples or the length cannot be cut so.

    >>> unit_widths(6, 2), unit_widths(6, 2, [0, 3, 1, 2]), unit_widths(7, 1, [3, 1, 3])
    ((3, 3), (3, 3), (7,))
    """
    if num_units == 1:
        return (length,)
    if sizes is None:
        if length % num_units:
            raise ConfigError(
                f"a share of {length} along the batch cannot be cut into {num_units} equal parts for the replicas of "
                f"the other module; use a multiple of {num_units}, or say where samples end (_mimo_bridge_split_sizes)"
            )
        return (length // num_units,) * num_units
    per_unit, rest = divmod(len(sizes), num_units)
    if rest or not per_unit:
        raise ConfigError(
            f"bridge split metadata has {len(sizes)} entries, but communication requires {num_units} splits; use a "
            f"multiple of {num_units} samples"
        )
    if sum(sizes) != length:
        raise ConfigError(
            f"bridge split metadata sums to {sum(sizes)}, but tensor batch dimension is {length}; give the tokens of "
            "every sample"
        )
    return tuple(sum(sizes[start : start + per_unit]) for start in range(0, len(sizes), per_unit))
