"""Pictures of pipelines and of bridges between modules."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, product

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind
from vtp_plugin.plan.boundary.channel_spec import PipelineBoundary
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.arrange import (
    BADGE_HEIGHT,
    BOX_GAP,
    BOX_HEIGHT,
    BOX_WIDTH,
    BRACKET_WIDTH,
    FRAME_PAD,
    LEGEND_STEP,
    LETTER_WIDTH,
    LINE_HEIGHT,
    MARGIN,
    STAGE_GAP,
    STYLE,
    TITLE_LETTER_WIDTH,
    Picture,
    Point,
    arrange,
    badge,
    badge_width,
    has_finish,
    heads,
    labels,
    legend_entry,
    path,
    straight,
    way_of,
)

_HEADER_HEIGHT = 30
_GAP = STAGE_GAP + 2 * FRAME_PAD
_FRAME_WIDTH = BRACKET_WIDTH + BOX_WIDTH + 2 * FRAME_PAD


Box = tuple[int, int]
"""Upper left corner of a rank's box."""
DrawnModule = tuple[str, BridgeEndpoint]
"""A module in a picture of bridges: the title above its frame, and its ranks at the bridge."""


def draw_bridges(
    sources: Sequence[DrawnModule], destination: DrawnModule, plans: Sequence[BoundaryPlan], *, title: str
) -> str:
    """Draw the sources below each other at the left, the destination at the right, and the forward transfers.

    Args:
        sources: the modules that send.
        destination: the module that all of them send to.
        plans: plans of the activations, one for each source.
        title: title of the picture.

    Returns:
        An SVG document; marks as in :func:`vtp_plugin.report.pictures.draw_pipeline.draw_pipeline`.

    >>> ends = [BridgeEndpoint(ranks=(((rank,),),)) for rank in range(2)]
    >>> from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
    >>> plan = BridgeSpec.between("a -> b", *ends, num_dims=3).probe
    >>> draw_bridges([("a", ends[0])], ("b", ends[1]), [plan], title="a bridge").count('class="transfer"')
    1
    """
    top = MARGIN + 2 * LINE_HEIGHT
    boxes: dict[int, Box] = {}
    body = [heads(), svg.text(MARGIN, MARGIN + 8, title, "title")]
    below = top
    for module in sources:
        body += _module(module, MARGIN, below, boxes)
        below += _module_height(module) + 2 * BOX_GAP
    height, own_height = below - top - 2 * BOX_GAP, _module_height(destination)
    right = MARGIN + _FRAME_WIDTH + _GAP
    body += _module(destination, right, top + max(0, height - own_height) // 2, boxes)
    for transfer in (transfer for plan in plans for transfer in plan.transfers):
        body.append(path(straight(boxes[transfer.src], boxes[transfer.dst]), "transfer", str(transfer)))
    # Each source's plan ends with the same collective.
    body += _finish(plans[0].finish.kind, plans[0].finish.groups, boxes.__getitem__)
    legend = [("leader", "first rank of a replica"), ("transfer", "activations, forward; gradients come back alike")]
    if plans[0].finish.groups:
        legend.append(("finish", f"{plans[0].finish.kind} inside the replica after the transfers"))
    bottom = _add_legend(body, legend, top + max(height, own_height) + LINE_HEIGHT)
    widths = [TITLE_LETTER_WIDTH * len(title), *(LETTER_WIDTH * (len(text) + 10) - MARGIN for _, text in legend)]
    width = MARGIN + max(right + _FRAME_WIDTH, MARGIN + max(widths))
    *names, end = (f"{name} ({len(of_module.members)} ranks)" for name, of_module in (*sources, destination))
    count = sum(len(plan.transfers) for plan in plans)
    about = f"{', '.join(names)} at the left, {end} at the right; {count} transfers."
    return svg.document(width, bottom, title=title, about=about, style=STYLE, body=body)


def _module_height(module: DrawnModule) -> int:
    return _HEADER_HEIGHT + len(module[1].members) * (BOX_HEIGHT + BOX_GAP) - BOX_GAP + 2 * FRAME_PAD


def _module(module: DrawnModule, left: int, top: int, boxes: dict[int, Box]) -> Iterator[str]:
    """Draw title, frame and ranks of a module, and note where its ranks are."""
    title, end = module
    yield svg.text(left + _FRAME_WIDTH // 2, top + _HEADER_HEIGHT - 10, title, "stage")
    yield _frame(left, top + _HEADER_HEIGHT, _FRAME_WIDTH, _module_height(module) - _HEADER_HEIGHT)
    first_box = top + _HEADER_HEIGHT + FRAME_PAD
    for dp_rank, replica in enumerate(end.ranks):
        for cp_rank, row in enumerate(replica):
            for tp_rank, rank in enumerate(row):
                number = end.members.index(rank)
                boxes[rank] = left + FRAME_PAD + BRACKET_WIDTH, first_box + number * (BOX_HEIGHT + BOX_GAP)
                place = f"replica {dp_rank}" + f", cp {cp_rank}" * (len(replica) > 1) + f", tp {tp_rank}"
                yield from _box(boxes[rank], "member" if tp_rank or cp_rank else "leader", f"rank {rank}", place)


def _frame(left: int, top: int, width: int, height: int) -> str:
    return svg.element("rect", kind="frame", x=left, y=top, width=width, height=height, rx=10)


def _box(corner: Box, kind: str, name: str, place: str) -> Iterator[str]:
    """Draw one rank, or the ranks that share a box."""
    left, top = corner
    yield svg.element("rect", kind=kind, x=left, y=top, width=BOX_WIDTH, height=BOX_HEIGHT, rx=6)
    yield svg.text(left + BOX_WIDTH // 2, top + 18, name, "rank")
    yield svg.text(left + BOX_WIDTH // 2, top + 34, place, "place")


def _finish(kind: CollectiveKind, groups: Iterable[Sequence[int]], box_of: Callable[[int], Box]) -> Iterator[str]:
    """Draw the collectives that complete a plan as brackets at the left of the ranks.

    Arrows of a broadcast lead from its root to the other ranks, those of an all-gather to every rank.
    """
    low = BOX_HEIGHT - 8
    # Before an all-gather a transfer ends in the middle of every box, so the bracket enters lower.
    entry = low if kind is CollectiveKind.ALL_GATHER else BOX_HEIGHT // 2
    for group in groups:
        left, top = box_of(group[0])
        turn = left - BRACKET_WIDTH + 8
        yield "<g>" + svg.title_of(f"{kind} among {', '.join(f'rank {rank}' for rank in group)}")
        start = (left, top + low)
        for box_top in dict.fromkeys(box_of(rank)[1] for rank in group[1:]):
            end = (left, box_top + entry)
            yield path([start, (turn, start[1]), (turn, end[1]), end], "finish")
        if kind is CollectiveKind.ALL_GATHER:
            yield path([(turn, start[1]), start], "finish")
        yield "</g>"


def _add_legend(body: list[str], legend: Sequence[tuple[str, str]], top: int) -> int:
    """Explain the marks below a picture, and return where it ends."""
    for index, (kind, text) in enumerate(legend):
        body += legend_entry(top + index * LEGEND_STEP, kind, text)
    return top + len(legend) * LEGEND_STEP + MARGIN // 2


_TEXT_COLUMNS = 78  # of a line of the title


def draw_pipeline(
    layout: PipelineLayout,
    *,
    is_ring: bool = False,
    rules: TransportRules | None = None,
    dp_mode: DpMode = DpMode.MULTIPLEX,
    num_rings: int = 0,
) -> str:
    """Draw the stages side by side, every rank as a box, and the forward transfers of the plans as arrows.

    Stages that do not fit beside each other continue in a band below, unless replicas mix. Replicas are stacked. If
    there are more than four, or many ranks, one of each stage is drawn, with the number of those that are like it. Of a
    stage with many ranks the picture shows the first few and the last.

    Args:
        layout: the pipeline layout.
        is_ring: whether the last stage sends to the first, as with virtual stages.
        rules: how the transport of every boundary is chosen, and the sites; by default the automatic choice inside one
            site.
        dp_mode: how stages of different data-parallel sizes work together.
        num_rings: number of times that a microbatch passes the cloud, if the first stage also holds the last layers;
            else 0.

    Returns:
        An SVG document (see :mod:`vtp_plugin.report.pictures.svg`). Transfers are paths of the class `transfer`, each
        with a title such as `rank 0 to rank 1`; boxes have the class `leader` or `member`. Equal arguments give equal
        text.

    Raises:
        ConfigError: the dp sizes cannot be joined, or the rules do not fit a boundary.

    >>> svg = draw_pipeline(PipelineLayout.from_sizes((1, 2), world_size=3))
    >>> svg.count('class="transfer"'), svg.count("<title>rank 0 to rank 1</title>")
    (2, 1)
    """
    title, subtitle = _titles(layout, dp_mode, num_rings)
    head = [*((line, "title") for line in textwrap.wrap(title, _TEXT_COLUMNS)), (subtitle, "")]
    picture = arrange(
        layout,
        is_ring=is_ring or num_rings > 0,
        rules=rules or TransportRules(),
        dp_mode=dp_mode,
        head_height=len(head) * LINE_HEIGHT,
    )
    legend = _legend(picture)
    body = [heads()]
    body += [svg.text(MARGIN, MARGIN + 8 + i * LINE_HEIGHT, text, kind) for i, (text, kind) in enumerate(head)]
    is_split = dp_mode is DpMode.SPLIT
    body += [*_headers(picture), *_rows(picture), *_arrows(picture, num_rings, is_split=is_split), *_badges(picture)]
    height = _add_legend(body, legend, picture.bottom)
    # The most that each text can take; a mark of the legend takes as much as six letters.
    widths = [(TITLE_LETTER_WIDTH if kind else LETTER_WIDTH) * len(text) for text, kind in head]
    widths += [LETTER_WIDTH * (len(text) + 6) for _, text in legend]
    width = max(picture.frames_right + picture.wrap_room, MARGIN + max(widths)) + MARGIN
    about = "; ".join(_about(picture))
    return svg.document(width, height, title=f"{title}: {_counts(layout)}", about=f"{about}.", style=STYLE, body=body)


def _about(picture: Picture) -> Iterator[str]:
    """Say in words what is drawn: the stages, and how each sends to the next one."""
    for stage, grid in enumerate(picture.layout.stages):
        ranks = picture.layout.tp_ranks(stage, 0, 0)
        site = f" at {picture.sites[stage]}" if picture.sites else ""
        times = f", one of {grid.dp * grid.cp} alike" if grid.dp * grid.cp > 1 else ""
        yield f"stage {stage}{site}: {_counted(grid.tp, 'rank')}, from {ranks[0]} to {ranks[-1]}{times}"
    seen: set[tuple[int, int]] = set()
    for drawn in picture.boundaries:
        ends = drawn.upstream, drawn.downstream
        if ends not in seen:
            seen.add(ends)
            yield f"stage {ends[0]} sends to stage {ends[1]} {way_of(drawn)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _arrows(picture: Picture, num_rings: int, *, is_split: bool) -> Iterator[str]:
    """Draw what crosses, after all boxes: what is painted last lies on top."""
    lines: list[Sequence[Point]] = []
    for drawn in picture.boundaries:
        yield from _transfers(picture, drawn, lines)
        finish = drawn.forward.finish
        yield from _finish(finish.kind, filter(lambda group: picture.is_drawn(group[0]), finish.groups), picture.box)
    yield from labels(picture, lines, num_rings, is_split=is_split)


def _titles(layout: PipelineLayout, dp_mode: DpMode, num_rings: int) -> tuple[str, str]:
    """Return the flags that the picture shows, and what they mean."""
    title, what = f"--vtp-size-list {_commas(layout.tp_sizes)}", "tensor-parallel size"
    if len(set(layout.cp_sizes)) > 1:
        title, what = f"{title} --vtp-cp-list {_commas(layout.cp_sizes)}", "parallel sizes"
    if len(set(layout.dp_sizes)) > 1:
        title, what = f"{title} --vtp-dp-list {_commas(layout.dp_sizes)} --vtp-dp-mode {dp_mode}", "parallel sizes"
    if num_rings:
        title += " --layerwise-disaggregated-training"
    return title, _counts(layout) + ("" if layout.is_uniform else f"; every stage has its own {what}")


def _commas(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _counts(layout: PipelineLayout) -> str:
    """Count stages, ranks and replicas; the parts of one sequence (context parallelism) count as one replica."""
    parts = [(layout.num_stages, "stage"), (layout.world_size, "rank")]
    if max(layout.dp_sizes) > 1 and len(set(layout.dp_sizes)) == 1:
        parts.append((layout.dp_sizes[0], "replica"))
    text = ", ".join(_counted(number, noun) for number, noun in parts)
    if len(set(layout.dp_sizes)) > 1:
        text += f", from {min(layout.dp_sizes)} to {max(layout.dp_sizes)} replicas of a stage"
    return text


def _headers(picture: Picture) -> Iterable[str]:
    """Write the title of every stage above its column, and the sites above the titles."""
    rows = [row for row in range(len(picture.replicas)) if picture.has_header(row)]
    for row, band in product(rows, range(picture.num_bands)):
        y = picture.band_top(row, band) + picture.header_height - 10
        stages = picture.stages_of(band)
        for stage in stages:
            grid = picture.layout.stages[stage]
            middle = picture.frame_lefts[stage] + picture.frame_width(stage) // 2
            size = f"tp {grid.tp}" + (f", cp {grid.cp}" if len(set(picture.layout.cp_sizes)) > 1 else "")
            size += f", dp {grid.dp}" if len(set(picture.layout.dp_sizes)) > 1 else ""
            yield svg.text(middle, y, f"stage {stage} - {size}", "stage")
        for site, group in groupby(stages, key=lambda stage: picture.sites[stage]) if picture.sites else ():
            members = list(group)
            left, right = picture.frame_lefts[members[0]], picture.frame_lefts[members[-1]]
            right += picture.frame_width(members[-1])
            yield svg.text((left + right) // 2, y - 32, f"site {site}", "site")
            yield path([(left, y - 18), (left, y - 25), (right, y - 25), (right, y - 18)], "site")


def _rows(picture: Picture) -> Iterable[str]:
    """Draw every replica: its frames and boxes, and a label if there are several."""
    layout = picture.layout
    for row, (dp_rank, cp_rank) in enumerate(picture.replicas):
        for band in range(picture.num_bands) if picture.has_row_labels else ():
            y = picture.frame_top(row, band) - (BADGE_HEIGHT if picture.is_cut else 8)
            yield svg.text(picture.frame_lefts[0], y, _row_label(picture, dp_rank, cp_rank))
        for stage in range(layout.num_stages):
            if not picture.has_frame(row, stage):
                continue
            left, top = picture.frame_lefts[stage], picture.frame_top(row, picture.band(stage))
            width, height = picture.frame_width(stage), picture.frame_height(len(picture.boxes[stage]))
            for distance in (5, 10)[: picture.times(stage) - 1]:
                right, bottom = left + width + distance, top + height + distance
                corner = [(right - 8, bottom), (right, bottom - 8)]
                yield path([(left + 8 + distance, bottom), *corner, (right, top + 8 + distance)], "behind")
            yield _frame(left, top, width, height)
            ranks = layout.tp_ranks(stage, dp_rank, cp_rank)
            for first, last in picture.boxes[stage]:
                kind, name, place = "member", f"rank {ranks[first]}", f"tp {first}"
                if first == 0:
                    kind, place = "leader", "tp 0, leader"
                if last != first:
                    kind, name = "hidden", f"{last - first + 1} ranks"
                    place = f"ranks {ranks[first]} to {ranks[last]}"
                yield from _box(picture.box(ranks[first]), kind, name, place)


def _row_label(picture: Picture, dp_rank: int, cp_rank: int) -> str:
    """Name a replica, and state how many there are unless all are drawn."""
    num_dp, num_cp = max(picture.layout.dp_sizes), max(picture.layout.cp_sizes)
    label = f"replica {dp_rank}" + (f", context-parallel rank {cp_rank}" if num_cp > 1 else "")
    if len(picture.replicas) == len(picture.layout.replicas):
        return label
    if not picture.layout.has_equal_replicas:
        return f"{label} of each stage"
    return f"{label} of {num_dp} replicas" + (f" x {num_cp} context-parallel ranks" if num_cp > 1 else "")


def _badges(picture: Picture) -> Iterable[str]:
    """Write on the frames how many replicas they stand for."""
    for row, stage in product(range(len(picture.replicas)), range(picture.layout.num_stages)):
        if picture.has_frame(row, stage) and picture.times(stage) > 1:
            text = f"x {picture.times(stage)}"
            left = picture.frame_lefts[stage] + picture.frame_width(stage) - badge_width(text) - 8
            yield from badge(left, picture.frame_top(row, picture.band(stage)) - BADGE_HEIGHT // 2, text)


def _transfers(picture: Picture, drawn: PipelineBoundary, lines: list[Sequence[Point]]) -> Iterable[str]:
    """Draw the arrows of one boundary, and add them to `lines`."""
    edges = picture.edges(drawn)
    for index, (src, dst, number) in enumerate(edges):
        points = picture.way_across(src, dst)
        if picture.goes_round(drawn):
            start, end = points[0], points[-1]
            right, bottom, left = picture.way_round(drawn, src, index, len(edges))
            points = [start, (right, start[1]), (right, bottom), (left, bottom), (left, end[1]), end]
        lines.append(points)
        if picture.is_shown(src) and picture.is_shown(dst):
            yield path(points, "transfer", f"rank {src} to rank {dst}")
        else:
            yield path(points, "transfer many", f"{number} transfer{'s' if number > 1 else ''}")


def _legend(picture: Picture) -> tuple[tuple[str, str], ...]:
    """Return the kinds of marks in the picture that need an explanation, and the explanation."""
    entries = [("leader", "leader: tensor-parallel rank 0 of a stage")]
    if any(first != last for boxes in picture.boxes for first, last in boxes):
        entries.append(("hidden", "ranks that are not drawn one by one; dashed: their transfers"))
    if picture.is_cut:
        entries.append(("badge", "number of replicas that are alike; one of them is drawn"))
    if picture.boundaries:
        entries.append(("transfer", "activations, forward; gradients come back alike"))
    if any(has_finish(drawn) for drawn in picture.boundaries):
        kinds = " or ".join(sorted({one.forward.finish.kind for one in picture.boundaries if has_finish(one)}))
        entries.append(("finish", f"{kinds} inside the stage after the transfers"))
    return tuple(entries)
