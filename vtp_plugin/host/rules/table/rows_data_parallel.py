"""Options of data parallelism."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.table.evidence import OPTIONS, PARITY
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    above,
    case,
    given,
    off,
    on,
    refused,
    refused_unequal,
    supported,
)

DATA_PARALLEL_RULES: tuple[OptionRule, ...] = (
    *supported(
        "its shards and collectives stay among the data-parallel replicas of one stage",
        PARITY,
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
    *supported(
        "it only shifts when the buckets of a stage are reduced or gathered",
        OPTIONS,
        case("--no-align-grad-reduce", off, "align_grad_reduce"),
        case("--no-align-param-gather", off, "align_param_gather"),
    ),
    *supported(
        "it gathers the weights of a rank's first chunk among the replicas of its stage",
        OPTIONS,
        "--overlap-param-gather-with-optimizer-step",
    ),
    *refused(
        "the plugin's group builder makes one distributed-optimizer instance",
        case("--num-distributed-optimizer-instances", above(1)),
    ),
    *refused(
        "the plugin's group builder makes no second gather group, Megatron's makes it from one size",
        "--create-all-gather-group",
    ),
    *refused("the plugin's group builder does not set up SHARP", "--use-sharp"),
    *refused(
        "the plugin's group builder does not read NCCL options per group, so they would have no effect",
        case("--nccl-communicator-config-path", given),
        "--high-priority-stream-groups",
    ),
    *refused_unequal(
        "_ParamAndGradBuffer waits for the whole world at every buffer, whose number differs between stages with "
        "experts or in a U-shape, and on CPUs stock ends with \"Error building extension 'nccl_allocator'\"",
        case("--use-nccl-ub", on, "nccl_ub"),
    ),
    *refused_unequal(
        "fully sharded data parallelism makes its device mesh from one tensor-parallel size",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        way_out="use --use-distributed-optimizer or give every stage the same size",
    ),
    *refused_unequal(
        "weights that appear after start-up miss the copy of the tied embedding between stages",
        "--init-model-with-meta-device",
    ),
    *(
        replace(rule, versions=("<0.18",))
        for rule in refused_unequal(
            "weights that are not drawn are not marked as cut, so norms and clipping count only what the first rank of "
            "a stage has (Megatron up to 0.17)",
            case("--no-initialization", off, "perform_initialization"),
        )
    ),
)
