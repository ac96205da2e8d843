"""What crosses each boundary, as one replica shows it, and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from vtp_plugin.boundary.pipeline import PipelineBoundary, pipeline_boundaries
from vtp_plugin.boundary.plan import BoundaryPlan, Collective, CollectiveKind, Transfer
from vtp_plugin.boundary.spread import Box
from vtp_plugin.cli.flags import Run
from vtp_plugin.layout.channel import Direction
from vtp_plugin.layout.show import format_ranks

_MAX_TRANSFERS_SHOWN = 4
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_DIMENSIONS = "SBH"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryView:
    """Two neighbouring stages, and how a microbatch crosses between them in one replica; the others are alike.

    Attributes:
        boundary: of the first replica.
        reason: of the strategy.
        num_replicas: that cross alike.
        forward: plan of the activations.
        backward: plan of the gradients.
        itemsize_bytes: of one number of the tensor; None where its shape is not known: the plans are for a small one.
    """

    boundary: PipelineBoundary
    reason: str
    num_replicas: int
    forward: BoundaryPlan
    backward: BoundaryPlan
    itemsize_bytes: int | None

    @property
    def name(self) -> str:
        """Both stages, as error messages name them."""
        return f"{self.boundary.upstream}->{self.boundary.downstream}"

    @property
    def strategy(self) -> str:
        """How it is crossed."""
        return self.boundary.strategy

    @property
    def buffer_bytes(self) -> int | None:
        """Size that a channel's buffer gets on HCCL; None where the tensor's size is not known."""
        return self.boundary.channel(Direction.FORWARD).largest_message_bytes

    @property
    def pattern(self) -> tuple[object, ...]:
        """What is the same for boundaries that are crossed alike: ranks counted inside their stages."""
        src, dst = self.boundary.src.ranks, self.boundary.dst.ranks
        place = {rank: (side, index) for side, ranks in enumerate((src, dst)) for index, rank in enumerate(ranks)}
        transfers = tuple((place[t.src], place[t.dst], t.boxes) for t in self.forward.transfers)
        return self.strategy, self.reason, self.num_replicas, transfers, self.forward.finish.kind, len(src), len(dst)

    def num_bytes(self, transfer: Transfer) -> int | None:
        """Size of a message; None where the tensor's is not known."""
        return None if self.itemsize_bytes is None else transfer.num_elements * self.itemsize_bytes

    def share(self, transfer: Transfer) -> Fraction:
        """Part of the whole tensor that a message carries."""
        return Fraction(transfer.num_elements, math.prod(self.forward.src.shape))

    def as_json(self) -> dict[str, object]:
        """Everything, for machines."""
        return {
            "upstream": self.boundary.upstream,
            "downstream": self.boundary.downstream,
            "strategy": self.strategy,
            "reason": self.reason,
            "num_replicas": self.num_replicas,
            "probe_shape": None if self.itemsize_bytes is not None else list(self.forward.src.shape),
            "hccl_buffer_bytes": self.buffer_bytes,
            "forward": self._direction(self.forward),
            "backward": self._direction(self.backward),
        }

    def _direction(self, plan: BoundaryPlan) -> dict[str, object]:
        return {
            "before": _collective(plan.start),
            "transfers": [
                {
                    "src": t.src,
                    "dst": t.dst,
                    "share": float(self.share(t)),
                    "bytes": self.num_bytes(t),
                    "boxes": [[list(interval) for interval in box] for box in t.boxes],
                }
                for t in plan.transfers
            ],
            "after": _collective(plan.finish),
        }


def view_boundaries(flags: Run) -> tuple[BoundaryView, ...]:
    """Plan every boundary for the tensor of the run, or for a small one where its shape is not known."""
    boundaries = pipeline_boundaries(
        flags.layout, is_ring=flags.is_ring, rules=flags.rules, dp_mode=flags.replicas.mode
    )
    by_stages: dict[tuple[int, int], list[PipelineBoundary]] = {}
    for boundary in boundaries:
        by_stages.setdefault((boundary.upstream, boundary.downstream), []).append(boundary)
    return tuple(_view(flags, alike) for alike in by_stages.values())


def _view(flags: Run, alike: Sequence[PipelineBoundary]) -> BoundaryView:
    first = alike[0]
    _, reason = flags.rules.choose(flags.layout, first.upstream, first.downstream)
    forward, backward = (first.channel(direction) for direction in Direction)
    if flags.shape is None:
        plans = forward.probe, backward.probe
    else:
        rows, size, hidden = flags.shape
        # Where both stages cut the sequence for context parallelism, each pair of cp ranks carries its own part.
        rows = rows if first.cp_rank is None else rows // flags.layout.cp_sizes[first.upstream]
        batch = flags.replicas.micro_batch(first.upstream, size) * first.src.num_replicas
        shape, is_sharded = (rows, batch, hidden), flags.is_sharded
        plans = tuple(c.plan(shape, src_sharded=is_sharded, dst_sharded=is_sharded) for c in (forward, backward))
    return BoundaryView(
        boundary=first,
        reason=reason,
        num_replicas=len(alike),
        forward=plans[0],
        backward=plans[1],
        itemsize_bytes=None if flags.shape is None else flags.itemsize_bytes,
    )


