"""Command line: ``python -m vtp_plugin run | plan | draw | simulate | doctor``. Thin: parse, call, print."""

from __future__ import annotations

import argparse
import math
import runpy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import vtp_plugin
from vtp_plugin.config import VtpConfig, choose_cp_sizes, parse_cp_list, parse_dp_list, parse_sites, parse_size_list
from vtp_plugin.errors import ConfigError, VtpError

if TYPE_CHECKING:
    from vtp_plugin.boundary.pipeline import TransportRules
    from vtp_plugin.config import DeviceName
    from vtp_plugin.layout.pipeline import PipelineLayout
    from vtp_plugin.patching import PatchStatus
    from vtp_plugin.schedule import Costs, Placement, Schedule

_REQUIRED_PACKAGES = ("torch", "megatron-core")
_OPTIONAL_PACKAGES = ("torch_npu", "mindspeed", "transformer_engine", "apex")  # they change what Megatron does


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; errors of the plugin are one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
    if options.command is _run:
        # argparse would swallow a "--" that is the script's.
        options.arguments = words[words.index(options.script, 1) + 1 :]
    try:
        options.command(options)
    except VtpError as error:
        if options.command is _run:
            # The exception hook also tells the other ranks.
            raise
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"vtp_plugin: error: {message}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vtp_plugin", description=vtp_plugin.__doc__)
    parser.add_argument("--version", action="version", version=f"vtp_plugin {vtp_plugin.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a Megatron training script under the plugin")
    run.add_argument("script", help="the training script; what follows it is the script's")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="such as --vtp-size-list 1,4,4")
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="print who is where and what crosses, without starting anything")
    _add_layout_options(plan)
    plan.set_defaults(command=_plan)

    draw = commands.add_parser("draw", help="draw a pipeline as SVG")
    _add_layout_options(draw)
    draw.add_argument("--output", type=Path, required=True, help="SVG file to write")
    draw.set_defaults(command=_draw)

    simulate = commands.add_parser("simulate", help="simulate one step of a schedule; nothing is measured")
    _add_simulate_options(simulate)
    simulate.set_defaults(command=_simulate)

    doctor = commands.add_parser("doctor", help="print versions, platform, patches and the table of Megatron options")
    doctor.add_argument("--device", default="auto", help="auto, cuda, npu or cpu")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vtp-size-list", required=True, help="tensor-parallel size of every stage, such as 1,4,4")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: one replica")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--vtp-cp-list", help="context-parallel size of every stage, such as 1,2,2; default: all one")
    parser.add_argument("--vtp-dp-list", help="data-parallel size of every stage, such as 1,2,2; default: all equal")
    parser.add_argument("--vtp-dp-mode", default="multiplex", help="multiplex or split, with --vtp-dp-list")
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true", help="replica-major rank order")
    parser.add_argument("--vtp-transport", default="auto", help="auto, rank0 or sliced")
    parser.add_argument("--vtp-sites", help="site of every stage, such as edge,cloud,cloud")
    parser.add_argument("--ring", action="store_true", help="virtual stages: the last stage sends to the first")


def _add_simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulate one step. Times are in units of the forward of one model chunk of stage 0, the edge; "
        "a backward takes twice its forward."
    )
    parser.add_argument("--schedule", required=True, help="1f1b, interleaved (two chunks on each stage) or u")
    parser.add_argument("--num-stages", type=int, required=True)
    parser.add_argument(
        "--num-microbatches", type=int, required=True, help="of a pipeline; with --vtp-dp-list all replicas' together"
    )
    parser.add_argument("--vtp-dp-list", help="data-parallel size of every stage, such as 1,2,2; default: all equal")
    parser.add_argument("--vtp-dp-mode", default="multiplex", help="multiplex or split, with --vtp-dp-list")
    parser.add_argument(
        "--latency", type=float, default=0.0, help="one way, between stage 0 and other stages; default 0"
    )
    parser.add_argument(
        "--cloud", type=float, help="forward of a chunk of any other stage; default: all stages get equal work"
    )
    parser.add_argument("--limit", type=int, help="u: most microbatches in flight on each stage; default: no limit")
    parser.add_argument(
        "--output", type=Path, help="FILE.svg: picture; FILE.json: trace for Perfetto or Chrome (1 = 1 s)"
    )


