"""``apply``, ``revert``, ``status`` and the queries.

Importing this module imports neither torch nor Megatron; their absence is an error of ``apply``, in one line.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from vtp_plugin.config import DpModeName, LogLevelName, ScheduleName, TransportName, VtpConfig, read_keywords
from vtp_plugin.config.flag import DeviceName
from vtp_plugin.config.resolve import check_command_line, merge, take_flags
from vtp_plugin.elastic.failed_cards import note_for_next_start
from vtp_plugin.errors import MissingError, PatchError, VtpError
from vtp_plugin.host.mindspeed import TOO_LATE, UNKNOWN, ImportWatch, flags_of_mindspeed
from vtp_plugin.host.versions import find_host
from vtp_plugin.runtime.health.failure_hook import FailureHook
from vtp_plugin.util.undo import UndoStack

if TYPE_CHECKING:
    import torch.distributed as dist

    from vtp_plugin.host.patching import PatchStatus
    from vtp_plugin.platform.interface import Platform
    from vtp_plugin.session import Session


class _Holder:
    """What ``apply()`` has left in this process: one session, what it was asked for, and what watches the process."""

    session: Session | None = None
    request: VtpConfig | None = None
    hook: FailureHook | None = None
    platform: Platform | None = None
    watch: ImportWatch | None = None
    modules = UndoStack()  # modules that were put among Python's own, with or without a session


def apply(
    *,
    vtp_size_list: Sequence[int] | str | None = None,
    stages: Sequence[int] | str | None = None,
    vtp_cp_list: Sequence[int] | str | None = None,
    vtp_dp_list: Sequence[int] | str | None = None,
    vtp_ep_list: Sequence[int] | str | None = None,
    vtp_etp_list: Sequence[int] | str | None = None,
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
    num_layer_list: Sequence[int] | str | None = None,
    encoder_layer_list: Sequence[int] | str | None = None,
    edge_seed: str | None = None,
    audit: str | None = None,
    record_crossing: str | None = None,
    split_backward: bool = False,
    in_flight: int | str | Sequence[int] | None = None,
    costs: str | Sequence[str] | None = None,
    replan_share: float = 0.25,
    load_newest_valid: bool = False,
    keep_checkpoints: int | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: str | Sequence[str] = (),
    lora_layers: str | Sequence[tuple[int, int]] = (),
    lora_save_base: bool = False,
    log_level: LogLevelName = "INFO",
    trace: str | None = None,
    trace_steps: str | Sequence[int] = (2, 21),
    timing: bool = False,
    share_errors: bool = False,
    link_is_protected: bool = False,
    bridges: bool | Literal["extended"] = False,
) -> None:
    """Patch Megatron so that every pipeline stage can have its own tensor-parallel size.

    Call it before Megatron's ``parallel_state`` is initialised, and best before the script imports anything from
    Megatron. If names, class attributes, default arguments or partial objects already hold a function of Megatron, they
    get the replacement, here and once the list is known. A warning names what was seen to stay in closures, containers
    and attributes; what would make a run wrong ends it. Without a list here or on the command line
    (``--vtp-size-list``), Megatron stays as it is. In a child process that ``multiprocessing`` spawns, the call does
    nothing while the script is imported again.

    With a list, under a launcher and before torch.distributed is initialised, all ranks meet here. Otherwise torch
    would wait for a missing rank until its timeout, 30 minutes by default, and would not name it.

    Args:
        vtp_size_list: tensor-parallel size of every stage, such as ``[1, 4, 4]``, or ``"auto"``.
        stages: fewest and most pipeline stages of a layout that is chosen for the devices that are there, such as
            ``"2:4"``, with ``vtp_size_list="auto"``; only ``vtp run`` can choose one; ``None``: a node is a stage.
        vtp_cp_list: context-parallel size of every stage; ``None`` is Megatron's one size for all. With a list,
            ``initialize_model_parallel(context_parallel_size=...)`` may be left out or be the largest of it.
        vtp_dp_list: data-parallel size of every stage; ``None`` is one size for all, from the number of ranks.
        vtp_ep_list: expert-parallel size of every stage; ``None`` is Megatron's one size for all.
        vtp_etp_list: the same of the experts; ``None`` is Megatron's one size for all, or else each stage's own.
        dp_mode: ``"multiplex"`` or ``"split"``, see :class:`~vtp_plugin.config.VtpConfig`.
        device: ``"auto"`` asks npu, then cuda, then cpu.
        transport: ``"auto"``, ``"rank0"``, ``"sliced"`` or another, see :class:`~vtp_plugin.config.VtpConfig`.
        transport_threshold_bytes: size such as ``"4MiB"`` from which on ``"auto"`` sends slices; ``None`` tries both.
        sites: site of every stage, such as ``["edge", "cloud", "cloud"]``; ``None`` is one site.
        timeout_s: a rank that does not answer for this long ends the run on all ranks.
        force: use the plugin's groups and communicator for a uniform list too.
        data_parallel_size: replicas of every stage; only needed by ``"auto"``.
        schedule: ``"stock"`` or ``"planned"``, see :class:`~vtp_plugin.config.VtpConfig`.
        layerwise_disaggregated: U-shaped pipeline: stage 0 holds the first and the last layers; see there.
        num_layer_list: layers of a U: of the edge's first part, of every cloud stage, of the edge's last part. A model
            that is built without ``megatron.training`` also has them in its ``TransformerConfig``, as
            ``pipeline_model_parallel_layout``, where Megatron has that field.
        encoder_layer_list: layers of the encoder's parts in a U-shaped pipeline with two rings, in the same order.
        edge_seed: what the edge of a U of two sites draws its layers from: ``"random"`` (as ``None``), ``"shared"``
            or a file, see :class:`~vtp_plugin.config.VtpConfig`; core scripts build in ``drawing_edge_weights()``.
        audit: file that records every message between stages; each rank adds its number to the name.
        record_crossing: in a U a folder where the cloud keeps the first activations that come from the edge.
        split_backward: compute gradients of weights where a stage would wait; see docs/guides/split-backward.md.
        in_flight: most microbatches in flight in a U or a planned order, one number for all stages or one for each.
        costs: durations and links for which the order of a U is planned, such as ``"latency_ms=9"``; ``None`` measures.
        replan_share: share by which a step of a U may last longer or shorter than planned before it is planned again.
        load_newest_valid: load the newest checkpoint that is whole, instead of refusing one that is broken.
        keep_checkpoints: how many of the newest checkpoints stay when one is saved; ``None`` keeps all.
        lora_rank: rank of the adapters (LoRA) that are trained in the place of the model; ``None`` trains the model.
        lora_alpha: the product of an adapter's factors is multiplied by this over the rank; ``None`` is the rank.
        lora_dropout: share of its inputs that each adapter leaves out in a training step.
        lora_targets: what gets adapters, such as ``["q_proj", "linear_fc1"]``; empty is all.
        lora_layers: which layers do, as ranges of numbers from 0, such as ``"0:4,28:32"``, or in a U ``"edge"`` or
            ``"cloud"``; empty is all.
        lora_save_base: save the frozen model with the adapters.
        log_level: least level of the plugin's log: ``"DEBUG"``, ``"INFO"``, ``"WARNING"`` or ``"ERROR"``.
        trace: folder for files of what each rank does and when; all ranks give one, or none.
        trace_steps: first and last training step that is written there, such as ``"2-21"``, from 1 on.
        timing: say at every line of Megatron's log what the time of a step goes to on each stage.
        share_errors: let other sites read the texts of this rank's errors; each site decides for itself.
        link_is_protected: something that the plugin does not see encrypts the way between several sites.
        bridges: use the plugin's bridges between modules; ``"extended"``: the colocated one, where Megatron's cannot.

    Raises:
        ConfigError: a value breaks its rule.
        PeerError: not all ranks came within the timeout.
        PatchError: torch or Megatron is missing or of another version, or Megatron is already initialised; or ``apply``
            was called before with other arguments.
    """
    keywords = dict(locals())  # must stay the first line; the fields of VtpConfig say how each keyword is read
    # Set while multiprocessing imports the main module in a child: a data loader is no rank of the run.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    try:
        _apply(read_keywords(keywords))
    except VtpError:
        report_failures()
        raise


def apply_flags(words: Sequence[str]) -> list[str]:
    """Call :func:`apply` with what the plugin's flags among some words say, where a framework does not know them.

    Returns:
        The other words.

    Raises:
        ConfigError: a flag's value is wrong; or as of :func:`apply`.
    """
    try:
        request, rest = take_flags(words)
        _apply(request)
    except VtpError:
        report_failures()
        raise
    return rest


def report_failures() -> None:
    """Make an error of the plugin that ends this process one line, even in a run without a list."""
    _hook().install()


def announce_exit(leave: SystemExit) -> bool:
    """Tell the other ranks that a script has ended itself with a status; nothing if it was 0.

    Returns:
        Whether another rank failed before.
    """
    return leave.code not in (None, 0) and _hook().announce(leave)


def choose_device(device: DeviceName) -> None:
    """Find a platform, and map Megatron's calls onto it, before anything keeps references into torch.

    ``apply()`` takes it over; ``revert()`` undoes the mapping.

    Raises:
        ConfigError: there is no such device.
    """
    from vtp_plugin.platform.detect import detect

    if _Holder.platform is None:
        _Holder.platform = detect(device)
        _Holder.platform.install()


def _apply(request: VtpConfig) -> None:
    """Apply the plugin for what was asked for; see :func:`apply`."""
    request.refuse_to_fit()
    if _Holder.session is not None:
        if not _Holder.session.applied:
            raise PatchError("apply() was called before and failed; call vtp_plugin.revert() first")
        if request == _Holder.request:
            return
        raise PatchError(
            f"apply() was called before with other arguments ({_Holder.request}, now {request}); call it once, or "
            "vtp_plugin.revert() first"
        )
    check_command_line(sys.argv, request, {}, flags_of_mindspeed())  # whatever the number of processes
    family, _ = find_host()
    # Exit handlers run in reverse order: registered this early, it runs after those that are still to come.
    atexit.register(_hook().leave)
    from vtp_plugin.config.resolve import peek_device
    from vtp_plugin.patches.activation import activate, begin
    from vtp_plugin.patches.hosts import load_host
    from vtp_plugin.session import Session
    from vtp_plugin.session.session import refuse_late
    from vtp_plugin.session.stage_comm_grid import meet

    refuse_late()
    host = load_host(family.name)
    # The device before the command line is parsed, which then says the same.
    asked = merge(request, {"device": peek_device(sys.argv)}) if host.needs_device_first else request
    session = Session(asked, platform=_Holder.platform, watch_failures=_hook().install)
    if host.mindspeed is None:
        _Holder.watch = ImportWatch(before_adaptor=_refuse_adaptor, before_unknown=_refuse_unknown_adaptor)
    if host.needs_device_first:
        session.choose_platform()
    # Held before anything can fail: revert() can then clean up what that leaves.
    _Holder.session, _Holder.request = session, request
    if not isinstance(request.size_list, tuple):
        # The list may still come from the command line.
        begin(session, host)
        return
    session.watch_failures()
    session.open_log()
    prepare = functools.partial(activate, session, host)
    meet(session, prepare)
    prepare()  # meet() has not called it if no launcher says where the ranks meet


def revert() -> None:
    """Undo ``apply``: put the original objects of Megatron and torch back; and ``vtp_plugin.functional.install``.

    Without either it does nothing.
    """
    _Holder.modules.undo()
    session, _Holder.session, _Holder.request = _Holder.session, None, None
    hook, _Holder.hook = _Holder.hook, None
    if hook is not None:
        atexit.unregister(hook.leave)
        hook.remove()
    watch, _Holder.watch = _Holder.watch, None
    if watch is not None:
        watch.stop()
    platform, _Holder.platform = _Holder.platform, None
    if session is None:
        if platform is not None:
            platform.uninstall()
        return
    session.ranks.stop()
    session.release()
    session.savings.unlock()
    session.applied.revert()
    session.until_revert.close()
    if session.platform is not None:
        session.platform.uninstall()
    session.close_log()


def status() -> tuple[PatchStatus, ...]:
    """Return the state of every patch; empty before ``apply``."""
    session = _Holder.session
    return () if session is None else tuple(entry for applied in session.applied for entry in applied.status())


def current_session() -> Session | None:
    """Return the session of the applied plugin, if it is."""
    return _Holder.session


def installed_modules() -> UndoStack:
    """Return what :func:`revert` takes out of Python's modules, to add to it."""
    return _Holder.modules


