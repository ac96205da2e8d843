"""Which of Megatron's arguments may differ between ranks, and which between the sites of a U-shaped pipeline.

All others must be equal everywhere: every rank states them at start-up. The plugin's flags are not among them, since
the session states what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

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
