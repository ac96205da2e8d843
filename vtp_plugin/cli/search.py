"""``search``: the layouts of a cluster whose steps are shortest, as simulated, beside the best of stock Megatron."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.model_flags import read_model
from vtp_plugin.cli.parser import check_ending, print_json, read_sizes, write_file
from vtp_plugin.cli.progress_bar import progress
from vtp_plugin.cli.run_flags import add_run_flags, check_unknown
from vtp_plugin.cli.search_picture import draw_found
from vtp_plugin.cli.search_request import SearchRequest, read_question
from vtp_plugin.config.parse_values import format_value
from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.tune.cluster.read_cluster import read_cluster
from vtp_plugin.tune.fit.as_flags import fitted_words, stock_words
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.fastest import Found, fastest
from vtp_plugin.util.printable import plain

_LEAST_GAIN = 1.05
_TEXT = """\
Every list, number of replicas and split of layers that the cards allow is bounded or simulated; nothing is started.
Times of layers come from the cluster's file: measured by `profile`, fitted to that, or from data sheets. What a file
holds: docs/search.md."""
_KEYS = """\
Keys of --json: is_complete (false: the time was over, or Ctrl-C came), megatron (whose flags layouts are given in),
and layouts: best; stock, the best one that this Megatron can run without the plugin (one size, any layers that its
flags can say, equal replicas; null without one); equal, likewise with equally many layers on every stage. Each has:
sizes, layers, num_chunks (virtual stages of each stage), num_replicas, micro_batch_size, in_flight (microbatches, of
every part), transport, nodes (of every stage, by replica), num_cards, step_s, pipeline_s, sums_s (gradients), update_s,
tokens_per_s, price_per_million_tokens (null without prices), busy (share of the step that each stage computes),
memory_bytes (of a rank, by stage), source (of the times: measured, fitted, data sheet), flags."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = _TEXT
    parser.epilog = _KEYS
    add_run_flags(parser)
    group = parser.add_argument_group("Of the search")
    group.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml", help="cards, nodes and links")
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
        help="of every stage, to choose from beside one, where all stages have equally many layers (interleaving)",
    )
    group.add_argument("--num-best", type=int, default=3, metavar="N", help="layouts to print at most, default 3")
    group.add_argument(
        "--output", type=Path, metavar="FILE.svg", help="picture of the best step and of stock Megatron's"
    )
    group.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="seconds of the processor, default 60")


def run(options: argparse.Namespace) -> None:
    """Search and print."""
    check_unknown(options.unknown)
    if options.num_best < 1 or not options.limit_s > 0:
        raise ConfigError(
            f"--num-best {options.num_best}, --limit-s {options.limit_s:g}; give at least one layout and some seconds"
        )
    if options.micro_batch_sizes and not options.micro_batch_size:
        options.micro_batch_size = options.micro_batch_sizes[0]
    check_ending(options.output, {".svg": "picture"})
    asked = read_question(options, read_cluster(options.cluster))
    for text in asked.silent:
        print(f"vtp_plugin: {plain(text)}", file=sys.stderr)
    found = _search(asked, options)
    if not found.best:
        raise LayoutError(_why_nothing(asked, found))
    if options.output is not None:
        write_file(options.output, draw_found(asked, found))
    if options.json:
        print_json("search", _as_json(asked, found))
    else:
        print("\n".join(_lines(asked, found)))


def _search(asked: SearchRequest, options: argparse.Namespace) -> Found:
    with progress(1.0, "search", is_bytes=False) as tell:
        done = 0.0

        def say(share: float, best_s: float) -> None:
            nonlocal done
            tell(share - done, f"best step so far {best_s:.4g} s")
            done = share

        return fastest(asked.question, num_best=options.num_best, limit_s=options.limit_s, tell=say)


