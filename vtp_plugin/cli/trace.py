"""``trace``: the files of a traced run, joined to one picture beside its plan, and where the two differ."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vtp_plugin.cli.command_base import (
    PAGE,
    add_json_flag,
    add_output_flag,
    as_json,
    check_ending,
    print_answer,
    written,
)
from vtp_plugin.cli.page_sections import split_parts, write_output
from vtp_plugin.plan.schedule.cost.costs import format_costs
from vtp_plugin.report.page.report_page import ReportPage, TextTable
from vtp_plugin.report.pictures import svg
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.trace.compare_steps import (
    Difference,
    TracedStep,
    differences,
    explained,
    join_files,
    median_s,
    slower_by_itself,
    split_asked_for,
    undisturbed,
)
from vtp_plugin.trace.explain import arrivals
from vtp_plugin.trace.stretches import COMPUTES, MEANINGS, Cause, RankFile, Stretch, read_files
from vtp_plugin.trace.sums import RankPlace, SiteTraffic, traffic_between
from vtp_plugin.util.text import in_digits

_ENDINGS = {".json": "trace for Perfetto or Chrome", ".svg": "picture of the last step", PAGE: "page"}
_NUM_SHOWN = 10
_RUN, _PLAN = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = run.__doc__
    causes = "; ".join(f"{cause}: {meaning}" for cause, meaning in MEANINGS.items() if cause is not Cause.WAIT)
    parser.epilog = f"Causes: {causes}. {_answer.__doc__ or ''}"
    parser.add_argument("folder", type=Path, metavar="DIR", help="of --vtp-trace, with the files of all ranks")
    about = (
        "FILE.html: page to open in a browser; FILE.json: trace for Perfetto (ui.perfetto.dev) or Chrome; "
        "FILE.svg: picture of the last step"
    )
    add_output_flag(parser, "FILE", about, "--out")
    add_json_flag(parser, "print one JSON object")


def run(options: argparse.Namespace) -> None:
    """Join the files that all ranks wrote with --vtp-trace, align their clocks, and compare with a simulated step of
    the same costs: those that the run measured or was given, or else medians of the trace itself. The file shows two
    processes, run and plan, with a row for each rank.
    """
    check_ending(options.output, _ENDINGS)
    files = read_files(options.folder)
    traced = join_files(files)
    steps = undisturbed(traced)
    found = differences(steps)
    slower = slower_by_itself(steps, found)
    planned, asked_for = split_asked_for(steps, found)
    told = [*_asked_for(asked_for), *_between_sites(files, steps), _verdict(slower)]
    parts = [*_disturbed(traced, steps), *_summary(files, steps), "", _table(files, planned), *told]
    by_ending = {
        PAGE: lambda: _page(files, steps, parts),
        ".svg": lambda: _picture(files, steps[-1]),
        ".json": lambda: svg.chrome_text(_events(files, traced)),
    }
    write_output(options, by_ending)
    answer = _answer(files, traced, steps, found, slower, options.output)
    print_answer(options, answer, [*parts, *written(options)])


def _page(files: Sequence[RankFile], steps: Sequence[TracedStep], parts: Sequence[str | TextTable]) -> ReportPage:
    """Show what was measured beside what was predicted."""
    table, notes = split_parts(parts)
    return ReportPage(
        title=f"{len(files)} ranks, steps {steps[0].number} to {steps[-1].number}",
        notes=notes,
        table=table,
        about_table="Measured beside predicted",
        step=_picture(files, steps[-1]),
        about_step=f"Step {steps[-1].number}: the run above its plan",
    )


def _events(files: Sequence[RankFile], steps: Sequence[TracedStep]) -> Iterator[svg.Event]:
    """Yield all boxes of the picture; time 0 is the start of the first step."""
    zero_s = steps[0].start_s
    for process, name in ((_RUN, "run"), (_PLAN, "plan")):
        yield svg.name_process(process, name)
        for file in files:
            yield from svg.name_row(process, file.owner.rank, _label(file))
    num_arrows = 0
    for step in steps:
        for share in step.shares:
            shown = [Stretch(cause=Cause.OTHER, name=f"step {step.number}", start_s=share.start_s, end_s=share.end_s)]
            for one in (*shown, *share.stretches):
                yield _box(_RUN, share.rank, one, -zero_s)
            for one in step.plan[share.worker]:
                yield _box(_PLAN, share.rank, one, step.start_s - zero_s)
        for name, start, end in _messages(step, zero_s):
            num_arrows += 1
            yield from svg.arrow(name, num_arrows, start, end)


def _picture(files: Sequence[RankFile], step: TracedStep) -> str:
    """Draw one step, the run above its plan; what an idle rank waits for is left empty."""

    def row(file: RankFile, stretches: Sequence[Stretch], zero_s: float) -> tuple[str, list[Box]]:
        boxes: list[Box] = []
        for one in stretches:
            text = one.name if one.cause in COMPUTES else ""
            start, end = 1e3 * (one.start_s - zero_s), 1e3 * (one.end_s - zero_s)
            boxes.append(Box(kind=one.cause, start=start, end=end, text=text, short=_microbatch(text)))
        return _label(file), boxes

    ran = [row(file, step.run[file.owner.rank], step.start_s) for file in files]
    planned = [row(file, step.plan[file.owner.worker], 0.0) for file in files]
    sizes = Counter(file.owner.stage for file in files)
    title = f"step {step.number} on stages of {','.join(str(sizes[stage]) for stage in sorted(sizes))} ranks"
    groups = [Group(name="run", rows=ran), Group(name="plan", rows=planned)]
    return draw_rows(groups, title=title, unit="ms")


def _label(file: RankFile) -> str:
    return f"rank {file.owner.rank} (stage {file.owner.stage})"


def _microbatch(name: str) -> str:
    """Cut the name of a forward or backward down to its microbatch.

    >>> _microbatch("2F13")
    '13'
    """
    return name[max(name.rfind(letter) for letter in "FBIW") + 1 :]


def _box(process: int, row: int, one: Stretch, shift_s: float) -> svg.Event:
    says_all = one.cause in (*COMPUTES, Cause.OTHER) and one.name
    name = one.name if says_all else f"{one.cause} {one.name}".strip()
    return svg.box(process, row, name, one.cause, one.start_s + shift_s, one.end_s + shift_s)


def _messages(step: TracedStep, zero_s: float) -> Iterator[tuple[str, tuple[int, int, float], tuple[int, int, float]]]:
    """Yield what crossed: its name, and where its arrow begins and ends."""
    for share, wait, sender, sent_s in arrivals(step.shares):
        yield wait.name, (_RUN, sender, sent_s - zero_s), (_RUN, share.rank, wait.end_s - zero_s)


def _disturbed(traced: Sequence[TracedStep], steps: Sequence[TracedStep]) -> Iterator[str]:
    """Say which of the traced steps had what others have not, and whether they are left out of the rest."""
    named = [
        f"step {step.number} ({one.cause} {in_digits(1e3 * one.took_s)} ms on rank {one.rank})"
        for step in traced
        for one in step.disturbances
    ]
    if not named:
        return
    shown = ", ".join(named[:_NUM_SHOWN]) + (f" and {len(named) - _NUM_SHOWN} more" if named[_NUM_SHOWN:] else "")
    if steps is traced:
        yield f"all traced steps were disturbed: {shown}; what follows says little; give other --vtp-trace-steps"
    else:
        yield f"disturbed: {shown}; what follows leaves such steps out"


def _summary(files: Sequence[RankFile], steps: Sequence[TracedStep]) -> Iterator[str]:
    """Say what was traced, how well, and what it is compared with."""
    planned_s, step_s = max(step.planned_s for step in steps), median_s(steps)
    known = explained(steps)
    least = min(known, key=lambda rank: known[rank])
    yield (
        f"{len(files)} ranks, steps {steps[0].number} to {steps[-1].number}: a step takes {1e3 * step_s:,.1f} ms "
        f"(median), the simulated one {1e3 * planned_s:,.1f} ms without the optimizer"
    )
    source = "medians of this trace" if steps[-1].are_measured else "of the run"
    yield f"costs of the plan ({source}): {format_costs(steps[-1].costs)}"
    yield _clocks(files)
    yield f"causes explain {100 * known[least]:.1f} % of the steps at least (rank {least})"


def _clocks(files: Sequence[RankFile]) -> str:
    errors_s = {file.owner.rank: _clock_error_s(file) for file in files}
    worst = max(errors_s, key=lambda rank: errors_s[rank])
    return f"clocks are compared to within {1e3 * errors_s[worst]:.3f} ms (rank {worst})"


def _clock_error_s(file: RankFile) -> float:
    return max((error_s for _, _, error_s in file.clocks), default=0.0)


def _table(files: Sequence[RankFile], found: Sequence[Difference]) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for one in found[:_NUM_SHOWN]:
        values = (f"{1e3 * each:,.2f}" for each in (one.planned_s, one.ran_s, one.more_s))
        rows.append((str(one.rank), str(files[one.rank].owner.stage), str(one.cause), *values, one.where))
    header = ("rank", "stage", "cause", "planned ms", "ran ms", "more ms", "where")
    form = "{:>4}  {:>5}  {:<10}  {:>10}  {:>10}  {:>10}  {}"
    lines = [form.format(*row).rstrip() for row in ((*header[:-1], ""), *rows)]
    return TextTable(lines=lines, header=header, rows=rows)


def _asked_for(found: Sequence[Difference]) -> Iterator[str]:
    """Name what no plan has, so that it explains the length of the steps and hides nothing."""
    if found:
        named = (f"{one.cause} {1e3 * one.ran_s:,.1f} ms (rank {one.rank})" for one in found)
        yield "in no plan, since flags ask for it, in a step on average: " + ", ".join(named)


def _traffic(files: Sequence[RankFile], steps: Sequence[TracedStep]) -> tuple[SiteTraffic, ...]:
    owners = [file.owner for file in files]
    places = {one.rank: RankPlace(stage=one.stage, site=one.site, network=one.network) for one in owners}
    return traffic_between([step.shares for step in steps], places)


def _between_sites(files: Sequence[RankFile], steps: Sequence[TracedStep]) -> Iterator[str]:
    """Say what crossed between sites, where there are several."""
    traffic = _traffic(files, steps)
    if traffic:
        yield "between sites, in a step on average, with the waits for the other site:"
        yield from map(str, traffic)


def _verdict(slower: Sequence[Difference]) -> str:
    """Name what took longer, whoever had to wait for it."""
    if not slower:
        return "nothing was slow on its own: all that took longer than planned waited, or is below 2 % of a step"
    named = (
        f"rank {one.rank} {one.cause} {1e3 * one.more_s:+,.1f} ms" + (f" ({one.where})" if one.where else "")
        for one in slower[:_NUM_SHOWN]
    )
    return "slow on its own (not because it waited), more than planned in a step: " + "; ".join(named)


def _answer(
    files: Sequence[RankFile],
    traced: Sequence[TracedStep],
    steps: Sequence[TracedStep],
    found: Sequence[Difference],
    slower: Sequence[Difference],
    out: Path | None,
) -> Mapping[str, object]:
    """Keys of --json, times in ms: steps (their numbers), disturbed (step, cause, rank, ms; such steps are left out of
    all below if there are others), step_ms (median, of the slowest rank), planned_ms, costs,
    are_costs_measured (taken from the trace), clock_error_ms, explained (share of the steps with a known cause, by
    rank), differences (rank, stage, cause, planned_ms, ran_ms, where), slower_by_itself (the same), sites (site,
    sent_bytes, received_bytes, goodput_mbit, timed_bytes, timed_ms, exposed_ms and on_way_ms by stage, num_resent;
    on average per step; empty where all ranks are at one site), out (file or null).
    """

    def row(one: Difference) -> dict[str, object]:
        times = {"planned_ms": 1e3 * one.planned_s, "ran_ms": 1e3 * one.ran_s}
        stage = files[one.rank].owner.stage
        return {"rank": one.rank, "stage": stage, "cause": one.cause, **times, "where": one.where}

    return {
        "steps": [step.number for step in traced],
        "disturbed": [
            {"step": step.number, "cause": one.cause, "rank": one.rank, "ms": 1e3 * one.took_s}
            for step in traced
            for one in step.disturbances
        ],
        "step_ms": 1e3 * median_s(steps),
        "planned_ms": 1e3 * max(step.planned_s for step in steps),
        "costs": format_costs(steps[-1].costs),
        "are_costs_measured": steps[-1].are_measured,
        "clock_error_ms": max(1e3 * _clock_error_s(file) for file in files),
        "explained": explained(steps),
        "differences": [*map(row, found[:_NUM_SHOWN])],
        "slower_by_itself": [*map(row, slower)],
        "sites": [as_json(site) | {"goodput_mbit": site.goodput_mbit} for site in _traffic(files, steps)],
        "out": out,
    }
