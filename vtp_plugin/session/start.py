"""One start of model parallelism: what is planned for it, and what it has opened."""

from __future__ import annotations

from contextlib import ExitStack

from vtp_plugin.config import VtpConfig
from vtp_plugin.runtime.wire.audit import Audit
from vtp_plugin.session.planned import PlannedRun


class Start:
    """What belongs to one start on this rank, from its plan to its groups; it ends as a whole, and the next is new.

    Attributes:
        planned: the run, once its layout is known.
        audit: record of what crosses; None unless asked for, or before it begins.
        ending: what ends with this start, the last first: channels, groups, entries in torch's tables, files.
    """

    def __init__(self, planned: PlannedRun | None = None) -> None:
        self.planned = planned
        self.audit: Audit | None = None
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

    def next(self) -> Start:
        """End all that is open, and return the next start, which keeps a plan that follows from arguments."""
        self.ending.close()
        return Start(self.planned if self.planned is not None and self.planned.has_arguments else None)
