"""The applied plugin in three states: asked for (``Session.config``), planned, running.

:class:`Session` holds the state; ``planned`` and ``running`` say what is known from when on. What all ranks do together
outside the pipeline is done by ``ranks``, and ``request`` and ``statement`` say what they compare.
"""

from __future__ import annotations

from vtp_plugin.session.planned import PlannedRun
from vtp_plugin.session.running import RunningPipeline
from vtp_plugin.session.session import Session

__all__ = ["PlannedRun", "RunningPipeline", "Session"]
