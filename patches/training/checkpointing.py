"""H9: whether a checkpoint has this run's layout is one answer for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session

# No stage has this size, so Megatron's comparison says "another layout" on every rank.
_OTHER_LAYOUT = -1

# Arguments whose values follow the own stage's size.
_PER_STAGE = (
    "tensor_model_parallel_size",
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
            why="the caller compares the size stored by rank 0 with the own one: ranks of other stages disagree, take "
            "different branches and hang",
            versions=">=0.19,<0.20",
            remove_when="Megatron stores and compares all stages' sizes",
            optional=True,
        ),
        PatchRecord(
            id="H9b",
            target="megatron.training.training:preprocess_common_state_dict",
            build=_preprocess,
            why="per-stage sizes in the stored arguments would be reported as a difference between ranks",
            versions=">=0.19,<0.20",
            remove_when="with H9",
            optional=True,
        ),
    )


def _load(session: Session, original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: str, args: Any, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        result = original(load_dir, args, *rest, **kwargs)
        stored = result[0].get("args") if isinstance(result[0], dict) else None
        if stored is not None and session.layout is not None:
            is_same = stored_sizes(stored) == session.layout.tp_sizes
            stored.tensor_model_parallel_size = args.tensor_model_parallel_size if is_same else _OTHER_LAYOUT
        return result

    return _load_base_checkpoint


def stored_sizes(stored: Any) -> tuple[int, ...]:
    """Give the stage sizes of the run that wrote a checkpoint, with or without the plugin."""
    sizes = getattr(stored, "vtp_size_list", None)
    if sizes is not None:
        return tuple(sizes)
    tp = getattr(stored, "tensor_model_parallel_size", 1)
    return (tp,) * getattr(stored, "pipeline_model_parallel_size", 1)


def _preprocess(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(original)
    def preprocess_common_state_dict(common_state_dict: Any) -> dict[str, Any]:
        result = original(common_state_dict)
        for name in _PER_STAGE:
            result["args"].pop(name, None)
        return result

    return preprocess_common_state_dict
