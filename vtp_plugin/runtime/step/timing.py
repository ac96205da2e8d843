"""``--vtp-timing``: what the time of a step goes to, stage by stage, and what crosses between sites."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vtp_plugin.report.trace.between_sites import RankPlace, SiteTraffic, traffic_between
from vtp_plugin.report.trace.explain import on_one_clock
from vtp_plugin.report.trace.stage_times import StageTimes, stage_times
from vtp_plugin.report.trace.trace_files import Owner, read_step, step_line
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.health.clock import ClockOffset
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.runtime.health.store_posts import PostError
from vtp_plugin.runtime.step.measure import read_shared
from vtp_plugin.runtime.step.recorded import HostTimes, RecordedStep, begin_step
from vtp_plugin.util.printable import one_line

Line = dict[str, Any]
ShareLines = Callable[[Line, Callable[[Sequence[Line]], str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """A step of all ranks, summed up.

    Attributes:
        stages: what the time of every stage went to; empty if no step has run.
        sites: what crossed between sites; empty where all ranks are at one.
    """

    stages: tuple[StageTimes, ...] = ()
    sites: tuple[SiteTraffic, ...] = ()


class Timing:
    """Keeps what this rank does in the step under way, and sums up the last step of all ranks when the log is due.

    Args:
        owner: this rank, as the lines name it.
        recorder: notes what this rank does.
        share_lines: combines the lines of all ranks into one text, and returns it on all; a collective call.
        compare_clocks: measures how far this rank's clock is behind that of rank 0; a collective call.
    """

    def __init__(
        self,
        owner: Owner,
        recorder: Recorder,
        *,
        share_lines: ShareLines,
        compare_clocks: Callable[[], ClockOffset],
    ) -> None:
        self._owner = owner
        self._recorder = recorder
        self._share_lines = share_lines
        self._compare_clocks = compare_clocks
        self._step: RecordedStep | None = None
        self._times: HostTimes | None = None

    def begin_step(self) -> None:
        """Note that a training step begins; the one before is forgotten."""
        self.close()
        self._times = self._times or HostTimes(self._recorder.watch)
        self._step = begin_step(0, self._recorder)

    def report(self) -> StepSums:
        """End the step, and sum it up for all stages and sites; a collective call.

        Returns:
            The sums, the same on all ranks.
        """
        step, self._step = self._step, None
        if step is None or self._times is None:
            return StepSums()
        step.finish(self._recorder)
        offset = self._compare_clocks()
        owner = {name: getattr(self._owner, name) for name in ("rank", "stage", "worker", "site", "network")}
        line = {**owner, "offset_s": offset.offset_s, **step_line(step.read(self._times))}
        sums = read_shared(StepSums, self._share_lines(line, _sum_up))
        try:
            [str(each) for each in (*sums.stages, *sums.sites)]
        except KeyError as error:
            raise PostError(Topic.REPORTS.key, "text", f"lacks {one_line(str(error), 80)}, a part of a step") from None
        return sums

    def close(self) -> None:
        """Forget the step under way; idempotent."""
        if self._step is not None:
            self._recorder.stop_listening(self._step.noted)
            self._step = None


def _sum_up(lines: Sequence[Line]) -> str:
    shares = [
        on_one_clock(
            read_step(line), rank=line["rank"], worker=line["worker"], offset_s=lambda _, line=line: line["offset_s"]
        )
        for line in lines
    ]
    places = {
        line["rank"]: RankPlace(stage=line["stage"], site=line["site"], network=line["network"]) for line in lines
    }
    sums = StepSums(
        stages=stage_times(shares, {rank: place.stage for rank, place in places.items()}),
        sites=traffic_between([shares], places),
    )
    return json.dumps(asdict(sums))
