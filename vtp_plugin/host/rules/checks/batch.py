"""Checks of batches, of packed samples, and of sites.

Which of Megatron's arguments may differ between ranks, and which between the sites of a U-shaped pipeline.

All others must be equal everywhere: every rank states them at start-up. The plugin's flags are not among them, since
the session states what follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.versions import capability
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import ReplicaMap

# Than the arguments say, such as with pictures in a text.
_TIMES_LONGER = 16


def check_batches(args: object, replicas: ReplicaMap, version: str = "") -> tuple[str, ...]:
    """Find batches of training, ramp-up or evaluation that a stage cannot cut into whole microbatches.

    Args:
        args: Megatron's arguments as parsed; the microbatch size holds for the stage with most replicas.
        replicas: which replicas of the stages work together.
        version: version of Megatron, which may ignore a ramp-up; empty if it is not known.

    Returns:
        One line for every such batch.
    """
    if replicas.is_equal:  # Megatron itself refuses the others, on all ranks alike
        batch, size = (getattr(args, name, None) or 0 for name in ("global_batch_size", "micro_batch_size"))
        is_free = not (batch and size) or getattr(args, "decrease_batch_size_if_needed", False)
        return () if is_free else replicas.check_equal_batch(batch, size)
    return tuple(line for batch in _batches(args, version) for line in replicas.check_batch(*batch))


def own_batches(args: object, replicas: ReplicaMap, stage: int) -> dict[str, int]:
    """Return the batch arguments of one stage: the stages differ in them, or Megatron would derive them differently.

    Args:
        args: Megatron's arguments as parsed.
        replicas: which replicas of the stages work together.
        stage: this rank's.

    >>> from types import SimpleNamespace
    >>> from vtp_plugin.plan.layout.replica_map import DpMode
    >>> args = SimpleNamespace(micro_batch_size=2, global_batch_size=None)
    >>> own_batches(args, ReplicaMap(dp_sizes=(1, 2), mode=DpMode.SPLIT), 0)
    {'micro_batch_size': 4, 'global_batch_size': 4}
    """
    given = {name: getattr(args, name, None) for name in ("micro_batch_size", "eval_micro_batch_size")}
    sizes = {name: replicas.micro_batch(stage, size) for name, size in given.items() if size}
    size = given["micro_batch_size"]
    if size and not getattr(args, "global_batch_size", None):
        sizes["global_batch_size"] = replicas.batch_unit(size)
    return sizes


def describe_batches(batch: int, size: int, replicas: ReplicaMap) -> str:
    """Write one line for each stage: how it cuts the global batch.

    Args:
        batch: samples of a step.
        size: size of a microbatch on the stage with most replicas.
        replicas: which replicas of the stages work together.

    >>> print(describe_batches(8, 2, ReplicaMap(dp_sizes=(1, 2))))
    stage 0: data-parallel size 1 * micro batch size 2 * 4 microbatches = 8
    stage 1: data-parallel size 2 * micro batch size 2 * 2 microbatches = 8
    """
    sizes = [(dp, replicas.micro_batch(stage, size)) for stage, dp in enumerate(replicas.dp_sizes)]
    return "\n".join(
        f"stage {stage}: data-parallel size {dp} * micro batch size {micro} * "
        f"{batch // (dp * micro)} microbatches = {batch}"
        for stage, (dp, micro) in enumerate(sizes)
    )


def final_batch(args: Any) -> int:
    """Return the samples of a step once batches grow no more.

    Args:
        args: Megatron's arguments, validated.

    >>> from types import SimpleNamespace
    >>> final_batch(SimpleNamespace(global_batch_size=4, step_batch_size_schedule="0:768 2.5B:1.5K"))
    1500
    """
    *_, last = (args.global_batch_size, *_scheduled(getattr(args, "step_batch_size_schedule", None)))
    return last


def _scheduled(schedule: str | None) -> Iterator[int]:
    """Yield the batches of a schedule of steps, ``THRESHOLD:BATCH`` each; what has another form Megatron refuses."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    for entry in (schedule or "").replace(",", " ").split():
        found = re.fullmatch(r"[^:]+:(\d+(?:\.\d*)?)([KMBT]?)", entry, flags=re.IGNORECASE)
        if found:
            yield int(float(found[1]) * units.get(found[2].upper(), 1))