def open_session() -> Session:
    """Return the session of a run whose channels are open.

    Raises:
        MissingError: there is none, or Megatron's communicator is in use.
    """
    session = _running_session()
    if session is None or session.running.communicator is None:
        raise MissingError(
            "the plugin's channels are not open; call vtp_plugin.apply() with vtp_size_list, then "
            "initialize_model_parallel() (if all sizes are equal, also with force=True)"
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
    if (session := _running_session()) is None:
        return None
    layout, replicas, own = session.planned.layout, session.planned.replicas, session.planned.own
    return [
        list(layout.tp_ranks(stage, replicas.partner(own.stage, own.dp_rank, stage), own.cp_rank % grid.cp))
        for stage, grid in enumerate(layout.stages)
    ]


def get_vtp_my_stage_idx() -> int | None:
    """Return the index of this rank's stage; None before the groups exist."""
    return None if (session := _running_session()) is None else session.planned.own.stage


def is_vtp_stage_rank0() -> bool:
    """Tell whether this rank is its stage's leader; True before the groups exist, as in the Ascend implementation."""
    session = _running_session()
    return session is None or session.planned.own.tp_rank == 0


def get_vtp_intra_stage_group() -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of this rank's stage; None before the groups exist."""
    return None if (session := _running_session()) is None else session.running.stage_group


def _running_session() -> Session | None:
    """Return the session once the groups exist."""
    session = _Holder.session
    return session if session is not None and session.is_running else None


def _hook() -> FailureHook:
    """Return the exception hook; one per process, since a hook that was set after it may still call it."""
    if _Holder.hook is None:
        _Holder.hook = FailureHook(
            is_applied=lambda: _Holder.session is not None,
            get_monitor=lambda: None if _Holder.session is None else _Holder.session.ranks.monitor,
            note=note_for_next_start,
        )
    return _Holder.hook


def _refuse_adaptor() -> None:
    """End a run that imports MindSpeed's adaptor after ``apply()``: it needs a Megatron that nobody has loaded."""
    report_failures()
    raise PatchError(TOO_LATE)


def _refuse_unknown_adaptor() -> None:
    """End a run whose stages are planned and imports an unknown adaptor; of one that came before, the plan says so."""
    if _Holder.session is not None and _Holder.session.is_active:
        report_failures()
        raise PatchError(UNKNOWN)
