"""A layout for people: its table, and ranks as short texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.grids import RankOrder
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

_MAX_RUNS_SHOWN = 6


def describe_layout(layout: PipelineLayout, *, writer_rank: int | None = None, layers: Sequence[str] = ()) -> str:
    """Return a table: one line per stage, then which rank writes the log.

    Args:
        layout: the stages.
        writer_rank: rank that reports, if it is not :attr:`PipelineLayout.writer_rank`.
        layers: numbers of layers of every stage; empty if they are not known.

    >>> print(describe_layout(PipelineLayout.from_sizes([1, 2], world_size=6), layers=["2", "1+3"]))
    stage  tp  cp  dp  layers  ranks  leaders
        0   1   1   2       2  0-1    0-1
        1   2   1   2     1+3  2-5    2,4
    rank 5 writes the log

    Sizes of experts stand there where they are others than those of the stage:

    >>> print(describe_layout(PipelineLayout.from_sizes([1, 2], world_size=3, ep=[1, 2], etp=1)))
    stage  tp  cp  dp  etp  ep  edp  ranks  leaders
        0   1   1   1    1   1    1  0      0
        1   2   1   1    1   2    1  1-2    1
    rank 2 writes the log
    """
    rows = [["stage", *size_names(layout), *(["layers"] if layers else []), "ranks", "leaders"]]
    for stage, grid in enumerate(layout.stages):
        leaders = (layout.leader(stage, d, c) for d in range(grid.dp) for c in range(grid.cp))
        sizes = (*size_texts(layout, stage), *layers[stage : stage + 1])
        rows.append([str(stage), *sizes, format_ranks(layout.stage_ranks(stage)), format_ranks(leaders)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [f"{{:>{width}}}" for width in widths[:-2]] + [f"{{:<{widths[-2]}}}", "{}"]
    lines = ["  ".join(columns).format(*row) for row in rows]
    writer_rank = layout.writer_rank if writer_rank is None else writer_rank
    order = f"ranks are numbered in the order {layout.order}; " if layout.order is not RankOrder.STAGE_MAJOR else ""
    return "\n".join([*lines, f"{order}rank {writer_rank} writes the log"])


def format_layers(stages: Iterable[Iterable[Chunk]]) -> tuple[str, ...]:
    """Write how many layers each stage has, chunk by chunk.

    >>> from vtp_plugin.plan.layout.chunks import u_chunks
    >>> format_layers(u_chunks((1, 2, 1)))
    ('1+1', '2')
    """
    return tuple(join_layers(len(chunk.layers) for chunk in chunks) for chunks in stages)


def join_layers(numbers: Iterable[int]) -> str:
    """Write the numbers of layers of the chunks of a stage, without those that have none."""
    return "+".join(str(number) for number in numbers if number) or "0"


def size_names(layout: PipelineLayout) -> tuple[str, ...]:
    """Return the names of a stage's sizes; experts are named where they have sizes of their own.

    >>> size_names(PipelineLayout.from_sizes([1, 2], world_size=3))
    ('tp', 'cp', 'dp')
    """
    return ("tp", "cp", "dp", *(("etp", "ep", "edp") if layout.has_expert_groups else ()))


def size_texts(layout: PipelineLayout, stage: int) -> tuple[str, ...]:
    """Return the sizes of a stage, as texts in the order of :func:`size_names`.

    >>> size_texts(PipelineLayout.from_sizes([1, 2], world_size=3), 1)
    ('2', '1', '1')
    """
    grid, expert = layout.stages[stage], layout.experts[stage]
    sizes = grid.tp, grid.cp, grid.dp, *((expert.tp, expert.ep, expert.dp) if layout.has_expert_groups else ())
    return tuple(map(str, sizes))


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks for people: consecutive ranks become ranges, and a long list ends with the total count.

    >>> format_ranks([0, 1, 2, 5, 8, 9])
    '0-2,5,8-9'
    >>> format_ranks(range(0, 40, 2))
    '0,2,4,6,8,10,... (20 ranks)'
    """
    runs: list[list[int]] = []
    total = 0
    for rank in ranks:
        total += 1
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS_SHOWN]]
    if len(runs) > _MAX_RUNS_SHOWN:
        shown.append(f"... ({total} ranks)")
    return ",".join(shown)
