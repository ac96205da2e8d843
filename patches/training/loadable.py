"""Whether this run's stages can load what another run has saved, by the arguments that are stored with it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.optimizer_formats import IN_MODEL_SPACE
from vtp_plugin.checkpoint.hf.import_note import read_note
from vtp_plugin.checkpoint.load.masters import require_masters
from vtp_plugin.checkpoint.load.stored_optimizer import StoredOptimizer
from vtp_plugin.checkpoint.save.edge_key_file import HAS_EDGE_KEY
from vtp_plugin.errors import ConfigError
from vtp_plugin.patches.core.dist_checkpointing.plain_objects import index_of
from vtp_plugin.patches.core.dist_checkpointing.strategies.torch import checking
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.plan.layout.size_checks import cuts_experts_apart
from vtp_plugin.session import Session
from vtp_plugin.util.own_command import own_command


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
