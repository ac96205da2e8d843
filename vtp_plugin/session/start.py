"""One start of model parallelism: what is planned for it, and what it has opened."""

from __future__ import annotations

from contextlib import ExitStack

from vtp_plugin.config import VtpConfig
from vtp_plugin.runtime.life.line_file import LineFile
from vtp_plugin.runtime.step.tracing import Tracing
from vtp_plugin.runtime.wire.audit import Audit
from vtp_plugin.runtime.wire.recorder import Recorder
from vtp_plugin.session.planned import PlannedRun
from vtp_plugin.session.ranks import AllRanks
from vtp_plugin.trace.files import Owner, trace_path


class Start:
    """What belongs to one start on this rank, from its plan to its groups; it ends as a whole, and the next is new.

    Attributes:
        planned: the run, once its layout is known.
        audit: record of what crosses; None unless asked for, or before it begins.
        tracing: record of what this rank does, likewise.
        ending: what ends with this start, the last first: channels, groups, entries in torch's tables, files.
    """

    def __init__(self, planned: PlannedRun | None = None) -> None:
        self.planned = planned
        self.audit: Audit | None = None
        self.tracing: Tracing | None = None
        self.ending = ExitStack()

    def plan(self, planned: PlannedRun) -> None:
        """Take a plan, or what is known of it by now."""
        self.planned = planned

    def open_audit(self, config: VtpConfig, rank: int) -> Audit | None:
        """Begin the record of what crosses, if it is asked for; idempotent.

        Raises:
            ConfigError: it cannot be written.
        """
        if config.audit is not None and self.audit is None:
            self.audit = Audit(config.audit, rank)
            self.ending.callback(self.audit.close)
        return self.audit

    def open_trace(self, rank: int, ranks: AllRanks, recorder: Recorder) -> None:
        """Begin the trace, if it is asked for, once the layout is known; idempotent.

        Args:
            rank: this rank.
            ranks: all of the run, which have met.
            recorder: knows what this rank does.

        Raises:
            ConfigError: it cannot be written.
        """
        planned = self.planned
        if planned is None or planned.config.trace is None or self.tracing is not None:
            return
        folder, place = planned.config.trace, planned.layout.coord(rank)
        owner = Owner(
            run=ranks.name_run(),
            rank=rank,
            world_size=planned.layout.world_size,
            stage=place.stage,
            worker=planned.replicas.worker(place.stage, place.dp_rank),
        )
        file = LineFile(trace_path(folder, rank), option=f"--vtp-trace {folder}", is_continued=False)
        self.tracing = Tracing(
            file, owner, recorder, steps=planned.config.trace_steps, compare_clocks=ranks.compare_clocks
        )
        self.ending.callback(self.tracing.close)

    def next(self) -> Start:
        """End all that is open, and return the next start, which keeps a plan that follows from arguments."""
        self.ending.close()
        return Start(self.planned if self.planned is not None and self.planned.has_arguments else None)
