"""H9: one answer for all ranks: whether a checkpoint has this run's layout, can be loaded, and where it is saved."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from vtp_plugin.errors import ConfigError
from vtp_plugin.patching import PatchRecord
from vtp_plugin.runtime.store import Topic, part_of
from vtp_plugin.session import Session

# No stage has this size, so Megatron's comparison says "another layout" on every rank.
_OTHER_LAYOUT = -1

# Arguments whose values follow its stage's sizes.
_PER_STAGE = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "eval_micro_batch_size",
    "expert_tensor_parallel_size",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "sequence_parallel",
)


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H9",
            target="megatron.training.checkpointing:_load_base_checkpoint",
            build=functools.partial(_load, session),
            why="the caller compares the size stored by rank 0 with this rank's: ranks of other stages disagree, take "
            "different branches and hang",
            versions=">=0.19,<0.20",
            remove_when="Megatron stores and compares all stages' sizes",
        ),
        PatchRecord(
            id="H9b",
            target="megatron.training.training:preprocess_common_state_dict",
            build=_preprocess,
            why="per-stage sizes in the stored arguments would be reported as a difference between ranks",
            versions=">=0.19,<0.20",
            remove_when="with H9",
        ),
        PatchRecord(
            id="H9c",
            target="megatron.training.checkpointing:save_checkpoint",
            build=_save,
            why="in the old format every rank writes a file of its own, so sites may have folders of their own, but "
            "only rank 0 notes the iteration: the others would not find their files when the run is resumed",
            versions=">=0.19,<0.20",
            remove_when="every folder gets the note",
            aliases=("megatron.training.training:save_checkpoint",),
        ),
    )


def require_common_folder(session: Session, args: Any) -> None:
    """Refuse at start-up a folder for checkpoints that the ranks do not share, unless each writes for itself.

    Raises:
        ConfigError: a rank does not find in its folder what rank 0 has put into its own.
    """
    store = session.ranks.store
    if store is None or args.save is None or args.ckpt_format == "torch" or "://" in args.save:
        return
    folder = Path(args.save)

    def put() -> dict[str, object]:
        if args.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            name = f".vtp-{uuid.uuid4().hex}"
            (folder / name).touch()
            part_of(store, Topic.FOLDER).set("name", name)
        return {}

    def look() -> dict[str, object]:
        if not (folder / part_of(store, Topic.FOLDER).get("name").decode()).exists():
            raise ConfigError(
                f"--save {args.save} is not the folder of rank 0 (other machine or path), and --ckpt-format "
                f"{args.ckpt_format} writes one checkpoint together; use a folder that all ranks share, or "
                "--ckpt-format torch, which lets every site keep its own part"
            )
        return {}

    agree = functools.partial(session.ranks.agree, "check of --save")
    agree(put)
    try:
        agree(look)
    finally:
        if args.rank == 0:
            (folder / part_of(store, Topic.FOLDER).get("name").decode()).unlink(missing_ok=True)


def _save(original: Callable[..., None]) -> Callable[..., None]:
    from megatron.training.checkpointing import get_checkpoint_tracker_filename
    from megatron.training.global_vars import get_args

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> None:
        original(iteration, *args, **kwargs)
        arguments = get_args()
        if arguments.ckpt_format != "torch" or kwargs.get("non_persistent_ckpt"):
            return
        tracker, text = Path(get_checkpoint_tracker_filename(arguments.save)), str(iteration)
        # Rank 0 has written its own before all ranks met at the end of the original.
        if not tracker.exists() or tracker.read_text().strip() != text:
            partial = tracker.with_name(f"{tracker.name}.{arguments.rank}")
            partial.write_text(text)
            partial.replace(tracker)

    return save_checkpoint


def _load(session: Session, original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    from megatron.training.checkpointing import checkpoint_exists

    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: str | None, args: Any, rank0: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        # The first look at a checkpoint; those of the old format get only one.
        is_first = rank0 or args.ckpt_format == "torch"
        if is_first:
            # Megatron looks again, in a collective of the ranks that see one.
            _agree(session, lambda: {"checkpoint found in --load": checkpoint_exists(load_dir)})
        is_read = True
        try:
            result = original(load_dir, args, rank0=rank0, **kwargs)
        except SystemExit:
            # Megatron leaves so, with exit code 0, when it cannot read its file; the one of rank 0 may tell why.
            is_read, result = False, _read_of_rank_0(load_dir)
            if result is None:
                raise
        if is_first:
            _agree(session, functools.partial(_judge, session, load_dir, args, result, is_read))
        stored = _stored_arguments(result)
        if stored is not None and session.is_planned:
            is_same = stored_sizes(stored) == session.planned.layout.tp_sizes
            stored.tensor_model_parallel_size = args.tensor_model_parallel_size if is_same else _OTHER_LAYOUT
            has_same_dp = stored_dp_sizes(stored) == session.planned.layout.dp_sizes
            stored.data_parallel_size = args.data_parallel_size if has_same_dp else _OTHER_LAYOUT
        return result

    return _load_base_checkpoint


def _agree(session: Session, prepare: Callable[[], dict[str, object]]) -> None:
    """Go on only if the check succeeds with equal results on all ranks."""
    if session.ranks.store is None:
        prepare()
    else:
        session.ranks.agree("checkpoint check", prepare)


def _read_of_rank_0(load_dir: str | None) -> tuple[Any, ...] | None:
    """Read rank 0's file of a checkpoint in the old format, without any collective; None if there is none."""
    from megatron.training.checkpointing import CheckpointType, find_checkpoint_rank_0, get_loaded_iteration

    name = None if load_dir is None else find_checkpoint_rank_0(load_dir, get_loaded_iteration())
    if name is None:
        return None
    return torch.load(name, map_location="cpu", weights_only=False), name, False, CheckpointType.LEGACY


