"""What a page holds: data that the template draws, section by section, each left out where it is empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table.

    Attributes:
        header: names of the columns.
        rows: cells of each row.
        marked: number of the row that matters most; None for none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOfStage:
    """The ranks of one stage on one node.

    Attributes:
        stage: number of the stage.
        ranks: its ranks, ascending.
    """

    stage: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNode:
    """A node with what runs on it.

    Attributes:
        name: name of the node.
        site: site of its stages; empty where there are none.
        stages: the stages on it with their ranks, in order.
        command: what to start on it, for a shell; empty where that is not known.
    """

    name: str
    site: str
    stages: tuple[RanksOfStage, ...]
    command: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the node."""
        return sum(len(one.ranks) for one in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of the page's table of boundaries: one boundary, or several that are alike.

    Attributes:
        name: name of the boundary.
        cells: cells behind the name.
        lines: who sends what to whom.
    """

    name: str
    cells: tuple[str, ...]
    lines: tuple[str, ...]


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
        command: the command that wrote it.
        title: heading.
        argv: the command line, quoted for a shell.
        notes: sentences below the heading.
        table: the command's table, such as the layouts that were found.
        about_table: heading of the table.
        step: picture of a step, an SVG document.
        about_step: heading of that picture.
        nodes: the nodes with their stages and commands.
        about_nodes: what is to be said of them.
        picture: picture of the pipeline, an SVG document.
        stages: table of the stages.
        crossing_header: names of the columns of `crossings`.
        crossings: what crosses the boundaries.
        about_crossings: what is to be said of them.
        memory: memory of the ranks.
        script: a batch script; empty if none was asked for.
    """

    command: str
    title: str
    argv: str
    notes: tuple[str, ...] = ()
    table: PageTable | None = None
    about_table: str = ""
    step: str = ""
    about_step: str = ""
    nodes: tuple[PageNode, ...] = ()
    about_nodes: tuple[str, ...] = ()
    picture: str = ""
    stages: PageTable | None = None
    crossing_header: tuple[str, ...] = ()
    crossings: tuple[TableRow, ...] = ()
    about_crossings: tuple[str, ...] = ()
    memory: MemorySection | None = None
    script: str = ""

    @property
    def has_commands(self) -> bool:
        """Whether it says what to start."""
        return bool(self.script) or any(node.command for node in self.nodes)
