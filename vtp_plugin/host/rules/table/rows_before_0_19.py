"""The rows for options that only a Megatron before 0.19 has."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.table.rule import OptionRule, case, given, refused_unequal

_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "fully sharded data parallelism makes its device mesh from one tensor-parallel size (Megatron 0.12)",
        "--use-custom-fsdp",
        way_out="use --use-distributed-optimizer or give every stage the same size",
    ),
    *refused_unequal(
        "it puts the layers of an encoder on ranks of their own, for one tensor-parallel size (Megatron 0.12)",
        case("--encoder-tensor-model-parallel-size"),
        case("--encoder-pipeline-model-parallel-size"),
        case("--pipeline-model-parallel-split-rank", given),
    ),
    *refused_unequal(
        "these models have a pipeline and checkpoints of their own (Megatron 0.12)",
        "--use-legacy-models",
        "--retro-add-retriever",
        case("--retro-project-dir", given),
        way_out="leave it out: use the models of megatron.core",
    ),
    *refused_unequal(
        "it stores one regular grid of shards for each weight (Megatron 0.12)",
        "--ckpt-format zarr",
        way_out="use --ckpt-format torch_dist",
    ),
)

OLDER_RULES = tuple(replace(rule, versions=("<0.19",)) for rule in _RULES)
