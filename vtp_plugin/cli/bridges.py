"""Bridges between modules on the command line: ``plan --bridge``, ``draw --bridge`` and ``simulate --bridge``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.cli.boundaries import PlansView, crossing_cells, explain, format_bytes
from vtp_plugin.cli.run_flags import check_unknown, read_tensor
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, boundary_ranks
from vtp_plugin.plan.layout.pipeline_layout import format_ranks
from vtp_plugin.report.page.report_page import ReportPage, TextTable
from vtp_plugin.report.pictures.draw_pipeline import draw_bridges

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


def view_bridges(args: argparse.Namespace, modules: Sequence[Module]) -> tuple[PlansView, ...]:
    """Plan the bridges for the tensor of the flags, or for a small one.

    Raises:
        ConfigError: the batch cannot be cut for the modules.
    """
    *sources, destination = modules
    return tuple(_view(args, source, destination) for source in sources)


def _view(args: argparse.Namespace, source: Module, destination: Module) -> PlansView:
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


def bridge_lines(modules: Sequence[Module], views: Sequence[PlansView]) -> Iterator[str]:
    """Write the modules, and what crosses each bridge."""
    rows = [(one.name, *map(str, one.sizes), format_ranks(one.ranks), format_ranks(one.end.members)) for one in modules]
    yield from TextTable.aligned(("module", *_DIMENSIONS, "ranks", "ranks at the bridge"), rows).lines
    yield f"world size {modules[-1].ranks.stop}"
    if views[0].itemsize_bytes is None:
        yield "What crosses: [S, B, H]; give --seq-length, --micro-batch-size and --hidden-size to see bytes."
    for view in views:
        num_units = view.forward.src.shape[1]
        counted = f"the batch counts {num_units} unit{'s'[: num_units > 1]}"
        if view.itemsize_bytes is not None:
            each = math.prod(view.forward.src.shape) // num_units * view.unit_samples * view.itemsize_bytes
            counted += f" of {view.unit_samples} sample{'s'[: view.unit_samples > 1]}, {format_bytes(each)} each"
        yield f"bridge {view.name}: {counted}"
        yield from (f"  {line}" for line in explain(view))


def bridges_as_json(modules: Sequence[Module], views: Sequence[PlansView]) -> dict[str, object]:
    """Return what :func:`bridge_lines` says, for JSON."""
    return {
        "world_size": modules[-1].ranks.stop,
        "modules": [
            {"name": one.name, **dict(zip(_DIMENSIONS, one.sizes, strict=True))}
            | {"ranks": [*one.ranks], "bridge_ranks": one.end.members}
            for one in modules
        ],
        "bridges": [
            {
                "src": source.name,
                "dst": modules[-1].name,
                "num_units": view.forward.src.shape[1],
                "unit_samples": None if view.itemsize_bytes is None else view.unit_samples,
                **view.directions(),
            }
            for source, view in zip(modules, views, strict=False)
        ],
    }


def bridge_picture(modules: Sequence[Module], views: Sequence[PlansView]) -> str:
    """Draw the bridges."""
    *sources, destination = ((str(one), one.end) for one in modules)
    return draw_bridges(
        sources, destination, [view.forward for view in views], title=f"Bridge {bridges_title(modules)}"
    )


def bridges_title(modules: Sequence[Module]) -> str:
    """Name the modules that send, and the one that they send to."""
    *sources, destination = (one.name for one in modules)
    return f"{' and '.join(sources)} -> {destination}"


def page_of_bridges(modules: Sequence[Module], views: Sequence[PlansView]) -> ReportPage:
    """Show modules on grids of their own, and the bridges between them."""
    rows = [(one.name, *map(str, one.sizes), f"{one.ranks.start}-{one.ranks.stop - 1}") for one in modules]
    return ReportPage(
        title=bridges_title(modules),
        table=TextTable.aligned(("module", *_DIMENSIONS, "ranks"), rows),
        about_table="Modules",
        picture=bridge_picture(modules, views),
        crossing_header=("bridge", "messages", "for each microbatch"),
        crossings=[((view.name, *crossing_cells(view)), [*explain(view)]) for view in views],
    )
