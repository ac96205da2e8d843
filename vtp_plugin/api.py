"""``apply``, ``revert``, ``status`` and the queries; torch and Megatron are imported when they are called."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

from vtp_plugin import log
from vtp_plugin.config import (
    DeviceName,
    DpModeName,
    LogLevelName,
    ScheduleName,
    TransportName,
    VtpConfig,
    read_keywords,
)
from vtp_plugin.errors import ConfigError, PatchError, VtpError
from vtp_plugin.failure import FailureHook

if TYPE_CHECKING:
    import torch.distributed as dist

    from vtp_plugin.patching import PatchStatus
    from vtp_plugin.session import Session

_SUPPORTED = ">=0.19,<0.20"


class _Holder:
    """The one applied session of this process."""

    session: Session | None = None
    request: VtpConfig | None = None
    hook: FailureHook | None = None


def apply(
    *,
    vtp_size_list: Sequence[int] | str | None = None,
    vtp_cp_list: Sequence[int] | str | None = None,
    vtp_dp_list: Sequence[int] | str | None = None,
    dp_mode: DpModeName = "multiplex",
    device: DeviceName = "auto",
    transport: TransportName = "auto",
    transport_threshold_bytes: int | str | None = None,
    sites: str | Sequence[str] | None = None,
    timeout_s: float = 600.0,
    force: bool = False,
    data_parallel_size: int | None = None,
    schedule: ScheduleName = "stock",
    layerwise_disaggregated: bool = False,
    audit: str | None = None,
    in_flight: int | str | Sequence[int] | None = None,
    costs: str | Sequence[str] | None = None,
    replan_share: float = 0.25,
    log_level: LogLevelName = "INFO",
    share_errors: bool = False,
) -> None:
    """Patch Megatron so that every pipeline stage can have its own tensor-parallel size.

    Call it before Megatron's ``parallel_state`` is initialised, best before the script imports anything from Megatron.
    Names, class attributes, default arguments and partial objects that took something from Megatron before are made to
    hold the replacement, here and once the list is known; a warning names what was seen to stay in closures,
    containers and attributes, and what would make a run wrong is refused. Without a list here or on the command line
    (``--vtp-size-list``), Megatron stays as it is. In a child process that ``multiprocessing`` spawns while it imports
    the script again, the call does nothing.

    With a list, under a launcher and before torch.distributed is initialised, all ranks meet here: torch would wait for
    a missing rank for its own timeout, 30 minutes by default, and not name it.

    Args:
        vtp_size_list: tensor-parallel size of every stage, such as ``[1, 4, 4]``, or ``"auto"``.
        vtp_cp_list: context-parallel size of every stage; ``None`` is Megatron's one size for all. With a list,
            ``initialize_model_parallel(context_parallel_size=...)`` may be left out or be the largest of it.
        vtp_dp_list: data-parallel size of every stage; ``None`` is one size for all, from the world's. Where sizes
            differ, the schedule is planned.
        dp_mode: ``"multiplex"`` or ``"split"``, see :class:`~vtp_plugin.config.VtpConfig`.
        device: ``"auto"`` asks npu, then cuda, then cpu.
        transport: ``"auto"``, ``"rank0"`` or ``"sliced"``, see :class:`~vtp_plugin.config.VtpConfig`.
        transport_threshold_bytes: with ``"auto"``, the size from which on tensors cross in slices, such as ``"4MiB"``;
            ``None`` lets the run try both ways.
        sites: site of every stage, such as ``["edge", "cloud", "cloud"]``; ``None`` is one site.
        timeout_s: a rank that does not answer for so long ends the run on all ranks.
        force: use the plugin's groups and communicator for a uniform list too.
        data_parallel_size: replicas of every stage; only needed by ``"auto"``.
        schedule: ``"stock"`` or ``"planned"``, see :class:`~vtp_plugin.config.VtpConfig`.
        layerwise_disaggregated: stage 0 holds the first and the last layers; see there.
        audit: file that records every message between stages; each rank puts its number into the name.
        in_flight: most microbatches in flight then, on all stages or on each.
        costs: what its order is planned for, such as ``"forward_ms=40,80,40 latency_ms=20"``; ``None`` measures it.
        replan_share: how far real and planned time of a U's step may lie apart, see
            :class:`~vtp_plugin.config.VtpConfig`.
        log_level: least level of what the plugin says: ``"DEBUG"``, ``"INFO"``, ``"WARNING"`` or ``"ERROR"``.
        share_errors: let the texts of errors cross from this rank to other sites; each site decides for itself.

    Raises:
        ConfigError: a value breaks its rule.
        PeerError: not all ranks came within the timeout.
        PatchError: Megatron is missing, of another version, or already initialised; or ``apply`` was called before with
            other arguments.
    """
    keywords = dict(locals())  # all of them by name: the fields of VtpConfig say how each is read
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    try:
        _apply(read_keywords(keywords))
    except VtpError:
        report_failures()
        raise


def report_failures() -> None:
    """Let an error of the plugin that ends this process be one line, also where no list was given."""
    _hook().install()


def _apply(request: VtpConfig) -> None:
    """Apply the plugin for what was asked for; see :func:`apply`."""
    if _Holder.session is not None:
        if not _Holder.session.applied:
            raise PatchError("apply() was called before and failed; call vtp_plugin.revert() first")
        if request == _Holder.request:
            return
        raise PatchError(
            f"apply() was called before with other arguments ({_Holder.request}, now {request}); call it once, or "
            "vtp_plugin.revert() first"
        )
    host_version = _megatron_version()
    # Early, to run after the handlers that are registered later.
    atexit.register(_hook().leave)
    from vtp_plugin.patches.registry import argument_records, platform_records, training_records
    from vtp_plugin.patching import apply_records
    from vtp_plugin.session import Session
    from vtp_plugin.session.request import meet

    _refuse_late()
    session = Session(request)
    session.watch_failures = _hook().install

    def activate() -> None:
        if session.is_activated:
            return
        session.is_activated = True
        is_mapped = session.choose_platform().name == "cpu"
        if session.config.size_list is None and not is_mapped:
            return
        records = (*(arguments if not session.applied else ()), *platform_records(session))
        if session.config.size_list is not None:
            records += training_records(session)
        earlier = tuple(session.applied)
        session.applied.append(apply_records(records, host_version))
        if session.config.size_list is not None:
            for applied in earlier:
                applied.rebind()
            _warn_of_unreached(session)

    arguments = argument_records(session, activate)
    if not isinstance(request.size_list, tuple):
        session.applied.append(apply_records(arguments, host_version))
        _Holder.session, _Holder.request = session, request
    else:
        _Holder.session, _Holder.request = session, request
        # All records at once: each set of them costs a search of everything that is loaded.
        session.watch_failures()
        session.open_log()
        meet(session, activate)
        activate()  # unless this rank has met nobody


def revert() -> None:
    """Undo ``apply``: every replaced object of Megatron and torch is the original again. Without ``apply``: nothing."""
    session, _Holder.session, _Holder.request = _Holder.session, None, None
    hook, _Holder.hook = _Holder.hook, None
    if hook is not None:
        atexit.unregister(hook.leave)
        hook.remove()
    if session is None:
        return
    session.ranks.stop()
    for applied in reversed(session.applied):
        applied.revert()
    if session.platform is not None:
        session.platform.uninstall()
    if session.close_log is not None:
        session.close_log()


def status() -> tuple[PatchStatus, ...]:
    """Return the state of every patch; empty before ``apply``."""
    session = _Holder.session
    return () if session is None else tuple(entry for applied in session.applied for entry in applied.status())


def open_session() -> Session:
    """Return the session of a run whose channels are open.

    Raises:
        ConfigError: there is none, or Megatron's own communicator is in use.
    """
    session = _Holder.session
    if session is None or not session.is_running or session.running.communicator is None:
        raise ConfigError(
            "the plugin's channels are not open; call vtp_plugin.apply() with vtp_size_list, then "
            "initialize_model_parallel() (a uniform list needs force=True)"
        )
    return session


def is_vtp_enabled() -> bool:
    """Tell whether the plugin's groups and communicator are in use in this run."""
    return _Holder.session is not None and _Holder.session.is_active


