"""The applied plugin: what was asked for, what was planned, and what runs.

:class:`Session` holds the state; what it decides from the configuration is computed by functions (``plan``,
``statement``), and what all ranks do together outside the pipeline is done by ``ranks``.
"""

from __future__ import annotations

from vtp_plugin.session.session import Session

__all__ = ["Session"]
