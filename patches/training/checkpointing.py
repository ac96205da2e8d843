"""`checkpoint-layout`: all ranks agree whether a checkpoint has this run's layout, can be loaded, and where to save.

`checkpoint-timeout`: a load that stands still ends.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import load_object, naming_broken_files
from vtp_plugin.checkpoint.format.index import DamagedError, Extent, read_index
from vtp_plugin.checkpoint.format.resolver import Asked, asked_by
from vtp_plugin.checkpoint.hf.hf_model import ORIGIN, check_note, origin_of
from vtp_plugin.checkpoint.load.stored_optimizer import Rates
from vtp_plugin.checkpoint.save.atomic_dir import SITE_ARGUMENTS, make_folder
from vtp_plugin.checkpoint.save.saving import LOCK_VARIABLE, patience_s
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.one_site import is_own_part, require_held
from vtp_plugin.patches.core.dist_checkpointing.serialization import index_of, plain_only
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.adapter_checkpoints import load_base_first, problems_of_adapters
from vtp_plugin.patches.training.choose_checkpoint import (
    check_own_files,
    choose,
    look_at,
    open_optimizer,
    own_file,
    prepare_requests,
    require_loadable,
    require_manifest,
    require_plain_files,
    require_same_model,
    settle_trackers,
    stored_arguments,
    stored_dp_sizes,
    stored_experts,
    stored_tp_sizes,
)
from vtp_plugin.patches.training.vocab_utils import require_padding
from vtp_plugin.runtime.health.store import name_run
from vtp_plugin.session import Session
from vtp_plugin.util import log

# No stage has this size: with it Megatron's comparison finds another layout on every rank.
_OTHER_LAYOUT = -1

# Arguments whose values depend on the sizes of a stage.
_PER_STAGE = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "eval_micro_batch_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "sequence_parallel",
)


def share_folder(session: Session, host: MegatronHost, args: Any) -> None:
    """Find out at start-up whether all ranks share the folder for checkpoints, or those of each site do.

    The first rank of each site leaves a file in its folder, all with one name but for the site's number; every rank
    looks which of them it sees. Nothing is done where each rank writes for itself.

    Raises:
        ConfigError: a folder cannot be written, ranks of one site have different ones, or this Megatron cannot let each
            site keep a part.
    """
    store = session.ranks.store
    if store is None or args.save is None or args.ckpt_format == "torch" or "://" in args.save:
        return
    folder, named = Path(args.save), f".vtp-{name_run(store)}"
    firsts = session.planned.reporting_ranks if session.config.has_several_sites else {"": 0}
    site = session.planned.site_of(args.rank) if len(firsts) > 1 else ""
    files = {each: folder / f"{named}-{number}" for number, each in enumerate(firsts)}
    is_apart = False

    def put() -> dict[str, object]:
        if args.rank == firsts[site]:
            try:
                make_folder(folder)
                files[site].touch()
            except OSError as error:
                why = (error.strerror or type(error).__name__).lower()
                raise ConfigError(
                    f"--save {args.save} cannot be written: {why}; give another folder", is_final=False
                ) from error
        return {}

    def look() -> dict[str, object]:
        nonlocal is_apart
        seen = {each for each, file in files.items() if file.exists()}
        if site not in seen:
            whose = "rank 0" if len(firsts) == 1 else f"rank {firsts[site]}, the first of site {site}"
            raise ConfigError(
                f"--save {args.save} is not the folder of {whose} (other machine or path), and --ckpt-format "
                f"{args.ckpt_format} writes one checkpoint together; use a folder that all ranks share"
                f"{'' if len(firsts) == 1 else ' at a site'}, or --ckpt-format torch"
            )
        is_apart = len(firsts) > 1 and seen == {site}
        if is_apart and (args.ckpt_format != "torch_dist" or not host.can("saves_by_site")):
            text = (
                f"--save differs between the sites, and with --ckpt-format {args.ckpt_format} Megatron {host.name} "
                "plans a checkpoint over all ranks; use a folder that all share, or --ckpt-format torch"
            )
            raise ConfigError(text, shared=text)
        return {"whether each site has a --save of its own": is_apart}

    session.ranks.agree("check of --save", put)
    try:
        session.ranks.agree("check of --save", look)
    finally:
        if args.rank == firsts[site]:
            files[site].unlink(missing_ok=True)
    if is_apart:
        session.parts.keep_apart(name_run(store))


def lock_folders(session: Session, args: Any) -> None:
    """Take the folders in which this run saves, before it trains; a run that saves nothing takes none.

    One process of all that see a folder holds its lock, the others find the run's token in it: sites and machines may
    have folders of their own.

    Raises:
        ConfigError: another run has one, or it cannot be written; the text is the same on all ranks.
    """
    folders, store = [*_saved_to(args)], session.ranks.store
    if not folders:
        return
    limit_s = patience_s(session.config.timeout_s)

    def lock() -> dict[str, object]:
        token = os.environ.get(LOCK_VARIABLE)
        if not token and store is not None:
            token = name_run(store)
        for folder in folders:
            session.savings.lock(folder, os.environ, limit_s, token)
        return {}

    _agree(session, lock, "lock of --save")


def _saved_to(args: Any) -> Iterator[Path]:
    """Name the folders of this machine's in which a run will save checkpoints."""
    if getattr(args, "ckpt_convert_format", None) is not None:  # then nothing is trained
        names = [os.path.join(args.ckpt_convert_save or "", args.ckpt_convert_format)]
    elif args.save is None or args.skip_train:
        names = []
    else:
        names = [args.save, getattr(args, "non_persistent_global_ckpt_dir", None)]
    yield from (Path(name) for name in names if name and "://" not in name)


