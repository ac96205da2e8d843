"""The report of ``certify``: what was run, how far each run lies from the uniform one, and of what it speaks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from vtp_plugin.certify.compare import FACTOR, TOO_LARGE, Numbers, first_fault, judge, tolerances
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.util.text import in_digits

Verdict = Literal["equal", "differs", "failed", "named", "not named", "not judged"]
WELL: Final = ("equal", "named")
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
        note: more, in a line.
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
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyReport:
    """A report. It holds no paths, no names of machines, and no data; it is a statement of whoever sends it.

    Attributes:
        versions: of the packages, Python among them, by name.
        sources: digest of the plugin's files, which tells its commit.
        device: kind of the devices.
        num_ranks: ranks that were there.
        is_short: whether a part of the runs was asked for.
        rows: the runs.
        left_out: what was not run, and why.
        seconds: time of all runs.
        digest: of all other fields.
    """

    versions: dict[str, str]
    sources: str
    device: str
    num_ranks: int
    is_short: bool
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    seconds: int
    digest: str = ""

    @property
    def is_well(self) -> bool:
        """Whether every run went as it should."""
        return all(row.verdict in WELL for row in self.rows)

    def signed(self) -> CertifyReport:
        """Give the report with its digest."""
        values = {name: value for name, value in asdict(self).items() if name != "digest"}
        text = json.dumps(values, sort_keys=True)
        return replace(self, digest=hashlib.sha256(text.encode()).hexdigest()[:16])


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

    >>> numbers = Numbers(vectors={"losses": (4.0, 3.0, 2.0)})
    >>> row = judge_row(CertifiedRun(shows="slices"), numbers, 0.5, numbers, [])
    >>> row.verdict, row.worst, row.step_ms
    ('equal', 'losses', '500')
    """
    if run.saved_by:  # its first step has run with other stages
        numbers, reference, *changed = (_later(each) for each in (numbers, reference, *changed))
    allowed = tolerances(reference, list(changed))
    found = judge(numbers, reference, allowed)
    worst, losses = found[0], next(one for one in found if one.name == "losses")
    is_judged = losses.tolerance < TOO_LARGE
    verdict: Verdict = "equal" if worst.is_equal and not numbers.drifts else "differs"
    return Row(
        shows=run.shows,
        layout=run.list_text,
        num_ranks=run.num_ranks,
        verdict=verdict if is_judged else "not judged",
        losses=f"{losses.difference:.1e}",
        losses_tolerance=f"{losses.tolerance:.1e}",
        worst=worst.name,
        worst_difference=f"{worst.difference:.1e}",
        worst_tolerance=f"{worst.tolerance:.1e}",
        step_ms=in_digits(1e3 * step_s, 3),
        note="" if verdict == "equal" else "; ".join((first_fault(numbers, reference, found), *numbers.drifts[:1])),
    )


def unjudged(run: CertifiedRun, verdict: Verdict, note: str) -> Row:
    """Give the row of a run that was not compared.

    Args:
        run: the run.
        verdict: what came of it.
        note: why, in a line.
    """
    return Row(shows=run.shows, layout=run.list_text, num_ranks=run.num_ranks, verdict=verdict, note=note)


def _later(numbers: Numbers) -> Numbers:
    """Leave out what only a run from the first step on has."""
    later = {name: numbers.vectors[name][-2:] for name in ("losses", "gradient norms")}
    return replace(numbers, vectors={**numbers.vectors, **later})


def text_of(report: CertifyReport) -> Iterator[str | TextTable]:
    """Write a report for people."""
    yield f"{report.device}, {report.num_ranks} ranks{', --short' if report.is_short else ''}, {report.seconds} s"
    yield ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"sources of the plugin {report.sources}, report {report.digest}"
    yield ""
    header = ("shows", "stages", "verdict", "losses", "allowed", "furthest", "by", "allowed", "step")
    rows = [
        (
            *(row.shows, row.layout, row.verdict, row.losses, row.losses_tolerance),
            *(row.worst, row.worst_difference, row.worst_tolerance, f"{row.step_ms} ms" if row.step_ms else ""),
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
    yield from (f"not run: {what}: {why}" for what, why in report.left_out.items())
    num_well = sum(row.verdict in WELL for row in report.rows)
    yield f"verdict: {'fine' if report.is_well else 'wrong'}: {num_well} of {len(report.rows)} runs went as they should"


def digest_of(folders: Iterable[Path]) -> str:
    """Give the digest of all Python files in some folders, which does not depend on where these lie.

    Args:
        folders: the folders; a file counts in the last of them that holds it, whether this is a link or not.
    """
    folders = list(folders)
    digest = hashlib.sha256()
    for number, folder in enumerate(folders):
        for path in sorted(folder.rglob("*.py")):
            if any(path.is_relative_to(later) for later in folders[number + 1 :]):
                continue
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def problems_of(report: CertifyReport, versions: Mapping[str, str], sources: str) -> Iterator[str]:
    """Say why a report does not speak of what is installed; nothing if it does.

    Args:
        report: that somebody has sent.
        versions: of the packages that are installed.
        sources: digest of the plugin that is installed.

    >>> report = CertifyReport(versions={"torch": "2.8"}, sources="ab", device="cpu", num_ranks=3, is_short=True,
    ...                        rows=(), left_out={}, seconds=1).signed()
    >>> list(problems_of(report, {"torch": "2.9"}, "ab"))
    ['torch 2.8 in the report, 2.9 here']
    """
    if report.signed().digest != report.digest:
        yield "its fields were changed after it was written"
    if report.sources != sources:
        yield f"sources of the plugin {report.sources} in the report, {sources} here"
    for name in dict.fromkeys([*report.versions, *versions]):
        one, other = report.versions.get(name, "none"), versions.get(name, "none")
        if one != other:
            yield f"{name} {one} in the report, {other} here"
