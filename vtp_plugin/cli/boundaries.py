"""What crosses each boundary: the plans of one replica, in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from vtp_plugin.cli.run_flags import Run
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, Collective, CollectiveKind, Transfer
from vtp_plugin.plan.boundary.channel_spec import PipelineBoundary, pipeline_boundaries
from vtp_plugin.plan.layout.pipeline_layout import Direction, format_ranks
from vtp_plugin.util.index_boxes import Box

_MAX_TRANSFERS_SHOWN = 4
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class PlansView:
    """What commands show of a boundary or a bridge: the plans of both directions, in one replica.

    Attributes:
        name: names of both ends.
        forward: plan of the activations.
        backward: plan of the gradients.
        itemsize_bytes: bytes of one element; None if the shape is unknown: the plans are then for a small tensor.
        num_replicas: number of replicas that cross in the same way.
        replica_name: name of this one.
        unit_samples: samples of a unit, in which a bridge counts the batch.
        dimensions: names of the plans' dimensions.
    """

    name: str
    forward: BoundaryPlan
    backward: BoundaryPlan
    itemsize_bytes: int | None
    num_replicas: int = 1
    replica_name: str = ""
    unit_samples: int = 1
    dimensions: tuple[str, ...] = ("S", "B", "H")

    def num_bytes(self, *transfers: Transfer) -> int | None:
        """Return the bytes of messages together; None if the size of the tensor is unknown."""
        if self.itemsize_bytes is None:
            return None
        return sum(transfer.num_elements for transfer in transfers) * self.unit_samples * self.itemsize_bytes

    def share(self, *transfers: Transfer) -> Fraction:
        """Return the share of the whole tensor that messages carry together."""
        return Fraction(sum(transfer.num_elements for transfer in transfers), math.prod(self.forward.src.shape))

    def directions(self) -> dict[str, object]:
        """Return both plans for JSON."""
        return {"forward": self._direction(self.forward), "backward": self._direction(self.backward)}

    def _direction(self, plan: BoundaryPlan) -> dict[str, object]:
        transfers = [
            {"src": t.src, "dst": t.dst, "share": float(self.share(t)), "bytes": self.num_bytes(t), "boxes": t.boxes}
            for t in plan.transfers
        ]
        before, after = (each if each.groups else None for each in (plan.start, plan.finish))
        return {"before": before, "transfers": transfers, "after": after}


Views = Mapping[PipelineBoundary, PlansView]
"""What is shown of every boundary, of its first replica."""


def pattern_of(boundary: PipelineBoundary, view: PlansView) -> tuple[object, ...]:
    """Return what is equal for boundaries that are crossed alike: ranks are counted inside their stages."""
    ends = boundary.src.ranks, boundary.dst.ranks
    local = {rank: (side, index) for side, ranks in enumerate(ends) for index, rank in enumerate(ranks)}
    transfers = tuple((local[t.src], local[t.dst], t.boxes) for t in view.forward.transfers)
    choice = boundary.strategy, boundary.reason, view.num_replicas
    return *choice, transfers, view.forward.finish.kind, *map(len, ends)


def view_boundaries(flags: Run) -> Views:
    """Plan every boundary for the tensor of the run, or for a small one if its shape is unknown."""
    boundaries = pipeline_boundaries(
        flags.layout, is_ring=flags.is_ring, rules=flags.rules, dp_mode=flags.replicas.mode
    )
    by_stages: dict[tuple[int, int], list[PipelineBoundary]] = {}
    for boundary in boundaries:
        by_stages.setdefault((boundary.upstream, boundary.downstream), []).append(boundary)
    return {alike[0]: _view(flags, alike[0], len(alike)) for alike in by_stages.values()}


def _view(flags: Run, first: PipelineBoundary, num_replicas: int) -> PlansView:
    forward, backward = (first.channel(direction) for direction in Direction)
    plans = forward.probe, backward.probe
    if flags.shape is not None:
        rows, size, hidden = flags.shape
        # If both stages cut the sequence for context parallelism, each pair of cp ranks carries one part of it.
        rows = rows if first.cp_rank is None else rows // flags.layout.cp_sizes[first.upstream]
        batch = flags.replicas.micro_batch(first.upstream, size) * first.src.num_replicas
        shape, is_sharded = (rows, batch, hidden), flags.is_sharded
        plans = tuple(c.plan(shape, src_sharded=is_sharded, dst_sharded=is_sharded) for c in (forward, backward))
    return PlansView(
        name=f"{first.upstream}->{first.downstream}",
        forward=plans[0],
        backward=plans[1],
        itemsize_bytes=None if flags.shape is None else flags.itemsize_bytes,
        num_replicas=num_replicas,
        replica_name=first.replica_name,
    )


def explain(view: PlansView) -> Iterator[str]:
    """Write lines that say which rank sends which part to which rank, in one replica."""
    if view.num_replicas > 1:
        yield f"{view.num_replicas} replicas cross alike; here {view.replica_name}"
    yield from _collective_lines(view.forward.start, "first")
    yield from _transfers(view)
    yield from _collective_lines(view.forward.finish, "then")
    there = {(t.src, t.dst): t.num_elements for t in view.forward.transfers}
    back = {(t.dst, t.src): t.num_elements for t in view.backward.transfers}
    start = "; ".join(_collective_lines(view.backward.start, "first"))
    finish = "; ".join(_collective_lines(view.backward.finish, "then"))
    messages = "the same parts over the same links" if there == back else f"{len(back)} messages"
    yield "gradients come back: " + ", ".join(text for text in (start, messages, finish) if text)


def crossing_cells(view: PlansView) -> tuple[str, str]:
    """Say how many messages cross forward, and how much they carry together."""
    transfers = view.forward.transfers
    share, num_bytes = float(view.share(*transfers)), view.num_bytes(*transfers)
    size = f"{share:g} tensor{'' if share == 1 else 's'}" if num_bytes is None else format_bytes(num_bytes)
    return str(len(transfers)), size


def _transfers(view: PlansView) -> Iterator[str]:
    """Write one line for each message, without the middle of a long list, and one for their sum."""
    transfers = view.forward.transfers
    lines = [f"rank {transfer.src} -> rank {transfer.dst}: {_part(view, transfer)}" for transfer in transfers]
    if len(lines) > _MAX_TRANSFERS_SHOWN + 1:
        lines[_MAX_TRANSFERS_SHOWN - 1 : -1] = [f"... {len(lines) - _MAX_TRANSFERS_SHOWN} more alike, up to"]
    yield from lines
    if len(transfers) > 1 and (total := view.num_bytes(*transfers)) is not None:
        yield f"together {format_bytes(total)} for each microbatch over {len(transfers)} links"


def _part(view: PlansView, transfer: Transfer) -> str:
    """Describe the content of a message."""
    share, size = view.share(transfer), view.num_bytes(transfer)
    what = "the whole tensor" if share == 1 else f"{share} of the tensor"
    boxes = [text for box in transfer.boxes if (text := _slice(box, view))]
    where = f", {' and '.join(boxes)}" if boxes else ""
    return what + where + ("" if size is None else f", {format_bytes(size)}")


def _slice(box: Box, view: PlansView) -> str:
    """Write the dimensions that a box cuts: `S[0:512]`, or `S[0:1/4]` if the length is unknown."""
    parts: list[str] = []
    for name, (start, stop), length in zip(view.dimensions, box, view.forward.src.shape, strict=True):
        if (start, stop) == (0, length):
            continue
        ends = (start, stop) if view.itemsize_bytes is not None else (Fraction(start, length), Fraction(stop, length))
        parts.append(f"{name}[{ends[0]}:{ends[1]}]")
    return ", ".join(parts)


def _collective_lines(collective: Collective, when: str) -> Iterator[str]:
    """Write at most one line about what the ranks of a stage do together, before (``first``) or after (``then``)."""
    for group in collective.groups[:1]:
        root, others = group[0], format_ranks(group[1:])
        text = {
            CollectiveKind.SUM: f"ranks {format_ranks(group)} reduce-scatter their values",
            CollectiveKind.GATHER: f"rank {root} gathers the slices of ranks {others}",
            CollectiveKind.BROADCAST: f"rank {root} broadcasts the whole tensor to ranks {others}",
            CollectiveKind.SCATTER: f"rank {root} scatters slices to ranks {others}",
            CollectiveKind.ALL_GATHER: f"ranks {format_ranks(group)} all-gather the whole tensor from their parts",
        }[collective.kind]
        more = f"; {len(collective.groups) - 1} more groups alike" if len(collective.groups) > 1 else ""
        yield f"{when} {text}{more}"


def site_traffic(flags: Run, views: Views) -> dict[tuple[str, str], tuple[float, int | None]]:
    """Sum what sites send to each other for a microbatch of one replica.

    Returns:
        For each source and destination: the amount in whole tensors, and in bytes; None if their size is unknown.
    """
    found: dict[tuple[str, str], tuple[float, int | None]] = {}
    for boundary, view in views.items() if flags.sites else ():
        up, down = flags.sites[boundary.upstream], flags.sites[boundary.downstream]
        for ends, plan in (((up, down), view.forward), ((down, up), view.backward)) if up != down else ():
            share, num_bytes = found.get(ends, (0.0, 0))
            more_bytes = view.num_bytes(*plan.transfers)
            share += float(view.share(*plan.transfers))
            found[ends] = share, None if num_bytes is None or more_bytes is None else num_bytes + more_bytes
    return found


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest unit that gives at least 1.

    >>> format_bytes(16 * 2**20), format_bytes(1536), format_bytes(1)
    ('16 MiB', '1.5 KiB', '1 bytes')
    """
    power = min(len(_UNITS) - 1, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.4g} {_UNITS[power]}"