def get_vtp_size_list() -> list[int] | None:
    """Return the tensor-parallel size of every stage; None before it is known."""
    session = _Holder.session
    return None if session is None or not session.is_planned else list(session.planned.layout.tp_sizes)


def get_vtp_stage_ranks() -> list[list[int]] | None:
    """Return the global ranks of every stage in this rank's replica; None before the groups exist."""
    session = _Holder.session
    if session is None or not session.is_running:
        return None
    planned = session.planned
    layout, own = planned.layout, planned.own
    return [
        list(layout.tp_ranks(i, planned.replicas.partner(own.stage, own.dp_rank, i), own.cp_rank % grid.cp))
        for i, grid in enumerate(layout.stages)
    ]


def get_vtp_my_stage_idx() -> int | None:
    """Return the index of this rank's stage; None before the groups exist."""
    session = _Holder.session
    return None if session is None or not session.is_running else session.planned.own.stage


def is_vtp_stage_rank0() -> bool:
    """Tell whether this rank is its stage's leader; True before the groups exist, as in the Ascend implementation."""
    session = _Holder.session
    return session is None or not session.is_running or session.planned.own.tp_rank == 0


def get_vtp_intra_stage_group() -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of this rank's stage; None before the groups exist."""
    session = _Holder.session
    return None if session is None or not session.is_running else session.running.stage_group


