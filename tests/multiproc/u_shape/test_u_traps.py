"""What a U-shaped run cannot do is refused, before any training, with a way out; rare things that it can do work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, assert_same_training, num_ranks
from tests.multiproc.cases.u_shape_cases import u_shaped
from tests.support.hosts import host_name, resharding_flags
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,2"]
LEFT_OUT = {
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "overlap_moe_expert_parallel_comm": True,
    "defer_embedding_wgrad_compute": True,
    "fine_grained_activation_offloading": True,
    "cuda_graph_impl": "local",
}


def test_what_the_executor_leaves_out_is_refused(pool: Pool) -> None:
    kwargs = {"case": u_shaped(1, 2), "options": LEFT_OUT}
    for lines in pool.run(3, "tests.multiproc.jobs.variants:refused_steps", kwargs):
        assert len(lines) == (2 if host_name() == "0.12" else len(LEFT_OUT))  # Megatron 0.12 has not the others
        for name, line in lines.items():
            assert re.search(rf"config\.{name}( local)? with a planned schedule; .*; leave it out", line), line


def refused(scripts: Scripts, *flags: str) -> None:
    command = arguments("1,2", extra=[*U_SHAPE, *flags])
    assert_refused(scripts.launch(num_ranks("1,2"), {"arguments": command}), flags[0])


def test_masks_of_samples_are_refused(scripts: Scripts) -> None:
    refused(scripts, "--reset-attention-mask")


@pytest.mark.needs("flags_after_0_12")
@pytest.mark.full
def test_several_packed_rows_are_refused(scripts: Scripts) -> None:
    """The runs of the tests have two samples in a microbatch."""
    command = arguments("1,2", extra=[*U_SHAPE, "--sft"])
    assert_refused(scripts.launch(num_ranks("1,2"), {"arguments": command}), "--micro-batch-size 2 with --sft; ")


@pytest.mark.parametrize(
    "flags",
    [("--num-layers-per-virtual-pipeline-stage", "1"), ("--decoder-first-pipeline-num-layers", "1")],
    ids=lambda flags: flags[0],
)
@pytest.mark.full
def test_what_no_u_has_is_refused(scripts: Scripts, flags: tuple[str, ...]) -> None:
    refused(scripts, *flags)


@pytest.mark.full
@pytest.mark.parametrize("sizes", ["1,1", pytest.param("1,2", marks=pytest.mark.needs("experts"))])
def test_experts(scripts: Scripts, tmp_path: Path, sizes: str) -> None:
    """Losses and gradients are those of one process, from its checkpoint."""
    # Megatron's local experts fail with fused activations and with biases.
    experts = ["--num-experts", "2", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"]
    experts += ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"]
    reference = scripts.train("1", [*experts, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    experts += ["--sequence-parallel", "--expert-tensor-parallel-size", "1"] if "2" in sizes else []
    runs = scripts.train(sizes, [*U_SHAPE, *experts, *resharding_flags(), "--load", str(tmp_path)])
    assert_same_training(runs, reference, first=2)