def _judge(
    session: Session, load_dir: str | None, args: Any, result: tuple[Any, ...], is_read: bool
) -> dict[str, object]:
    """Say which checkpoint this rank found.

    Raises:
        ConfigError: it cannot be loaded.
    """
    _require_loadable(session, load_dir, args, result)
    if not is_read:
        raise ConfigError(
            f"the file of this rank in checkpoint {load_dir} cannot be read, see above; make the whole folder readable "
            "for every rank"
        )
    stored = _stored_arguments(result)
    return {
        "iteration of the checkpoint": result[0].get("iteration") if isinstance(result[0], dict) else None,
        "vtp_size_list of the checkpoint": None if stored is None else ",".join(map(str, stored_sizes(stored))),
    }


def _stored_arguments(result: tuple[Any, ...]) -> Any:
    """Give the arguments of the run that wrote a checkpoint; None where they are not stored."""
    return result[0].get("args") if isinstance(result[0], dict) else None


def _require_loadable(session: Session, load_dir: str | None, args: Any, result: tuple[Any, ...]) -> None:
    """Check that this run's stages can load a checkpoint.

    Raises:
        ConfigError: another list wrote the checkpoint, in a form that only that list can load.
    """
    state, _, is_release, kind = result
    stored = _stored_arguments(result)
    if stored is None or not session.is_planned or stored_sizes(stored) == session.planned.layout.tp_sizes:
        return
    wrote, runs = (
        f"--vtp-size-list {','.join(map(str, sizes))}"
        for sizes in (stored_sizes(stored), session.planned.layout.tp_sizes)
    )
    if kind is not None and kind.name == "LEGACY":
        raise ConfigError(
            f"checkpoint {load_dir} was saved with --ckpt-format torch by {wrote}, and only that list can load it, not "
            f"{runs}; save it with --ckpt-format torch_dist"
        )
    is_optimizer_loaded = not (is_release or args.finetune or args.no_load_optim or stored.no_save_optim)
    if args.use_distributed_optimizer and is_optimizer_loaded and not _is_reshardable(state):
        raise ConfigError(
            f"checkpoint {load_dir} holds a distributed optimizer of {wrote} in a form that only that list can load, "
            f"not {runs}; save it with --dist-ckpt-optim-fully-reshardable, or load only the weights with "
            "--no-load-optim"
        )


def _is_reshardable(state: dict[str, Any]) -> bool:
    """Tell whether other sizes can load the distributed optimizer's part of a checkpoint."""
    metadata = load_content_metadata(preloaded_state_dict=state) or {}
    # Old checkpoints do not say; what Megatron makes of them is its own affair.
    form = metadata.get("distrib_optim_sharding_type")
    return form is None or form in DistributedOptimizer.checkpoint_fully_reshardable_formats


def stored_sizes(stored: Any) -> tuple[int, ...]:
    """Give the stage sizes of the run that wrote a checkpoint, with or without the plugin."""
    sizes = getattr(stored, "vtp_size_list", None)
    if sizes is not None:
        return tuple(sizes)
    tp = getattr(stored, "tensor_model_parallel_size", 1)
    return (tp,) * getattr(stored, "pipeline_model_parallel_size", 1)


def stored_dp_sizes(stored: Any) -> tuple[int, ...]:
    """Give the data-parallel sizes of the stages of the run that wrote a checkpoint, with or without the plugin."""
    sizes = getattr(stored, "vtp_dp_list", None)
    if sizes is not None:
        return tuple(sizes)
    return (getattr(stored, "data_parallel_size", 0),) * getattr(stored, "pipeline_model_parallel_size", 1)


def _preprocess(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(original)
    def preprocess_common_state_dict(common_state_dict: Any) -> dict[str, Any]:
        result = original(common_state_dict)
        for name in _PER_STAGE:
            result["args"].pop(name, None)
        return result

    return preprocess_common_state_dict
