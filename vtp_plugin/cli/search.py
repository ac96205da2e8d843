"""``search``: the layouts of a cluster whose steps are shortest, as simulated, beside the best of stock Megatron."""

from __future__ import annotations

import argparse
import functools
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.command_base import PAGE, Parser, add_output_flag, check_ending, named, print_answer, read_sizes
from vtp_plugin.cli.for_frameworks import LEAST_PERCENT, add_for_flag, advises_stock, framework_lines
from vtp_plugin.cli.launch_text import add_slurm_flag, launch_lines, launch_of_found
from vtp_plugin.cli.page_sections import split_parts, write_output
from vtp_plugin.cli.run_flags import add_run_flags, check_unknown
from vtp_plugin.cli.search_request import SearchRequest, read_request
from vtp_plugin.cli.terminal import progress
from vtp_plugin.config.flag import format_value
from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.plan.layout.pipeline_layout import format_ranks
from vtp_plugin.plan.schedule.cost.simulator import timeline_of
from vtp_plugin.plan.schedule.order.placement import num_rings
from vtp_plugin.report.page.report_page import MemoryBar, MemorySection, ReportPage, TextTable
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.report.pictures.draw_simulated_step import pass_name
from vtp_plugin.tune.cluster.read_cluster import read_cluster
from vtp_plugin.tune.fit.fit_layout import Chosen, about_padding, fitted_flags, order_flags, stock_flags
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import SearchResult, find_best
from vtp_plugin.tune.search.problem import StageType
from vtp_plugin.tune.search.schedule_time import compiled_for
from vtp_plugin.tune.search.stage_cost import held_by
from vtp_plugin.util.text import in_digits, plain

_COLUMNS = ("", "TP sizes", "layers", "replicas", "microbatch size", "devices", "step")
_COLUMNS_BEHIND = ("tokens/s", "price per M tokens", "times from")
# Once all stages are busy, every further microbatch looks like the one before. Of a replica so many are drawn.
_MOST_MICROBATCHES = 16


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.description = run.__doc__
    parser.epilog = _answer.__doc__
    add_run_flags(parser, has_layout=False)
    parser.most_used |= {
        "--vtp-stages": "the fewest and the most stages to look at",
        "--vtp-data-parallel-size": "replicas of every stage; default: any number",
        "--layerwise-disaggregated-training": "look for U-shapes",
        "--vtp-split-backward": "allow split backwards, where they gain",
    }
    group = parser.add_argument_group("Of the search")
    group.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml", help="devices, nodes and links")
    group.add_argument(
        "--micro-batch-sizes",
        type=read_sizes,
        metavar="1,2,4",
        help="to choose from, instead of --micro-batch-size",
    )
    group.add_argument(
        "--virtual-stages",
        type=read_sizes,
        metavar="2,4",
        help="of every stage, to choose from beside one, where stages have equally many layers",
    )
    group.add_argument("--num-best", type=int, default=3, metavar="N", help="layouts to print at most, default 3")
    about = "FILE.html: page to open in a browser; FILE.svg: picture of the best step and of stock Megatron's"
    add_output_flag(group, "FILE", about)
    group.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="seconds of the processor, default 60")
    add_slurm_flag(group)
    add_for_flag(group)


