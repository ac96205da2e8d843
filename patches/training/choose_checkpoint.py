"""Which checkpoint is loaded, and whether it can be."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch.distributed.checkpoint import FileSystemReader

from vtp_plugin.checkpoint.format.checkpoint_files import (
    TORCH_DIST,
    broken_file,
    check_files,
    check_trackers,
    format_of,
)
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.index import MANIFEST, Index, Manifest, load_manifest, problems_of_pieces
from vtp_plugin.checkpoint.format.resolver import IN_MODEL_SPACE, RELEASE, Asked, Found, number_of, overruled
from vtp_plugin.checkpoint.format.site_part import save_of
from vtp_plugin.checkpoint.hf.hf_model import read_note
from vtp_plugin.checkpoint.load.stored_optimizer import Request, StoredOptimizer, require_masters
from vtp_plugin.checkpoint.save.atomic_dir import HAS_EDGE_KEY, problem_of, problem_without_manifest, share_out
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.patches.core.dist_checkpointing.serialization import index_of, require_plain, require_plain_checkpoint
from vtp_plugin.patches.core.dist_checkpointing.strategies.torch import checking
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.plan.layout.grids import cuts_experts_apart
from vtp_plugin.runtime.step.step_times import read_shared
from vtp_plugin.session import Session
from vtp_plugin.util import log
from vtp_plugin.util.text import one_line, own_command


def stored_arguments(result: tuple[Any, ...]) -> Any:
    """Give the arguments of the run that wrote a checkpoint; None where they are not stored."""
    return result[0].get("args") if isinstance(result[0], dict) else None


# What Megatron compares, too, after it has changed what it was started with.
_OF_THE_MODEL = ("num_layers", "hidden_size", "num_attention_heads")


def require_same_model(load_dir: str | None, args: Any, stored: Any) -> None:
    """Refuse a checkpoint of another model before its weights are looked for.

    Args:
        load_dir: folder of checkpoints, the value of ``--load``.
        args: Megatron's arguments.
        stored: those of the run that wrote the checkpoint; None where they are not stored.

    Raises:
        ConfigError: it is; the text names what differs.
    """
    if stored is None or args.finetune or (load_dir is not None and read_note(load_dir) is not None):
        # An import is compared flag by flag with its note, later.
        return
    there, here = vars(stored), vars(args)
    differ = [
        f"--{name.replace('_', '-')} {there[name]}, here {here[name]}"
        for name in _OF_THE_MODEL
        if there.get(name) is not None and here.get(name) is not None and there[name] != here[name]
    ]
    if differ:
        raise ConfigError(
            f"checkpoint {load_dir} is of another model ({'; '.join(differ)}); give the flags that it was saved with, "
            "or another folder"
        )


def require_loadable(
    session: Session, host: MegatronHost, load_dir: str | None, args: Any, result: tuple[Any, ...]
) -> None:
    """Check that this run's stages can load a checkpoint.

    Raises:
        ConfigError: another layout wrote the checkpoint, in a form that only that one can load; or the key of its edge
            is lost.
    """
    state, found, _, kind = result
    stored = stored_arguments(result)
    if load_dir is not None and found:
        session.edge_seed.judge(Path(load_dir), has_key=getattr(stored, HAS_EDGE_KEY, False))
    if stored is None or not session.is_planned:
        return
    form = host.lost_form(state) if args.use_distributed_optimizer and _loads_optimizer(args, result) else None
    if form is not None:
        raise ConfigError(
            f"checkpoint {load_dir} holds the distributed optimizer as {form}, which this Megatron no longer reads; "
            f"{written_again(session, f'--form {IN_MODEL_SPACE} ')}, or load only the weights with --no-load-optim"
        )
    layout = session.planned.layout
    here = (layout.tp_sizes, layout.ep_sizes, layout.etp_sizes)
    there = (stored_tp_sizes(stored), *stored_experts(stored))
    if there == here:
        return
    wrote, runs = _shown(there), _shown(here)
    if kind is not None and kind.name == "LEGACY":
        raise ConfigError(
            f"checkpoint {load_dir} was saved with --ckpt-format torch by {wrote}, and only that layout can load it, "
            f"not {runs}; save it with --ckpt-format torch_dist"
        )
    if not _loads_optimizer(args, result):
        return
    if getattr(args, "num_experts", None) and cuts_experts_apart(*there) != cuts_experts_apart(*here):
        raise ConfigError(
            f"checkpoint {load_dir} was saved by {wrote}, this run has {runs}, and only in one of them experts have an "
            "optimizer of their own (they have one where a stage's ep is above 1 or its etp is not its tp); load only "
            "the weights with --no-load-optim"
        )
    if args.use_distributed_optimizer and not host.is_reshardable(state) and _folder_by_bucket(host, result) is None:
        raise ConfigError(
            f"checkpoint {load_dir} holds a distributed optimizer of {wrote} in a form that only that layout can "
            f"load, not {runs}; save it {host.for_any_list}, {written_again(session)}, or load only the weights with "
            "--no-load-optim"
        )


def written_again(session: Session, form: str = "") -> str:
    """Name the command that writes the checkpoint that is loaded again, in a form that more runs can load."""
    source = shlex.quote(str(session.loading.asked and session.loading.asked.checkpoint))
    return f"write it again with {own_command()} checkpoint reshard {form}--from {source} --to DIR"


def _loads_optimizer(args: Any, result: tuple[Any, ...]) -> bool:
    """Tell whether the optimizer's state is to be loaded, too."""
    stored = stored_arguments(result)
    is_saved = stored is None or not getattr(stored, "no_save_optim", False)
    return is_saved and not (result[2] or args.finetune or args.no_load_optim)


