"""Plans of a bridge: how a tensor gets from the ranks of one module to those of another, whatever their grids.

A module's grid has tensor-parallel, context-parallel and data-parallel ranks; a bridge joins those of the source's last
stage to those of the destination's first. Both ends cut the batch into *shares*, one for each replica. The number of
shares may be anything on either side: a plan counts the batch in *units*, so many that both ends hold whole ones. How
long a unit is in memory is known from the tensor where it is sent, and from a header where it arrives. So one plan
serves every microbatch, and units may differ in length, as images of different sizes do.

Plans are made for `[rows, units, depth]`: `[S, B, H]` as it is, `[tokens, H]` as `[H, tokens, 1]`. The rows
are what ranks with equal tensors divide among each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.channel_spec import ChannelSpec
from vtp_plugin.boundary.plan import NO_COLLECTIVE, STRATEGIES, BoundaryPlan, Transfer
from vtp_plugin.boundary.side import Shape, Side
from vtp_plugin.boundary.spread import Holding, Spread
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.text_enum import TextEnum

HEADER_FIELDS = 3
"""Integers of a header before the lengths of its units: type, rows and depth."""


class SequenceCut(TextEnum):
    """What the context-parallel ranks of a replica hold of a sequence.

    WHOLE: all of it, each; their gradients add up. PLAIN: consecutive pieces. ZIGZAG: a chunk from each end, as
    Megatron cuts under a causal mask.
    """

    WHOLE = "whole"
    PLAIN = "plain"
    ZIGZAG = "zigzag"


@dataclass(frozen=True, kw_only=True)
class BridgeEnd:
    """One module's ranks at a bridge, and how they hold the tensor.

    Attributes:
        ranks: Global ranks by data-parallel, context-parallel and tensor-parallel rank.
        sequence: What context-parallel ranks hold.
        is_sharded: Whether tensor-parallel ranks hold slices of that (sequence parallelism), not copies.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: SequenceCut = SequenceCut.WHOLE
    is_sharded: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks, replica after replica.

        >>> BridgeEnd(ranks=(((4, 5),), ((6, 7),))).members
        (4, 5, 6, 7)
        """
        return tuple(chain.from_iterable(self.replicas))

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every data-parallel replica."""
        return tuple(tuple(chain.from_iterable(rows)) for rows in self.ranks)

    @property
    def summands(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose gradients add up: those that read one tensor at different positions.

        Tensor-parallel ranks are never among them: each of them has the complete gradient of what it holds.

        >>> BridgeEnd(ranks=(((0, 1), (2, 3)),)).summands
        ((0, 2), (1, 3))
        """
        if self.sequence is not SequenceCut.WHOLE or len(self.ranks[0]) == 1:
            return ()
        return tuple(column for rows in self.ranks for column in zip(*rows, strict=True))

    def side(self, *, num_dims: int) -> Side:
        """Describe the ranks as boundaries do: rows of ranks with copies, each with its part of the rows or the batch.

        Args:
            num_dims: Of the tensors. Of `[tokens, H]` the batch is cut where a sequence would be.

        Raises:
            ConfigError: The tokens of a batch cannot be cut in zig-zag.
        """
        if num_dims == 2 and self.sequence is SequenceCut.ZIGZAG and len(self.ranks[0]) > 1:
            raise ConfigError(
                "a bridge of tensors [tokens, H] cannot cut in zig-zag: one tensor holds several samples; name a plain "
                "cut, or send [S, B, H]"
            )
        if self.sequence is SequenceCut.WHOLE:
            # Slices of one context-parallel rank are copies of those of the others.
            rows = tuple(zip(*replica, strict=True) for replica in self.ranks) if self.is_sharded else ()
            lists = tuple(tuple(one) for one in rows) if rows else tuple((ranks,) for ranks in self.replicas)
        elif num_dims == 2 and self.is_sharded:
            lists = tuple(tuple((rank,) for rank in ranks) for ranks in self.replicas)
        else:
            lists = self.ranks
        num_replicas = len(lists) * (len(lists[0]) if num_dims == 2 else 1)
        is_zigzag = self.sequence is SequenceCut.ZIGZAG
        return Side(ranks_by_cp=tuple(chain.from_iterable(lists)), num_replicas=num_replicas, is_zigzag=is_zigzag)

    def is_sliced(self, *, num_dims: int) -> bool:
        """Whether the ranks of a row of :meth:`side` hold slices of the row's part."""
        return self.is_sharded and self.sequence is not SequenceCut.WHOLE and num_dims == 3


@dataclass(frozen=True, kw_only=True)
class BridgeSpec(ChannelSpec):
    """One direction of a bridge: a channel between two modules. :meth:`between` makes it.

    Attributes:
        src_end: Module that sends.
        dst_end: Module that receives.
        num_dims: Of the tensors, 2 or 3.
        is_gradient: Whether gradients cross: where ranks read one tensor at different positions, theirs add up.

    >>> ends = BridgeEnd(ranks=(((0,),), ((1,),))), BridgeEnd(ranks=(((2,),), ((3,),), ((4,),)))
    >>> spec = BridgeSpec.between("vision -> language", *ends, num_dims=3)
    >>> spec.num_units
    6
    >>> print(spec.plan((8, 6, 4)).describe())
    0 -> 2 [0:8, 0:2, 0:4]
    0 -> 3 [0:8, 2:3, 0:4]
    1 -> 3 [0:8, 3:4, 0:4]
    1 -> 4 [0:8, 4:6, 0:4]
    """

    src_end: BridgeEnd
    dst_end: BridgeEnd
    num_dims: int
    is_gradient: bool = False

    @classmethod
    def between(cls, name: str, src: BridgeEnd, dst: BridgeEnd, *, num_dims: int) -> BridgeSpec:
        """Describe the way of activations from one module to another.

        Raises:
            ConfigError: An end cannot cut such tensors as it says.
        """
        return cls(
            name=f"bridge {name}, forward",
            src=src.side(num_dims=num_dims),
            dst=dst.side(num_dims=num_dims),
            strategy="divided",
            src_end=src,
            dst_end=dst,
            num_dims=num_dims,
        )

    def reversed(self) -> BridgeSpec:
        """Describe the way of their gradients: the adjoint."""
        return replace(
            self,
            name=self.name.replace("forward", "backward"),
            src=self.dst,
            dst=self.src,
            cargo=Cargo.GRADIENT,
            src_end=self.dst_end,
            dst_end=self.src_end,
            is_gradient=True,
        )

    @functools.cached_property
    def num_units(self) -> int:
        """Units of the whole batch: the fewest of which every share of either end is a whole number."""
        return math.lcm(self.src.num_replicas, self.dst.num_replicas)

    def units_of(self, rank: int) -> range:
        """Return the units of a rank's share of the batch."""
        for side in (self.src, self.dst):
            if rank in side.ranks:
                share = side.ranks.index(rank) * side.num_replicas // len(side.ranks)
                per_share = self.num_units // side.num_replicas
                return range(share * per_share, (share + 1) * per_share)
        raise PlanError(f"{self.name}: rank {rank} is at neither end")

    @property
    def header_length(self) -> int:
        """Integers in the header of one share of the source."""
        return HEADER_FIELDS + self.num_units // self.src.num_replicas

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Plan how one tensor crosses.

        Args:
            shape: `[rows, units, depth]`.
            src_sharded: Not used: the ends say it.
            dst_sharded: Not used.

        Raises:
            ConfigError: The sequence cannot be cut as an end wants it.
        """
        src, dst = (
            side.spread(shape, is_sharded=end.is_sliced(num_dims=self.num_dims))
            for side, end in ((self.src, self.src_end), (self.dst, self.dst_end))
        )
        if self.is_gradient:
            src = replace(src, summands=self.src_end.summands)
        return STRATEGIES[self.strategy](src, dst)

    @functools.cached_property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides evenly everywhere; its ranks and links are those of every tensor."""
        rows = math.lcm(*(2 * len(side.ranks) for side in (self.src, self.dst)))
        return self.plan((rows, self.num_units, 1))

    @property
    def prototype(self) -> BoundaryPlan:
        """The probe itself: bridges are few."""
        return self.probe

    @property
    def participants(self) -> tuple[int, ...]:
        """All ranks of both ends: also those that send nothing but a header."""
        return tuple(sorted(self.members))

    @property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of receiving ranks that complete their copies by an all-gather."""
        return self.probe.finish.groups

    def plan_header(self, length: int) -> BoundaryPlan:
        """Plan how every receiving rank gets the header of each share of the source of which it gets units.

        Args:
            length: Of one header. The tensor is `[shares of the source, length]`: one row is one header.
        """
        shares = [_shares(side) for side in (self.src, self.dst)]
        ours, theirs = (self.num_units // len(one) for one in shares)
        rows = {rank: (share,) for share, ranks in enumerate(shares[0]) for rank in ranks}
        for share, ranks in enumerate(shares[1]):
            sources = tuple(range(share * theirs // ours, -(-(share + 1) * theirs // ours)))
            rows |= dict.fromkeys(ranks, sources)
        src, dst = (
            Spread(
                shape=(len(shares[0]), length),
                holdings=tuple(
                    Holding(rank=rank, boxes=tuple(((row, row + 1), (0, length)) for row in rows[rank]))
                    for rank in side.ranks
                ),
            )
            for side in (self.src, self.dst)
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


def _shares(side: Side) -> tuple[tuple[int, ...], ...]:
    """List the ranks of every share of a side.

    >>> _shares(Side(ranks_by_cp=((0, 1), (2, 3), (4, 5), (6, 7)), num_replicas=2))
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    starts = range(0, len(side.ranks_by_cp), side.cp)
    return tuple(tuple(chain.from_iterable(side.ranks_by_cp[start : start + side.cp])) for start in starts)


def unit_widths(length: int, num_units: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut a replica's share of the batch into units.

    Args:
        length: Of the share along the batch: samples, or tokens.
        num_units: Units of the share.
        sizes: Tokens of every sample, or of every unit; None cuts evenly.

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


def require_disjoint(src: range, dst: range) -> None:
    """Refuse two modules that have some ranks in common, but not all.

    Raises:
        ConfigError: They have.

    >>> require_disjoint(range(4), range(4, 8)), require_disjoint(range(4), range(4))
    (None, None)
    """
    common = range(max(src.start, dst.start), min(src.stop, dst.stop))
    if common and src != dst:
        raise ConfigError(
            f"the modules at a bridge, of the ranks {src.start} to {src.stop - 1} and {dst.start} to {dst.stop - 1}, "
            f"have the ranks {', '.join(map(str, common))} in common; give them disjoint grids, or the same ranks and "
            "a ColocatedBridgeCommunicator"
        )


def boundary_ranks(
    shape: Sequence[int], dim_names: Sequence[str], first_rank: int, *, is_last: bool
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """List the ranks of one stage of a grid, by data-parallel, context-parallel and tensor-parallel rank.

    Args:
        shape: Length of every dimension, the first changing fastest.
        dim_names: Of `tp`, `cp`, `pp` and `dp` those that the grid has, and others of length 1.
        first_rank: Of the grid.
        is_last: Take the last stage, not the first.

    Raises:
        ConfigError: The grid has ranks along another dimension.

    >>> boundary_ranks([2, 1, 2, 2], ["tp", "cp", "pp", "dp"], 8, is_last=True)
    (((10, 11),), ((14, 15),))
    """
    length = dict(zip(dim_names, shape, strict=True))
    stride = {name: math.prod(shape[:index]) for index, name in enumerate(dim_names)}
    if others := [name for name in dim_names if name not in ("tp", "cp", "pp", "dp") and length[name] > 1]:
        raise ConfigError(
            f"a bridge's grid has the dimensions {dict(zip(dim_names, shape, strict=True))}; beside tp, cp, pp and dp "
            f"all must be 1, but {', '.join(others)} is not; use a grid without it"
        )
    start = first_rank + (length.get("pp", 1) - 1) * stride.get("pp", 0) * is_last
    dp, cp, tp = ([i * stride.get(name, 0) for i in range(length.get(name, 1))] for name in ("dp", "cp", "tp"))
    return tuple(tuple(tuple(start + d + c + t for t in tp) for c in cp) for d in dp)
