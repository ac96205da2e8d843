"""The applied plugin in three states: asked for (``Session.config``), planned, running.

:class:`Session` holds the state; ``planned_run`` holds what is known once the layout is, and ``stage_comm_grid`` the
open pipelines. ``ranks`` does what all ranks do together outside the pipelines, and says what they compare.
``loading`` knows the checkpoint that is being loaded, ``edge_seed`` the key of an edge.

Words:
    request: what this rank was asked for, before any layout is known.
    statement: what ranks compare: the request, then the plan.
    planned: the layout is known; running: the channels are open.
    start: from a plan to the end of its groups; a process may have several, one after another (``Start``).
    pipeline: stages that work together on one part of a model: the run's own, or that of a module (``Pipeline``).
    joints: the channels and bridges of a rank's stage to other stages and other modules (``Joints``).
    ends: how the first and the last stage of a pipeline are joined, to each other or to other modules (``Ends``).
"""

from __future__ import annotations

from vtp_plugin.session.planned_run import PlannedRun
from vtp_plugin.session.session import Pipeline, Session

__all__ = ["Pipeline", "PlannedRun", "Session"]
