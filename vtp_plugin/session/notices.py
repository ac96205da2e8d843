"""Warnings at a run's start: patches that come too late or do not reach every name, and options with a warning."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from vtp_plugin.errors import PatchError
from vtp_plugin.host.patching import unreached
from vtp_plugin.host.rules.table.check_options import option_warnings
from vtp_plugin.host.versions import host_named, untried
from vtp_plugin.util import log

if TYPE_CHECKING:
    from vtp_plugin.session.planned_run import PlannedRun
    from vtp_plugin.session.session import Session


def warn_of_untried(name: str) -> None:
    """Warn, on one rank, of features that were never run with this Megatron."""
    parts = untried(host_named(name))
    if parts and os.environ.get("RANK", "0") == "0":
        log.warning(f"not yet run with Megatron {name}: {parts}; compare your first steps with a uniform run")


def warn_of_unreached(session: Session) -> None:
    """Warn of names that still hold a function of Megatron that was replaced."""
    # Each search asks for what refers to an object, among all objects of the process.
    places = unreached(applied for applied in session.applied if not applied.is_reached)
    if places:
        rest = f" and {len(places) - 8} more" if len(places) > 8 else ""
        log.warning(
            f"imported from Megatron before vtp_plugin.apply() and not replaced: {', '.join(places[:8])}{rest}; code "
            "that uses these bypasses the plugin; move vtp_plugin.apply() above the lines that import them"
        )


def warn_of_options(planned: PlannedRun, options: object, *, rank: int, version: str = "") -> None:
    """Warn, on one rank of each site, of options that work in another way than a user may expect.

    Args:
        planned: plan of the run.
        options: Megatron's arguments, or a model's configuration.
        rank: this rank.
        version: version of Megatron; empty takes only the rows for all versions.
    """
    if rank not in planned.reporting_ranks.values():
        return
    for line in option_warnings(options, replace(planned.option_context, version=version)):
        log.warning(line)


def refuse_late() -> None:
    """Refuse to patch a Megatron whose groups exist already: they have the sizes of a uniform run."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        raise PatchError(
            "Megatron's parallel_state is already initialised; call vtp_plugin.apply() before initialize_model_parallel"
        )