def _lines(asked: SearchRequest, found: Found) -> Iterator[str]:
    best = found.best[0]
    if not found.is_complete:
        yield "the search ended before all lists were bounded: there may be better ones; --limit-s gives it more time"
    rows = [
        ("", "--vtp-size-list", "layers", "replicas", "micro", "cards", "step", "tokens/s", "per M tokens", "times")
    ]
    rows += [_row(asked, str(number + 1), choice) for number, choice in enumerate(found.best)]
    stocks = (("stock", found.stock), ("equal", found.equal))
    rows += [_row(asked, name, choice) for name, choice in stocks if choice is not None]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield (
        asked.about_memory
        + ": "
        + ", ".join(f"stage {stage} {format_bytes(held)}" for stage, held in enumerate(best.held_bytes))
    )
    yield from _places(asked, best)
    yield f"bottleneck of 1: {_bottleneck(best)}"
    for number, choice in enumerate(found.best[1:], start=2):
        yield f"{number} takes {choice.step_s / best.step_s:.3f} times as long: {_bottleneck(choice)}"
    yield from _compared(asked, found)
    if best.transport != asked.question.rules.transport and len({*asked.fitted(best).sites}) > 1:
        yield f"--vtp-transport {best.transport}: all ranks of neighbouring stages connect, also those of two sites"


def _places(asked: SearchRequest, choice: Candidate) -> Iterator[str]:
    names = enumerate(asked.fitted(choice).node_names)
    texts = [f"stage {stage} on {', '.join(dict.fromkeys(own))}" for stage, own in names]
    yield "nodes of 1: " + "; ".join(texts)


def _compared(asked: SearchRequest, found: Found) -> Iterator[str]:
    """Say what stock Megatron can do, whether the best layout is worth the plugin, and the flags of what is."""
    best, stock, equal = found.best[0], found.stock, found.equal
    if asked.ask.ends is not None:
        yield "stock: Megatron has no U-shape; without that flag other pipelines are searched"
    elif stock is None:
        yield f"stock: no layout of one size that the flags of {asked.megatron} can say fits these cards"
    else:
        gain = stock.step_s / best.step_s
        yield f"stock, the best of {asked.megatron} by itself, takes {gain:.3f} times as long: {_bottleneck(stock)}"
        if equal is not None and equal.layers != stock.layers:
            yield f"equal, its best with equally many layers, takes {equal.step_s / best.step_s:.3f} times as long"
        if gain < _LEAST_GAIN:
            why = f"a gain below {100 * (_LEAST_GAIN - 1):.0f} % is less than such a prediction is worth"
            yield f"stay with stock Megatron: {why if gain > 1 else 'nothing is quicker'}"
            yield f"flags of stock: {shlex.join(flags(asked, stock))}"
            return
    yield from _padded(asked, best)
    yield f"flags of 1: {shlex.join(flags(asked, best))}"


def _padded(asked: SearchRequest, choice: Candidate) -> Iterator[str]:
    """Say so if the flags pad the vocabulary otherwise than Megatron would."""
    own = read_model(asked.ask.args, PipelineLayout.from_sizes(choice.sizes, world_size=sum(choice.sizes))).vocab
    if own != asked.vocab:
        yield (
            f"--make-vocab-size-divisible-by pads the vocabulary to {asked.vocab}, as every list of this model does, "
            f"so that all can load each other's checkpoints; Megatron would to {own}; padding enters the loss"
        )


def _row(asked: SearchRequest, name: str, choice: Candidate) -> tuple[str, ...]:
    price = _price(asked, choice)
    return (
        name,
        format_value(choice.sizes),
        format_value(choice.layers) + (f" in {choice.num_chunks} parts each" if choice.num_chunks > 1 else ""),
        str(choice.shape.num_replicas),
        str(choice.shape.micro_batch_size),
        str(choice.num_cards),
        f"{choice.step_s:.4g} s",
        f"{_tokens_per_s(asked, choice):.4g}",
        "-" if price is None else f"{price:.3g}",
        choice.source,
    )


def _tokens_per_s(asked: SearchRequest, choice: Candidate) -> float:
    return asked.samples * asked.ask.args.seq_length / choice.step_s


def _price(asked: SearchRequest, choice: Candidate) -> float | None:
    """Give what a million tokens cost; cards that stay idle cost nothing."""
    cp, pools = choice.shape.cp, choice.shape.pools
    prices = [(kind.tp * cp, pools[place].card_price) for kind in choice.kinds for place in kind.places]
    if any(price is None for _, price in prices):
        return None
    per_hour = sum(number * (price or 0.0) for number, price in prices)
    return per_hour / 3600 / _tokens_per_s(asked, choice) * 1e6