def _folder_by_bucket(host: MegatronHost, result: tuple[Any, ...]) -> Path | None:
    """Return the folder of a checkpoint whose optimizer is stored by bucket; None if it is not, or cannot be read."""
    state, folder = result[:2]
    if not isinstance(state, dict) or not host.is_by_bucket(state) or "://" in str(folder):
        return None
    return Path(folder)


def prepare_requests(wanted: Any) -> None:
    """Plan what this rank reads of another layout's optimizer, as `bucket-map/request` has noted it in a state."""
    for value in nested_values(wanted):
        if isinstance(value, LocalNonpersistentObject) and isinstance(value.obj, Request):
            value.obj.prepare()


def open_optimizer(session: Session, host: MegatronHost, args: Any, result: tuple[Any, ...]) -> None:
    """Open the optimizer of a checkpoint, and note it in the session, where `bucket-map/request` finds it.

    Without a map, the ranks share the proof of the one that they work out.

    Raises:
        ConfigError: the map is damaged, does not fit what is stored, or cannot be worked out.
    """
    session.loading.keep(None)
    folder = _folder_by_bucket(host, result)
    if folder is None or not args.use_distributed_optimizer or not _loads_optimizer(args, result):
        return
    contents, stored = Contents(folder, index_of(session, folder)), stored_arguments(result)
    is_cut_alike = _is_cut_alike(session, args, stored)
    if not contents.has_map and is_cut_alike:
        return
    is_same = is_cut_alike and stored_dp_sizes(stored) == session.planned.layout.dp_sizes
    if getattr(args, "use_precision_aware_optimizer", False) and not is_same:
        raise ConfigError(
            f"checkpoint {folder} was saved in another layout, and --use-precision-aware-optimizer is given: with it "
            "an optimizer keeps its state in types of its own, which is not filled from other layouts; load it in the "
            "layout that wrote it, or load only the weights with --no-load-optim"
        )
    require_masters(contents, args.rank, args.world_size)
    session.loading.keep(StoredOptimizer(contents, checking(FileSystemReader, session)(str(folder))))
    # So any layout can load it, and Megatron asks no more.
    host.take_for_reshardable(result[0])


