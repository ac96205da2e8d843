"""Which patches apply when: at once, or when it is known whether there is a list of sizes."""

from __future__ import annotations

import functools

from vtp_plugin.errors import PatchError, refuse
from vtp_plugin.host.patching import Record, apply_records
from vtp_plugin.host.rules.checks.lora_fits import check_version
from vtp_plugin.host.versions import find_host
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import list_moments, platform_records, records_at
from vtp_plugin.patches.site_objects import close_objects
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.session import Session
from vtp_plugin.session.session import warn_of_unreached, warn_of_untried
from vtp_plugin.util.log import warning


def begin(session: Session, host: MegatronHost) -> None:
    """Apply what a run needs whose list of sizes may still come from the command line, or not at all.

    Raises:
        ConfigError: there is no such device.
        PatchError: a patch does not fit, or Megatron has no bridges.
    """
    records = _argument_records(session, host)
    if session.config.bridges:
        _require_bridges(host)
        records += (*platform_records(session, host), *records_at(session, host, Moment.STAGES, Moment.BRIDGES))
        session.applied.begin_bridges()
    _put(session, host, records)


def activate(session: Session, host: MegatronHost) -> None:
    """Apply the records that depend on the list, which is now known or known to be missing; idempotent."""
    if not session.applied.begin_list():
        return
    has_list, is_mapped = session.config.size_list is not None, session.choose_platform().name == "cpu"
    wants_bridges = bool(session.config.bridges) and not session.applied.has_bridges
    if not (has_list or wants_bridges or is_mapped):
        return
    # All records in one set: each set costs a search through everything that is loaded.
    records = () if session.applied else _argument_records(session, host)
    records += () if session.applied.has_bridges else platform_records(session, host)
    moments = (Moment.STAGES,) if (has_list or wants_bridges) and not session.applied.has_bridges else ()
    if has_list:
        if host.mindspeed is not None:
            config = session.config
            refuse(host.mindspeed.problems(is_planned=config.has_planned_schedule, is_split=config.split_backward))
        refuse(check_version(session.config.lora, host.version))
        moments += list_moments(session.config)
        moments += (Moment.MM_RINGS,) if session.is_planned and session.planned.first_ring is not None else ()
    if wants_bridges:
        _require_bridges(host)
        moments += (Moment.BRIDGES,)
        session.applied.begin_bridges()
    _put(session, host, (*records, *records_at(session, host, *moments)))
    if Moment.SITES in moments:
        close_objects(session)
    if has_list and known_swift.is_loaded():
        _put_swift(session, host)
    if has_list:
        warn_of_untried(host.name)
        warn_of_unreached(session)


def _put_swift(session: Session, host: MegatronHost) -> None:
    """Apply the records of ms-swift, a set of their own: it is another package that is patched."""
    refuse(known_swift.problems_of_versions())
    for line in known_swift.changes_of_versions():
        warning(line)
    # Their versions are Megatron's, too.
    records = records_at(session, host, Moment.SWIFT)
    session.applied.add(apply_records(records, find_host()[1].version, "swift", (), ("mcore_bridge",)))


def split_layers(session: Session, host: MegatronHost) -> None:
    """Let linear layers leave the gradients of their weights for later, where there is no run: they are timed."""
    _put(session, host, records_at(session, host, Moment.SPLIT))


def _argument_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records that apply at once and change nothing by themselves.

    They read the command line, or replace what scripts import by name before there is a command line.
    """
    return records_at(session, host, Moment.COMMAND_LINE, activate=functools.partial(activate, session, host))


def _require_bridges(host: MegatronHost) -> None:
    """Refuse a Megatron that has no bridges that we can stand in for."""
    if not host.can("bridges"):
        raise PatchError(
            f"--vtp-bridges: megatron-core {find_host()[1].version} has no such bridges between modules; use 0.19, or "
            "leave it out"
        )


def _put(session: Session, host: MegatronHost, records: tuple[Record, ...]) -> None:
    """Apply a set of records, and let MindSpeed put it in place again whenever it does so with its own."""
    applied = apply_records(records, find_host()[1].version)
    session.applied.add(applied)
    if host.mindspeed is not None:
        host.mindspeed.keep(applied)
        session.applied.before_revert(host.mindspeed.forget)