def run(options: argparse.Namespace) -> None:
    """Every layout (TP sizes, replicas, layers of each stage) that the devices allow is bounded or simulated; nothing
    is started. Times of layers come from the cluster's file: measured by `profile`, fitted to that, or from data
    sheets. What a file holds: docs/guides/search.md.
    """
    check_unknown(options.unknown)
    if options.num_best < 1 or not options.limit_s > 0:
        raise ConfigError(
            f"--num-best {options.num_best}, --limit-s {options.limit_s:g}; give at least one layout and some seconds"
        )
    check_ending(options.output, {".svg": "picture", PAGE: "page"})
    request = read_request(options, read_cluster(options.cluster))
    for text in request.silent:
        print(f"vtp_plugin: {plain(text)}", file=sys.stderr)
    result = _search(request, options)
    if not result.best:
        raise LayoutError(_why_nothing(request, result))
    advised = _advised(request, result)
    launch = _launch(request, advised, options.argv)
    lines = [*_lines(request, result)]
    start = ["", *launch_lines(launch, is_slurm=options.slurm)]
    if options.framework is not None:
        best, stock = (each and (each, _launch(request, each, options.argv)) for each in (result.best[0], result.stock))
        assert best is not None
        start = [*framework_lines(options.framework, best, stock, is_slurm=options.slurm)]
    page_of = functools.partial(_page, options, request, result, advised, lines, launch)
    write_output(options, {PAGE: page_of, ".svg": lambda: draw_found(result)})
    answer = _answer(request, result) | {"launch": launch.as_json(is_slurm=options.slurm)}
    print_answer(options, answer, [*lines, *start])


def _advised(request: SearchRequest, result: SearchResult) -> Candidate:
    """Give the layout to start: the best one, but stock Megatron's where that is nearly as quick."""
    best, stock = result.best[0], result.stock
    return stock if stock is not None and advises_stock(best, stock) else best


def _launch(request: SearchRequest, candidate: Candidate, argv: Sequence[str]) -> Launch:
    layout = request.constraints.layout(candidate.sizes, candidate.num_replicas)
    assert layout is not None
    return launch_of_found(argv, candidate.node_names, layout, flags(request, candidate))


def _search(request: SearchRequest, options: argparse.Namespace) -> SearchResult:
    with progress(1.0, "search", is_bytes=False) as tell:
        done = 0.0

        def say(share: float, best_s: float) -> None:
            nonlocal done
            tell(share - done, f"best step so far {in_digits(best_s)} s")
            done = share

        return find_best(
            request.problem,
            unlimited=request.unlimited,
            num_best=options.num_best,
            limit_s=options.limit_s,
            tell=say,
        )


def _lines(request: SearchRequest, result: SearchResult) -> Iterator[str | TextTable]:
    best = result.best[0]
    yield _verdict(request, result)
    if not result.is_complete:
        yield "the search ended before all layouts were bounded: there may be better ones; --limit-s gives it more time"
    named = _named(request, result)
    of_split = ["whole backwards"] if request.problem.split_backward else []
    rows = [_row(request, name, candidate) for name, candidate in named]
    yield TextTable.aligned((*_COLUMNS, *of_split, *_COLUMNS_BEHIND), rows, marked=0)
    held = ", ".join(f"stage {stage} {format_bytes(held)}" for stage, held in enumerate(best.held_bytes))
    yield f"{request.about_memory}: {held}"
    yield f"bottleneck of 1: {_bottleneck(best)}"
    for name, candidate in named[1:]:
        if name.isdecimal():  # the others are compared below
            yield f"{name} takes {candidate.step_s / best.step_s:.3f} times as long: {_bottleneck(candidate)}"
    yield from _compared(request, result)
    if best.transport != request.problem.rules.transport and len({*best.sites}) > 1:
        yield f"--vtp-transport {best.transport}: all ranks of neighbouring stages connect, also those of two sites"


