"""One start of model parallelism: what it has opened."""

from __future__ import annotations

import functools
from contextlib import ExitStack

from vtp_plugin.config import VtpConfig
from vtp_plugin.report.trace.trace_files import Owner, trace_path
from vtp_plugin.runtime.comm.audit import Audit
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.comm.tcp_counters import name_network
from vtp_plugin.runtime.health.line_file import LineFile
from vtp_plugin.runtime.step.timing import Line, Timing
from vtp_plugin.runtime.step.tracing import Tracing
from vtp_plugin.session.planned_run import PlannedRun
from vtp_plugin.session.ranks import AllRanks


class Start:
    """What one start has opened on this rank. It ends at once; the next start is new.

    Attributes:
        audit: record of all messages; None unless asked for, or before it begins.
        is_described: whether the log has its summary.
        tracing: trace of this rank's steps; None unless asked for, or before it begins.
        timing: times of all ranks' steps; None unless asked for, or before it begins.
        ending: stack of what is closed when this start ends: channels, groups, entries in torch's tables, files.
    """

    def __init__(self) -> None:
        self.audit: Audit | None = None
        self.is_described = False
        self.tracing: Tracing | None = None
        self.timing: Timing | None = None
        self.ending = ExitStack()

    def open_audit(self, config: VtpConfig, rank: int) -> Audit | None:
        """Open the audit, if it is asked for; idempotent.

        Raises:
            ConfigError: the audit's file cannot be written.
        """
        if config.audit is not None and self.audit is None:
            self.audit = Audit(config.audit, rank)
            self.ending.callback(self.audit.close)
        return self.audit

    def open_records(self, planned: PlannedRun, rank: int, ranks: AllRanks, recorder: Recorder) -> None:
        """Open the trace and the timing, if they are asked for; idempotent.

        Args:
            planned: the run.
            rank: this rank.
            ranks: all ranks of the run, which have met.
            recorder: notes what this rank does.

        Raises:
            ConfigError: the trace cannot be written.
        """
        if not planned.is_recorded:
            return
        config, coord = planned.config, planned.layout.coord(rank)
        recorder.counts_traffic = config.has_several_sites
        owner = Owner(
            run=ranks.name_run(),
            rank=rank,
            world_size=planned.layout.world_size,
            stage=coord.stage,
            worker=planned.replicas.worker(coord.stage, coord.dp_rank),
            site=planned.site_of(rank) if recorder.counts_traffic else "",
            network=name_network() if recorder.counts_traffic else "",
        )
        compare_clocks = ranks.compare_clocks
        if config.trace is not None and self.tracing is None:
            path, option = trace_path(config.trace, rank), f"--vtp-trace {config.trace}"
            file = LineFile(path, option=option, is_continued=False)
            steps = config.trace_steps
            self.tracing = Tracing(file, owner, recorder, steps=steps, compare_clocks=compare_clocks)
            self.ending.callback(self.tracing.close)
        if config.timing and self.timing is None:
            share = functools.partial(ranks.share_reports, kind=Line)
            self.timing = Timing(owner, recorder, share_lines=share, compare_clocks=compare_clocks)
            self.ending.callback(self.timing.close)

    def begin_step(self) -> None:
        """Tell the trace and the timing that a training step begins."""
        if self.tracing is not None:
            self.tracing.begin_step()
        if self.timing is not None:
            self.timing.begin_step()
