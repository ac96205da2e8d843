"""ms-swift's checkpoints in the format `torch_dist`: resumed in the list that saved them, or in another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from megatron.core import dist_checkpointing

from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.patches.training.choose_checkpoint import (
    open_optimizer,
    prepare_requests,
    require_loadable,
    stored_tp_sizes,
)
from vtp_plugin.session import Session
from vtp_plugin.util.undo import replaced

PADDED_VOCABULARY: Final = "vtp_padded_vocab_size"
"""Argument that a checkpoint keeps: the rows of the embedding, with those that only pad it."""


@replaces(known_swift.LOAD, id="swift-load", when=Moment.SWIFT)
def _load(
    session: Session,
    host: MegatronHost,
    original: Callable[..., int],
    args: Any,
    *parts: Any,
    load_arg: str = "mcore_model",
    **options: Any,
) -> int:
    """Run `load_mcore_checkpoint`; all ranks first agree what is loaded, and how the optimizer gets there.

    Why: it compares one size of all stages with the one that was saved: it would not load another layout's optimizer,
    and would ask for random states of other ranks.

    Remove when: ms-swift stores and compares all stages' sizes.
    """
    found: list[Any] = []

    def judge() -> dict[str, object]:
        folder = Path(getattr(args, load_arg))
        checkpoint = find_checkpoint(folder)
        state = dist_checkpointing.load_common_state_dict(str(checkpoint))
        found.append(state["args"])
        _require_padding(args, folder, state["args"])
        # Adapters are resumed from their own checkpoint; beside it, the model's is only read for its weights.
        if args.tuner_type == "full" or load_arg == "mcore_adapter":
            result = (state, str(checkpoint), False, None)
            require_loadable(session, host, str(folder), args, result)
            open_optimizer(session, host, args, result)
        return {"checkpoint": checkpoint.name, "vtp_size_list of the checkpoint": [*stored_tp_sizes(found[0])]}

    session.ranks.agree("checkpoint check", judge)
    stored = found[0]
    is_same = stored_tp_sizes(stored) == session.planned.layout.tp_sizes
    session.loading.note_move(session.is_active or not is_same)
    # What it compares is settled.
    sizes = {name: getattr(stored, name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
    try:
        with replaced(args, **sizes, no_load_rng=args.no_load_rng or not is_same):
            return original(args, *parts, load_arg=load_arg, **options)
    finally:
        session.loading.keep(None)
        session.loading.note_move(False)


def _require_padding(args: Any, folder: Path, stored: Any) -> None:
    """Refuse a checkpoint whose embedding has more or fewer rows than this run's.

    Raises:
        ConfigError: it has.
    """
    there, here = (getattr(one, PADDED_VOCABULARY, None) for one in (stored, args))
    if None not in (there, here) and there != here:
        raise ConfigError(
            f"checkpoint {folder} has {there} rows in its embedding, this run {here}: a multiple of the sizes of its "
            "first and last stage; load the exported weights with --model, or give a list with the same multiple"
        )


@replaces(known_swift.STATE, id="swift-load/request", when=Moment.SWIFT)
def _ask(session: Session, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `_generate_state_dict`, then prepare what is wanted of a stored optimizer.

    Why: the part of another layout's optimizer that a rank reads is planned here, before a weight is changed.

    Remove when: with `swift-load`.
    """
    state = original(*args, **kwargs)
    if session.loading.stored_optimizer is not None:
        prepare_requests(state)
    return state