def _run(options: argparse.Namespace) -> None:
    script = Path(options.script)
    if not script.is_file():
        _fail(f"script {options.script} does not exist; give the path of the training script")
    vtp_plugin.apply()
    # As Python itself does for a script: its own arguments, and the modules beside it first.
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def _plan(options: argparse.Namespace) -> None:
    from vtp_plugin.boundary.pipeline import Direction, pipeline_boundaries
    from vtp_plugin.layout.replicas import DpMode

    layout = _layout(options)
    rules = _rules(options, layout)
    boundaries = pipeline_boundaries(layout, is_ring=options.ring, rules=rules, dp_mode=DpMode(options.vtp_dp_mode))
    print(layout.describe())
    for boundary in boundaries:
        _, reason = rules.choose(layout, boundary.upstream, boundary.downstream)
        name = boundary.name(Direction.FORWARD) + ("" if boundary.is_shared else f", {boundary.replica_name}")
        print(f"{name}: {boundary.strategy} ({reason})")
        print("  " + boundary.crossing(Direction.FORWARD).probe.describe().replace("\n", "\n  "))


def _draw(options: argparse.Namespace) -> None:
    from vtp_plugin.boundary.draw import draw_pipeline
    from vtp_plugin.layout.replicas import DpMode

    layout = _layout(options)
    mode = DpMode(options.vtp_dp_mode)
    _write(options.output, draw_pipeline(layout, is_ring=options.ring, rules=_rules(options, layout), dp_mode=mode))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}; choose another file") from error
    print(f"wrote {path}")


def _layout(options: argparse.Namespace) -> PipelineLayout:
    from vtp_plugin.layout.pipeline import PipelineLayout, RankOrder

    sizes = parse_size_list(options.vtp_size_list)
    if not isinstance(sizes, tuple):
        raise ConfigError("--vtp-size-list auto needs a running launcher; write the list")
    lists = VtpConfig(
        size_list=sizes,
        cp_list=parse_cp_list(options.vtp_cp_list),
        dp_list=parse_dp_list(options.vtp_dp_list),
        dp_mode=options.vtp_dp_mode,
    )
    cp = choose_cp_sizes(lists.cp_list, options.context_parallel_size, num_stages=len(sizes))
    order = RankOrder.REPLICA_MAJOR if options.use_tp_pp_dp_mapping else RankOrder.STAGE_MAJOR
    least = sum(map(math.prod, zip(sizes, cp, lists.dp_list or (1,) * len(sizes), strict=True)))
    world_size = least if options.world_size is None else options.world_size
    return PipelineLayout.from_sizes(sizes, world_size=world_size, cp=cp, dp=lists.dp_list, order=order)


def _rules(options: argparse.Namespace, layout: PipelineLayout) -> TransportRules:
    from vtp_plugin.boundary.pipeline import TransportRules

    config = VtpConfig(size_list=layout.tp_sizes, transport=options.vtp_transport, sites=parse_sites(options.vtp_sites))
    return TransportRules(transport=config.transport, sites=config.sites or ())


def _simulate(options: argparse.Namespace) -> None:
    from vtp_plugin.schedule import chrome_trace, draw_svg, draw_text, simulate

    kind = options.output.suffix if options.output else ""
    if options.output and kind not in (".svg", ".json"):
        raise ConfigError(f"--output {options.output}: the name must end in .svg (picture) or .json (trace)")
    schedule, costs, reason = _schedule(options)
    timeline = simulate(schedule, costs)
    if kind == ".svg":
        counts = f"{options.num_stages} stages, {options.num_microbatches} microbatches"
        _write(options.output, draw_svg(timeline, title=f"{schedule.name}, {counts}, latency {options.latency:g}"))
    elif kind == ".json":
        _write(options.output, chrome_trace(timeline))
    else:
        placement = schedule.placement
        names = [placement.label(worker).removeprefix("stage ") for worker in range(placement.num_workers)]
        width = max(map(len, ("stage", *names)))
        print(draw_text(timeline), *reason, f"{'stage':>{width}}  in flight  peak activations of its chunks", sep="\n")
        for worker, (name, in_flight) in enumerate(zip(names, timeline.in_flight, strict=True)):
            vstages = placement.vstages(placement.place(worker)[0])
            activations = [str(timeline.activations[vstage]) for vstage in vstages]
            print(f"{name:>{width}}  {in_flight:9}  {', '.join(activations)}")


