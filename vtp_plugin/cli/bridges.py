"""Bridges between modules on the command line: ``plan --bridge``, ``draw --bridge`` and ``simulate --bridge``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from vtp_plugin.cli.boundaries import PlansView, explain, format_bytes
from vtp_plugin.cli.run_flags import check_unknown
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, boundary_ranks
from vtp_plugin.plan.layout.pipeline_layout import format_ranks
from vtp_plugin.report.pictures.draw_pipeline import DrawnModule, draw_bridges

_DIMENSIONS = ("tp", "cp", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of a model, on a grid of its own.

    Attributes:
        name: name of the module.
        sizes: tensor-parallel, context-parallel and data-parallel size, and pipeline stages, in the order of ranks.
        first_rank: first rank of its grid.
    """

    name: str
    sizes: tuple[int, int, int, int]
    first_rank: int

    @property
    def ranks(self) -> range:
        """All ranks of the module."""
        return range(self.first_rank, self.first_rank + math.prod(self.sizes))

    @property
    def num_stages(self) -> int:
        """Number of its pipeline stages."""
        return self.sizes[2]

    def end(self, *, is_last: bool) -> BridgeEndpoint:
        """Return the ranks of its last stage, or of its first."""
        ranks = boundary_ranks(self.sizes, _DIMENSIONS, self.first_rank, is_last=is_last)
        return BridgeEndpoint(ranks=ranks)

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {size}" for name, size in zip(_DIMENSIONS, self.sizes, strict=True))
        return f"{self.name}: {sizes}"


@dataclass(frozen=True, kw_only=True)
class BridgeView(PlansView):
    """A bridge and its plans.

    Attributes:
        source: name of the module that sends activations.
        destination: module that receives them.
        num_units: units in which the batch is counted.
        unit_samples: samples of a unit; None if the batch is not known.
    """

    source: Module
    destination: Module
    num_units: int
    unit_samples: int | None


def add_bridge_flag(parser: argparse.ArgumentParser) -> None:
    """Declare ``--bridge``."""
    parser.add_argument_group("Of modules on grids of their own").add_argument(
        "--bridge",
        nargs="+",
        metavar="NAME=TP,PP,DP",
        help="instead of TP sizes: modules in the order of their ranks, as vision=1,1,3 language=2,1,2, or with a "
        "fourth number, cp; all send to the last one, whose --micro-batch-size counts",
    )


def read_modules(args: argparse.Namespace) -> tuple[Module, ...]:
    """Read the modules.

    Raises:
        ConfigError: a value is wrong, or flags contradict each other.
    """
    check_unknown(args.unknown)
    if args.vtp_size_list is not None:
        raise ConfigError("--bridge shows modules, --vtp-size-list one pipeline; give one of them")
    modules: list[Module] = []
    for word in args.bridge:
        name, _, text = word.partition("=")
        sizes = [int(part) for part in text.split(",")] if text.replace(",", "").isdigit() else []
        if len(sizes) not in (3, 4) or min(sizes) < 1 or not name:
            raise ConfigError(f"--bridge {word}: write NAME=TP,PP,DP or NAME=TP,PP,DP,CP, such as vision=1,1,3")
        tp, pp, dp, cp = (*sizes, 1)[:4]
        first = modules[-1].ranks.stop if modules else 0
        modules.append(Module(name=name, sizes=(tp, cp, pp, dp), first_rank=first))
    if len({module.name for module in modules}) < max(2, len(modules)):
        raise ConfigError(f"--bridge {' '.join(args.bridge)}: give at least two modules, with different names")
    if args.world_size not in (None, modules[-1].ranks.stop):
        raise ConfigError(
            f"--world-size {args.world_size}, the modules have {modules[-1].ranks.stop} ranks; leave it out"
        )
    return tuple(modules)


def view_bridges(args: argparse.Namespace, modules: tuple[Module, ...]) -> tuple[BridgeView, ...]:
    """Plan the bridges for the tensor of the flags, or for a small one.

    Raises:
        ConfigError: the batch cannot be cut for the modules.
    """
    *sources, destination = modules
    return tuple(_view(args, source, destination) for source in sources)