def _is_cut_alike(session: Session, args: Any, stored: Any) -> bool:
    """Tell whether this run's layers lie where those of a checkpoint did, so that Megatron loads it by itself."""
    layout = session.planned.layout
    here = (layout.tp_sizes, layout.ep_sizes, layout.etp_sizes)
    there = (stored_tp_sizes(stored), *stored_experts(stored))
    return here == there and all(
        (getattr(args, name, None) or None) == (getattr(stored, name, None) or None) for name in _SHARES_OF_LAYERS
    )


_SHARES_OF_LAYERS = (
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "layerwise_disaggregated_training",
)

_Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Tensor-parallel size of every stage, expert-parallel size, and tensor-parallel size of the experts."""


def _shown(sizes: _Sizes) -> str:
    flags = ("--vtp-size-list", "--vtp-ep-list", "--vtp-etp-list")[: 3 if cuts_experts_apart(*sizes) else 1]
    return " ".join(f"{flag} {','.join(map(str, values))}" for flag, values in zip(flags, sizes, strict=False))


def stored_experts(stored: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the expert-parallel size of every stage, and the tensor-parallel size of the experts."""
    tp_sizes = stored_tp_sizes(stored)
    is_said = hasattr(stored, "vtp_etp_list") or (
        len(set(tp_sizes)) == 1 and getattr(stored, "expert_tensor_parallel_size", None)
    )
    return (
        _stored_sizes(stored, "vtp_ep_list", "expert_model_parallel_size", missing=1),
        # A checkpoint of unequal stages that does not say has no experts.
        _stored_sizes(stored, "vtp_etp_list", "expert_tensor_parallel_size", missing=1) if is_said else tp_sizes,
    )


def stored_tp_sizes(stored: Any) -> tuple[int, ...]:
    """Return the tensor-parallel size of every stage."""
    return _stored_sizes(stored, "vtp_size_list", "tensor_model_parallel_size", missing=1)


def stored_dp_sizes(stored: Any) -> tuple[int, ...]:
    """Return the data-parallel size of every stage; 0 where a checkpoint does not say."""
    # 0 is no size: a checkpoint that does not say counts as another layout.
    return _stored_sizes(stored, "vtp_dp_list", "data_parallel_size", missing=0)


def _stored_sizes(stored: Any, by_stage: str, of_all: str, *, missing: int) -> tuple[int, ...]:
    """Give a size of each stage of the run that wrote a checkpoint, with or without the plugin.

    Args:
        stored: its arguments.
        by_stage: argument with the sizes of all stages, which the plugin stores.
        of_all: Megatron's argument, one size for all stages.
        missing: the size where the checkpoint has neither.
    """
    sizes = getattr(stored, by_stage, None)
    if sizes is None:
        sizes = (getattr(stored, of_all, missing),) * getattr(stored, "pipeline_model_parallel_size", 1)
    return tuple(sizes)


# As a rank of another site may write them.
_NAME = re.compile(r"[0-9]{1,18}( [0-9a-f]{32})?|release")


def look_at(session: Session, asked: Asked, args: Any) -> None:
    """Check that the checkpoint that is to be loaded is the right one, and whole; one rank of each site reads files.

    Args:
        session: the applied plugin.
        asked: where it is looked for.
        args: Megatron's arguments.

    Raises:
        ConfigError: a file is broken, or Megatron loads another one than ``--ckpt-step`` names.
    """
    refuse(check_trackers(asked))
    checkpoint = asked.checkpoint
    is_reporter = args.rank in (session.planned.reporting_ranks.values() if session.is_planned else (0,))
    lines = [*overruled(asked, takes_optimizer_of_tracker=_takes_optimizer_of_tracker(checkpoint, args))]
    if session.is_active:
        refuse(lines)
    if is_reporter:
        for line in (*lines, *_left_behind(asked)):
            log.warning(line)
    # What lies elsewhere is read only if it is newer, which Megatron finds out.
    if is_reporter and args.ckpt_format in ("torch", "torch_dist") and asked.is_certain:
        refuse(check_files(asked, _readable_index(session, checkpoint)))
        if checkpoint is not None and not (checkpoint / MANIFEST).exists():
            log.info(f"{checkpoint} has no {MANIFEST}, so changed bytes cannot be detected")


