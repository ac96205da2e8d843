"""What crosses: the boundaries of a pipeline, and bridges between modules (``--bridge``); in words, JSON, pictures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from vtp_plugin.cli.run_flags import Run, check_unknown, read_tensor
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, Collective, CollectiveKind, Transfer
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.channel_spec import PipelineBoundary, pipeline_boundaries
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, boundary_ranks
from vtp_plugin.plan.layout.pipeline_layout import Direction, format_ranks
from vtp_plugin.report.page.report_page import ReportPage, TextTable
from vtp_plugin.report.pictures.draw_pipeline import draw_bridges
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
        has_gradient: whether the backward plan is carried out.
    """

    name: str
    forward: BoundaryPlan
    backward: BoundaryPlan
    itemsize_bytes: int | None
    num_replicas: int = 1
    replica_name: str = ""
    unit_samples: int = 1
    dimensions: tuple[str, ...] = ("S", "B", "H")
    has_gradient: bool = True

    def num_bytes(self, *transfers: Transfer) -> int | None:
        """Return the bytes of messages together; None if the size of the tensor is unknown."""
        if self.itemsize_bytes is None:
            return None
        return sum(transfer.num_elements for transfer in transfers) * self.unit_samples * self.itemsize_bytes

    def share(self, *transfers: Transfer) -> Fraction:
        """Return the share of the whole tensor that messages carry together."""
        return Fraction(sum(transfer.num_elements for transfer in transfers), math.prod(self.forward.src.shape))

    def directions(self) -> dict[str, object]:
        """Return both plans for JSON; None for the backward one where no gradient comes back."""
        back = self._direction(self.backward) if self.has_gradient else None
        return {"forward": self._direction(self.forward), "backward": back}

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
    choice = boundary.strategy, boundary.reason, view.num_replicas, view.has_gradient
    return *choice, transfers, view.forward.finish.kind, *map(len, ends)


def view_boundaries(flags: Run) -> Views:
    """Plan every boundary for the tensor of the run, or for a small one if its shape is unknown."""
    boundaries = pipeline_boundaries(
        flags.layout, is_ring=flags.is_ring, rules=flags.rules, dp_mode=flags.replicas.mode
    )
    by_stages: dict[tuple[int, int], list[PipelineBoundary]] = {}
    for boundary in boundaries:
        by_stages.setdefault((boundary.upstream, boundary.downstream), []).append(boundary)
    return {alike[0]: _view_boundary(flags, alike[0], len(alike)) for alike in by_stages.values()}