def _hook() -> FailureHook:
    """Return the link in the chain of exception hooks; made once, since who set a hook after it may call it."""
    if _Holder.hook is None:
        _Holder.hook = FailureHook(
            is_applied=lambda: _Holder.session is not None,
            get_watch=lambda: None if _Holder.session is None else _Holder.session.ranks.monitor,
            note=_note_failure,
        )
    return _Holder.hook


def _note_failure(error: BaseException, position: str, is_consequence: bool) -> None:
    """Fill the file in which the launcher looks for the reason."""
    from vtp_plugin.runtime.disclosure import describe_error
    from vtp_plugin.runtime.error_file import write_error_file

    write_error_file(f"{describe_error(error)}{position}", is_consequence=is_consequence)


def _megatron_version() -> str:
    from packaging.specifiers import SpecifierSet

    try:
        found = distribution_version("megatron-core")
    except PackageNotFoundError:
        raise PatchError("megatron-core is not installed; run: pip install 'megatron-core>=0.19,<0.20'") from None
    if not SpecifierSet(_SUPPORTED).contains(found, prereleases=True):
        raise PatchError(
            f"megatron-core {found} is not supported by this version of vtp_plugin, which knows {_SUPPORTED}; run: "
            f"pip install 'megatron-core{_SUPPORTED}'"
        )
    return found


def _warn_of_unreached(session: Session) -> None:
    """Name what took something from Megatron before and still holds it."""
    places = [place for applied in session.applied for place in applied.unreached]
    if places:
        rest = f" and {len(places) - 8} more" if len(places) > 8 else ""
        log.warning(
            f"taken from Megatron before vtp_plugin.apply() and not replaced: {', '.join(places[:8])}{rest}; what uses "
            "these goes past the plugin: move vtp_plugin.apply() above the lines that take them"
        )


def _refuse_late() -> None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        raise PatchError(
            "Megatron's parallel_state is already initialised; call vtp_plugin.apply() before initialize_model_parallel"
        )
