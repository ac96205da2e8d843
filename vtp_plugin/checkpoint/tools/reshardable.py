"""Rewrites what a checkpoint holds besides tensors, so that any layout can load its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from vtp_plugin.checkpoint.format.archive import load_object, read_archive
from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE
from vtp_plugin.checkpoint.format.contents import WEIGHT, Contents, kind_of
from vtp_plugin.checkpoint.format.entries import Extent, write_archive
from vtp_plugin.checkpoint.format.optimizer_formats import (
    BY_BLOCK,
    BY_BUCKET,
    BY_BUCKET_OLDER,
    BY_RANK,
    FORM,
    IN_MODEL_SPACE,
    PLAIN,
    TYPE,
    stored_optimizers,
)
from vtp_plugin.checkpoint.format.safe_pickle import dump_again, load_safely
from vtp_plugin.checkpoint.format.stored_values import taking
from vtp_plugin.errors import ConfigError

_OF_A_GROUP: Final = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)(?:/shard_.*)?")
_RANDOM: Final = "rng_state/"
_OF_RANKS: Final = (_RANDOM, "rerun_state_machine_state/")
"""What is stored by pipeline and tensor-parallel rank."""
_BECOMES: Final = {
    None: None,
    PLAIN: PLAIN,
    BY_BUCKET: IN_MODEL_SPACE,
    IN_MODEL_SPACE: IN_MODEL_SPACE,
    BY_BUCKET_OLDER: BY_BLOCK,
    BY_RANK: BY_BLOCK,
    BY_BLOCK: BY_BLOCK,
}
"""The form that any uniform layout loads, with the Megatron that wrote each form."""


def form_for_any(contents: Contents, wanted: str | None = None) -> str | None:
    """Return the format in which any uniform layout loads a checkpoint's optimizer.

    Args:
        contents: the checkpoint.
        wanted: the format to use, if it is not that of the Megatron that wrote the checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be written so.
    """
    own = contents.form
    if own not in _BECOMES:
        known = ", ".join(form for form in _BECOMES if form)
        raise ConfigError(
            f"{contents.folder} holds the optimizer as {own}; this version knows {known}; take a newer vtp_plugin, or "
            "load only the weights with --no-load-optim"
        )
    form = _BECOMES[own]
    if wanted in (None, form):
        return form
    if form == BY_BLOCK:
        return wanted
    state = "has no optimizer" if own is None else f"holds the optimizer as {own}"
    raise ConfigError(f"{contents.folder} {state}; of that nothing is made {wanted}; leave --form out")


def is_kept(contents: Contents, key: str, form: str | None) -> bool:
    """Tell whether the data of a key is copied: all but what all ranks share, and an optimizer in another format.

    What unequal stages have stored by pipeline and tensor-parallel rank has no place elsewhere.

    Args:
        contents: the checkpoint as it is.
        key: key of a tensor or of an object.
        form: format that the optimizer gets.
    """
    if _OF_A_GROUP.match(key) or kind_of(key) != WEIGHT:
        return form == contents.form
    return not (key.startswith("common_state/") or (key.startswith(_OF_RANKS) and _is_unequal(contents)))


def loses_random_states(contents: Contents) -> bool:
    """Tell whether a checkpoint has random states that find no place in another layout."""
    return _is_unequal(contents) and any(key.startswith(_RANDOM) for key in contents.index.objects)


def note_of_experts(contents: Contents) -> str | None:
    """Say which layouts can load the optimizer of a model with experts; None without experts or an optimizer.

    Megatron numbers optimizers where experts have one of their own, and loads neither form where they have the other.
    """
    optimizer = contents.common.get("optimizer")
    if contents.form is None or not contents.arguments.get("num_experts") or not isinstance(optimizer, Mapping):
        return None
    elsewhere = "load only the weights elsewhere, with --no-load-optim"
    if any(isinstance(key, int) for key in cast(Mapping[Any, Any], optimizer)):
        return (
            "experts have an optimizer of their own in it; only layouts load it in which they have one: with an "
            f"expert-parallel size above 1, or with another tensor-parallel size than other layers; {elsewhere}"
        )
    return (
        "experts have no optimizer of their own in it; only layouts load it in which they have none: with an "
        f"expert-parallel size of 1, and the tensor-parallel size of other layers; {elsewhere}"
    )


def _is_unequal(contents: Contents) -> bool:
    return len(set(contents.arguments.get("vtp_size_list") or ())) > 1


def rewritten_common(contents: Contents, form: str | None) -> tuple[str, bytes]:
    """Rewrite what all ranks share.

    Args:
        contents: the checkpoint as it is.
        form: format that the optimizer gets.

    Returns:
        The key under which it is stored, or the name of its file, and its bytes.

    Raises:
        ConfigError: stages have different optimizers.
    """
    objects = contents.index.objects
    key = next((key for key in objects if key.startswith("common_state/")), COMMON_FILE)
    entries = read_archive(contents.folder, objects.get(key, Extent(COMMON_FILE)))
    top = next(iter(entries)).partition("/")[0]
    with taking(contents.folder):
        read = load_safely(entries[f"{top}/data.pkl"])
        _rewrite(contents, read if key == COMMON_FILE else read[0], form)
        return key, write_archive({**entries, f"{top}/data.pkl": dump_again(read)})


def _rewrite(contents: Contents, common: dict[str, Any], form: str | None) -> None:
    arguments: dict[str, Any] = common["args"].state if "args" in common else {}
    if _is_unequal(contents):
        arguments["no_save_rng"] = True
        common.pop("rerun_state_machine", None)
    if form == contents.form:
        return
    if form == BY_BLOCK:
        # By this argument Megatron 0.12 knows the form.
        arguments["ckpt_fully_parallel_save"] = True
    else:
        content = common.setdefault("content_metadata", {})
        content[FORM] = form
        # Parameters are stored by name, so which of several optimizers has one need not stand before it.
        content["chained_optim_avoid_prefix"] = True
    for number, stored in _stored_by_groups(contents).items():
        state = common["optimizer"] if number is None else common["optimizer"].get(number)
        if state is None or TYPE not in state:
            raise ConfigError(
                f"{contents.folder} holds different optimizers on different stages; such a checkpoint cannot be "
                f"rewritten; load it with the plugin, and save it with {_SAVED_SO.get(form, form)}"
            )
        state.update(stored)
    for state in stored_optimizers(common):
        state.pop("param_state", None)
        state[TYPE] = form


_SAVED_SO: Final[Mapping[str | None, str]] = {
    IN_MODEL_SPACE: "--dist-ckpt-optim-fully-reshardable",
    BY_BLOCK: "stages of one size",
}


def _stored_by_groups(contents: Contents) -> dict[int | None, dict[str, Any]]:
    """Collect what the data-parallel groups have stored, for each optimizer in a chain, or for the only one."""
    objects = ((_OF_A_GROUP.fullmatch(key), extent) for key, extent in contents.index.objects.items())
    matched = [(match, extent) for match, extent in objects if match and match.group(3) in ("optimizer", "grad_scaler")]
    found: dict[int | None, dict[str, Any]] = {}
    # Megatron 0.12 takes groups of parameters in the order of the first stage.
    for match, extent in sorted(matched, key=lambda pair: int(pair[0].group(2))):
        number = None if match.group(1) is None else int(match.group(1))
        stored = found.setdefault(number, {"optimizer": {"param_groups": []}})
        (value,) = load_object(contents.folder, extent)
        if match.group(3) == "grad_scaler":
            stored["grad_scaler"] = value
        else:
            known = stored["optimizer"]["param_groups"]
            known += [group for group in value["param_groups"] if group not in known]
    for stored in found.values():
        # Of groups that are else alike the last one counts; it is to be one that knows the steps.
        stored["optimizer"]["param_groups"].sort(key=lambda group: "step" in group)
    return found
