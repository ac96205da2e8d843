"""What a page holds: data that the template draws, section by section, each left out where it is empty."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from vtp_plugin.plan.launch.launch_commands import Launch, NodeRanks
from vtp_plugin.plan.layout.pipeline_layout import format_ranks, size_names, size_texts

_NUMBER: Final = re.compile(r"-|(\d{1,3}(,\d{3})+|\d+)(\.\d+)?( [A-Za-z%]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Rows that a page or a terminal shows as a table, and other outputs as lines.

    Attributes:
        header: names of the columns.
        rows: cells of each row.
        lines: the lines, the header's first.
        marked: number of the row that matters most; None for none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]
    marked: int | None = None

    @property
    def numeric(self) -> set[int]:
        """The columns of numbers, with or without a unit, which a page aligns at the right."""
        columns = enumerate(zip(*self.rows, strict=True))
        return {number for number, cells in columns if all(map(_NUMBER.fullmatch, cells))}

    @classmethod
    def aligned(
        cls,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        right: Container[int] = (),
        marked: int | None = None,
    ) -> TextTable:
        """Align the cells of each column, at the left unless it is one of `right`.

        Args:
            header: names of the columns.
            rows: cells of each row.
            right: numbers of the columns whose cells are aligned at the right.
            marked: number of the row that matters most.

        >>> TextTable.aligned(("a", "step"), [("1,2", "3 s"), ("4", "")], right=(1,)).lines
        ['a    step', '1,2   3 s', '4']
        >>> TextTable.aligned(("sizes", "rate", "step"), [("1,2", "74,950", "3.5 s"), ("4", "-", "3 s")]).numeric
        {1, 2}
        """
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        form = "  ".join(f"{{:{'>' if n in right else '<'}{width}}}" for n, width in enumerate(widths))
        return cls(
            header=header, rows=rows, lines=[form.format(*row).rstrip() for row in (header, *rows)], marked=marked
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """What ranks that are alike hold, each.

    Attributes:
        label: names the ranks.
        pieces: kind and bytes of each piece.
        limit_bytes: memory of their device; None where it is not known.
    """

    label: str
    pieces: tuple[tuple[str, int], ...]
    limit_bytes: int | None

    @property
    def held_bytes(self) -> int:
        """All bytes that a rank holds."""
        return sum(size for _, size in self.pieces)

    @property
    def fits(self) -> bool:
        """Whether it is not known to be too much."""
        return self.limit_bytes is None or self.held_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """Memory of all ranks.

    Attributes:
        bars: the bars, in the order of the ranks.
        notes: what the bars include, and what is missing.
    """

    bars: tuple[MemoryBar, ...]
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of pieces, in order."""
        return tuple(dict.fromkeys(kind for bar in self.bars for kind, size in bar.pieces if size))

    @property
    def has_limits(self) -> bool:
        """Whether the memory of any device is known."""
        return any(bar.limit_bytes is not None for bar in self.bars)

    def percent(self, num_bytes: int) -> float:
        """Give a length as a share of the longest bar or limit.

        >>> bar = MemoryBar(label="rank 0", pieces=(("weights", 6),), limit_bytes=8)
        >>> MemorySection(bars=(bar,)).percent(6)
        75.0
        """
        longest = max(max(bar.held_bytes, bar.limit_bytes or 0) for bar in self.bars)
        return 100 * num_bytes / longest if longest else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPage:
    """A page.

    Attributes:
        title: heading.
        notes: sentences below the heading.
        table: the command's table, such as the layouts that were found.
        about_table: heading of the table.
        step: picture of a step, an SVG document.
        about_step: heading of that picture.
        launch: the layout on its nodes; without a program where it is not known what is to be started.
        sites: site of every stage; empty where there are none.
        about_nodes: what else is to be said of the nodes.
        picture: picture of the pipeline, an SVG document.
        crossing_header: names of the columns of `crossings`.
        crossings: of each boundary, or several that are alike: its row in the table, and who sends what to whom.
        memory: memory of the ranks.
        is_slurm: whether a batch script is shown.
    """

    title: str
    notes: Sequence[str] = ()
    table: TextTable | None = None
    about_table: str = ""
    step: str = ""
    about_step: str = ""
    launch: Launch | None = None
    sites: Sequence[str] = ()
    about_nodes: Sequence[str] = ()
    picture: str = ""
    crossing_header: Sequence[str] = ()
    crossings: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    memory: MemorySection | None = None
    is_slurm: bool = False

    def site_of(self, node: NodeRanks) -> str:
        """Name the site of a node's stages, or several; empty where there are none."""
        assert self.launch is not None
        return " and ".join(dict.fromkeys(self.sites[stage] for stage in node.stages(self.launch.layout) if self.sites))

    @property
    def stages(self) -> TextTable:
        """A row for each stage."""
        assert self.launch is not None
        layout, sites = self.launch.layout, self.sites
        rows = [
            (str(stage), *sites[stage : stage + 1], *size_texts(layout, stage), format_ranks(layout.stage_ranks(stage)))
            for stage in range(layout.num_stages)
        ]
        return TextTable.aligned(("stage", *("site" for _ in sites[:1]), *size_names(layout), "ranks"), rows)
