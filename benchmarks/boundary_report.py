"""What the results of ``benchmarks/boundary.py`` say, as text: tables, targets met and missed, the crossover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.boundary_results import KIB, MIB, ONE_LINK, Record, Results, tensor_bytes

SLICED, SHARDED, DIVIDED, RANK0 = "sliced", "sliced, sharded receiver", "divided", "rank0"

# Targets, from 4 MiB up: time over the floor with a finish and without; speed against rank0, as a part of the number of
# links that the narrower stage has; on loopback, time over the time of rank0. Between stages of one size `auto` tries
# rank to rank and divided: on limited links the second counts, on loopback the first.
LEAST_BYTES = 4 * MIB
MOST_OF_FLOOR, MOST_OF_FLOOR_SHARDED = 1.15, 1.05
LEAST_SPEED_UP = 0.85
MOST_OF_RANK0 = 1.10
MOST_GOODPUT_DIFFERENCE = 0.05
# An exchange that is faster than this part of the floor used links that were not limited.
LEAST_OF_FLOOR = 0.97
# What counts as equally fast when the crossover is looked for.
CROSSOVER_TOLERANCE = 0.05


def report(results: Results) -> str:
    """Write the whole report."""
    parts = ["\n".join(f"{key}: {value}" for key, value in results.settings.items())]
    for network in ("limited", "loopback"):
        for sizes in sorted({r.sizes for r in results.boundaries if r.network == network}):
            parts.append("\n".join(_pair_table(results, network, sizes)))
    if results.finishes:
        parts.append("\n".join(_finish_table(results.finishes)))
    if results.boundaries:
        parts.append("\n".join([*_goodput_lines(results), *_target_lines(results), *_crossover_lines(results)]))
    return "\n\n".join(parts)


def format_bytes(num_bytes: int) -> str:
    """Write a size.

    >>> format_bytes(64 * KIB), format_bytes(4 * MIB)
    ('64 KiB', '4 MiB')
    """
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _names(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.name for record in records if record.name != ONE_LINK))


def _pair_table(results: Results, network: str, sizes: tuple[int, int]) -> Iterator[str]:
    """Write medians in ms; on limited links with the floor and how far from it each is."""
    records = [r for r in results.boundaries if r.network == network and r.sizes == sizes]
    names = _names(records)
    is_limited = network == "limited"
    yield f"{network}, {sizes[0]} -> {sizes[1]}, ms" + (" (in brackets: times the floor)" if is_limited else "")
    yield (
        f"{'tensor':>8} {'floor':>9}" * is_limited
        + f"{'tensor':>8}" * (not is_limited)
        + "".join(f" {name:>24}" for name in names)
    )
    for num_bytes in sorted({r.num_bytes for r in records if r.name != ONE_LINK}):
        floor_s = results.floor_s(sizes, num_bytes) if is_limited else None
        line = f"{format_bytes(num_bytes):>8}" + (f" {floor_s * 1e3:9.2f}" if floor_s else "")
        for name in names:
            median_s = results.median_s(network, sizes, name, num_bytes)
            assert median_s is not None
            ratio = f"({median_s / floor_s:6.3f})" if floor_s else ""
            line += f" {median_s * 1e3:15.2f} {ratio:>8}"
        yield line


def _finish_table(finishes: Iterable[Record]) -> Iterator[str]:
    finishes = list(finishes)
    names = _names(finishes)
    yield "finish inside a receiving stage, ms"
    yield f"{'network':>8} {'tp':>3} {'tensor':>8}" + "".join(f" {name:>18}" for name in names)
    keys = dict.fromkeys((r.network, r.sizes[1], r.num_bytes) for r in finishes)
    for network, tp_size, num_bytes in keys:
        medians = {
            r.name: r.median_s
            for r in finishes
            if (r.network, r.sizes[1], r.num_bytes) == (network, tp_size, num_bytes)
        }
        yield f"{network:>8} {tp_size:>3} {format_bytes(num_bytes):>8}" + "".join(
            f" {medians[name] * 1e3:18.2f}" for name in names
        )


def goodput_error(results: Results, sizes: tuple[int, int]) -> float:
    """Return by how much short and long messages on one link differ in goodput, as a part of the long ones'."""
    records = [r for r in results.boundaries if r.name == ONE_LINK and r.sizes == sizes]
    short, long = (tensor_bytes(r.num_bytes) / r.median_s for r in sorted(records, key=lambda r: r.num_bytes))
    return abs(short / long - 1)