def _verdict(request: SearchRequest, result: SearchResult) -> str:
    """Say whether to leave stock Megatron, and for which layout."""
    best, stock, unlimited = result.best[0], result.stock, result.unlimited
    number = best.num_replicas
    layout = f"--vtp-size-list {format_value(best.sizes)} in {number} replica{'s'[: number > 1]}"
    if request.constraints.ends is not None:
        return f"only with the plugin: {layout}; Megatron has no U-shape, but may be quicker with another pipeline"
    if stock is None:
        text = (
            f"only with the plugin: {layout}; no layout of one size that the flags of {request.megatron} can say fits"
        )
    elif _advised(request, result) is not stock:
        text = f"{_percent(stock, best):g} % faster than the best of stock Megatron: {layout}"
    elif stock.step_s > best.step_s:
        gain = min(_percent(stock, best), LEAST_PERCENT - 0.1)  # rounded, it might seem to be enough
        text = f"stay with stock Megatron: the plugin gains {gain:g} %; "
        text += f"below {LEAST_PERCENT} % such a prediction says little"
    else:
        text = "stay with stock Megatron: nothing is quicker"
    if unlimited is not None:
        more = _percent(unlimited, best)
        text += f"; without {' '.join(request.limits)} stock Megatron takes {in_digits(unlimited.step_s)} s a step, "
        text += f"{abs(more):g} % {'more' if more >= 0 else 'less'} than that layout"
    return text


def _percent(stock: Candidate, best: Candidate) -> float:
    """Give how much longer stock takes."""
    return round(100 * (stock.step_s / best.step_s - 1), 1)


def _named(request: SearchRequest, result: SearchResult) -> list[tuple[str, Candidate]]:
    """Name the layouts; one that has the flags and the replicas of another has several names."""
    stocks = (("stock", result.stock), ("equal", result.equal), ("unlimited", result.unlimited))
    all_names = [(str(number), candidate) for number, candidate in enumerate(result.best, start=1)]
    all_names += [(name, candidate) for name, candidate in stocks if candidate is not None]
    found: dict[tuple[object, ...], tuple[str, Candidate]] = {}
    for name, candidate in all_names:
        key = (candidate.num_replicas, *flags(request, candidate))
        same = found.get(key)
        found[key] = (name, candidate) if same is None else (f"{same[0]}, {name}", same[1])
    return [*found.values()]


def _compared(request: SearchRequest, result: SearchResult) -> Iterator[str]:
    """Say what stock Megatron can do, whether the best layout is worth the plugin, and the flags of what is."""
    best, stock, equal = result.best[0], result.stock, result.equal
    if (unlimited := result.unlimited) is not None:
        limits, ratio = " ".join(request.limits), unlimited.step_s / best.step_s
        yield f"unlimited, stock without {limits}, takes {ratio:.3f} times as long: {_bottleneck(unlimited)}"
        yield f"flags of unlimited: {shlex.join(flags(request, unlimited))}"
    if stock is not None:
        gain = stock.step_s / best.step_s
        yield f"stock, the best of {request.megatron} by itself, takes {gain:.3f} times as long: {_bottleneck(stock)}"
        if equal is not None and equal.layers != stock.layers:
            yield f"equal, its best with equally many layers, takes {equal.step_s / best.step_s:.3f} times as long"
        if _advised(request, result) is stock:
            yield f"flags of stock: {shlex.join(flags(request, stock))}"
            return
    if padding := about_padding(best.sizes, request.constraints):
        yield padding
    if "--vtp-force" in flags(request, best):
        yield "--vtp-force: all stages have one size, and --vtp-transport is the plugin's"
    if best.order.is_split:
        yield (
            "--vtp-split-backward: for Megatron's own linear layers, with --transformer-impl local and "
            "--no-gradient-accumulation-fusion; a run plans the order for what it measures"
        )
    yield f"flags of 1: {shlex.join(flags(request, best))}"


def _row(request: SearchRequest, name: str, candidate: Candidate) -> list[str]:
    price = _price(request, candidate)
    return [
        name,
        format_value(candidate.sizes),
        format_value(candidate.layers) + (f" in {candidate.num_chunks} parts each" if candidate.num_chunks > 1 else ""),
        str(candidate.split.num_replicas),
        str(candidate.split.micro_batch_size),
        str(candidate.num_cards),
        f"{in_digits(candidate.step_s)} s",
        *([f"{in_digits((candidate.whole or candidate).step_s)} s"] if request.problem.split_backward else []),
        in_digits(_tokens_per_s(request, candidate)),
        "-" if price is None else in_digits(price, 3),
        candidate.source,
    ]


