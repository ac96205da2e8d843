"""Options of the pipeline, of tensor, sequence and context parallelism, and of orders."""

from __future__ import annotations

from vtp_plugin.host.rules.table.evidence import OPTIONS, PARITY
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    above,
    case,
    given,
    off,
    on,
    refused,
    refused_planned,
    refused_u_shaped,
    refused_unequal,
    refused_unequal_dp,
    supported,
)

_SEQUENCE = "tests/multiproc/training/test_parity.py::test_sequence_parallelism"
_CONTEXT = "tests/multiproc/training/test_parity.py::test_context_parallelism"


PARALLELISM_RULES: tuple[OptionRule, ...] = (
    # The pipeline: its schedule, layers and rank order.
    *supported(
        "the interleaved schedule asks its communicator for every transfer, the ring's wrap-around included",
        PARITY,
        case("--num-virtual-stages-per-pipeline-rank", given),
        case("--num-layers-per-virtual-pipeline-stage", given),
        case("--no-overlap-p2p-communication", off, "overlap_p2p_comm"),
    ),
    *supported(
        "the schedule only changes the order of the same transfers, which every rank of a stage issues alike",
        OPTIONS,
        case("--microbatch-group-size-per-virtual-pipeline-stage", given, "microbatch_group_size_per_vp_stage"),
        case("--overlap-p2p-communication-warmup-flush", on, "overlap_p2p_comm_warmup_flush"),
    ),
    *supported(
        "the layers of a stage follow from its pipeline rank, never from its size",
        OPTIONS,
        case("--decoder-first-pipeline-num-layers", given),
        case("--decoder-last-pipeline-num-layers", given),
        case("--pipeline-model-parallel-layout", given),
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *supported("the layout knows both rank orders", PARITY, "--use-tp-pp-dp-mapping"),
    *refused(
        "the plugin's channels replace Megatron's point-to-point calls and have no ring exchange",
        "--use-ring-exchange-p2p",
    ),
    *refused(
        "the plugin's channels use the backend of the run, not UCC",
        "--pipeline-model-parallel-comm-backend ucc",
        way_out="leave it out or use nccl",
    ),
    *refused("the start-up checks and the channels need real peers", "--fake-process-group"),
    *refused("it leaves out the group creation that gives every stage its size", "--lazy-mpu-init"),
    # Tensor, sequence and context parallelism.
    *supported(
        "boundary plans convert between copies and slices, and each stage's size says which it has",
        _SEQUENCE,
        "--sequence-parallel",
    ),
    *supported(
        "boundaries join the ranks that share a sequence, whatever size each stage has",
        _CONTEXT,
        case("--context-parallel-size", above(1)),
    ),
    *refused(
        "the plugin's group builder does not make the groups of nested context parallelism",
        case("--hierarchical-context-parallel-sizes", given),
        "--hybrid-context-parallel",
        way_out="leave it out and use plain --context-parallel-size",
    ),
    *refused_unequal(
        "Transformer Engine makes its overlap groups from one tensor-parallel size for the whole world",
        "--tp-comm-overlap",
    ),
    *refused_unequal(
        "it asserts a tensor-parallel size above 1, which fails on some stages only", "--distribute-saved-activations"
    ),
    *refused(
        "the plugin's group builder does not make the weight-sharding groups, whose number is tied to one size",
        case("--tensor-parallel-num-weight-shards", given),
        case("--expert-tensor-parallel-num-weight-shards", given),
    ),
)

ORDER_RULES: tuple[OptionRule, ...] = (
    *refused_planned(
        "only Megatron's schedules do this, the plugin's executor does not",
        "--defer-embedding-wgrad-compute",
        "--fine-grained-activation-offloading",
    ),
    *refused_unequal_dp(
        "no interleaved order is known for different data-parallel sizes",
        case("--num-virtual-stages-per-pipeline-rank", given),
        case("--num-layers-per-virtual-pipeline-stage", given),
    ),
    *refused_u_shaped(
        "--num-layer-list alone says which layers each part of the U holds",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *refused_u_shaped(
        "masks of the edge's samples do not cross to the cloud, only lengths of packed ones do",
        "--reset-attention-mask",
    ),
)
"""What only some orders refuse."""