def _goodput_lines(results: Results) -> Iterator[str]:
    for sizes in dict.fromkeys(r.sizes for r in results.boundaries if r.name == ONE_LINK):
        error = goodput_error(results, sizes)
        verdict = "ok" if error <= MOST_GOODPUT_DIFFERENCE else "NOT OK: the figures of this pair do not count"
        yield (
            f"one link of {sizes[0]} -> {sizes[1]}: {results.goodput(sizes) * 8e-6:.1f} Mbit/s; 256 KiB and 16 MiB "
            f"differ by {error:.1%} ({verdict})"
        )
    ratios = [
        record.median_s / results.floor_s(record.sizes, record.num_bytes)
        for record in results.boundaries
        if record.network == "limited" and record.name != ONE_LINK and record.num_bytes >= LEAST_BYTES
    ]
    if ratios and min(ratios) < LEAST_OF_FLOOR:
        yield f"NOT OK: an exchange took {min(ratios):.3f} of the floor, so some link was not limited"


def _target_lines(results: Results) -> Iterator[str]:
    """Say for every target how many of its cases met it, and name those that missed."""
    checks: dict[str, list[tuple[str, float, bool]]] = {}
    for record in results.boundaries:
        is_cut = record.network == "limited" and record.sizes[0] == record.sizes[1]
        if record.num_bytes < LEAST_BYTES or record.name not in (DIVIDED if is_cut else SLICED, SHARDED):
            continue
        place = f"{record.sizes[0]}->{record.sizes[1]} {format_bytes(record.num_bytes)}"
        for target, value, is_met in _checks(results, record):
            checks.setdefault(target, []).append((place, value, is_met))
    for target, cases in checks.items():
        missed = [f"{place} {value:.3f}" for place, value, is_met in cases if not is_met]
        values = [value for _, value, _ in cases]
        verdict = "met" if not missed else f"MISSED by {len(missed)} of {len(cases)}: {', '.join(missed)}"
        yield f"target {target}: {min(values):.3f} to {max(values):.3f}, {verdict}"


def _checks(results: Results, record: Record) -> Iterator[tuple[str, float, bool]]:
    """Yield the targets that concern a record of slices: text, value, whether it is met."""
    rank0_s = results.median_s(record.network, record.sizes, RANK0, record.num_bytes)
    assert rank0_s is not None
    if record.network == "loopback":
        if record.name == SLICED:
            value = record.median_s / rank0_s
            yield f"loopback, sliced at most {MOST_OF_RANK0} of rank0", value, value <= MOST_OF_RANK0
        return
    value = record.median_s / results.floor_s(record.sizes, record.num_bytes)
    if record.name == SHARDED:
        text = f"limited, without finish at most {MOST_OF_FLOOR_SHARDED} of the floor"
        yield text, value, value <= MOST_OF_FLOOR_SHARDED
        return
    yield f"limited, sliced at most {MOST_OF_FLOOR} of the floor", value, value <= MOST_OF_FLOOR
    speed_up = rank0_s / record.median_s / min(record.sizes)
    text = f"limited, sliced at least {LEAST_SPEED_UP} * min(tp) times as fast as rank0, over min(tp)"
    yield text, speed_up, speed_up >= LEAST_SPEED_UP


def _crossover_lines(results: Results) -> Iterator[str]:
    """Name the size from which `sliced` is at least as fast as rank0 for good."""
    for network, sizes in dict.fromkeys((r.network, r.sizes) for r in results.boundaries):
        crossover = None
        for num_bytes in sorted({r.num_bytes for r in results.boundaries if r.name == SLICED}, reverse=True):
            sliced_s = results.median_s(network, sizes, SLICED, num_bytes)
            rank0_s = results.median_s(network, sizes, RANK0, num_bytes)
            if sliced_s is None or rank0_s is None or sliced_s > rank0_s * (1 + CROSSOVER_TOLERANCE):
                break
            crossover = num_bytes
        text = "at no size" if crossover is None else f"from {format_bytes(crossover)} up"
        yield f"crossover, {network}, {sizes[0]} -> {sizes[1]}: sliced is as fast as rank0 {text}"
