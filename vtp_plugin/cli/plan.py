"""``plan``: who is where, and what crosses between the stages; nothing is started."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from vtp_plugin.cli.boundaries import BoundaryView, explain, format_bytes, site_traffic, view_boundaries
from vtp_plugin.cli.flags import Run, add_run_flags, read_run
from vtp_plugin.cli.parser import print_json
from vtp_plugin.layout.pipeline import RankOrder, StageGrid
from vtp_plugin.layout.show import format_ranks
from vtp_plugin.options.checks.batch import describe_batches

_MAX_STAGES_UNFOLDED = 12
_MAX_LINES = 60
_MAX_BUFFERS_SHOWN = 3
_KEYS = """\
Keys of --json: world_size, rank_order, writer_rank, is_active (false: all stages have one size, and Megatron works
alone); tensor: shape [S, B, H] and bytes of what crosses, null where a flag is missing; stages: tp, cp, dp, site,
ranks, leaders; boundaries: upstream, downstream, strategy, reason, num_replicas, hccl_buffer_bytes (of a channel), and
of the first replica forward and backward: transfers with src, dst, share (of the tensor), bytes (null where unknown)
and boxes (half-open intervals of S, B and H; of probe_shape where the shape is not known), before and after
(collectives inside a stage); traffic: tensors and bytes from site to site for each microbatch of a replica."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_run_flags(parser)
    parser.epilog = _KEYS


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    flags = read_run(options)
    views = view_boundaries(flags)
    if options.json:
        print_json("plan", _as_json(flags, views))
        return
    head, sums = [*_stages(flags), *_tensor(flags)], [*_buffers(views), *_traffic(flags, views)]
    lines = [*head, *_boundaries(flags, views, is_short=False), *sums]
    if len(lines) > _MAX_LINES:
        lines = [*head, *_boundaries(flags, views, is_short=True), *sums]
    if len(lines) > _MAX_LINES:
        more = f"... {len(lines) - _MAX_LINES + 1} more lines; --json has everything"
        lines = [*lines[: _MAX_LINES - 1], more]
    print("\n".join(lines))


def _writer(flags: Run) -> int:
    layout = flags.layout
    return layout.leader(0, 0, 0) if flags.config.layerwise_disaggregated else layout.writer_rank


def _stages(flags: Run) -> Iterator[str]:
    """Write the table of the stages; many equal ones in a row are one line."""
    layout, sites = flags.layout, flags.sites
    kinds = [(grid, sites[stage] if sites else "") for stage, grid in enumerate(layout.stages)]
    does_fold = layout.num_stages > _MAX_STAGES_UNFOLDED
    runs = [[stage] for stage in range(layout.num_stages)]
    if does_fold:
        runs = [list(stages) for _, stages in groupby(range(layout.num_stages), key=lambda stage: kinds[stage])]
    heads = ["stage", *(["site"] if sites else []), "tp", "cp", "dp", "ranks", "leaders"]
    rows = [heads, *(_row(flags, stages, *kinds[stages[0]]) for stages in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-2], widths, strict=False)]
        yield "  ".join([*cells, row[-2].ljust(widths[-2]), row[-1]])
    yield (
        f"world size {layout.world_size}, rank order {layout.order}, writer rank {_writer(flags)} (reports the loss)"
    )
    if not flags.is_active:
        yield "all stages have one size: the plugin leaves Megatron as it is; with --vtp-force it would work as follows"


def _row(flags: Run, stages: Sequence[int], grid: StageGrid, site: str) -> list[str]:
    layout = flags.layout
    ranks = format_ranks(rank for stage in stages for rank in layout.stage_ranks(stage))
    leaders = format_ranks(
        layout.leader(stage, d, c) for stage in stages for d in range(grid.dp) for c in range(grid.cp)
    )
    name = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
    sizes = [str(size) for size in (grid.tp, grid.cp, grid.dp)]
    return [name, *([site] if flags.sites else []), *sizes, ranks, leaders]