def _busy(choice: Candidate) -> list[float]:
    both = [*map(sum, zip(choice.costs.forward, choice.costs.backward, strict=True))]
    placement = choice.placement
    loads = [sum(both[vstage] for vstage in placement.vstages(stage)) for stage in range(placement.num_stages)]
    return [choice.shape.num_microbatches * load / choice.step_s for load in loads]


def _in_flight(choice: Candidate) -> list[int]:
    """Give the most microbatches of which each virtual stage keeps activations."""
    return [*choice.order.peaks]


def _bottleneck(choice: Candidate) -> str:
    busy = _busy(choice)
    stage = max(range(len(busy)), key=busy.__getitem__)
    tail = choice.sums_s + choice.update_s
    text = f"stage {stage} computes for {100 * busy[stage]:.0f} % of the step"
    if len(busy) > 1:
        text += f", the idlest for {100 * min(busy):.0f} %"
    return text + f"; gradients and optimizer take {100 * tail / choice.step_s:.0f} %"


def flags(asked: SearchRequest, choice: Candidate) -> Sequence[str]:
    """Give what a run takes to have a layout: Megatron's own flags, where it needs no more."""
    fitted, size = asked.fitted(choice), str(choice.shape.micro_batch_size)
    own: list[str] = []
    if choice.order.is_planned and asked.ask.ends is None and choice.num_chunks == 1:
        own += ["--vtp-schedule", "planned"]
    if choice.transport != asked.question.rules.transport:
        own += ["--vtp-transport", choice.transport]
    is_unequal = len({*choice.sizes}) > 1 or asked.ask.ends is not None
    if is_unequal or own:
        words = [*fitted_words(fitted, asked.ask, is_forced=not is_unequal), *own]
    else:
        words = [*stock_words(fitted)]
    if choice.num_chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(choice.num_chunks)]
    return (*words, "--micro-batch-size", size)


def _why_nothing(asked: SearchRequest, found: Found) -> str:
    if not found.is_complete:
        return "the search ended before any layout was found; --limit-s gives it more time"
    ask, shape = asked.ask, asked.question.shapes[0]
    cards = sum(group.num_nodes * group.num_cards for group in asked.cluster.nodes)
    limits = [pool.memory_bytes for pool in shape.pools if pool.memory_bytes is not None]
    largest = max(size for pool in shape.pools for size in pool.speeds)
    stages = min(ask.most_stages, asked.question.num_layers, max(1, cards // (largest * shape.cp)))
    layers = math.ceil(asked.question.num_layers / stages)
    held_bytes = shape.held_bytes
    assert held_bytes is not None
    needed = held_bytes(largest, shape.num_replicas, 0, layers, True, stages == 1, stages)
    have = f"; the largest card has {format_bytes(max(limits))}" if limits else ""
    return (
        f"no layout of {ask.least_stages} to {ask.most_stages} stages fits the {cards} cards: {layers} layers of the "
        f"first of {stages} stages of {largest} ranks hold {format_bytes(needed)} on each rank{have}; give cards with "
        f"{format_bytes(needed)}, more nodes, or recompute activations"
    )


def _as_json(asked: SearchRequest, found: Found) -> dict[str, object]:
    return {
        "is_complete": found.is_complete,
        "megatron": asked.megatron,
        "best": [_choice_as_json(asked, choice) for choice in found.best],
        "stock": None if found.stock is None else _choice_as_json(asked, found.stock),
        "equal": None if found.equal is None else _choice_as_json(asked, found.equal),
    }


def _choice_as_json(asked: SearchRequest, choice: Candidate) -> dict[str, object]:
    return {
        "sizes": list(choice.sizes),
        "layers": list(choice.layers),
        "num_chunks": choice.num_chunks,
        "num_replicas": choice.shape.num_replicas,
        "micro_batch_size": choice.shape.micro_batch_size,
        "in_flight": _in_flight(choice),
        "transport": choice.transport,
        "nodes": asked.fitted(choice).node_names,
        "num_cards": choice.num_cards,
        "step_s": choice.step_s,
        "pipeline_s": choice.order.pipeline_s,
        "sums_s": choice.sums_s,
        "update_s": choice.update_s,
        "tokens_per_s": _tokens_per_s(asked, choice),
        "price_per_million_tokens": _price(asked, choice),
        "busy": _busy(choice),
        "memory_bytes": list(choice.held_bytes),
        "source": choice.source,
        "flags": list(flags(asked, choice)),
    }
