"""The report of ``certify``: what was run, how far each run lies from the uniform one, and of what it speaks."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final, Literal

from vtp_plugin.certify.compare import (
    FACTOR,
    NORM,
    TOO_LARGE,
    Numbers,
    first_fault,
    first_wrong,
    is_loss,
    judge,
    layer_of,
    tolerances,
)
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.trace.compare_steps import boundary_of, crossings_of
from vtp_plugin.trace.explain import TimeShare
from vtp_plugin.trace.stretches import Cause
from vtp_plugin.util.text import in_digits

Verdict = Literal["equal", "differs", "Megatron's own", "failed", "named", "not named", "not judged"]
WELL: Final = ("equal", "Megatron's own", "named")
"""Verdicts of runs that went as they should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one run.

    Attributes:
        shows: what it shows.
        layout: its stages, as a user writes them.
        num_ranks: ranks that it took.
        verdict: what came of it.
        losses: relative difference of the losses; "" where there is none.
        losses_tolerance: what they were judged by.
        worst: the number or tensor that lies furthest, in tolerances: its name.
        worst_difference: its relative difference.
        worst_tolerance: what it was judged by.
        step_ms: time of the last step, in milliseconds.
        boundary: between which stages a message takes longest, over the least time.
        boundary_ms: the median time of a message there, in milliseconds.
        floor_ms: the least time: that of its busiest sender's bytes on the link between ranks 0 and 1.
        note: more, in a line.
        first: the first that differs, in order of execution; empty if none does.
        wrong: names of all that differ.
    """

    shows: str
    layout: str
    num_ranks: int
    verdict: Verdict
    losses: str = ""
    losses_tolerance: str = ""
    worst: str = ""
    worst_difference: str = ""
    worst_tolerance: str = ""
    step_ms: str = ""
    boundary: str = ""
    boundary_ms: str = ""
    floor_ms: str = ""
    note: str = ""
    first: str = ""
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyReport:
    """A report. It holds no paths, no names of machines, and no data; it is a statement of whoever sends it.

    Attributes:
        versions: of the packages, Python among them, by name.
        sources: digest of the plugin's files, which tells its commit.
        device: kind of the devices.
        num_ranks: ranks that were there.
        is_short: whether a part of the runs was asked for.
        conclusion: of a user's script: rounding, Megatron's own, or ours; else empty.
        rows: the runs.
        left_out: what was not run, and why.
        seconds: time of all runs.
    """

    versions: dict[str, str]
    sources: str
    device: str
    num_ranks: int
    is_short: bool
    conclusion: str
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    seconds: int

    @property
    def is_well(self) -> bool:
        """Whether every run went as it should."""
        return all(row.verdict in WELL for row in self.rows)


def judge_row(
    run: CertifiedRun, numbers: Numbers, step_s: float, reference: Numbers, changed: Iterable[Numbers]
) -> Row:
    """Judge a run that ended well.

    Args:
        run: the run.
        numbers: what it computed.
        step_s: time of its last step, in seconds.
        reference: the uniform run of its training.
        changed: the same with start weights that are changed by a rounding.

    >>> numbers, run = Numbers(vectors={"lm loss": (4.0, 3.0)}), CertifiedRun(shows="slices", layout="1,2", num_ranks=3)
    >>> row = judge_row(run, numbers, 0.5, numbers, [])
    >>> row.verdict, row.worst, row.step_ms
    ('equal', 'lm loss', '500')
    """
    if run.is_later:  # its first step has run with other stages, and it began with other weights
        numbers, reference, *changed = (_later(each, run.num_steps) for each in (numbers, reference, *changed))
    found = judge(numbers, reference, tolerances(reference, list(changed)))
    worst = found[0]
    losses = next((one for one in found if is_loss(one.name)), worst)
    note, wrong = first_fault(numbers, reference, found), [one.name for one in found if not one.is_equal]
    verdict: Verdict = "differs" if wrong else "equal"
    if losses.tolerance >= TOO_LARGE:
        verdict, note = (
            "not judged",
            f"{losses.name} changes by {losses.tolerance / FACTOR:.1e} when weights are rounded",
        )
    elif verdict == "differs" and run.role == "uniform":
        verdict = "Megatron's own"
    return Row(
        shows=run.shows,
        layout=run.layout,
        num_ranks=run.num_ranks,
        verdict=verdict,
        losses=f"{losses.difference:.1e}",
        losses_tolerance=f"{losses.tolerance:.1e}",
        worst=worst.name,
        worst_difference=f"{worst.difference:.1e}",
        worst_tolerance=f"{worst.tolerance:.1e}",
        step_ms=in_digits(1e3 * step_s, 3),
        note=note,
        first=first_wrong(wrong, reference),
        wrong=tuple(sorted(wrong)),
    )


def beside_floor(row: Row, shares: Sequence[TimeShare], link: Sequence[float]) -> Row:
    """Add the boundary of a run where messages take longest over the least time that the link allows.

    Only messages count whose receiver waited for them: of others it is not known when they came.

    Args:
        row: of the run.
        shares: the last step of all ranks, on one clock.
        link: its latency, in seconds, and bytes per second.

    >>> from vtp_plugin.trace.stretches import Stretch
    >>> name = "boundary 0->1, replica 0, forward, microbatch 0"
    >>> sent = Stretch(cause=Cause.SEND, name=name, start_s=0.0, end_s=0.1, num_bytes=10)
    >>> waited = Stretch(cause=Cause.WAIT, name=name, start_s=-0.1, end_s=0.5)
    >>> shares = [TimeShare(rank=rank, worker=rank, start_s=0.0, end_s=1.0, stretches=(done,))
    ...           for rank, done in enumerate((sent, waited))]
    >>> row = beside_floor(Row(shows="", layout="", num_ranks=2, verdict="equal"), shares, (0.05, 100.0))
    >>> row.boundary, row.boundary_ms, row.floor_ms
    ('0->1 forward', '500', '150')
    """
    found: defaultdict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for _, name, took_s in crossings_of(shares):
        sent = [
            [one.num_bytes for one in share.stretches if (one.cause, one.name) == (Cause.SEND, name)]
            for share in shares
        ]
        num_bytes = max(map(sum, sent))
        if num_bytes and (boundary := boundary_of(name)):
            found[boundary].append((took_s, link[0] + num_bytes / link[1]))
    medians = {boundary: [median(column) for column in zip(*times, strict=True)] for boundary, times in found.items()}
    if not medians:
        return row
    (source, target, way), (took_s, floor_s) = max(medians.items(), key=lambda one: one[1][0] / one[1][1])
    times = {"boundary_ms": in_digits(1e3 * took_s, 3), "floor_ms": in_digits(1e3 * floor_s, 3)}
    return replace(row, boundary=f"{source}->{target} {way}", **times)


def blame(row: Row, fed: Numbers, reference: Numbers, changed: Sequence[Numbers]) -> Row:
    """Say whether the layer where a run first differs does so from the uniform run's input, too.

    Args:
        row: of the run.
        fed: what the run computes when the layer gets that input.
        reference: the uniform run of its training.
        changed: the same with start weights that are changed by a rounding.

    >>> name = "output of output_layer"
    >>> right, wrong = (Numbers(vectors={name: (x, 1.0)}) for x in (1.0, 2.0))
    >>> row = Row(shows="", layout="", num_ranks=1, verdict="differs", first=name, note="it differs")
    >>> [blame(row, fed, right, []).note for fed in (right, wrong)]  # doctest: +NORMALIZE_WHITESPACE
    ['it differs; the fault lies before output_layer, which is right when it gets the input of the uniform run',
     'it differs; the fault lies in output_layer, which differs when it gets the input of the uniform run, too']
    """
    layer = layer_of(row.first)
    is_right = all(
        one.is_equal for one in judge(fed, reference, tolerances(reference, changed)) if layer_of(one.name) == layer
    )
    which = (
        f"before {layer}, which is right when it gets the input of the uniform run"
        if is_right
        else f"in {layer}, which differs when it gets the input of the uniform run, too"
    )
    return replace(row, note=f"{row.note}; the fault lies {which}")


def conclude(rows: Sequence[Row], left_out: Mapping[str, str]) -> tuple[tuple[Row, ...], str]:
    """Say why a script's list differs from equal stages, or that it does not.

    Where stock Megatron with other equal stages differs at the tensor, too, at which the list first does, that is
    Megatron's own.

    Args:
        rows: in the order of the runs: the reference once more, other equal stages, the list.
        left_out: what was not run, and why.

    Returns:
        The rows, the list's with its verdict, and a line.
    """
    again, *equal, own = rows
    spread = f"from run to run TP 1 differs by {again.worst_difference}"
    others = [row for row in equal if row.verdict == "Megatron's own"]
    same = [row for row in others if own.first in row.wrong or own.verdict == "failed"]
    theirs = "; ".join(f"stock Megatron with {row.layout}: {row.note}" for row in same or others)
    unseen = ", ".join(f"{what} {why}" for what, why in left_out.items())
    if own.verdict == "equal":
        line = f"rounding: {own.layout} computes what TP 1 does; {spread}"
        return tuple(rows), f"{line}; of itself {theirs}" if theirs else line
    if same:
        own = replace(own, verdict="Megatron's own" if own.verdict == "differs" else own.verdict)
        return (again, *equal, own), f"Megatron's own: its numbers depend on the TP size; {theirs}; {spread}"
    line = f"ours: {own.note}" if own.verdict == "differs" else f"not run: {own.note}"
    return tuple(rows), f"{line}; {spread}" + (f"; whether Megatron's own is not known: {unseen}" if unseen else "")


def unjudged(run: CertifiedRun, verdict: Verdict, note: str) -> Row:
    """Give the row of a run that was not compared.

    Args:
        run: the run.
        verdict: what came of it.
        note: why, in a line.
    """
    return Row(shows=run.shows, layout=run.layout, num_ranks=run.num_ranks, verdict=verdict, note=note)


def _later(numbers: Numbers, num_steps: int) -> Numbers:
    """Keep what was logged in the last steps."""
    logged = {name: values[-num_steps:] for name, values in numbers.vectors.items() if is_loss(name) or name == NORM}
    return Numbers(vectors=logged)


def text_of(report: CertifyReport) -> Iterator[str | TextTable]:
    """Write a report for people."""
    yield f"{report.device}, {report.num_ranks} ranks{', --short' if report.is_short else ''}, {report.seconds} s"
    yield ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"sources of the plugin {report.sources}"
    yield ""
    header = (
        *("shows", "stages", "verdict", "losses", "allowed", "furthest", "by", "allowed", "step ms"),
        *("boundary", "message ms", "floor ms"),
    )
    rows = [
        (
            *(row.shows, row.layout, row.verdict, row.losses, row.losses_tolerance),
            *(row.worst, row.worst_difference, row.worst_tolerance, row.step_ms),
            *(row.boundary, row.boundary_ms, row.floor_ms),
        )
        for row in report.rows
    ]
    yield TextTable.aligned(header, rows)
    yield from (f"{row.shows} ({row.layout}): {row.note}" for row in report.rows if row.note)
    yield ""
    yield (
        f"losses, furthest: norm of the difference from the uniform run, relative. allowed: {FACTOR:g} times what the "
        "uniform run differs by from itself when each start weight is changed by one rounding; the larger of two runs"
    )
    yield (
        "boundary: where a message takes longest over its floor, which is the time of the bytes of its busiest sender "
        "between ranks 0 and 1"
    )
    yield from (f"not run: {what}: {why}" for what, why in report.left_out.items())
    num_well = sum(row.verdict in WELL for row in report.rows)
    yield from [f"conclusion: {report.conclusion}"] * bool(report.conclusion)
    yield f"verdict: {'fine' if report.is_well else 'wrong'}: {num_well} of {len(report.rows)} runs went as they should"


def digest_of(folder: Path) -> str:
    """Give the digest of all Python files in a folder, which does not depend on where it lies, nor on links in it."""
    digest = hashlib.sha256()
    paths = (Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names)
    for path in sorted(path for path in paths if path.suffix == ".py"):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def problems_of(report: CertifyReport, versions: Mapping[str, str], sources: str) -> Iterator[str]:
    """Say why a report does not speak of what is installed; nothing if it does.

    Args:
        report: that somebody has sent.
        versions: of the packages that are installed.
        sources: digest of the plugin that is installed.

    >>> report = CertifyReport(versions={"torch": "2.8"}, sources="ab", device="cpu", num_ranks=3, is_short=True,
    ...                        conclusion="", rows=(), left_out={}, seconds=1)
    >>> list(problems_of(report, {"torch": "2.9"}, "ab"))
    ['torch 2.8 in the report, 2.9 here']
    """
    if report.sources != sources:
        yield f"sources of the plugin {report.sources} in the report, {sources} here"
    for name in dict.fromkeys([*report.versions, *versions]):
        one, other = report.versions.get(name, "none"), versions.get(name, "none")
        if one != other:
            yield f"{name} {one} in the report, {other} here"
