"""`vtp plan` and `vtp draw`: the plan of a layout, its memory, its picture."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

from vtp_plugin.cli.boundaries import (
    Bridges,
    Views,
    add_bridge_flag,
    explain,
    format_bytes,
    pattern_of,
    site_traffic,
    view_boundaries,
)
from vtp_plugin.cli.command_base import (
    PAGE,
    Parser,
    add_output_flag,
    check_ending,
    named,
    print_answer,
    read_sizes,
    with_values,
    write_file,
    written,
)
from vtp_plugin.cli.for_frameworks import add_for_flag, framework_lines
from vtp_plugin.cli.launch_text import add_slurm_flag, launch_lines, launch_of_run
from vtp_plugin.cli.page_sections import (
    memory_as_json,
    memory_lines,
    peaks_by_stage,
    picture_of,
    with_run,
    write_output,
)
from vtp_plugin.cli.run_flags import Run, add_run_flags, read_run
from vtp_plugin.cli.search_request import Fitted
from vtp_plugin.config.flag import format_value
from vtp_plugin.config.resolve import option_context
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.checks.batch import describe_batches
from vtp_plugin.plan.boundary.channel_spec import PipelineBoundary
from vtp_plugin.plan.launch.launch_commands import Launch, named_nodes
from vtp_plugin.plan.layout.pipeline_layout import (
    Direction,
    PipelineLayout,
    RankOrder,
    format_ranks,
    size_names,
    size_texts,
)
from vtp_plugin.report.page.report_page import ReportPage, TextTable
from vtp_plugin.report.pictures.svg import is_document

_OWN_NAME = "pipeline.svg"
_HEAD = 4096  # characters, in which title and style of a picture stand


def add_draw_arguments(parser: Parser) -> None:
    """Declare the flags."""
    add_run_flags(parser)
    add_bridge_flag(parser)
    group = parser.add_argument_group("Of the picture")
    about = f"file to write; default: {_OWN_NAME}, which replaces only an earlier picture"
    add_output_flag(group, "FILE.svg", about)
    parser.epilog = (
        "Keys of --json: output (file), num_stages, world_size, num_replicas; with --bridge: output, num_modules, "
        "world_size."
    )


def run_draw(options: argparse.Namespace) -> None:
    """Draw and write."""
    check_ending(options.output, {".svg": "picture"})
    options = with_values(options, output=options.output or _own_file())
    if options.bridge is not None:
        bridges = Bridges.read(options)
        picture = bridges.picture()
        answer = {"num_modules": len(bridges.modules), "world_size": bridges.world_size}
    else:
        flags = read_run(options)
        picture = picture_of(flags)
        answer = named(flags.layout, "num_stages", "world_size") | {"num_replicas": max(flags.layout.dp_sizes)}
    write_file(options.output, picture)
    print_answer(options, {"output": options.output, **answer}, written(options))


def _own_file() -> Path:
    """Give the file that is written where none is named.

    Raises:
        ConfigError: there is another file of that name.
    """
    path = Path(_OWN_NAME)
    if os.path.lexists(path):
        text = ""
        if path.is_file():
            with path.open(encoding="ascii", errors="replace") as file:
                text = file.read(_HEAD)
        if not is_document(text):
            raise ConfigError(
                f"{path} is no picture of this plugin; without --output only such a picture is overwritten; "
                "give --output FILE.svg"
            )
    return path


_MAX_STAGES_UNFOLDED = 12
_MAX_LINES = 60
_MAX_BUFFERS_SHOWN = 3


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    add_run_flags(parser)
    group = parser.add_argument_group("Of the nodes")
    group.add_argument(
        "--nodes",
        type=read_sizes,
        metavar="8,6",
        help="devices of every node, in the order of the ranks, for what to start on each; default: one node if "
        "eight devices suffice, else one for each stage",
    )
    add_slurm_flag(group)
    add_for_flag(group)
    add_output_flag(group, "FILE.html", "a page with all of it, to open in a browser")
    add_bridge_flag(parser)
    parser.epilog = _answer.__doc__


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    check_ending(options.output, {PAGE: "page"})
    if options.bridge is not None:
        if options.nodes is not None or options.slurm:
            raise ConfigError("--nodes and --slurm are for one pipeline, not for --bridge; leave them out")
        bridges = Bridges.read(options)
        write_output(options, {PAGE: bridges.page})
        print_answer(options, bridges.as_json(), chain(bridges.lines(), written(options)))
        return
    flags = read_run(options)
    views = view_boundaries(flags)
    launch, note = launch_of_run(options, flags)
    start = [*_start(options, flags, launch, note)]
    write_output(options, {PAGE: lambda: _page(options, flags, views, launch, note)})
    answer = _answer(flags, views) | {"launch": launch.as_json(is_slurm=options.slurm)}
    start += written(options)
    print_answer(options, answer, chain(_plan_lines(flags, views, _MAX_LINES - len(start)), start))


def _start(options: argparse.Namespace, flags: Run, launch: Launch, note: str) -> Iterator[str]:
    if options.framework is None:
        yield from ("", *launch_lines(launch, note, is_slurm=options.slurm))
        return
    if flags.fitted is None:
        raise ConfigError("--for with sizes that were given; it writes a layout that is found; give --have 8,6,8")
    stock = flags.fitted.stock
    of_stock = None
    if stock is not None:
        layout = PipelineLayout.from_sizes(
            stock.sizes,
            world_size=stock.num_cards,
            dp=(stock.num_replicas,) * len(stock.sizes),
            cp=max(flags.layout.cp_sizes),
        )
        of_stock = stock, Launch(layout=layout, nodes=named_nodes(stock.node_names, layout), program=())
    best = flags.fitted.candidate, launch
    yield from framework_lines(options.framework, best, of_stock, note, is_slurm=options.slurm)


def _page(options: argparse.Namespace, flags: Run, views: Views, launch: Launch, note: str) -> ReportPage:
    """Show a layout: nodes, what crosses, memory, commands."""
    page = ReportPage(
        title=option_context(flags.config, flags.layout).layout_text,
        notes=[*_about(flags), *_of_ranks(flags), *_traffic(flags, views)],
        launch=launch,
        about_nodes=note.splitlines(),
        is_slurm=options.slurm,
    )
    return with_run(page, flags, views, options.card_memory, peaks_by_stage(flags))


def _plan_lines(flags: Run, views: Views, most: int) -> list[str]:
    """Write the plan in so many lines: first the messages of each boundary are left out, then the end."""
    head = [*_about(flags), *_stages(flags), *memory_lines(flags), *_tensor(flags)]
    sums = [*_buffers(views), *_traffic(flags, views)]
    for is_short in (False, True):
        lines = [*head, *_boundaries(flags, views, is_short=is_short), *sums]
        if len(lines) <= most:
            return lines
    return [*lines[: most - 1], f"... {len(lines) - most + 1} more lines; --json has everything"]


def _about(flags: Run) -> Sequence[str]:
    return () if flags.fitted is None else flags.fitted.reasons


def _writer(flags: Run) -> int:
    """Return the rank that reports the loss: in a U the edge has it, else the last stage."""
    layout = flags.layout
    return layout.leader(0, 0, 0) if flags.config.layerwise_disaggregated else layout.writer_rank


def _stages(flags: Run) -> Iterator[str]:
    """Write the table of the stages; in a long one, equal stages in a row are one line."""
    layout, sites = flags.layout, flags.sites
    kinds = [(grid, layout.experts[stage], sites[stage] if sites else "") for stage, grid in enumerate(layout.stages)]
    does_fold = layout.num_stages > _MAX_STAGES_UNFOLDED
    runs = groupby(range(layout.num_stages), key=lambda stage: kinds[stage] if does_fold else stage)
    header = ["stage", *("site" for _ in sites[:1]), *size_names(layout), "ranks", "leaders"]
    rows = [_row(layout, list(stages), sites) for _, stages in runs]
    yield from TextTable.aligned(header, rows, right=range(len(header) - 2)).lines
    yield from _of_ranks(flags)


def _of_ranks(flags: Run) -> Iterator[str]:
    """Say how many ranks there are, and whether the plugin is needed."""
    layout = flags.layout
    yield f"world size {layout.world_size}, rank order {layout.order}; rank {_writer(flags)} reports the loss"
    if not flags.is_active:
        yield "all stages have one size: the plugin leaves Megatron as it is; with --vtp-force it would work as follows"


def _row(layout: PipelineLayout, stages: Sequence[int], sites: Sequence[str]) -> list[str]:
    """Write a line of the table, for stages that are alike."""
    ranks = format_ranks(rank for stage in stages for rank in layout.stage_ranks(stage))
    leaders = format_ranks(leader for stage in stages for leader in _leaders(layout, stage))
    name = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
    return [name, *sites[stages[0] : stages[0] + 1], *size_texts(layout, stages[0]), ranks, leaders]


def _leaders(layout: PipelineLayout, stage: int) -> list[int]:
    grid = layout.stages[stage]
    return [layout.leader(stage, dp_rank, cp_rank) for dp_rank in range(grid.dp) for cp_rank in range(grid.cp)]


def _tensor(flags: Run) -> Iterator[str]:
    """Say what crosses, and explain how slices are written."""
    if flags.layout.num_stages == 1:
        yield "one stage: nothing crosses"
        return
    if flags.shape is None:
        what = "; give --seq-length, --micro-batch-size and --hidden-size to see bytes"
    else:
        what = f", here {list(flags.shape)} of {flags.itemsize_bytes} bytes each"
    yield f"What crosses: activations [S, B, H] (sequence, batch, hidden){what}."
    part = "S[0:1/4] is the first quarter"
    if flags.shape is not None:
        most = min(512, flags.shape[0] // 2 or 1)
        part = f"S[0:{most}] is the first {f'{most} positions' if most > 1 else 'position'}"
    yield f"Gradients of the same shape come back. {part} of the sequence; a part without S has all of it."
    if flags.config.num_rings > 1:
        yield (
            f"Two rings: layers of the encoder {format_value(flags.config.encoder_layer_list)}, then of the language "
            f"model{_layers(flags)}. Every boundary is crossed in both:"
        )
        yield (
            "the encoder's activations have its own hidden size. The edge has the model chunks 0, 1 and 2, a cloud "
            "stage 0 and 1."
        )
    if not flags.replicas.is_equal and flags.shape is not None and flags.global_batch_size:
        yield from describe_batches(flags.global_batch_size, flags.shape[1], flags.replicas).splitlines()


def _layers(flags: Run) -> str:
    layers = flags.config.num_layer_list
    return "" if layers is None else f" {format_value(layers)}"


def _boundaries(flags: Run, views: Views, *, is_short: bool) -> Iterator[str]:
    """Explain the boundaries; neighbouring boundaries that are crossed alike are explained once."""
    for _, group in groupby(views.items(), key=lambda item: pattern_of(*item)):
        (boundary, view), *rest = group
        name = f"boundary {view.name}"
        if rest:
            name = f"boundaries {view.name} to {rest[-1][1].name} ({len(rest) + 1} alike, here {view.name})"
        yield f"{name}: {boundary.strategy} ({boundary.reason})"
        # The reason names what a run tries.
        if rivals := boundary.rivals:
            flags_of = ["--vtp-transport-threshold" if rival == "rank0" else "--vtp-transport" for rival in rivals]
            yield f"  with {' or '.join(dict.fromkeys(flags_of))} nothing is tried"
        if not is_short:
            yield from (f"  {line}" for line in explain(view))


def _buffers(views: Views) -> Iterator[str]:
    """Say how large the channels' buffers are on HCCL, the only backend whose buffers the plugin sizes."""
    known = [(view.name, size) for one, view in views.items() if (size := _buffer_bytes(one)) is not None]
    sizes = [f"{name} {-(-size // 2**20)} MiB" for name, size in known]
    if len(sizes) > _MAX_BUFFERS_SHOWN:
        sizes[_MAX_BUFFERS_SHOWN:] = [f"and {len(sizes) - _MAX_BUFFERS_SHOWN} more"]
    if sizes:
        yield f"buffer of each channel, on HCCL only (never run on an NPU), in whole MiB: {', '.join(sizes)}"


