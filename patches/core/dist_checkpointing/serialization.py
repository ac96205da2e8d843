"""`bucket-map/file`: beside a checkpoint lies a map of the distributed optimizer's buckets.

`checkpoint-timeout/core-load`: a load that stands still ends. `safe-load/common-objects`: what all ranks share runs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from vtp_plugin.checkpoint.format.checkpoint_files import naming_broken_files
from vtp_plugin.checkpoint.format.map_file import MAP, dump_map
from vtp_plugin.checkpoint.format.optimizer_formats import BY_BUCKET, BY_BUCKET_OLDER, FORM, TYPE
from vtp_plugin.checkpoint.format.shard_map import Bucket
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.plain_objects import common_of, plain_only
from vtp_plugin.patches.core.optimizer.moved_state import MapPart
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.comm.plain_data import ObjectError
from vtp_plugin.session import Session


@replaces(
    "megatron.core.dist_checkpointing.serialization:save",
    id="bucket-map/file",
    when=Moment.LIST,
    why="the map that `bucket-map` makes, part by part, is one file beside what is stored",
    remove_when="with `bucket-map`",
    aliases=("megatron.core.dist_checkpointing:save",),
)
def _save(session: Session, original: Callable[..., Any], state: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `save`, watched as by `checkpoint-timeout`; rank 0 then writes the map.

    It does so before what is saved in the background is complete.
    """
    is_by_bucket = _is_by_bucket(state, kwargs.get("content_metadata") or {}) and "://" not in str(folder)
    values = nested_values(state) if is_by_bucket else ()
    parts = [value.obj for value in values if isinstance(value, LocalNonpersistentObject)]
    own = [part.buckets() for part in parts if isinstance(part, MapPart)]
    with session.ranks.together("the save of a checkpoint"):
        result = original(state, folder, *args, **kwargs)
        if is_by_bucket:
            _write(Path(folder), own)
    return result


@replaces(
    "megatron.core.dist_checkpointing.serialization:load",
    id="checkpoint-timeout/core-load",
    when=Moment.LIST,
    why="scripts on megatron-core call it without what `checkpoint-timeout` watches",
    remove_when="with `checkpoint-timeout`",
    aliases=("megatron.core.dist_checkpointing:load",),
)
def _load(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `load`, watched; torch wraps what is refused while it reads."""
    try:
        with session.ranks.together("the load of a checkpoint"), naming_broken_files(None):
            return original(*args, **kwargs)
    finally:
        session.loading.drop_index()


@replaces(
    "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
    id="safe-load/common-objects",
    when=Moment.LIST,
    why="torch's own planner, which it uses, asks torch to make whatever an object names",
    remove_when="torch asks for plain values there",
    unneeded={"<0.19": "there it is a file, which `safe-load/common-file` carries"},
    aliases=("megatron.core.dist_checkpointing:load_common_state_dict",),
)
def _load_shared(session: Session, original: Callable[..., Any], checkpoint_dir: Any) -> Any:
    """Run `load_common_state_dict` for plain values."""
    common = None if "://" in str(checkpoint_dir) else common_of(session, Path(checkpoint_dir))
    with plain_only(common, f"what all ranks share in {checkpoint_dir}"):
        return original(checkpoint_dir)


def _is_by_bucket(state: Any, content: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer is stored by bucket; all ranks know it alike."""
    if content.get(FORM) == BY_BUCKET:
        return True
    stored = state.get("optimizer") if isinstance(state, dict) else None
    parts = (stored, *stored.values()) if isinstance(stored, dict) else ()
    return any(isinstance(part, dict) and part.get(TYPE) == BY_BUCKET_OLDER for part in parts)


def _write(folder: Path, own: list[tuple[Bucket, ...] | None]) -> None:
    """Write what all ranks have, on rank 0, if all know it. Whoever reads the file finds it whole or not at all."""
    is_writer = dist.get_rank() == 0
    found: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(own, found)
    if found is None:
        return
    text = _text_of(found)
    # Another save into this folder may have left one.
    (folder / MAP).unlink(missing_ok=True)
    if text is not None:
        partial = folder / f"{MAP}.partial"
        partial.write_text(text)
        partial.replace(folder / MAP)


def _text_of(found: list[Any]) -> str | None:
    """Write the parts of all ranks as one map; None where a rank does not know its part.

    Raises:
        PeerError: another site has sent what is no part of a map.
    """
    try:
        parts = [part for of_rank in found for part in of_rank]
        if not parts or None in parts:
            return None
        return dump_map(sorted((each for part in parts for each in part), key=lambda each: each.key))
    except Exception as error:  # of whatever kind: of such objects only the classes are known
        raise ObjectError(f"is no part of the map of a checkpoint ({type(error).__name__})") from error