def _tensor(flags: Run) -> Iterator[str]:
    """Say what crosses, and how to read the slices."""
    if flags.layout.num_stages == 1:
        yield "one stage: nothing crosses"
        return
    if flags.shape is None:
        what = "; give --seq-length, --micro-batch-size and --hidden-size to see bytes"
    else:
        what = f", here {list(flags.shape)} of {flags.itemsize_bytes} bytes each"
    yield f"What crosses: activations [S, B, H] (sequence, batch, hidden){what}."
    part = "S[0:1/4] is the first quarter" if flags.shape is None else "S[0:512] is the first 512 positions"
    yield f"Gradients of the same shape come back. {part} of the sequence; a part without S has all of it."
    if not flags.replicas.is_equal and flags.shape is not None and flags.num_microbatches is not None:
        size = flags.shape[1]
        parts = max(flags.replicas.dp_sizes) if flags.replicas.is_split else flags.replicas.num_copies
        yield from describe_batches(flags.num_microbatches * size * parts, size, flags.replicas).splitlines()


def _boundaries(flags: Run, views: Sequence[BoundaryView], *, is_short: bool) -> Iterator[str]:
    """Explain the boundaries; those that are crossed alike, one behind the other, are explained once."""
    for _, group in groupby(views, key=lambda view: view.pattern):
        alike = list(group)
        first, *rest = alike
        name = f"boundary {first.name}"
        if rest:
            name = f"boundaries {first.name} to {rest[-1].name} ({len(alike)} alike, here {first.name})"
        yield f"{name}: {first.strategy} ({first.reason})"
        if flags.rules.is_open(flags.layout, first.boundary.upstream, first.boundary.downstream):
            yield "  a run tries rank0 too when it starts, and takes the faster one; --vtp-transport-threshold decides"
        if not is_short:
            yield from (f"  {line}" for line in explain(first, flags))


def _buffers(views: Sequence[BoundaryView]) -> Iterator[str]:
    """Say how large the buffers of channels are where the plugin sizes them."""
    sizes = [f"{view.name} {format_bytes(size)}" for view in views if (size := view.buffer_bytes) is not None]
    if sizes:
        more = [f"and {len(sizes) - _MAX_BUFFERS_SHOWN} more"] if len(sizes) > _MAX_BUFFERS_SHOWN else []
        shown = ", ".join([*sizes[:_MAX_BUFFERS_SHOWN], *more])
        yield f"buffer of each channel, on HCCL only (never run on an NPU), in whole MiB: {shown}"


def _traffic(flags: Run, views: Sequence[BoundaryView]) -> Iterator[str]:
    """Sum up what crosses between sites."""
    for (source, target), (share, num_bytes) in site_traffic(flags, views).items():
        size = f"{share:g} tensors" if num_bytes is None else format_bytes(num_bytes)
        yield f"site {source} sends to site {target}: {size} for each microbatch, activations and gradients together"


def _as_json(flags: Run, views: Sequence[BoundaryView]) -> dict[str, object]:
    layout = flags.layout
    return {
        "world_size": layout.world_size,
        "rank_order": "tp-cp-dp-pp" if layout.order is RankOrder.STAGE_MAJOR else "tp-cp-pp-dp",
        "writer_rank": _writer(flags),
        "is_active": flags.is_active,
        "tensor": {
            "shape": None if flags.shape is None else list(flags.shape),
            "bytes": None if flags.shape is None else flags.itemsize_bytes * math.prod(flags.shape),
        },
        "stages": [
            {
                "stage": stage,
                "site": flags.sites[stage] if flags.sites else None,
                "tp": grid.tp,
                "cp": grid.cp,
                "dp": grid.dp,
                "ranks": list(layout.stage_ranks(stage)),
                "leaders": [layout.leader(stage, d, c) for d in range(grid.dp) for c in range(grid.cp)],
            }
            for stage, grid in enumerate(layout.stages)
        ],
        "boundaries": [view.as_json() for view in views],
        "traffic": [
            {"from": source, "to": target, "tensors": share, "bytes": num_bytes}
            for (source, target), (share, num_bytes) in site_traffic(flags, views).items()
        ],
    }