def _takes_optimizer_of_tracker(checkpoint: Path | None, args: Any) -> bool:
    """Tell whether Megatron reads the optimizer from a file of its own, which it looks for by the tracker."""
    is_asked = args.use_distributed_optimizer and not args.finetune and not args.no_load_optim
    return is_asked and checkpoint is not None and any(checkpoint.glob("mp_rank_*/distrib_optim.pt"))


def _left_behind(asked: Asked) -> Iterator[str]:
    """Say that a run begins again though it has saved a checkpoint that is not persistent."""
    beside = None if asked.passed_over is None else replace(asked, load_dir=asked.passed_over, step=None).resolve()
    if beside is not None and not beside.is_persistent:
        yield (
            f"{beside.checkpoint} is there, and --load {asked.passed_over} has no persistent checkpoint; Megatron then "
            "begins with --pretrained-checkpoint; to resume from there give --vtp-load-newest-valid"
        )


def _readable_index(session: Session, checkpoint: Path | None) -> Index | None:
    """Return the index of a checkpoint; None where there is none, or it cannot be read, which others say better."""
    try:
        return None if checkpoint is None else index_of(session, checkpoint)
    except (ConfigError, OSError):
        return None


def own_file(checkpoint: Path | None, *, is_of_rank_0: bool) -> Path | None:
    """Return the file of the old format that Megatron reads on this rank; None if there is none, or another format.

    Args:
        checkpoint: the one that is to be loaded; None if there is none.
        is_of_rank_0: whether it reads the file of rank 0.
    """
    from megatron.training.checkpointing import find_checkpoint_rank_0, get_checkpoint_name

    if checkpoint is None or not any(checkpoint.glob("mp_rank_*")):
        return None
    is_release = not checkpoint.name.startswith("iter_")
    iteration = 0 if is_release else int(checkpoint.name.removeprefix("iter_"))
    find = find_checkpoint_rank_0 if is_of_rank_0 else get_checkpoint_name
    found = find(str(checkpoint.parent), iteration, is_release)
    return None if found is None else Path(found)


def require_plain_files(session: Session, checkpoint: Path | None, own: Path | None) -> None:
    """Look at what this rank is about to unpickle.

    Args:
        session: the applied plugin.
        checkpoint: the one that is to be loaded; None if there is none.
        own: its file of the old format; None for another one.

    Raises:
        ConfigError: it names what may run, or has a format that the plugin does not look into.
    """
    if own is not None:
        for file in sorted(own.parent.glob("*.pt")):
            require_plain(file, str(file))
        return
    if checkpoint is None:
        return
    require_plain_checkpoint(session, checkpoint)
    found = format_of(checkpoint)
    if session.is_planned and not session.planned.layout.is_uniform and found not in (None, TORCH_DIST):
        raise ConfigError(
            f"checkpoint {checkpoint} has the format {ascii(found)[:40]}; stages of different sizes load {TORCH_DIST}; "
            f"load it with one size, and save it with --ckpt-format {TORCH_DIST}"
        )


def choose(session: Session, asked: Asked, args: Any) -> Found | None:
    """Let Megatron load the newest checkpoint that is whole; all ranks call it, and read a part each.

    Where sites keep parts, it is whole if all sites have theirs of one save; a tracker is then only a hint.

    Args:
        session: the applied plugin.
        asked: where the run looks.
        args: Megatron's arguments.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        ConfigError: none is whole, or a step is asked for.
    """
    for flag, value in (("--load", asked.load_dir), ("--non-persistent-global-ckpt-dir", asked.other)):
        if "://" in (value or ""):
            raise ConfigError(
                f"--vtp-load-newest-valid with {flag} {value}; it looks into folders; leave it out, or copy the "
                "checkpoints into a folder"
            )
    if asked.step is not None:
        raise ConfigError(f"--vtp-load-newest-valid with --ckpt-step {asked.step}; leave one of them out")
    return _choose_of(session, asked, args, _of_all(session, _read(asked.names)))


