"""`atomic-checkpoint`: a checkpoint is there as a whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.checkpoint.format.resolver import asked_by, number_of
from vtp_plugin.checkpoint.save.atomic_dir import HAS_EDGE_KEY, HAS_MANIFEST, final_of, make_folder, tracker_text
from vtp_plugin.checkpoint.save.saving import Kept, Saving, naming_what_failed
from vtp_plugin.errors import PeerError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.one_site import waiting_for_site
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_MODULE = "megatron.training.checkpointing"
# Those of fully sharded data parallelism are written by torch itself.
_FORMATS = ("torch", "torch_dist")


@replaces(
    f"{_MODULE}:save_checkpoint",
    id="atomic-checkpoint",
    when=Moment.LIST,
    remove_when="Megatron writes checkpoints beside their place, with a hash of every piece",
    aliases=("megatron.training.training:save_checkpoint",),
)
def _save(session: Session, original: Callable[..., None], iteration: int, *args: Any, **kwargs: Any) -> None:
    """Run `save_checkpoint`, which writes beside; then, unless that continues in the background, publish it.

    Why: it writes into the checkpoint's own folder, syncs some of its files, and then overwrites the tracker: a run
    that is stopped, or a machine that loses its power, leaves a folder that is not whole, or a tracker that is empty or
    names what is not there. In the old format it notes the iteration in the folder of rank 0 only, and each site may
    have its own.
    """
    # Not at the top: on megatron-core alone there is no megatron.training, and this module is imported all the same.
    from megatron.training.global_vars import get_args

    with session.ranks.together(f"the save of iteration {iteration}"):
        _save_whole(session, get_args(), functools.partial(original, iteration, *args, **kwargs), iteration, kwargs)


def _save_whole(
    session: Session, arguments: Any, save: Callable[[], None], iteration: int, kwargs: Mapping[str, Any]
) -> None:
    from megatron.training import checkpointing

    savings = session.savings
    is_local = kwargs.get("non_persistent_ckpt") and arguments.non_persistent_ckpt_type == "local"
    if is_local or arguments.ckpt_format not in _FORMATS or "://" in str(arguments.save):
        return save()
    setattr(arguments, HAS_MANIFEST, True)
    setattr(arguments, HAS_EDGE_KEY, session.edge_seed.root is not None)
    savings.copies_tensors = arguments.async_save and arguments.use_persistent_ckpt_worker
    with naming_what_failed(Path(arguments.save)):
        session.edge_seed.keep(Path(arguments.save))
        # Ranks of several sites wait for each other once, in `_confirm`: each time is a round trip of their line.
        with savings.call(iteration), waiting_for_site(session, checkpointing):
            save()
        if (saving := savings.take()) is not None:
            _finish(session, saving)


@replaces(
    f"{_MODULE}:get_checkpoint_name",
    id="atomic-checkpoint/folder",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _name(session: Session, original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """Run `get_checkpoint_name`; while a checkpoint is saved, its own name is that of the folder beside.

    Why: it says where `save_checkpoint` writes.
    """
    name, savings = original(*args, **kwargs), session.savings
    if not savings.is_called_for(kwargs.get("iteration", *args[1:2])):
        return name
    final = Path(original(*args, **kwargs | {"return_base_dir": True}))
    saving = savings.current
    if saving is None:
        is_by_rank = not kwargs.get("return_base_dir", False)
        is_part = session.parts.run is not None and not is_by_rank
        part = session.parts.part_of(final, session.planned) if is_part else None
        saving = savings.begin(Saving(final, is_by_rank=is_by_rank, part=part))
        _await_all(session, saving)  # nobody writes before all have cleared away what was there
        if saving.part is not None:  # Megatron makes it on rank 0 alone
            make_folder(saving.partial)
    if final != saving.final:
        return name
    own = Path(name)
    if own != final:
        saving.own = saving.partial / own.parent.relative_to(final)
    return str(saving.partial / own.relative_to(final))


@replaces(
    f"{_MODULE}:get_checkpoint_tracker_filename",
    id="atomic-checkpoint/tracker",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _tracker(session: Session, original: Callable[[str], str], folder: str) -> str:
    """Run `get_checkpoint_tracker_filename`; while a checkpoint is saved, give a file that nobody reads.

    Why: `save_checkpoint` overwrites the tracker before the checkpoint is at its place, and as it stands; and
    `--vtp-load-newest-valid` loads another checkpoint than the tracker names.
    """
    savings = session.savings
    if savings.current is not None:
        return str(savings.scratch(Path(original(folder)).name))
    return str(savings.tracker(Path(folder)) or original(folder))


@replaces(
    f"{_MODULE}:checkpoint_exists",
    id="atomic-checkpoint/exists",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
    aliases=("megatron.training.training:checkpoint_exists",),
)
def _exists(session: Session, original: Callable[[str | None], bool], folder: str | None) -> bool:
    """Run `checkpoint_exists`; with `--vtp-load-newest-valid` any checkpoint counts that may be chosen.

    Why: it asks for the tracker of `--load` alone; where that is missing, `--pretrained-checkpoint` is loaded, also
    where `--vtp-load-newest-valid` would find a checkpoint.
    """
    from megatron.training.global_vars import get_args

    args: Any = get_args()
    may_be_chosen = folder is not None and folder in (args.load, args.pretrained_checkpoint)
    if original(folder) or not session.config.load_newest_valid or not may_be_chosen:
        return original(folder)
    return bool(asked_by(args, folder, session.savings.trackers).candidates())


@replaces(
    f"{_MODULE}:schedule_async_save",
    id="atomic-checkpoint/async-save",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _schedule(session: Session, original: Callable[[Any], None], request: Any) -> None:
    """Run `schedule_async_save`; all ranks publish the checkpoint when they have finished it.

    Why: what is saved in the background is published when all of it is on disk.
    """
    saving = session.savings.current
    # The logits that a teacher saves come as a request of their own, which then has all that is to be done.
    if saving is not None and request.finalize_fns:
        saving.is_in_background = True
        request.finalize_fns.append(functools.partial(_finish, session, saving))
    original(request)


@replaces(
    "megatron.training.wandb_utils:on_save_checkpoint_success",
    id="atomic-checkpoint/wandb",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _note(session: Session, original: Callable[..., None], path: str, tracker: str, *args: Any) -> None:
    """Run `on_save_checkpoint_success` with the checkpoint's place, once it is there.

    Why: it notes the checkpoint's place, and copies the tracker, before they are there.
    """
    note = functools.partial(_note_now, original, final_of(str(path)), *args)
    saving = session.savings.find(path)
    if saving is None:
        original(path, tracker, *args)
    else:
        saving.afterwards.append(note)


def _note_now(original: Callable[..., None], path: str, folder: str, *args: Any) -> None:
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    original(path, get_checkpoint_tracker_filename(folder), folder, *args)


def _finish(session: Session, saving: Saving) -> None:
    """Publish a checkpoint, on all ranks at once."""
    from megatron.training.global_vars import get_args

    is_first = session.parts.is_first(session.planned) if session.is_planned else dist.get_rank() == 0
    saving.sync_own(is_first=is_first)
    if session.savings.checks(saving) and session.ranks.store is not None:
        # The last rank to come has written all that is read, and of one that is gone a collective knows at once.
        dist.barrier()
        session.ranks.agree("check of what was saved", lambda: _read_again(saving, is_reader=is_first))
    publishes = saving.claim() if saving.is_by_rank else is_first
    _await_all(session, saving)
    place = saving.place if publishes else lambda: None
    if saving.part is None:
        place()
    else:
        # Whole on all sites, or no site goes on: only then is it the newest, and an older one may go.
        _confirm(session, saving, place)
    if publishes:
        interval = getattr(get_args(), "save_retain_interval", None)
        saving.note(Kept(session.config.keep_checkpoints, interval))
    _await_all(session, saving)
    session.savings.end(saving)
    session.show(f"saved {saving.final}")


def _await_all(session: Session, saving: Saving) -> None:
    """Wait for all ranks that write this checkpoint: those of the site, of a part, and none further away."""
    dist.barrier(session.parts.open(session.planned) if saving.part is not None else None)


def _read_again(saving: Saving, *, is_reader: bool) -> dict[str, object]:
    """Say on one rank whether what was saved can be read; what is agreed on is that it can.

    Raises:
        ConfigError: it cannot.
    """
    if is_reader:
        saving.read_again()
    return {}


def _confirm(session: Session, saving: Saving, place: Callable[[], None]) -> None:
    """Put this site's part in its place, and go on when all ranks of all sites have seen theirs there: one round trip.

    What crosses are three numbers of each rank: the iteration, 63 bits of the digest of the save, and 1 if all is well.

    Raises:
        ConfigError: the disk does not take it.
        PeerError: a part of another site is not there.
    """
    assert saving.part is not None
    problem: Exception | None = None
    try:
        with naming_what_failed(saving.final.parent):
            place()
    except Exception as error:  # the other sites must learn of it, whatever it is
        problem = error
    iteration = number_of(tracker_text(saving.final))
    said = [iteration, int(saving.part.save, 16) >> 65, int(problem is None)]
    own = torch.tensor(said, device=session.planned.platform.device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    if problem is not None:
        raise problem
    wrong = {session.planned.site_of(rank) for rank, each in enumerate(found) if each.tolist() != said}
    if wrong:
        text = f"iteration {iteration} is partial: site {' and '.join(sorted(wrong))} does not have its part whole"
        raise PeerError(f"{text}; the checkpoint before stays the newest; look at its output", shared=text)