@replaces(
    "megatron.training.checkpointing:load_checkpoint",
    id="checkpoint-timeout",
    when=Moment.LIST,
    remove_when="every collective of a load and of a save has a limit that a long one does not reach",
    aliases=("megatron.training.training:load_checkpoint",),
)
def _load_all(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `load_checkpoint`, watched.

    Why: its ranks wait for each other without a limit; the monitor ends them when none gets on any more.
    """
    from megatron.training import get_args

    if session.config.lora is not None:
        kwargs["strict"] = False  # a checkpoint holds the base or the adapters
    with session.ranks.together("the load of a checkpoint"):
        load_base_first(session, get_args(), functools.partial(original, *args, **kwargs))
        result = original(*args, **kwargs)
    _say_what_was_loaded(session, get_args(), result[0])
    return result


def _say_what_was_loaded(session: Session, args: Any, step: int) -> None:
    """Say where training begins: Megatron goes on with new weights where nothing is in ``--load``."""
    from megatron.training.checkpointing import checkpoint_exists

    if not session.is_planned or args.load is None:
        return
    if step or checkpoint_exists(args.load):
        session.show(f"loaded {args.load}: begins at step {step}")
    elif getattr(args, "pretrained_checkpoint", None) is not None:
        session.show(f"nothing in {args.load}: begins at step 0 with the weights of {args.pretrained_checkpoint}")
    else:
        line = f"nothing in {args.load}: begins at step 0 with new weights"
        if args.load == args.save:  # the first start of a run that is to resume
            session.show(line)
        elif args.rank == session.planned.writer_rank:
            log.warning(f"{line}; if it should resume, give the folder that a run saved in with --load")


@replaces(
    "megatron.training.checkpointing:_load_base_checkpoint",
    id="checkpoint-layout",
    when=Moment.LIST,
    remove_when="Megatron stores and compares all stages' sizes",
)
def _load(
    session: Session,
    host: MegatronHost,
    original: Callable[..., tuple[Any, ...]],
    load_dir: str | None,
    args: Any,
    rank0: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Run `_load_base_checkpoint`; all ranks then agree on what they found and whether it has this run's layout.

    Why: the caller compares the size stored by rank 0 with this rank's: ranks of other stages disagree, take different
    branches and hang.
    """
    # The first look at a checkpoint; Megatron looks only once at those of the old format.
    is_first = rank0 or args.ckpt_format == "torch"
    asked = session.loading.begin(asked_by(args, load_dir, session.savings.trackers))
    if is_first:
        given = Rates.STORED if args.use_checkpoint_opt_param_scheduler else Rates.SAME
        session.loading.note_rates(Rates.OWN if args.override_opt_param_scheduler else given)
        if session.config.load_newest_valid and load_dir is not None:
            choose(session, asked, args)
        settle_trackers(session, asked, args)
        # Megatron looks again in a collective, which only ranks that see a checkpoint enter.
        _agree(session, functools.partial(_look, session, asked, args, rank0=rank0))
    elif (wanted := kwargs.get("sharded_state_dict")) is not None:
        # What is missing is found before Megatron changes a weight.
        _agree(session, functools.partial(_prepare, session, asked, wanted, args))
    checkpoint, is_read = asked.checkpoint, True
    try:
        with naming_broken_files(asked):
            check_own_files(session, checkpoint)
            with plain_only(own := own_file(checkpoint, is_of_rank_0=rank0), str(own)):
                result = original(load_dir, args, rank0=rank0, **kwargs)
    except SystemExit:
        # Megatron exits with code 0 when it cannot read its file. Rank 0's file may tell why.
        is_read, result = False, _read_of_rank_0(checkpoint)
        if result is None:
            if checkpoint is None:
                raise
            raise _unreadable(checkpoint) from None
    if not is_first:
        # Whoever wants something of it has it now.
        session.loading.keep(None)
        if session.loading.is_moved:
            result = _without_keys(result)
        session.loading.note_move(False)
    if is_first:
        _agree(session, functools.partial(_judge, session, host, asked, args, result, is_read))
        session.loading.drop_index()
    stored = stored_arguments(result)
    if stored is not None and session.is_planned:
        layout = session.planned.layout
        tp, dp = (stored_tp_sizes(stored), layout.tp_sizes), (stored_dp_sizes(stored), layout.dp_sizes)
        # With other tensor-parallel sizes Megatron leaves the random states alone.
        same_states = tp[0] == tp[1]
        if host.stores_states_by_replica and not args.no_load_rng:
            ep = (stored_experts(stored)[0], layout.ep_sizes)
            same_states &= ep[0] == ep[1] and (dp[0] == dp[1] or max(layout.ep_sizes) == 1)
        # The caller compares these with this rank's sizes. Now it gets the same answer on every rank.
        for name, is_same in (("tensor_model_parallel_size", same_states), ("data_parallel_size", dp[0] == dp[1])):
            setattr(stored, name, getattr(args, name) if is_same else _OTHER_LAYOUT)
        if is_first:
            session.loading.note_move(session.is_active or not (same_states and dp[0] == dp[1]))
    return result


def _without_keys(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take the state out of what `load` returns with --dist-ckpt-strictness return_all, and log the keys beside it.

    The caller takes all of it for the state, and fails.
    """
    if not isinstance(result[0], tuple):
        return result
    state, missing, unexpected = result[0]
    if missing:
        log.info(f"Missing keys (for all ranks): {', '.join(sorted(missing))}")
    if unexpected:
        log.warning(f"Unexpected keys (for this rank): {', '.join(sorted(unexpected))}")
    return (state, *result[1:])


def _look(session: Session, asked: Asked, args: Any, *, rank0: bool) -> dict[str, object]:
    """Say whether there is a checkpoint; one rank of each site looks whether its files are whole.

    Raises:
        ConfigError: a file is broken, or names what may run; or another one than ``--ckpt-step`` names is loaded.
    """
    from megatron.training.checkpointing import checkpoint_exists

    if asked.load_dir is not None:
        look_at(session, asked, args)
        require_plain_files(session, asked.checkpoint, own_file(asked.checkpoint, is_of_rank_0=rank0))
    return {
        "checkpoint found in --load": checkpoint_exists(asked.load_dir),
        "non-persistent checkpoint found": asked.tracker(asked.non_persistent) is not None,
    }


def _prepare(session: Session, asked: Asked, wanted: Any, args: Any) -> dict[str, object]:
    """Compare the model with an import, and plan what this rank reads of another layout's optimizer.

    `bucket-map/request` reads it.

    Raises:
        ConfigError: the checkpoint is another model, or does not hold the optimizer, or layers of this site.
    """
    if asked.load_dir is not None:
        refuse(check_note(asked.load_dir, args))
    if (checkpoint := asked.checkpoint) is not None and is_own_part(session, checkpoint):
        require_held(index_of(session, checkpoint) or read_index(checkpoint), wanted)
    prepare_requests(wanted)
    return {}


def _agree(session: Session, prepare: Callable[[], dict[str, object]], name: str = "checkpoint check") -> None:
    """Go on only if the check succeeds with equal results on all ranks."""
    if session.ranks.store is None:
        prepare()
    else:
        session.ranks.agree(name, prepare)


def _read_of_rank_0(checkpoint: Path | None) -> tuple[Any, ...] | None:
    """Read rank 0's file of a checkpoint in the old format, without any collective; None if that cannot be done.

    Nothing that it names is made: what is asked of it are the arguments, and how the optimizer is stored.
    """
    from megatron.training.checkpointing import CheckpointType

    if (file := own_file(checkpoint, is_of_rank_0=True)) is None:
        return None
    try:
        state = load_object(file.parent, Extent(file.name))
        stored = state["args"].state
        return {**state, "args": Namespace(**stored)}, str(file), False, CheckpointType.LEGACY
    except (DamagedError, AttributeError, LookupError, TypeError):
        return None


def _judge(
    session: Session, host: MegatronHost, asked: Asked, args: Any, result: tuple[Any, ...], is_read: bool
) -> dict[str, object]:
    """Say which checkpoint this rank found.

    Raises:
        ConfigError: it cannot be loaded.
    """
    stored, load_dir = stored_arguments(result), asked.load_dir
    require_same_model(load_dir, args, stored)
    refuse(problems_of_adapters(load_dir, args, stored))
    # What this run saves says it, too; `_prepare` compares with it.
    setattr(args, ORIGIN, origin_of(load_dir, {} if stored is None else vars(stored)))
    require_loadable(session, host, load_dir, args, result)
    if session.is_planned:
        open_optimizer(session, host, args, result)
        if result[3] is not None and result[3].name == "GLOBAL":
            require_padding(session, host, load_dir, args, stored)
    if not is_read:
        raise _unreadable(Path(result[1]).parents[1])
    if stored is not None and result[1]:
        require_manifest(session, result[1], stored)
    return {
        "iteration of the checkpoint": result[0].get("iteration") if isinstance(result[0], dict) else None,
        "vtp_size_list of the checkpoint": None if stored is None else ",".join(map(str, stored_tp_sizes(stored))),
    }


def _unreadable(checkpoint: Path) -> ConfigError:
    file = own_file(checkpoint, is_of_rank_0=False) or checkpoint
    return ConfigError(
        f"{file}, the file of this rank, cannot be read, see above; make the whole folder readable for every rank"
    )


@replaces(
    "megatron.training.training:preprocess_common_state_dict",
    id="checkpoint-layout/arguments",
    when=Moment.LIST,
    remove_when="with `checkpoint-layout`",
)
def _preprocess(original: Callable[[Any], dict[str, Any]], common_state_dict: Any) -> dict[str, Any]:
    """Run `preprocess_common_state_dict`, then drop the arguments that differ between stages, or sites.

    Why: per-stage sizes in the stored arguments would be reported as a difference between ranks.

    Megatron compares the result over the ranks before it saves.
    """
    result = original(common_state_dict)
    for name in (*_PER_STAGE, *SITE_ARGUMENTS, ORIGIN):
        result["args"].pop(name, None)
    return result