def explain(view: BoundaryView, flags: Run) -> Iterator[str]:
    """Say who sends which part to whom, in one replica."""
    boundary = view.boundary
    if view.num_replicas > 1:
        yield f"{view.num_replicas} replicas cross alike; here {boundary.replica_name}"
    yield from _collective_lines(view.forward.start, "first")
    yield from _transfers(view)
    yield from _collective_lines(view.forward.finish, "then")
    there = {(t.src, t.dst): t.num_elements for t in view.forward.transfers}
    back = {(t.dst, t.src): t.num_elements for t in view.backward.transfers}
    start = "; ".join(_collective_lines(view.backward.start, "first"))
    finish = "; ".join(_collective_lines(view.backward.finish, "then"))
    way = "the same parts over the same links" if there == back else f"{len(back)} messages"
    yield "gradients come back: " + ", ".join(text for text in (start, way, finish) if text)


def _transfers(view: BoundaryView) -> Iterator[str]:
    transfers = view.forward.transfers
    shown = list(transfers)
    if len(transfers) > _MAX_TRANSFERS_SHOWN + 1:
        shown = list(transfers[: _MAX_TRANSFERS_SHOWN - 1])
    for transfer in shown:
        yield f"rank {transfer.src} -> rank {transfer.dst}: {_part(view, transfer)}"
    if hidden := len(transfers) - len(shown) - 1 if len(shown) < len(transfers) else 0:
        yield f"... {hidden} more alike, up to"
        yield f"rank {transfers[-1].src} -> rank {transfers[-1].dst}: {_part(view, transfers[-1])}"
    if len(transfers) > 1 and view.itemsize_bytes is not None:
        total = sum(view.num_bytes(transfer) or 0 for transfer in transfers)
        yield f"together {format_bytes(total)} for each microbatch over {len(transfers)} links"


def _part(view: BoundaryView, transfer: Transfer) -> str:
    """Describe what a message carries."""
    share, size = view.share(transfer), view.num_bytes(transfer)
    what = "the whole tensor" if share == 1 else f"{share} of the tensor"
    boxes = [text for box in transfer.boxes if (text := _slice(box, view))]
    where = f", {' and '.join(boxes)}" if boxes else ""
    return what + where + ("" if size is None else f", {format_bytes(size)}")


def _slice(box: Box, view: BoundaryView) -> str:
    """Write the part of each dimension that is not whole: `S[0:512]`, or `S[0:1/4]` where lengths are not known."""
    parts: list[str] = []
    for name, (start, stop), length in zip(_DIMENSIONS, box, view.forward.src.shape, strict=True):
        if (start, stop) == (0, length):
            continue
        ends = (start, stop) if view.itemsize_bytes is not None else (Fraction(start, length), Fraction(stop, length))
        parts.append(f"{name}[{ends[0]}:{ends[1]}]")
    return ", ".join(parts)


def _collective_lines(collective: Collective, when: str) -> Iterator[str]:
    """Say what ranks of one stage do together."""
    for group in collective.groups[:1]:
        root, others = group[0], format_ranks(group[1:])
        text = {
            CollectiveKind.GATHER: f"rank {root} gathers the slices of ranks {others}",
            CollectiveKind.BROADCAST: f"rank {root} hands the whole on to ranks {others} (broadcast)",
            CollectiveKind.SCATTER: f"rank {root} hands their slices to ranks {others} (scatter)",
            CollectiveKind.ALL_GATHER: f"ranks {format_ranks(group)} swap their parts, so that each has the whole "
            "(all-gather)",
        }[collective.kind]
        more = f"; {len(collective.groups) - 1} more groups alike" if len(collective.groups) > 1 else ""
        yield f"{when} {text}{more}"


def _collective(collective: Collective) -> dict[str, object] | None:
    if collective.kind is CollectiveKind.NONE:
        return None
    return {"kind": collective.kind.value, "groups": [list(group) for group in collective.groups]}


def site_traffic(flags: Run, views: Sequence[BoundaryView]) -> dict[tuple[str, str], tuple[float, int | None]]:
    """Sum what each site sends to each other one for a microbatch of one replica: in tensors, and in bytes if known."""
    found: dict[tuple[str, str], tuple[float, int | None]] = {}
    for view in views if flags.sites else ():
        ends = flags.sites[view.boundary.upstream], flags.sites[view.boundary.downstream]
        if ends[0] == ends[1]:
            continue
        for way, plan in ((ends, view.forward), ((ends[1], ends[0]), view.backward)):
            share = float(sum(view.share(transfer) for transfer in plan.transfers))
            size = view.itemsize_bytes
            num_bytes = None if size is None else sum(t.num_elements for t in plan.transfers) * size
            before = found.get(way, (0.0, None if num_bytes is None else 0))
            found[way] = before[0] + share, None if num_bytes is None else (before[1] or 0) + num_bytes
    return found


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest unit of which there is at least one.

    >>> format_bytes(16 * 2**20), format_bytes(1536), format_bytes(1)
    ('16 MiB', '1.5 KiB', '1 bytes')
    """
    power = min(len(_UNITS) - 1, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.4g} {_UNITS[power]}"
