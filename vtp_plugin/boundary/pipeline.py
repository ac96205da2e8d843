"""The boundaries of a pipeline: one per pair of neighbouring stages and replica, in one order for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vtp_plugin.boundary.plan import STRATEGIES, BoundaryPlan, plan_overlap, reversed_plan
from vtp_plugin.boundary.spread import Spread, replicated, sharded
from vtp_plugin.layout.pipeline import PipelineLayout

Shape = tuple[int, ...]


class Direction(StrEnum):
    """Which way a channel carries: activations go forward, gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBoundary:
    """Two neighbouring stages of one replica, and how tensors cross between them.

    Attributes:
        upstream: Stage whose output crosses.
        downstream: Stage that takes it as input; 0 for the ring's wrap-around.
        dp_rank: Data-parallel rank of the replica.
        cp_rank: Context-parallel rank of the replica.
        src_ranks: Global ranks of the upstream stage in this replica, by tensor-parallel rank.
        dst_ranks: The same of the downstream stage.
        strategy: Key of :data:`~vtp_plugin.boundary.plan.STRATEGIES`.
    """

    upstream: int
    downstream: int
    dp_rank: int
    cp_rank: int
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    strategy: str

    def plan(self, shape: Shape, direction: Direction, *, is_sharded: bool) -> BoundaryPlan:
        """Plan one exchange.

        Args:
            shape: Of the whole tensor, such as `[S, B, H]`.
            direction: FORWARD for activations, BACKWARD for their gradients.
            is_sharded: Both stages hold slices of dimension 0 (sequence parallelism), not copies.
        """
        spread = _sharded_rows if is_sharded else replicated
        forward = STRATEGIES[self.strategy](spread(shape, self.src_ranks), spread(shape, self.dst_ranks))
        return forward if direction is Direction.FORWARD else reversed_plan(forward)

    def name(self, direction: Direction) -> str:
        """Name boundary and direction as error messages do: `boundary 0->1, forward`."""
        return f"boundary {self.upstream}->{self.downstream}, {direction}"


def choose_strategy(src_tp: int, dst_tp: int, transport: str) -> tuple[str, str]:
    """Choose how a boundary is crossed, with the reason for the log.

    >>> choose_strategy(2, 2, "auto")[0], choose_strategy(1, 4, "auto")[0], choose_strategy(2, 2, "rank0")[0]
    ('direct', 'rank0', 'rank0')
    """
    if transport == "rank0":
        return "rank0", "asked for"
    if src_tp == dst_tp:
        return "direct", "both stages have one size"
    return "rank0", "the stages' sizes differ"


def pipeline_boundaries(
    layout: PipelineLayout, *, is_ring: bool, transport: str = "auto"
) -> tuple[PipelineBoundary, ...]:
    """List all boundaries in the order in which every rank opens and warms up their channels.

    Args:
        layout: Who is where.
        is_ring: Virtual stages let the last stage send to the first.
        transport: `"auto"` or `"rank0"`, see :func:`choose_strategy`.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> [(b.upstream, b.downstream, b.src_ranks, b.dst_ranks) for b in pipeline_boundaries(layout, is_ring=True)]
    [(0, 1, (0,), (1, 2)), (1, 0, (1, 2), (0,))]
    """
    num_stages = layout.num_stages
    num_boundaries = num_stages if is_ring and num_stages > 1 else num_stages - 1
    boundaries = []
    for upstream in range(num_boundaries):
        downstream = (upstream + 1) % num_stages
        strategy, _ = choose_strategy(layout.tp_sizes[upstream], layout.tp_sizes[downstream], transport)
        for dp_rank, cp_rank in layout.replicas:
            boundaries.append(
                PipelineBoundary(
                    upstream=upstream,
                    downstream=downstream,
                    dp_rank=dp_rank,
                    cp_rank=cp_rank,
                    src_ranks=layout.tp_ranks(upstream, dp_rank, cp_rank),
                    dst_ranks=layout.tp_ranks(downstream, dp_rank, cp_rank),
                    strategy=strategy,
                )
            )
    return tuple(boundaries)


def plan_vocabulary_exchange(shape: Shape, src_ranks: tuple[int, ...], dst_ranks: tuple[int, ...]) -> BoundaryPlan:
    """Plan how a vocabulary-sharded weight `[V, H]` gets from one stage's cut to another's.

    The cut is Megatron's: V divides by both sizes, rank i holds the i-th slice.
    """
    return plan_overlap(_sharded_rows(shape, src_ranks), _sharded_rows(shape, dst_ranks))


def _sharded_rows(shape: Shape, ranks: tuple[int, ...]) -> Spread:
    return sharded(shape, ranks, 0)