def _view_boundary(flags: Run, first: PipelineBoundary, num_replicas: int) -> PlansView:
    forward, backward = (first.channel(direction) for direction in Direction)
    plans = forward.probe, backward.probe
    if flags.shape is not None:
        rows, size, hidden = flags.shape
        # If both stages cut the sequence for context parallelism, each pair of cp ranks carries one part of it.
        rows = rows if first.cp_rank is None else rows // flags.layout.cp_sizes[first.upstream]
        batch = flags.replicas.micro_batch(first.upstream, size) * first.src.num_replicas
        shape, is_sharded = (rows, batch, hidden), flags.is_sharded
        plans = tuple(c.plan(shape, src_sharded=is_sharded, dst_sharded=is_sharded) for c in (forward, backward))
    stages, ends = flags.placement.stages, (first.upstream, first.downstream)
    crossing = (v for v, after in enumerate(flags.placement.successors) if (stages[v], stages[after]) == ends)
    return PlansView(
        has_gradient=any(map(flags.placement.is_trained, crossing)),
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
    if not view.has_gradient:
        yield "no gradient comes back: nothing before it has adapters"
        return
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
        root, others = group[0], f"rank{'s'[: len(group) > 2]} {format_ranks(group[1:])}"
        text = {
            CollectiveKind.SUM: f"ranks {format_ranks(group)} reduce-scatter their values",
            CollectiveKind.GATHER: f"rank {root} gathers the slices of {others}",
            CollectiveKind.BROADCAST: f"rank {root} broadcasts the whole tensor to {others}",
            CollectiveKind.SCATTER: f"rank {root} scatters slices to {others}",
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
        plans = [((up, down), view.forward), *([((down, up), view.backward)] if view.has_gradient else [])]
        for ends, plan in plans if up != down else ():
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


_DIMENSIONS = ("tp", "cp", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of a model, on a grid of its own.

    Attributes:
        name: name of the module.
        sizes: tensor- and context-parallel size, pipeline stages, and data-parallel size, in the order of ranks.
        ranks: all its ranks.
        end: its ranks at the bridge: those of its last stage, or, of the last module, of its first.
    """

    name: str
    sizes: tuple[int, int, int, int]
    ranks: range
    end: BridgeEndpoint

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {size}" for name, size in zip(_DIMENSIONS, self.sizes, strict=True))
        return f"{self.name}: {sizes}"


def add_bridge_flag(parser: argparse.ArgumentParser) -> None:
    """Declare ``--bridge``."""
    parser.add_argument_group("Of modules on grids of their own").add_argument(
        "--bridge",
        nargs="+",
        metavar="NAME=TP,PP,DP",
        help="instead of TP sizes: modules in the order of their ranks, as vision=1,1,3 language=2,1,2, or with a "
        "fourth number, cp; all send to the last one, whose --micro-batch-size counts",
    )


def read_modules(args: argparse.Namespace) -> Sequence[Module]:
    """Read the modules.

    Raises:
        ConfigError: a value is wrong, or flags contradict each other.
    """
    check_unknown(args.unknown)
    if args.vtp_size_list is not None:
        raise ConfigError("--bridge shows modules, --vtp-size-list one pipeline; give one of them")
    modules: list[Module] = []
    for number, word in enumerate(args.bridge, start=1):
        name, _, text = word.partition("=")
        given = [int(part) for part in text.split(",")] if text.replace(",", "").isdigit() else []
        if len(given) not in (3, 4) or min(given) < 1 or not name:
            raise ConfigError(f"--bridge {word}: write NAME=TP,PP,DP or NAME=TP,PP,DP,CP, such as vision=1,1,3")
        tp, pp, dp, cp = (*given, 1)[:4]
        sizes, first = (tp, cp, pp, dp), modules[-1].ranks.stop if modules else 0
        ranks = boundary_ranks(sizes, _DIMENSIONS, first, is_last=number < len(args.bridge))
        all_ranks = range(first, first + math.prod(sizes))
        modules.append(Module(name=name, sizes=sizes, ranks=all_ranks, end=BridgeEndpoint(ranks=ranks)))
    if len({module.name for module in modules}) < max(2, len(modules)):
        raise ConfigError(f"--bridge {' '.join(args.bridge)}: give at least two modules, with different names")
    if args.world_size not in (None, modules[-1].ranks.stop):
        raise ConfigError(
            f"--world-size {args.world_size}, the modules have {modules[-1].ranks.stop} ranks; leave it out"
        )
    return modules


@dataclass(frozen=True, slots=True)
class Bridges:
    """Modules on grids of their own, and the bridges from all others to the last one.

    Attributes:
        modules: the modules, in the order of their ranks.
        views: plans of the bridges, for the tensor of the flags, or for a small one.
    """

    modules: Sequence[Module]
    views: Sequence[PlansView]

    @classmethod
    def read(cls, args: argparse.Namespace) -> Bridges:
        """Read the modules, and plan.

        Raises:
            ConfigError: see :func:`read_modules`; or the batch cannot be cut for the modules.
        """
        *sources, destination = modules = read_modules(args)
        return cls(modules, [_view_bridge(args, source, destination) for source in sources])

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.modules[-1].ranks.stop

    def lines(self) -> Iterator[str]:
        """Write the modules, and what crosses each bridge."""
        rows = [
            (one.name, *map(str, one.sizes), format_ranks(one.ranks), format_ranks(one.end.members))
            for one in self.modules
        ]
        yield from TextTable.aligned(("module", *_DIMENSIONS, "ranks", "ranks at the bridge"), rows).lines
        yield f"world size {self.world_size}"
        if self.views[0].itemsize_bytes is None:
            yield "What crosses: [S, B, H]; give --seq-length, --micro-batch-size and --hidden-size to see bytes."
        for view in self.views:
            num_units = view.forward.src.shape[1]
            counted = f"the batch counts {num_units} unit{'s'[: num_units > 1]}"
            if view.itemsize_bytes is not None:
                each = math.prod(view.forward.src.shape) // num_units * view.unit_samples * view.itemsize_bytes
                counted += f" of {view.unit_samples} sample{'s'[: view.unit_samples > 1]}, {format_bytes(each)} each"
            yield f"bridge {view.name}: {counted}"
            yield from (f"  {line}" for line in explain(view))

    def as_json(self) -> dict[str, object]:
        """Return what :meth:`lines` says, for JSON."""
        return {
            "world_size": self.world_size,
            "modules": [
                {"name": one.name, **dict(zip(_DIMENSIONS, one.sizes, strict=True))}
                | {"ranks": [*one.ranks], "bridge_ranks": one.end.members}
                for one in self.modules
            ],
            "bridges": [
                {
                    "src": source.name,
                    "dst": self.modules[-1].name,
                    "num_units": view.forward.src.shape[1],
                    "unit_samples": None if view.itemsize_bytes is None else view.unit_samples,
                    **view.directions(),
                }
                for source, view in zip(self.modules, self.views, strict=False)
            ],
        }

    def picture(self) -> str:
        """Draw the bridges."""
        *sources, destination = ((str(one), one.end) for one in self.modules)
        plans = [view.forward for view in self.views]
        return draw_bridges(sources, destination, plans, title=f"Bridge {title_of(self.modules)}")

    def page(self) -> ReportPage:
        """Show modules on grids of their own, and the bridges between them."""
        rows = [(one.name, *map(str, one.sizes), f"{one.ranks.start}-{one.ranks.stop - 1}") for one in self.modules]
        return ReportPage(
            title=title_of(self.modules),
            table=TextTable.aligned(("module", *_DIMENSIONS, "ranks"), rows),
            about_table="Modules",
            picture=self.picture(),
            crossing_header=("bridge", "messages", "for each microbatch"),
            crossings=[((view.name, *crossing_cells(view)), [*explain(view)]) for view in self.views],
        )


def _view_bridge(args: argparse.Namespace, source: Module, destination: Module) -> PlansView:
    name, num_replicas = f"{source.name} -> {destination.name}", destination.sizes[3]
    spec = BridgeSpec.between(name, source.end, destination.end, num_dims=3)
    given, itemsize_bytes = read_tensor(args)
    shape, unit_samples = spec.probe.src.shape, 1
    if given is not None:
        shape = (given[0], spec.num_units, given[2])
        unit_samples, rest = divmod(given[1] * num_replicas, spec.num_units)
        if rest:
            raise ConfigError(
                f"--micro-batch-size {given[1]}: the batch of {num_replicas} replicas of "
                f"{destination.name} is no multiple of the {spec.num_units} units in which {name} is counted; use a "
                f"multiple of {spec.num_units // math.gcd(spec.num_units, num_replicas)}"
            )
    return PlansView(
        name=name,
        forward=spec.plan(shape),
        backward=spec.reversed().plan(shape),
        itemsize_bytes=None if given is None else itemsize_bytes,
        unit_samples=unit_samples,
        dimensions=("S", "units", "H"),
    )


def title_of(modules: Sequence[Module]) -> str:
    """Name the modules that send, and the one that they send to."""
    *sources, destination = (one.name for one in modules)
    return f"{' and '.join(sources)} -> {destination}"