def _schedule(options: argparse.Namespace) -> tuple[Schedule, Costs, list[str]]:
    """Return the schedule that the flags ask for, its costs, and why it was chosen if there was a choice."""
    from vtp_plugin.schedule import interleaved_one_f_one_b, one_f_one_b, plain_placement, plan_u_shape, u_placement

    num_stages = options.num_stages
    if options.schedule not in ("u", "1f1b", "interleaved"):
        raise ConfigError(f"--schedule {options.schedule!r} is unknown; use one of 1f1b, interleaved, u")
    if options.schedule != "u" and options.limit is not None:
        raise ConfigError(
            f"--limit {options.limit}: the order of {options.schedule} is fixed; "
            "leave the limit out, or use --schedule u, which chooses an order that keeps it"
        )
    if options.schedule == "interleaved":
        if options.vtp_dp_list is not None:
            raise ConfigError(
                "--vtp-dp-list with --schedule interleaved: stages of unequal data parallelism have one chunk"
            )
        schedule = interleaved_one_f_one_b(num_stages, 2, options.num_microbatches)
        return schedule, _costs(options, schedule.placement, equal_work=1.0), []
    place = u_placement if options.schedule == "u" else plain_placement
    placement = place(num_stages, num_replicas=_replicas(options))
    # The edge of the U has two chunks, a cloud stage one.
    costs = _costs(options, placement, equal_work=2.0 if options.schedule == "u" else 1.0)
    num_microbatches, placement, costs = _in_mode(options, placement, costs)
    replicas = placement.num_replicas
    if options.schedule == "1f1b":
        return one_f_one_b(num_stages, num_microbatches, num_replicas=replicas), costs, []
    limits = None if options.limit is None else (options.limit,) * placement.num_workers
    plan = plan_u_shape(num_stages, num_microbatches, costs, num_replicas=replicas, limits=limits)
    return plan.schedule, costs, [plan.reason]


def _replicas(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the replicas of every stage in one of the independent copies of the pipeline that a run consists of."""
    from vtp_plugin.layout.replicas import ReplicaMap

    sizes = VtpConfig(dp_list=parse_dp_list(options.vtp_dp_list), dp_mode=options.vtp_dp_mode).dp_list
    if sizes is None:
        return ()
    if len(sizes) != options.num_stages:
        raise ConfigError(
            f"--vtp-dp-list {options.vtp_dp_list} has {len(sizes)} entries: {options.num_stages} stages need one each"
        )
    return tuple(map(ReplicaMap(dp_sizes=sizes).num_replicas, range(len(sizes))))


def _in_mode(options: argparse.Namespace, placement: Placement, costs: Costs) -> tuple[int, Placement, Costs]:
    """Return what the schedule sees in the chosen mode: microbatches, placement and costs."""
    from vtp_plugin.schedule import split_costs

    num_microbatches, parts = options.num_microbatches, math.lcm(*placement.num_replicas)
    if options.vtp_dp_mode == "multiplex":
        return num_microbatches, placement, costs
    if num_microbatches % parts:
        raise ConfigError(
            f"--num-microbatches {num_microbatches} with --vtp-dp-mode split: {parts} at once run as one, "
            f"and {num_microbatches} mod {parts} = {num_microbatches % parts} must be 0"
        )
    return num_microbatches // parts, replace(placement, num_replicas=()), split_costs(placement, costs)


def _costs(options: argparse.Namespace, placement: Placement, *, equal_work: float) -> Costs:
    from vtp_plugin.schedule import uniform_costs

    cloud = equal_work if options.cloud is None else options.cloud
    forward = tuple(1.0 if stage == 0 else cloud for stage in placement.stages)
    links = zip(placement.stages, placement.stages[1:], strict=False)
    return replace(
        uniform_costs(placement),
        forward=forward,
        backward=tuple(2 * duration for duration in forward),
        latency=tuple(options.latency if 0 in link else 0.0 for link in links),
    )


def _doctor(options: argparse.Namespace) -> None:
    device = VtpConfig(device=options.device).device
    found = {name: _version(name) for name in (*_REQUIRED_PACKAGES, *_OPTIONAL_PACKAGES)}
    shown = [f"{name} {version}" for name, version in found.items() if version]
    print(", ".join([f"vtp_plugin {vtp_plugin.__version__}", *shown, f"Python {sys.version.split()[0]}"]))
    if missing := [name for name in _REQUIRED_PACKAGES if not found[name]]:
        raise VtpError(f"not installed: {', '.join(missing)}; run: pip install {' '.join(missing)}")
    from vtp_plugin.options import format_table
    from vtp_plugin.patching import format_status
    from vtp_plugin.platform import detect

    platform = detect(device)
    print(f"platform: {platform.name}, backend {platform.backend} ({platform.reason})")
    patches = _try_patches(device)
    print(f"patches: {sum(patch.applied for patch in patches)} of {len(patches)} applied, then reverted\n")
    print(f"{format_status(patches)}\n\nMegatron's options with stages of unequal size\n\n{format_table()}")


def _try_patches(device: DeviceName) -> tuple[PatchStatus, ...]:
    """Apply all patches as a run with unequal stages does, note their state, and revert them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about packages that it can do without
        vtp_plugin.apply(vtp_size_list=[1, 2], device=device)
        try:
            return vtp_plugin.status()
        finally:
            vtp_plugin.revert()


def _version(distribution: str) -> str:
    """Return the version of an installed distribution, else an empty string."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
