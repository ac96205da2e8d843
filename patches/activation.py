"""Which patches apply when: at once, or when it is known whether there is a list of sizes."""

from __future__ import annotations

import functools

from vtp_plugin.hosts import find_host
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.registry import (
    argument_records,
    bridge_records,
    module_records,
    platform_records,
    training_records,
)
from vtp_plugin.patching import Record, apply_records
from vtp_plugin.session import Session
from vtp_plugin.session.notices import warn_of_unreached, warn_of_untried


def begin(session: Session, host: MegatronHost) -> None:
    """Apply what a run needs whose list of sizes may still come from the command line, or not at all.

    Raises:
        ConfigError: there is no such device.
        PatchError: a patch does not fit, or Megatron has no bridges.
    """
    records = argument_records(session, host, functools.partial(activate, session, host))
    if session.config.bridges:
        session.choose_platform()
        records += (*platform_records(session, host), *module_records(session, host), *bridge_records(session, host))
        session.has_bridges = True
    _put(session, host, records)


def activate(session: Session, host: MegatronHost) -> None:
    """Apply the records that depend on the list, which is now known or known to be missing; idempotent."""
    if session.is_activated:
        return
    session.is_activated = True
    has_list, is_mapped = session.config.size_list is not None, session.choose_platform().name == "cpu"
    wants_bridges = bool(session.config.bridges) and not session.has_bridges
    if not (has_list or wants_bridges or is_mapped):
        return
    records: tuple[Record, ...] = () if session.has_bridges else platform_records(session, host)
    if not session.applied:
        # All records in one set: each set costs a search through everything that is loaded.
        records = (*argument_records(session, host, functools.partial(activate, session, host)), *records)
    if (has_list or wants_bridges) and not session.has_bridges:
        records += module_records(session, host)
    if has_list:
        records += training_records(session, host)
    if wants_bridges:
        records += bridge_records(session, host)
        session.has_bridges = True
    earlier = tuple(session.applied)
    _put(session, host, records)
    if has_list:
        warn_of_untried(host.name)
        # The script may have taken more from Megatron since the first set was applied.
        for applied in earlier:
            applied.rebind()
        warn_of_unreached(session)


def _put(session: Session, host: MegatronHost, records: tuple[Record, ...]) -> None:
    """Apply a set of records, and let MindSpeed put it in place again whenever it does so with its own."""
    applied = apply_records(records, find_host()[1].version)
    session.applied.append(applied)
    if host.mindspeed is not None:
        host.mindspeed.keep(applied)
        session.on_revert = host.mindspeed.forget