def _traffic(flags: Run, views: Views) -> Iterator[str]:
    """Say how much crosses between sites."""
    ring = ", in the language model's ring alone" if flags.config.num_rings > 1 else ""
    for (source, target), (share, num_bytes) in site_traffic(flags, views).items():
        size = f"{share:g} tensors" if num_bytes is None else format_bytes(num_bytes)
        what = f"activations and gradients together{ring}"
        yield f"site {source} sends to site {target}: {size} for each microbatch, {what}"


def _buffer_bytes(boundary: PipelineBoundary) -> int | None:
    """Return the bytes of each channel's buffer on HCCL; None if the size of the tensor is unknown."""
    return boundary.channel(Direction.FORWARD).largest_message_bytes


def _fit_as_json(found: Fitted) -> dict[str, object]:
    fitted = found.candidate
    return {
        **named(fitted, "sizes", "layers", "num_replicas"),
        "nodes": fitted.node_names,
        "spare": {node.name: number for node, number in fitted.spare_cards},
        "step": fitted.step_s,
        "reasons": found.reasons,
    }


def _answer(flags: Run, views: Views) -> dict[str, object]:
    """Keys of --json: fit (null without --have): sizes, layers, num_replicas, nodes (of every stage, by replica), spare
    (devices of every node), step (as simulated; a layer takes a device 1), reasons; world_size, rank_order,
    writer_rank, is_active (false: all stages have one size, and Megatron works alone); tensor: shape [S, B, H] and
    bytes of what crosses, null where a flag is missing; stages: tp, cp, dp, site, ranks, leaders; memory: rank,
    in_flight (activations that it keeps when it holds the most, null where not known), num_waiting (microbatches
    whose weights' gradients are missing then), total_bytes (held then), num_parameters, weight_bytes,
    gradient_bytes, optimizer_bytes, overhead_bytes, activation_bytes (of a microbatch, null where not known),
    kept_bytes (the same by module), waiting_bytes (of a microbatch that waits) and chunks (in_flight, num_waiting,
    activation_bytes and waiting_bytes of each) of every rank, or a text that says what is missing; boundaries:
    upstream, downstream, strategy, reason, num_replicas, hccl_buffer_bytes (of a channel), and of the first replica
    forward and backward: transfers with src, dst, share (of the tensor), bytes (null where unknown) and boxes
    (half-open intervals of S, B and H; of probe_shape where the shape is not known), before and after (collectives
    inside a stage); traffic: tensors and bytes from site to site for each microbatch of a replica; launch: nodes
    (node, ranks, stages, commands), stages_across_nodes (whose tensor-parallel groups lie on several nodes) and
    slurm (lines of a batch script, null without --slurm). With --bridge: world_size; modules: name, tp, cp, pp, dp,
    ranks, bridge_ranks; bridges: src, dst, num_units (of the batch), unit_samples, forward and backward as above,
    with boxes of S, units and H.
    """
    layout, shape = flags.layout, flags.shape
    return {
        "fit": None if flags.fitted is None else _fit_as_json(flags.fitted),
        "world_size": layout.world_size,
        "rank_order": "tp-cp-dp-pp" if layout.order is RankOrder.STAGE_MAJOR else "tp-cp-pp-dp",
        "writer_rank": _writer(flags),
        "is_active": flags.is_active,
        "tensor": {"shape": shape, "bytes": None if shape is None else flags.itemsize_bytes * math.prod(shape)},
        "stages": [
            {
                "stage": stage,
                "site": flags.sites[stage] if flags.sites else None,
                **named(grid, "tp", "cp", "dp"),
                **{"etp": experts.tp, "ep": experts.ep, "edp": experts.dp},
                "ranks": [*layout.stage_ranks(stage)],
                "leaders": _leaders(layout, stage),
            }
            for stage, (grid, experts) in enumerate(zip(layout.stages, layout.experts, strict=True))
        ],
        "memory": memory_as_json(flags),
        "boundaries": [
            {
                **named(boundary, "upstream", "downstream", "strategy", "reason"),
                "num_replicas": view.num_replicas,
                "probe_shape": None if view.itemsize_bytes is not None else view.forward.src.shape,
                "hccl_buffer_bytes": _buffer_bytes(boundary),
                **view.directions(),
            }
            for boundary, view in views.items()
        ],
        "traffic": [
            {"from": source, "to": target, "tensors": share, "bytes": num_bytes}
            for (source, target), (share, num_bytes) in site_traffic(flags, views).items()
        ],
    }