def _choose_of(session: Session, asked: Asked, args: Any, rows: Sequence[Sequence[str]]) -> Found | None:
    passed: list[str] = []
    names = [found for found in asked.merged(rows) if asked.step in (None, number_of(found.name))]
    for found in names:
        own = None
        if session.config.load_newest_valid or args.rank in session.planned.reporting_ranks.values():
            own = _problem_here(found, args, is_thorough=session.config.load_newest_valid)
        if not (problem := _agreed(session, own, _said_of(session, found))):
            for each in passed:
                log.info(f"skipped: {each}")
            log.info(f"loads {found.checkpoint}, the newest intact checkpoint")
            for folder, is_persistent in asked.folders:  # of two that are alike Megatron takes the other
                hides = found.is_persistent and not is_persistent
                session.savings.trackers[folder] = None if hides else found.name
            return found
        if own and found.save:
            log.warning(own)  # what others read of it names no path
        passed.append(problem)
    if any(rows):
        is_noted = any(asked.tracker(folder) is not None for folder, _ in asked.folders)
        if (
            names
            and all(found.save for found in names)
            and not _agreed(session, "noted" if is_noted else None, "noted")
        ):
            log.warning(
                f"{'; '.join(passed)}; no site has noted one, so the first save was stopped: it restarts from scratch"
            )
            session.savings.trackers.update({folder: None for folder, _ in asked.folders})
            return None
        problems = "; ".join(passed) or f"there is none of --ckpt-step {asked.step}"
        raise ConfigError(f"{asked.load_dir} holds no intact checkpoint: {problems}; load another folder")
    return None


def _said_of(session: Session, found: Found) -> str | None:
    """Say what other sites may know of a part that is not whole here."""
    if not found.save or not session.is_planned:
        return None
    site = session.planned.site_of(dist.get_rank())
    return f"iteration {found.name} is partial: site {site} does not have its part of that save whole"


def settle_trackers(session: Session, asked: Asked, args: Any) -> None:
    """Let all ranks load the newest checkpoint that one of their trackers names, as Megatron does.

    Sites may have folders of their own, and a run may have been killed before all trackers were written. Of parts the
    newest is loaded that all sites have whole.
    """

    def names() -> list[list[str]]:
        trackers = [[name] if (name := asked.tracker(folder)) else [] for folder, _ in asked.folders]
        if not (session.is_planned and session.config.has_several_sites):
            return trackers
        return [
            row if _are_parts(row) and folder not in asked.trackers else noted
            for row, noted, (folder, _) in zip(asked.names(), trackers, asked.folders, strict=True)
        ]

    own = _read(names)
    rows = _of_all(session, own)
    if any(map(_are_parts, rows)):
        _choose_of(session, asked, args, rows)
        return
    for (folder, _), mine, found in zip(asked.folders, own, rows, strict=False):
        if found and RELEASE not in found and mine not in ([], found[:1]):
            session.savings.trackers[folder] = found[0]


def _are_parts(names: Sequence[str]) -> bool:
    """Tell whether there are parts of sites among checkpoints: behind their names stand their saves."""
    return any(" " in name for name in names)


def _read(names: Callable[[], list[list[str]]]) -> list[list[str]]:
    with contextlib.suppress(ConfigError):  # of a tracker that cannot be read, which is said together
        return names()
    return []