def _tokens_per_s(request: SearchRequest, candidate: Candidate) -> float:
    args = request.constraints.args
    return args.global_batch_size * args.seq_length / candidate.step_s


def _price(request: SearchRequest, candidate: Candidate) -> float | None:
    """Give the price of a million tokens; cards that the layout does not use cost nothing."""
    cp, pools = candidate.split.cp, candidate.split.pools
    prices = [
        (stage_type.tp * cp, pools[pool_index].card_price)
        for stage_type in candidate.stage_types
        for pool_index in stage_type.replica_pools
    ]
    if any(price is None for _, price in prices):
        return None
    per_hour = sum(number * (price or 0.0) for number, price in prices)
    return per_hour / 3600 / _tokens_per_s(request, candidate) * 1e6


def _busy(candidate: Candidate) -> list[float]:
    both = [*map(sum, zip(candidate.costs.forward, candidate.costs.backward, strict=True))]
    placement = candidate.placement
    loads = [sum(both[vstage] for vstage in placement.vstages(stage)) for stage in range(placement.num_stages)]
    return [candidate.split.num_microbatches * load / candidate.step_s for load in loads]


def _bottleneck(candidate: Candidate) -> str:
    busy = _busy(candidate)
    stage = max(range(len(busy)), key=busy.__getitem__)
    tail = candidate.sums_s + candidate.update_s
    text = f"stage {stage} computes for {100 * busy[stage]:.0f} % of the step"
    if len(busy) > 1:
        text += f", the idlest for {100 * min(busy):.0f} %"
    percent = 100 * tail / candidate.step_s
    return text + f"; gradients and optimizer take {f'{percent:.0f}' if percent >= 1 else 'less than 1'} %"


def flags(request: SearchRequest, candidate: Candidate) -> Sequence[str]:
    """Give the flags with which a run has this layout: Megatron's own, where they suffice."""
    chosen, size = Chosen.of(candidate), str(candidate.split.micro_batch_size)
    extra = [*order_flags(candidate, request.constraints)]
    if candidate.transport != request.problem.rules.transport:
        extra += ["--vtp-transport", candidate.transport]
    is_unequal = len({*candidate.sizes}) > 1 or request.constraints.ends is not None
    if is_unequal or extra:
        # A planned schedule is the plugin's, with any sizes.
        is_forced = not is_unequal and "--vtp-schedule" not in extra
        argv = [*fitted_flags(chosen, request.constraints, is_forced=is_forced), *extra]
    else:
        argv = [*stock_flags(chosen)]
    if candidate.num_chunks > 1:
        argv += ["--num-virtual-stages-per-pipeline-rank", str(candidate.num_chunks)]
    return (*argv, "--micro-batch-size", size)


