"""Draw bridges between modules as a self-contained SVG: the ranks at the bridge, and what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.bridge_endpoint import BridgeEndpoint
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.arrange import (
    BOX_GAP,
    BOX_HEIGHT,
    BOX_WIDTH,
    BRACKET_WIDTH,
    FRAME_PAD,
    LINE_HEIGHT,
    MARGIN,
    STAGE_GAP,
)
from vtp_plugin.report.pictures.marks import (
    LEGEND_STEP,
    LETTER_WIDTH,
    STYLE,
    TITLE_LETTER_WIDTH,
    heads,
    legend_entry,
    path,
)

_HEADER_HEIGHT = 30
_GAP = STAGE_GAP + 2 * FRAME_PAD
_FRAME_WIDTH = BRACKET_WIDTH + BOX_WIDTH + 2 * FRAME_PAD


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnModule:
    """A module in the picture.

    Attributes:
        title: title above the module's frame.
        end: the module's ranks at the bridge.
    """

    title: str
    end: BridgeEndpoint

    @property
    def frame_height(self) -> int:
        """Height of the frame around its ranks."""
        return len(self.end.members) * (BOX_HEIGHT + BOX_GAP) - BOX_GAP + 2 * FRAME_PAD


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
    >>> left, right = (DrawnModule(title=name, end=end) for name, end in zip("ab", ends))
    >>> from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
    >>> plan = BridgeSpec.between("a -> b", left.end, right.end, num_dims=3).probe
    >>> draw_bridges([left], right, [plan], title="a bridge").count('class="transfer"')
    1
    """
    top = MARGIN + 2 * LINE_HEIGHT
    boxes: dict[int, tuple[int, int]] = {}
    body = [heads(), svg.text(MARGIN, MARGIN + 8, title, "title")]
    below = top
    for module in sources:
        body += _module(module, MARGIN, below, boxes)
        below += _HEADER_HEIGHT + module.frame_height + 2 * BOX_GAP
    height = below - top - 2 * BOX_GAP
    right = MARGIN + _FRAME_WIDTH + _GAP
    own_height = _HEADER_HEIGHT + destination.frame_height
    body += _module(destination, right, top + max(0, height - own_height) // 2, boxes)
    for plan in plans:
        body += _transfers(plan, boxes)
    # Each source's plan ends with the same collective.
    body += _finish(plans[0], boxes)
    legend = [("leader", "first rank of a replica"), ("transfer", "activations, forward; gradients come back alike")]
    if plans[0].finish.groups:
        legend.append(("finish", f"{plans[0].finish.kind} inside the replica after the transfers"))
    bottom = top + max(height, own_height) + LINE_HEIGHT
    for index, (kind, text) in enumerate(legend):
        body += legend_entry(bottom + index * LEGEND_STEP, kind, text)
    width = MARGIN + max(
        right + _FRAME_WIDTH,
        MARGIN + TITLE_LETTER_WIDTH * len(title),
        *(LETTER_WIDTH * (len(t) + 10) for _, t in legend),
    )
    height = bottom + len(legend) * LEGEND_STEP + MARGIN // 2
    names = ", ".join(f"{module.title} ({len(module.end.members)} ranks)" for module in sources)
    count = sum(len(plan.transfers) for plan in plans)
    end = f"{destination.title} ({len(destination.end.members)} ranks)"
    about = f"{names} at the left, {end} at the right; {count} transfers."
    return svg.document(width, height, title=title, about=about, style=STYLE, body=body)


def _module(module: DrawnModule, left: int, top: int, boxes: dict[int, tuple[int, int]]) -> Iterator[str]:
    """Draw title, frame and ranks of a module, and note where its ranks are."""
    yield svg.text(left + _FRAME_WIDTH // 2, top + _HEADER_HEIGHT - 10, module.title, "stage")
    top += _HEADER_HEIGHT
    height = module.frame_height
    yield svg.element("rect", kind="frame", x=left, y=top, width=_FRAME_WIDTH, height=height, rx=10)
    for dp_rank, replica in enumerate(module.end.ranks):
        for cp_rank, row in enumerate(replica):
            for tp_rank, rank in enumerate(row):
                index = module.end.members.index(rank)
                x, y = left + FRAME_PAD + BRACKET_WIDTH, top + FRAME_PAD + index * (BOX_HEIGHT + BOX_GAP)
                boxes[rank] = (x, y)
                place = f"replica {dp_rank}" + f", cp {cp_rank}" * (len(replica) > 1) + f", tp {tp_rank}"
                kind = "member" if tp_rank or cp_rank else "leader"
                yield svg.element("rect", kind=kind, x=x, y=y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=6)
                yield svg.text(x + BOX_WIDTH // 2, y + 18, f"rank {rank}", "rank")
                yield svg.text(x + BOX_WIDTH // 2, y + 34, place, "place")


def _transfers(plan: BoundaryPlan, boxes: Mapping[int, tuple[int, int]]) -> Iterable[str]:
    for transfer in plan.transfers:
        (start_x, start_y), (end_x, end_y) = boxes[transfer.src], boxes[transfer.dst]
        points = [(start_x + BOX_WIDTH, start_y + BOX_HEIGHT // 2), (end_x, end_y + BOX_HEIGHT // 2)]
        yield path(points, "transfer", str(transfer))


def _finish(plan: BoundaryPlan, boxes: Mapping[int, tuple[int, int]]) -> Iterable[str]:
    """Draw the collectives that complete a plan as brackets at the left of the ranks."""
    for group in plan.finish.groups:
        left = boxes[group[0]][0]
        turn, heights = left - BRACKET_WIDTH + 8, [boxes[rank][1] + BOX_HEIGHT - 8 for rank in group]
        yield "<g>" + svg.title_of(f"{plan.finish.kind} among {', '.join(f'rank {rank}' for rank in group)}")
        for height in heights[1:]:
            yield path([(left, heights[0]), (turn, heights[0]), (turn, height), (left, height)], "finish")
        yield path([(turn, heights[0]), (left, heights[0])], "finish")
        yield "</g>"