def _batches(args: object, version: str) -> Iterator[tuple[str, int, int]]:
    """Yield the flag, the samples and the microbatch size of every batch that was given."""
    size = getattr(args, "micro_batch_size", None)
    if not size:
        return
    batch = getattr(args, "global_batch_size", None)
    if batch:
        yield "--global-batch-size", batch, size
    if not version or capability("ramp_up").has(version):
        for number in (getattr(args, "rampup_batch_size", None) or ())[:2]:
            yield "--rampup-batch-size", int(number), size
    for number in _scheduled(getattr(args, "step_batch_size_schedule", None)):
        yield "--step-batch-size-schedule", number, size
    eval_size = getattr(args, "eval_micro_batch_size", None) or size
    eval_batch = getattr(args, "eval_global_batch_size", None) or batch
    if eval_batch and (eval_batch, eval_size) != (batch, size):
        yield "--eval-global-batch-size", eval_batch, eval_size


def most_tokens(options: Any) -> int | None:
    """Say how many tokens a microbatch may have, where samples have lengths of their own; None if that is not known.

    Args:
        options: Megatron's arguments.

    >>> from types import SimpleNamespace
    >>> most_tokens(SimpleNamespace(seq_length=12, max_position_embeddings=None, micro_batch_size=2))
    384
    """
    length, size = (
        max(getattr(options, name, None) or 0 for name in names)
        for names in (
            ("seq_length", "decoder_seq_length", "max_position_embeddings"),
            ("micro_batch_size", "eval_micro_batch_size"),
        )
    )
    return _TIMES_LONGER * length * size or None


_FLAGS = {"sft": "--sft", "dataloader_inter_document_masking": "--dataloader-inter-document-masking"}


