"""One endpoint of a bridge: the ranks of a module, and what each of them holds of the tensor that crosses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.endpoint import Endpoint
from vtp_plugin.util.text_enum import TextEnum


class SequenceCut(TextEnum):
    """How the context-parallel ranks of a replica cut a sequence.

    WHOLE: not at all; each rank holds all of it, and the gradients of the ranks add up. PLAIN: consecutive pieces.
    ZIGZAG: a chunk from each end, as Megatron cuts under a causal mask.
    """

    WHOLE = "whole"
    PLAIN = "plain"
    ZIGZAG = "zigzag"


@dataclass(frozen=True, kw_only=True)
class BridgeEndpoint:
    """One module's ranks at a bridge, and how they hold the tensor.

    Attributes:
        ranks: Global ranks by data-parallel, context-parallel and tensor-parallel rank.
        sequence: How context-parallel ranks cut the sequence.
        is_sharded: Whether tensor-parallel ranks hold slices of the sequence (sequence parallelism), not copies.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: SequenceCut = SequenceCut.WHOLE
    is_sharded: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks, replica after replica.

        >>> BridgeEndpoint(ranks=(((4, 5),), ((6, 7),))).members
        (4, 5, 6, 7)
        """
        return tuple(chain.from_iterable(self.replicas))

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every data-parallel replica."""
        return tuple(tuple(chain.from_iterable(rows)) for rows in self.ranks)

    @property
    def summands(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose gradients add up: those that use the same tensor at different positions of the
        sequence.

        Tensor-parallel ranks are never among them: each of them has the complete gradient of what it holds.

        >>> BridgeEndpoint(ranks=(((0, 1), (2, 3)),)).summands
        ((0, 2), (1, 3))
        """
        if self.sequence is not SequenceCut.WHOLE or len(self.ranks[0]) == 1:
            return ()
        return tuple(column for rows in self.ranks for column in zip(*rows, strict=True))

    def endpoint(self, *, num_dims: int) -> Endpoint:
        """Return the ranks as an endpoint of a boundary: rows of ranks that hold copies of one part of the tensor.

        Args:
            num_dims: Number of the tensor's dimensions: 3 for `[S, B, H]`; 2 for `[tokens, H]`, whose first dimension
                is the batch.

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
        return Endpoint(ranks_by_cp=tuple(chain.from_iterable(lists)), num_replicas=num_replicas, is_zigzag=is_zigzag)

    def is_sliced(self, *, num_dims: int) -> bool:
        """Whether the ranks of a row of :meth:`endpoint` hold slices of the row's part, not copies."""
        return self.is_sharded and self.sequence is not SequenceCut.WHOLE and num_dims == 3


def require_disjoint(src: range, dst: range) -> None:
    """Refuse two modules that have some ranks in common, but not all.

    Raises:
        ConfigError: The modules share some of their ranks.

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
        dim_names: Name of every dimension: `tp`, `cp`, `pp`, `dp`, or others of length 1.
        first_rank: Lowest global rank of the grid.
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