def _of_all(session: Session, own: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Give the names of checkpoints that any rank has in each folder: a release, then the newest first."""
    if session.ranks.store is None:
        return own
    posted = {str(place): dict.fromkeys(row, 0.0) for place, row in enumerate(own)}
    joined = read_shared(tuple[tuple[str, ...], ...], session.ranks.share_reports(posted, _join))
    return [[name for name in row if _NAME.fullmatch(name)] for row in joined]


def _join(posts: Sequence[dict[str, dict[str, float]]]) -> str:
    rows = [{name for post in posts for name in post.get(place, ()) if _NAME.fullmatch(name)} for place in ("0", "1")]
    return json.dumps(
        [
            sorted(row, key=lambda name: (name == RELEASE, number_of(name.split()[0]), name), reverse=True)
            for row in rows
        ]
    )


def _problem_here(found: Found, args: Any, *, is_thorough: bool) -> str | None:
    """Say what is wrong with the share of this rank; in the old format those are its own files.

    Args:
        found: the checkpoint.
        args: Megatron's arguments.
        is_thorough: whether its files are read, and not only their lengths.
    """
    checkpoint = found.checkpoint
    if checkpoint.is_dir():
        try:
            if save_of(checkpoint) != found.save:
                return f"{checkpoint} is of another save than iteration {found.name} of another site, or of another run"
        except ConfigError as error:
            return str(error).partition(";")[0]
    if not is_thorough:
        return broken_file(checkpoint) if checkpoint.is_dir() else f"{checkpoint} is missing"

    def share(manifest: Manifest) -> Callable[[str], bool]:
        if not any(checkpoint.glob("mp_rank_*")):
            return share_out(manifest, args.rank, args.world_size)
        folders = own_folders(checkpoint)
        return lambda name: name.partition("/")[0] in folders

    return problem_of(checkpoint, share)


def own_folders(checkpoint: Path) -> set[str]:
    """Return the names of the folders of the old format that a rank reads; before there are groups, that of rank 0."""
    from megatron.core import parallel_state
    from megatron.training.checkpointing import get_checkpoint_name

    if not parallel_state.model_parallel_is_initialized():
        return {"mp_rank_00", "mp_rank_00_000"}
    return {Path(get_checkpoint_name(str(checkpoint.parent), 0)).parent.name}


def _agreed(session: Session, problem: str | None, shared: str | None = None) -> str:
    """Give all ranks the first problem that one of them found, or what may be said of it; empty if none did."""
    if session.ranks.store is None:
        return problem or ""
    first: Callable[[Sequence[dict[str, Any]]], str] = lambda found: next((key for each in found for key in each), "")  # noqa: E731
    own = {} if problem is None else {session.ranks.redaction.describe(ConfigError(problem, shared=shared)): {}}
    return one_line(session.ranks.share_reports(own, first))


def check_own_files(session: Session, checkpoint: Path | None) -> None:
    """Compare the files of the old format that this rank reads with their hashes.

    Args:
        session: the applied plugin.
        checkpoint: the one that is to be loaded; None if there is none.

    Raises:
        ConfigError: one has changed.
    """
    if checkpoint is None or not any(checkpoint.glob("mp_rank_*")):
        return
    if (manifest := load_manifest(checkpoint)) is None:
        return
    folders = own_folders(checkpoint)
    own = manifest.of_files([name for name in manifest.sizes if name.partition("/")[0] in folders])
    for problem in problems_of_pieces(checkpoint, own):
        raise ConfigError(
            f"{problem}; without it this checkpoint cannot be loaded; {session.loading.way_out(checkpoint)}"
        )


def require_manifest(session: Session, name: str, stored: Any) -> None:
    """Refuse a checkpoint that was saved with a manifest and has none.

    Args:
        session: the applied plugin.
        name: folder of the checkpoint, or a file in it.
        stored: the arguments that are stored with it.

    Raises:
        ConfigError: it is so.
    """
    # In the old format the name is that of a rank's file.
    checkpoint = Path(name) if Path(name).is_dir() else Path(name).parents[1]
    problem = problem_without_manifest(checkpoint, vars(stored))
    if problem is not None:
        raise ConfigError(
            f"{problem}; without it changed bytes cannot be detected; {session.loading.way_out(checkpoint)}"
        )