def _view(args: argparse.Namespace, source: Module, destination: Module) -> BridgeView:
    name = f"{source.name} -> {destination.name}"
    spec = BridgeSpec.between(name, source.end(is_last=True), destination.end(is_last=False), num_dims=3)
    given = (args.seq_length, args.micro_batch_size, args.hidden_size)
    if any(number is not None and number < 1 for number in given):
        raise ConfigError("--seq-length, --micro-batch-size and --hidden-size must be at least 1")
    shape, itemsize_bytes, unit_samples = spec.probe.src.shape, None, None
    if all(given):
        unit_samples, rest = divmod(args.micro_batch_size * destination.sizes[3], spec.num_units)
        if rest:
            raise ConfigError(
                f"--micro-batch-size {args.micro_batch_size}: the batch of {destination.sizes[3]} replicas of "
                f"{destination.name} is no multiple of the {spec.num_units} units in which {name} is counted; use a "
                f"multiple of {spec.num_units // math.gcd(spec.num_units, destination.sizes[3])}"
            )
        shape = (args.seq_length, spec.num_units, args.hidden_size)
        itemsize_bytes = unit_samples * (2 if args.fp16 or args.bf16 else 4)
    return BridgeView(
        source=source,
        destination=destination,
        num_units=spec.num_units,
        unit_samples=unit_samples,
        forward=spec.plan(shape),
        backward=spec.reversed().plan(shape),
        itemsize_bytes=itemsize_bytes,
        dimensions=("S", "units", "H"),
    )


def bridge_lines(modules: tuple[Module, ...], views: tuple[BridgeView, ...]) -> Iterator[str]:
    """Write the modules, and what crosses each bridge."""
    rows = [["module", *_DIMENSIONS, "ranks", "ranks at the bridge"]]
    for module in modules:
        end = module.end(is_last=module is not modules[-1])
        rows.append([module.name, *map(str, module.sizes), format_ranks(module.ranks), format_ranks(end.members)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"world size {modules[-1].ranks.stop}"
    if views[0].itemsize_bytes is None:
        yield "What crosses: [S, B, H]; give --seq-length, --micro-batch-size and --hidden-size to see bytes."
    for view in views:
        counted = f"the batch counts {view.num_units} unit{'s' if view.num_units > 1 else ''}"
        if view.unit_samples is not None:
            size = f"{view.unit_samples} sample{'s' if view.unit_samples > 1 else ''}"
            each = math.prod(view.forward.src.shape) // view.num_units * (view.itemsize_bytes or 0)
            counted += f" of {size}, {format_bytes(each)} each"
        yield f"bridge {view.source.name} -> {view.destination.name}: {counted}"
        yield from (f"  {line}" for line in explain(view))


def bridges_as_json(modules: tuple[Module, ...], views: tuple[BridgeView, ...]) -> dict[str, object]:
    """Return what :func:`bridge_lines` says, for JSON."""
    return {
        "world_size": modules[-1].ranks.stop,
        "modules": [
            {
                "name": module.name,
                **dict(zip(_DIMENSIONS, module.sizes, strict=True)),
                "ranks": list(module.ranks),
                "bridge_ranks": list(module.end(is_last=module is not modules[-1]).members),
            }
            for module in modules
        ],
        "bridges": [
            {
                "src": view.source.name,
                "dst": view.destination.name,
                "num_units": view.num_units,
                "unit_samples": view.unit_samples,
                **view.directions(),
            }
            for view in views
        ],
    }


def bridge_picture(modules: tuple[Module, ...], views: tuple[BridgeView, ...]) -> str:
    """Draw the bridges."""
    drawn = [DrawnModule(title=str(one), end=one.end(is_last=one is not modules[-1])) for one in modules]
    *sources, destination = drawn
    title = f"Bridge {' and '.join(view.source.name for view in views)} -> {modules[-1].name}"
    return draw_bridges(sources, destination, [view.forward for view in views], title=title)