def check_packed(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find what packed samples do not work with.

    Args:
        args: Megatron's arguments as parsed.
        context: The run.

    Returns:
        One line for every problem, ``value; rule; way out``; none without packed samples.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(sft=True, micro_batch_size=2)
    >>> print(*check_packed(args, OptionContext(tp_sizes=(1, 4))))
    --micro-batch-size 2 with --sft; Megatron joins the samples to one row, and its pipeline expects several; use 1
    """
    flag = packing_flag(args)
    return tuple(_problems(args, context, flag)) if flag else ()


def packing_flag(args: object) -> str:
    """Return the flag that packs samples; the empty string if none does.

    >>> from types import SimpleNamespace
    >>> packing_flag(SimpleNamespace(sft=True)), packing_flag(SimpleNamespace(sft=False))
    ('--sft', '')
    """
    return next((flag for name, flag in _FLAGS.items() if getattr(args, name, False)), "")


def _problems(args: object, context: OptionContext, flag: str) -> Iterator[str]:
    size = getattr(args, "micro_batch_size", None) or 1
    if size > 1 and context.num_stages > 1:
        yield (
            f"--micro-batch-size {size} with {flag}; Megatron joins the samples to one row, and its pipeline expects "
            "several; use 1"
        )
    if context.has_unequal_cp:
        yield (
            f"{flag} with {context.layout_text}; samples are padded for the context-parallel size, so stages of "
            "different ones would read different rows; give every stage one size with --context-parallel-size"
        )
    if context.is_split:
        yield (
            f"{flag} with --vtp-dp-mode split; a stage with fewer replicas joins the rows of several; use "
            "--vtp-dp-mode multiplex"
        )
    if context.num_rings > 1:
        yield (
            f"{flag} with --vtp-encoder-layer-list; the lengths of rows would cross with what the encoder sends, too, "
            "which has no such rows; keep the encoder on the edge (leave the list out)"
        )
    if context.is_u_shaped and max(context.cp_sizes, default=1) > 1:
        yield (
            f"{flag} in a U-shape with context-parallel size {max(context.cp_sizes)}; lengths of rows that are cut "
            "have not been sent to a cloud; use --context-parallel-size 1"
        )


LOCAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "its number": ("rank", "local_rank"),
        "checkpoint folders": (
            "save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir",
            "non_persistent_local_ckpt_dir",
        ),
        "files": (
            "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
            "per_split_data_args_path", "per_dataset_sequences_path", "data_cache_path", "object_storage_cache_path",
            "vocab_file", "merge_file", "tokenizer_model", "metadata_path", "tokenizer_metadata", "s3_cache_path",
            "heterogeneous_layers_config_path", "te_precision_config_file", "memory_snapshot_path",
            "flight_recorder_dump_path", "result_rejected_tracker_filename", "dump_param_to_param_group_map",
            "mm_data", "mm_model", "mm_tool", "tokenizer_name_or_path", "auto_settings_work_dir",
        ),
        "logging": (
            "tensorboard_dir", "tensorboard_queue_size", "wandb_project", "wandb_exp_name", "wandb_save_dir",
            "wandb_entity", "enable_one_logger", "one_logger_project", "one_logger_run_name", "one_logger_async",
            "app_tag_run_name", "app_tag_run_version", "logging_level",
        ),
    }
)  # fmt: skip
"""Arguments that may differ between any two ranks: they concern files and logging, not what is computed."""

EDGE_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tokenizer": (
            "tokenizer_type", "vocab_size", "padded_vocab_size", "pad_vocab_size", "vocab_extra_ids",
            "special_tokens", "tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_sentencepiece_legacy",
            "tokenizer_sentencepiece_ignore_extra_whitespaces", "tokenizer_hf_no_use_fast",
            "tokenizer_hf_no_include_special_tokens", "trust_remote_code", "null_tokenizer_eod_id",
            "null_tokenizer_pad_id", "chat_template",
            # Names of older Megatrons.
            "tiktoken_special_tokens", "tokenizer_special_tokens", "tokenizer_hf_use_fast",
            "tokenizer_hf_include_special_tokens", "legacy_tokenizer",
        ),
        "data": (
            "mock_data", "split", "num_workers", "num_dataset_builder_threads", "mid_level_dataset_surplus",
            "mmap_bin_files", "dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap",
            "allow_ambiguous_pad_tokens", "reset_position_ids", "eod_mask_loss", "fim_data", "fim_rate",
            "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix", "fim_prefix_token",
            "fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token",
        ),
    }
)  # fmt: skip
"""Arguments that the cloud of a U-shaped pipeline need not have: it has neither tokenizer nor data."""

# Paths may differ, but all ranks must give them or none: saving and loading are collective.
_SAVING_AND_LOADING = ("save", "load", "pretrained_checkpoint", "dump_param_to_param_group_map")


def shared_arguments(arguments: Mapping[str, object], *, has_edge: bool) -> dict[str, object]:
    """Select the arguments that must be equal on every rank, under their flags' names.

    Args:
        arguments: Megatron's, as parsed.
        has_edge: The pipeline is U-shaped: only the edge has tokenizer and data.

    >>> shared_arguments({"lr": 0.1, "split": "9,1", "save": "/edge", "vtp_audit": "x"}, has_edge=True)
    {'--lr': 0.1, 'whether --save is given': True}
    """
    groups = (*LOCAL_ARGUMENTS.values(), *(EDGE_ARGUMENTS.values() if has_edge else ()))
    left_out = {name for names in groups for name in names}
    stated: dict[str, object] = {
        "--" + name.replace("_", "-"): value if isinstance(value, int | float | str | None) else str(value)
        for name, value in sorted(arguments.items())
        if name not in left_out and not name.startswith("vtp_")
    }
    given = {name: arguments[name] is not None for name in _SAVING_AND_LOADING if name in arguments}
    return stated | {f"whether --{name.replace('_', '-')} is given": is_given for name, is_given in given.items()}


def check_site(site: str | None, rank: int, layout: PipelineLayout, sites: Sequence[str]) -> tuple[str, ...]:
    """Find out whether this rank runs at its stage's site; not so if the launcher numbers the machines differently.

    Args:
        site: Site of this machine; None checks nothing.
        rank: This rank.
        layout: Has the stage of the rank.
        sites: Site of every stage; empty if none were named.

    Returns:
        One line if the site is unknown, or is not the stage's.
    """
    stage = layout.stage_of(rank)
    if site is None or (site in sites and sites[stage] == site):
        return ()
    if site not in sites:
        return (
            f"--vtp-site {site} is none of --vtp-sites {','.join(sites) or '(not given)'}; name the site of "
            "every stage there, and this machine's here",
        )
    return (
        f"stage {stage} belongs to site {sites[stage]}, but its rank {rank} runs on a machine of site "
        f"{site}; number the machines in the order of the stages, with a static rendezvous (--node-rank)",
    )