def _why_nothing(request: SearchRequest, result: SearchResult) -> str:
    if not result.is_complete:
        return "the search ended before any layout was found; --limit-s gives it more time"
    constraints, split = request.constraints, request.problem.splits[0]
    cards = sum(node.num_cards for pool in split.pools for node in pool.nodes)
    limits = [pool.memory_bytes for pool in split.pools if pool.memory_bytes is not None]
    largest = max(size for pool in split.pools for size in pool.speeds)
    stages = min(constraints.most_stages, request.problem.num_layers, max(1, cards // (largest * split.cp)))
    layers = math.ceil(request.problem.num_layers / stages)
    first, most, all_layers = StageType((0,), largest), max(limits, default=0), request.problem.num_layers
    whole = held_by(split, first, (0, all_layers), 0, is_first=True, is_last=True)
    in_all = whole * largest * split.cp * split.num_replicas
    have = sum((pool.memory_bytes or 0) * node.num_cards for pool in split.pools for node in pool.nodes)
    text = f"no layout of {constraints.least_stages} to {constraints.most_stages} stages fits the {cards} devices: "
    text += f"weights, gradients and optimizer need about {format_bytes(in_all)} in all"
    if len(limits) == len(split.pools):
        text += f", the devices have {format_bytes(have)}"
        if in_all > have:
            return f"{text}; give more devices or larger ones, or a smaller model"
    needed, steady = (
        held_by(split, first, (0, layers), in_flight, is_first=True, is_last=stages == 1) for in_flight in (stages, 0)
    )
    text += f"; with {stages} stages of TP size {largest} the first has {layers} layers, and each of its ranks "
    text += f"holds {format_bytes(needed)} with activations, {format_bytes(steady)} without"
    text += f"; the largest device has {format_bytes(most)}" if limits else ""
    is_recomputed = constraints.args.recompute_granularity == "full"
    more = "" if steady > most or is_recomputed else ", or recompute activations"
    return f"{text}; give devices of {format_bytes(needed)}, or more of them{more}"


def _answer(request: SearchRequest, result: SearchResult) -> dict[str, object]:
    """Keys of --json: verdict (the first line of the text), is_complete (false: the time was over, or Ctrl-C came),
    megatron (whose flags layouts are given in), and layouts: best; stock, the best one that this Megatron can run
    without the plugin (one size, any layers that its flags can say, equal replicas; null without one); equal, likewise
    with equally many layers on every stage; unlimited, like stock but without the flags that limit the search (null
    without such). Each has: sizes, layers, num_chunks (virtual stages of each stage), num_replicas, micro_batch_size,
    in_flight (microbatches, of every part), transport, nodes (of every stage, by replica), num_cards, step_s,
    whole_step_s (with whole backwards; null where they are not split), pipeline_s, sums_s (gradients), update_s,
    tokens_per_s, price_per_million_tokens (null without prices), busy (share of the step that each stage computes),
    memory_bytes (of a rank, by stage), source (of the times: measured, fitted, data sheet), flags.
    """
    layouts = {name: getattr(result, name) for name in ("stock", "equal", "unlimited")}
    best = [_facts(request, candidate) for candidate in result.best]
    about = {"verdict": _verdict(request, result), "is_complete": result.is_complete, "megatron": request.megatron}
    return {**about, "best": best, **{name: each and _facts(request, each) for name, each in layouts.items()}}


def _facts(request: SearchRequest, candidate: Candidate) -> dict[str, object]:
    return {
        **named(candidate, "sizes", "layers", "num_chunks"),
        **named(candidate.split, "num_replicas", "micro_batch_size"),
        "in_flight": candidate.order.peaks,
        "transport": candidate.transport,
        "nodes": candidate.node_names,
        **named(candidate, "num_cards", "step_s"),
        "whole_step_s": None if candidate.whole is None else candidate.whole.step_s,
        "pipeline_s": candidate.order.pipeline_s,
        **named(candidate, "sums_s", "update_s"),
        "tokens_per_s": _tokens_per_s(request, candidate),
        "price_per_million_tokens": _price(request, candidate),
        "busy": _busy(candidate),
        "memory_bytes": candidate.held_bytes,
        "source": candidate.source,
        "flags": flags(request, candidate),
    }


def _page(
    options: argparse.Namespace,
    request: SearchRequest,
    result: SearchResult,
    advised: Candidate,
    parts: Sequence[str | TextTable],
    launch: Launch,
) -> ReportPage:
    """Show what was found, and how the layout that is advised is started."""
    table, (verdict, *notes) = split_parts(parts)
    is_stock = advised is result.stock
    sites = advised.sites if any(advised.sites) else ()
    rules = TransportRules() if is_stock else replace(request.problem.rules, transport=advised.transport, sites=sites)
    rings = num_rings(advised.placement)
    is_ring = not rings and advised.num_chunks > 1
    return ReportPage(
        title=verdict,
        notes=notes,
        table=table,
        about_table="Layouts that were found",
        step=draw_found(result),
        about_step="A simulated step: as many samples of the best layout and of stock Megatron's",
        launch=launch,
        sites=sites,
        picture=draw_pipeline(launch.layout, is_ring=is_ring, rules=rules, num_rings=rings),
        memory=MemorySection(bars=tuple(_bars(advised, launch)), notes=(request.about_memory,)),
        is_slurm=options.slurm,
    )


def _bars(candidate: Candidate, launch: Launch) -> Iterator[MemoryBar]:
    """Yield the fullest rank of every stage, beside the smallest of its devices."""
    for stage, (held, stage_type) in enumerate(zip(candidate.held_bytes, candidate.stage_types, strict=True)):
        known = [candidate.split.pools[pool].memory_bytes for pool in stage_type.pools]
        limit_bytes = min((limit for limit in known if limit is not None), default=None)
        label = f"stage {stage}, ranks {format_ranks(launch.layout.stage_ranks(stage))}"
        yield MemoryBar(label=label, pieces=(("held by the fullest rank", held),), limit_bytes=limit_bytes)


def draw_found(result: SearchResult) -> str:
    """Draw the stages of both layouts over one axis of seconds, for as many samples of both, as SVG."""
    shown = {"best": result.best[0]} | ({} if result.stock is None else {"stock": result.stock})
    splits = [candidate.split for candidate in shown.values()]
    batch = splits[0].num_microbatches * splits[0].num_replicas * splits[0].micro_batch_size
    samples = samples_drawn([split.num_replicas * split.micro_batch_size for split in splits], batch)
    title = "One simulated step" if samples == batch else f"The first {samples} samples"
    groups: list[Group] = []
    for name, candidate in shown.items():
        split = candidate.split
        sizes = f"--vtp-size-list {format_value(candidate.sizes)}, layers {format_value(candidate.layers)}"
        number = samples // (split.num_replicas * split.micro_batch_size)
        drawn = "" if samples == batch else f" (drawn: {number} each)"
        counts = f"{split.num_replicas} replicas, {split.num_microbatches} microbatches{drawn}"
        note = f"{counts}, step {in_digits(candidate.step_s)} s"
        groups.append(Group(name=f"{name}: {sizes}", note=note, rows=[*_boxes(candidate, number)]))
    return draw_rows(groups, title=f"{title} of the layouts that search found", unit="s")


def samples_drawn(samples: Sequence[int], batch: int) -> int:
    """Choose how many samples of a step are drawn: of all layouts as many, in whole microbatches of every replica.

    Args:
        samples: for each layout the samples of one microbatch of all its replicas.
        batch: samples of a step.

    >>> samples_drawn([2, 3], 96), samples_drawn([1, 1], 12), samples_drawn([17, 16], 544)
    (30, 12, 272)
    """
    common = math.lcm(*samples)
    return min(batch, max(1, _MOST_MICROBATCHES * min(samples) // common) * common)


def _boxes(candidate: Candidate, number: int) -> Iterator[tuple[str, list[Box]]]:
    """Yield the boxes of so many microbatches, by stage; behind a whole step there are gradients and optimizer."""
    order = candidate.order
    compiled = compiled_for(
        candidate.placement,
        candidate.costs,
        number,
        is_planned=order.is_planned,
        in_flight=order.in_flight,
        is_split=order.is_split,
    )
    timeline = timeline_of(compiled, candidate.costs, mode="rendezvous")
    sums_s = timeline.makespan + candidate.sums_s
    tail = [
        Box(kind="gradients", start=timeline.makespan, end=sums_s),
        Box(kind="optimizer", start=sums_s, end=sums_s + candidate.update_s),
    ]
    for stage, spans in enumerate(timeline.spans):
        boxes = [
            Box(kind=pass_name(span.action), start=span.start, end=span.end, text=str(span.action.microbatch))
            for span in spans
        ]
        boxes += tail if number == candidate.split.num_microbatches else []
        yield f"stage {stage} on {', '.join(dict.fromkeys(candidate.node_names[stage]))}", boxes
