"""Options that do not go with an order of the plugin's own: a U-shaped pipeline, unequal data parallelism."""

from __future__ import annotations

from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.replicas import ReplicaMap

# The schedule has an order of its own, and what tells packed samples apart does not cross to the cloud.
_NOT_U_SHAPED = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "mtp_num_layers",
    "reset_attention_mask",
    "dataloader_inter_document_masking",
    "sft",
    "full_validation",
)


def check_u_shaped(args: object) -> None:
    """Refuse options that do not work with a U-shaped pipeline, and layers given twice or not at all.

    Args:
        args: Megatron's arguments as parsed.

    Raises:
        ConfigError: an option must be left out, or it is not said once which layers a stage holds.
    """
    refuse_with_u_shape(args)
    ways = ("num_layer_list", "pipeline_model_parallel_layout")
    if sum(getattr(args, name, None) is not None for name in ways) != 1:
        raise ConfigError(
            "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
            "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them"
        )


def refuse_with_u_shape(args: object) -> None:
    """Refuse options that do not work with a U-shaped pipeline.

    Raises:
        ConfigError: an option must be left out.
    """
    for name in _NOT_U_SHAPED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not work with --layerwise-disaggregated-training; leave it out")


def check_one_chunk(args: object, replicas: ReplicaMap) -> None:
    """Refuse several chunks on stages of different data-parallel sizes.

    Args:
        args: Megatron's arguments as parsed.
        replicas: of the stages.

    Raises:
        ConfigError: an option asks for them.
    """
    shown = ",".join(map(str, replicas.dp_sizes))
    for name in ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"):
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not work with --vtp-dp-list {shown}: no interleaved order "
                "is known for different data-parallel sizes; leave it out or use equal sizes"
            )
