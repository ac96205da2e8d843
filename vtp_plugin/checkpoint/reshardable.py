"""What a checkpoint holds besides tensors, rewritten so that any layout loads its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from vtp_plugin.checkpoint.archive import Extent, load_object, read_archive, write_archive
from vtp_plugin.checkpoint.contents import PLAIN, Contents
from vtp_plugin.checkpoint.files import COMMON_FILE
from vtp_plugin.checkpoint.forms import (
    BY_BLOCK,
    BY_BUCKET,
    BY_BUCKET_OLDER,
    FORM,
    IN_MODEL_SPACE,
    TYPE,
    stored_optimizers,
)
from vtp_plugin.checkpoint.inert import dump_inert, load_inert
from vtp_plugin.errors import ConfigError

_OF_A_GROUP: Final = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)(?:/shard_.*)?")
_RANDOM: Final = "rng_state/"


def check_source(contents: Contents) -> Iterator[str]:
    """Say why a checkpoint cannot be rewritten, or need not be.

    Yields:
        A line ``value; rule; way out``.
    """
    form = contents.form
    if form is None:
        yield f"{contents.folder} has no optimizer; weights load into any layout as they are; load it, or copy it"
    elif form != BY_BUCKET:
        is_for_any = form in (IN_MODEL_SPACE, BY_BLOCK, PLAIN)
        rule = "any layout loads that as it is" if is_for_any else f"only {BY_BUCKET} is rewritten"
        yield f"{contents.folder} holds the optimizer as {form}; {rule}; load it, or copy it"
    elif any(each[TYPE] == BY_BUCKET_OLDER for each in stored_optimizers(contents.common)):
        yield (
            f"{contents.folder} holds the optimizer as {BY_BUCKET_OLDER}, of Megatron 0.12, and only {BY_BUCKET} is "
            "rewritten; any list of that Megatron loads it as it is with this plugin; to go on without the plugin, "
            "load it into stages of one size and save it there"
        )
    elif not isinstance(contents.common.get("content_metadata"), Mapping):
        yield (
            f"{contents.folder} does not say in which form its optimizer is; Megatron 0.15 and later do; take one that "
            "they wrote"
        )


def is_kept(contents: Contents, key: str) -> bool:
    """Tell whether what is stored under a key stays as it is: all but the optimizer, and what all ranks share.

    Random states are stored by pipeline and tensor-parallel rank; those of unequal stages have no place elsewhere.
    """
    match = _OF_A_GROUP.match(key)
    return not (match or key.startswith("common_state/") or (key.startswith(_RANDOM) and _is_unequal(contents)))


def _is_unequal(contents: Contents) -> bool:
    return len(set(contents.arguments.get("vtp_size_list") or ())) > 1


def rewritten_common(contents: Contents) -> tuple[str, bytes]:
    """Rewrite what all ranks share.

    Returns:
        The key under which it is stored, or the name of its file, and its bytes.

    Raises:
        ConfigError: stages have different optimizers.
    """
    objects = contents.index.objects
    key = next((key for key in objects if key.startswith("common_state/")), COMMON_FILE)
    entries = read_archive(contents.folder, objects.get(key, Extent(COMMON_FILE)))
    top = next(iter(entries)).partition("/")[0]
    read = load_inert(entries[f"{top}/data.pkl"])
    _rewrite(contents, read if key == COMMON_FILE else read[0])
    return key, write_archive({**entries, f"{top}/data.pkl": dump_inert(read)})


def _rewrite(contents: Contents, common: dict[str, Any]) -> None:
    content = common["content_metadata"]
    content[FORM] = IN_MODEL_SPACE
    # Parameters are stored by name, so which of several optimizers has one need not stand before it.
    content["chained_optim_avoid_prefix"] = True
    if _is_unequal(contents):
        common["args"].state["no_save_rng"] = True
    for number, stored in _stored_by_groups(contents).items():
        state = common["optimizer"] if number is None else common["optimizer"].get(number)
        if state is None or "param_state_sharding_type" not in state:
            raise ConfigError(
                f"{contents.folder} holds different optimizers on different stages; such a checkpoint cannot be "
                "rewritten; load it with the plugin, and save it with --dist-ckpt-optim-fully-reshardable"
            )
        state.pop("param_state", None)
        state.update(stored, param_state_sharding_type=IN_MODEL_SPACE)


def _stored_by_groups(contents: Contents) -> dict[int | None, dict[str, Any]]:
    """Collect what the data-parallel groups have stored, for each optimizer in a chain, or for the only one."""
    found: dict[int | None, dict[str, Any]] = {}
    for key, extent in contents.index.objects.items():
        match = _OF_A_GROUP.fullmatch(key)
        if match is None or match.group(2) not in ("optimizer", "grad_scaler"):
            continue
        number = None if match.group(1) is None else int(match.group(1))
        stored = found.setdefault(number, {"optimizer": {"param_groups": []}})
        (value,) = load_object(contents.folder, extent)
        if match.group(2) == "grad_scaler":
            stored["grad_scaler"] = value
        else:
            known = stored["optimizer"]["param_groups"]
            known += [group for group in value["param_groups"] if group not in known]
    for stored in found.values():
        # Of groups that are else alike the last one counts; it is to be one that knows the steps.
        stored["optimizer"]["param_groups"].sort(key=lambda group: "step" in group)
    return found
