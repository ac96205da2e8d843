"""What a rank that fails leaves beside the checkpoint for later starts."""

from __future__ import annotations

from vtp_plugin.elastic.failed_cards import note_error
from vtp_plugin.elastic.failed_starts import note_failed_start
from vtp_plugin.elastic.stop_marker import leave_marker
from vtp_plugin.errors import VtpError
from vtp_plugin.runtime.health.redaction import describe_error


def note_for_next_start(error: BaseException, is_consequence: bool) -> None:
    """Note the error that ends this process for later starts, if this process failed first.

    Args:
        error: error that ends this process.
        is_consequence: whether another rank failed before.
    """
    if is_consequence:
        return
    if isinstance(error, VtpError) and error.is_final:
        leave_marker(describe_error(error))
    note_error(error)
    note_failed_start(error)
