"""The applied plugin in three states: asked for (``Session.config``), planned, running.

:class:`Session` holds the state; ``planned`` and ``running`` say what is known from when on. What all ranks do together
outside the pipeline is done by ``ranks``, and ``request`` and ``statement`` say what they compare.

Words:
    request: what this rank was asked for, before any layout is known.
    statement: what ranks compare: the request, then the plan.
    planned: the layout is known; running: the channels are open.
"""

from __future__ import annotations

from vtp_plugin.session.planned import PlannedRun
from vtp_plugin.session.running import RunningPipeline
from vtp_plugin.session.session import Session

__all__ = ["PlannedRun", "RunningPipeline", "Session"]
