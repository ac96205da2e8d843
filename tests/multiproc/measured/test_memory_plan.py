"""What ``plan`` says that a rank holds, against what the ranks of a run hold: to the last byte, activations to 2 %."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.multiproc.cases.presets import LAYOUTS, PRESETS, command
from tests.multiproc.cases.script_cases import Scripts, arguments
from vtp_plugin.cli import main

pytestmark = pytest.mark.needs("measured_memory")

COLUMNS = ("num_parameters", "weight_bytes", "gradient_bytes", "optimizer_bytes")
ONE_STEP = ["--train-iters", "1"]
DISTRIBUTED = ["--use-distributed-optimizer"]
BUCKETS = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000"]
ODD = ["--hidden-size", "60", "--ffn-hidden-size", "156"]
GATED = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
GATED += ["--no-rope-fusion"]
PREDICTING = ["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion"]
TWICE = [*PREDICTING[:1], "2", *PREDICTING[2:]]
LATENT = """--multi-latent-attention --q-lora-rank 36 --kv-lora-rank 20 --qk-head-dim 6 --qk-pos-emb-head-dim 4
    --v-head-dim 8"""
GATHERED = ["--moe-token-dispatcher-type", "allgather"]
SHARED = ["--moe-shared-expert-intermediate-size", "24", "--moe-router-score-function", "sigmoid"]
SPREAD = ["--group-query-attention", "--num-query-groups", "2"]
SELECTED = ["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp"]
AGAIN = ["--recompute-num-layers", "1"]
WHOLE = ["--recompute-granularity", "full", "--recompute-method"]
EXPERTS = """--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 30 --moe-layer-freq 2 --sequence-parallel
    --moe-token-dispatcher-type alltoall --vtp-ep-list 1,2 --vtp-etp-list 1,1"""

LORA = ["--vtp-lora-rank", "3", "--vtp-lora-targets", "linear_fc2"]

# The words of a microbatch are a part of all that the script reads at once, which counts more than 2 % of few layers.
DEEP = ["--num-layers", "8"]
EXPERTS_AGAIN = ["--disable-bias-linear", "--no-bias-gelu-fusion", *WHOLE, "uniform", *AGAIN]


def preset(name: str, layout: str, *extra: str, full: bool = True) -> Any:
    place = LAYOUTS[layout]
    words = [*command(PRESETS[name], place), *extra]
    marks = [pytest.mark.full] if full else []
    return pytest.param(place.sizes, words, place.dp, id=f"{name}-{layout}", marks=marks)


def plain(name: str, sizes: str, *extra: str, dp: int = 1, full: bool = True) -> Any:
    return pytest.param(sizes, extra, dp, id=name, marks=[pytest.mark.full] if full else [])


CASES = [
    preset("deepseek-v3", "1,2 dp 2", full=False),
    preset("deepseek-v2", "1,2,2 U", "--bf16"),
    preset("llama-3", "2,3", "--bf16", "--grad-reduce-in-bf16"),
    preset("qwen-2.5", "1,2 dp 2", "--ddp-bucket-size", "30000"),
    preset("qwen-3", "1,2,2 U", "--fp16", "--initial-loss-scale", "1024"),
    preset("qwen-3-moe", "1,2,2 U"),
    preset("mixtral", "2,3", "--bf16"),
    plain("momentum", "2,1", "--optimizer", "sgd", "--bf16"),
    plain("tied-biases", "1,2", *ODD, full=False),
    plain("gated-sharded", "3,1", *GATED, "--sequence-parallel", "--bf16"),
    plain("gated-normed", "1,2", *GATED, "--qk-layernorm", "--no-bias-swiglu-fusion"),
    plain("normed-sharded", "2,1", *ODD, "--qk-layernorm", "--sequence-parallel", "--bf16"),
    plain("tied-buckets", "2,1", *ODD, *BUCKETS, dp=2),
    plain("spread-groups", "1,4", *SPREAD, "--bf16"),
    plain("spread-rotated", "4,1", *SPREAD, *GATED, "--sequence-parallel"),
    plain("spread-single", "1,4", *SPREAD[:-1], "2", "--num-attention-heads", "4", "--kv-channels", "12"),
    plain("spread-one-sample", "1,4", *SPREAD, "--micro-batch-size", "1"),
    plain("spread-normed", "1,4", *SPREAD, *ODD, "--qk-layernorm"),
    plain("spread-normed-gated", "4,1", *SPREAD, *GATED, "--qk-layernorm", "--sequence-parallel"),
    plain("spread-normed-half", "1,4", *SPREAD, *GATED, "--qk-layernorm", "--bf16"),
    plain("spread-again", "1,4", *SPREAD, "--recompute-activations"),
    plain("attention-again", "1,2", *ODD, "--recompute-activations", full=False),
    plain(
        "attention-again-gated", "3,1", *GATED, "--recompute-granularity", "selective", "--sequence-parallel", "--bf16"
    ),
    plain("grouped-again", "1,2", "--group-query-attention", "--num-query-groups", "4", *GATED, *SELECTED),
    plain("normed-again", "2,1", *ODD, "--qk-layernorm", "--recompute-activations", "--bf16"),
    plain("layers-again", "1,2", *ODD, *WHOLE, "uniform", "--recompute-num-layers", "2", "--num-layers", "6"),
    plain(
        "layers-again-rotated", "2,1", *GATED, *WHOLE, "uniform", "--recompute-num-layers", "1", "--sequence-parallel"
    ),
    plain("blocks-again", "1,2", *GATED, *WHOLE, "block", "--recompute-num-layers", "1", "--bf16"),
    plain("latent-again", "1,2", *LATENT.split(), *GATED, *SELECTED),
    plain("experts-gathered", "1,2", *EXPERTS.split(), *GATHERED, "--disable-bias-linear", "--no-bias-gelu-fusion"),
    plain("experts-gathered-cut", "2,1", *EXPERTS.split()[:-4], *GATHERED, *GATED, "--no-bias-swiglu-fusion", "--bf16"),
    plain("experts-spread", "1,2", *EXPERTS.split(), *GATED, "--no-bias-swiglu-fusion", *SHARED, dp=2),
    plain("experts-again", "1,2", *EXPERTS.split(), "--disable-bias-linear", "--no-bias-gelu-fusion", *SELECTED),
    plain("interleaved", "2,1", *ODD, *DISTRIBUTED, "--num-virtual-stages-per-pipeline-rank", "2", dp=2),
    plain("replicas", "1,2", *BUCKETS, "--use-tp-pp-dp-mapping", "--untie-embeddings-and-output-weights", dp=3),
    plain("stages", "1,2,1", "--num-layers", "5", "--decoder-first-pipeline-num-layers", "1", *DISTRIBUTED),
    plain("prediction", "1,2", *PREDICTING),
    plain("prediction-again", "1,2", *PREDICTING, *SELECTED, "--disable-bias-linear"),
    plain("prediction-layers-again", "1,2", *PREDICTING, *ODD, *WHOLE, "uniform", *AGAIN, *DEEP, full=False),
    plain("predictions-layers-again", "2,3", *TWICE, *ODD, *GATED[:-3], *WHOLE, "uniform", *AGAIN, "--bf16"),
    plain("predictions-sharded-again", "2,3", *TWICE, *ODD, *WHOLE, "uniform", *AGAIN, "--sequence-parallel"),
    plain("predictions-blocks-again", "1,2", *TWICE, *ODD, *WHOLE, "block", *AGAIN),
    plain("prediction-blocks-again", "2,3", *PREDICTING, *ODD, *GATED[:-3], *WHOLE, "block", *AGAIN[:-1], "2"),
    plain("prediction-experts-again", "1,2", *PREDICTING, *EXPERTS.split(), *EXPERTS_AGAIN, *DEEP),
    plain("prediction-sharded", "2,1", *PREDICTING, *GATED[:-3], "--sequence-parallel", "--bf16"),
    plain("latent-biased", "1,2", *LATENT.split(), "--position-embedding-type", "rope", "--no-rope-fusion"),
    plain("latent-sharded", "3,1", *LATENT.split(), "--qk-layernorm", *GATED, "--sequence-parallel"),
    plain("adapters", "1,2", *GATED, "--vtp-lora-rank", "4", full=False),
    plain("adapters-sharded", "2,1", *ODD, *LORA, "--sequence-parallel", "--bf16"),
    plain("adapters-of-some", "1,2", *DEEP, *LORA, "q_proj", "v_proj", "--vtp-lora-layers", "2:7", *DISTRIBUTED, dp=2),
    plain("adapters-again", "1,2", *GATED, "--vtp-lora-rank", "4", *WHOLE, "uniform", *AGAIN),
    plain("adapters-beside-experts", "1,2", *EXPERTS.split(), *GATED, *DEEP, *LORA[:3], "linear_qkv", "linear_proj"),
    plain("adapters-dropout", "2,1", *ODD, *LORA[:2], "--vtp-lora-dropout", "0.1", "--sequence-parallel", "--bf16"),
    plain("adapters-dropout-latent", "1,2", *LATENT.split(), *GATED, *LORA[:2], "--vtp-lora-dropout", "0.1"),
    plain("adapters-latent", "1,2", *LATENT.split(), *GATED, "--qk-layernorm", *LORA[:2]),
    plain("adapters-latent-sharded", "3,1", *LATENT.split(), *GATED, *LORA[:2], "--sequence-parallel", "--bf16"),
    plain("adapters-of-experts", "1,2", *EXPERTS.split(), *GATED, *DEEP, *LORA[:2]),
    plain("adapters-of-cut-experts", "2,1", *EXPERTS.split()[:-4], *GATED, *LORA[:3], "experts.down_proj", "q_proj"),
    plain("experts-unscored", "1,2", *EXPERTS.split(), "--disable-bias-linear", "--no-bias-gelu-fusion", "--bf16"),
]


@pytest.mark.parametrize(("sizes", "extra", "dp"), CASES)
def test_plan_counts_every_byte(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], sizes: str, extra: Sequence[str], dp: int
) -> None:
    # The plan counts no masks of the data set, which layers that are computed again keep.
    extra = [*extra, "--no-create-attention-mask-in-dataloader"]
    words = [*arguments(sizes, dp=dp, extra=extra), *ONE_STEP, "--vtp-data-parallel-size", str(dp)]
    main(["plan", "--json", *words])
    planned = json.loads(capsys.readouterr().out)["memory"]
    hooks = ["note_memory", "note_activations"]
    hooks += ["latent_attention"] if "--multi-latent-attention" in extra else []
    hooks += ["balanced_routers"] if "--num-experts" in extra else []
    runs = scripts.train(sizes, [*extra, *ONE_STEP], dp=dp, hooks=hooks)
    held = [run.facts["memory"] for run in runs]
    assert len(planned) == len(held) > 1
    for rank, (wanted, found) in enumerate(zip(held, planned, strict=True)):
        assert {name: found[name] for name in COLUMNS} == {name: wanted[name] for name in COLUMNS}, f"rank {rank}"
        kept = sum(runs[rank].facts["activations"])
        assert found["activation_bytes"] == pytest.approx(kept, rel=0.02), f"rank {rank}"


SPLIT = ["--vtp-schedule", "planned", "--vtp-split-backward"]
BIASLESS = ["--disable-bias-linear", "--no-bias-gelu-fusion"]
SPLIT_CASES = [
    plain("tied-biases", "1,2", full=False),
    plain("odd-sharded", "2,1,3", *ODD, "--sequence-parallel", "--num-layers", "6", full=False),
    plain("gated-spread", "1,4", *GATED, *SPREAD, "--bf16"),
    plain("spread-sharded", "4,1", *SPREAD, "--qk-layernorm", "--sequence-parallel", "--bf16"),
    plain("layers-again", "2,1", *ODD, *WHOLE, "uniform", *AGAIN, "--num-layers", "6"),
    plain("blocks-again", "1,2", *GATED, *WHOLE, "block", *AGAIN, "--sequence-parallel"),
    plain("modules-again", "1,2", *GATED, *SELECTED),
    plain("predictions", "2,3", *TWICE, *ODD, "--sequence-parallel"),
    plain("prediction-again", "1,2", *PREDICTING, *WHOLE, "uniform", *AGAIN),
    plain("latent", "1,2", *LATENT.split(), "--position-embedding-type", "rope", "--no-rope-fusion"),
    plain("latent-unnormed-sharded", "3,1", *LATENT.split(), *GATED, "--sequence-parallel"),
    plain("latent-sharded", "3,1", *LATENT.split(), "--qk-layernorm", *GATED, "--sequence-parallel", "--bf16"),
    plain("latent-keys-only", "1,2", *LATENT.split()[:1], *LATENT.split()[3:], *GATED),
    plain("experts", "1,2", *EXPERTS.split(), *BIASLESS, full=False),
    plain("experts-gathered", "1,2", *EXPERTS.split(), *GATHERED, *BIASLESS, "--bf16"),
    plain("experts-cut-shared", "2,1", *EXPERTS.split()[:-4], *GATED, *SHARED),
    plain("experts-spread", "1,2", *EXPERTS.split(), *GATED, dp=2),
]


U = ["--layerwise-disaggregated-training", "--num-layer-list", "2,4,2", *DEEP]
TWICE_ROUND = ["--num-virtual-stages-per-pipeline-rank", "2", *DEEP]
SIX = ["--global-batch-size", "12"]
KEPT_CASES = [
    plain("U", "1,2", *U, *SPLIT, full=False),
    plain("U-whole", "1,2", *U, *SPLIT[:2], full=False),
    plain("interleaved", "1,2", *TWICE_ROUND, *SPLIT, full=False),
    plain("interleaved-whole", "1,2", *TWICE_ROUND, *SPLIT[:2], full=False),
    plain("U-sharded", "2,1,3", *ODD, "--sequence-parallel", *U[:2], "1,3,2,2", *DEEP, *SPLIT),
    plain("interleaved-again", "2,1,1", *GATED, *WHOLE, "uniform", *AGAIN, *TWICE_ROUND[:-1], "12", *SIX, *SPLIT),
]


def check_kept(
    scripts: Scripts,
    capsys: pytest.CaptureFixture[str],
    sizes: str,
    extra: Sequence[str],
    dp: int,
    hooks: Sequence[str],
) -> None:
    """Compare, after every compute of a step, what waits with the plan; and the most that is kept at a time."""
    is_split = "--vtp-split-backward" in extra
    extra = [*extra, "--no-create-attention-mask-in-dataloader"]
    words = [*arguments(sizes, dp=dp, extra=extra), *ONE_STEP, "--vtp-data-parallel-size", str(dp)]
    main(["plan", "--json", *words])
    planned = json.loads(capsys.readouterr().out)["memory"]
    # A forward whose backward is split keeps what waits beside what autograd saves.
    hooks = [*hooks, "note_waiting", *([] if is_split else ["note_activations"])]
    hooks += ["latent_attention"] if "--multi-latent-attention" in extra else []
    hooks += ["balanced_routers"] if "--num-experts" in extra else []
    runs = scripts.train(sizes, [*extra, *ONE_STEP], dp=dp, hooks=hooks)
    moments = [run.facts["kept"] for run in runs]
    assert len(planned) == len(runs) > 1
    assert any(len(waiting) > 1 for rank in moments for _, waiting, _ in rank) is is_split
    for rank, (found, run) in enumerate(zip(planned, runs, strict=True)):
        vstages = sorted({vstage for kept, _, _ in moments[rank] for vstage in kept})
        of = dict(zip(vstages, found["chunks"], strict=True))
        kept_bytes = []
        for kept, waiting, num_bytes in moments[rank]:
            assert num_bytes == sum(of[vstage]["waiting_bytes"] for vstage in waiting), f"rank {rank}"
            kept_bytes.append(sum(of[vstage]["activation_bytes"] for vstage in kept) + num_bytes)
        steady = sum(found[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "overhead_bytes"))
        assert max(kept_bytes) == found["total_bytes"] - steady, f"rank {rank}"
        if not is_split:
            sizes_of = [chunk["activation_bytes"] for chunk in found["chunks"]]
            assert sizes_of == pytest.approx(run.facts["activations"], rel=0.02), f"rank {rank}"


@pytest.mark.parametrize(("sizes", "extra", "dp"), SPLIT_CASES)
def test_plan_counts_every_byte_that_waits(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], sizes: str, extra: Sequence[str], dp: int
) -> None:
    check_kept(scripts, capsys, sizes, [*extra, *SPLIT], dp, [])


@pytest.mark.parametrize(("sizes", "extra", "dp"), KEPT_CASES)
def test_plan_counts_every_byte_of_several_chunks(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], sizes: str, extra: Sequence[str], dp: int
) -> None:
    check_kept(scripts, capsys, sizes, extra, dp, [])


def test_one_tensor_more_is_found(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        check_kept(scripts, capsys, "1,2", SPLIT, 1, ["keep_one_more"])


def test_a_stage_with_fewer_replicas_keeps_the_samples_of_several(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--vtp-dp-list", "1,2", "--vtp-dp-mode", "split", *DEEP, *ONE_STEP]
    words = arguments("1,1", extra=[*extra, "--no-create-attention-mask-in-dataloader"])
    main(["plan", "--json", *words])
    planned = json.loads(capsys.readouterr().out)["memory"]
    runs = scripts.finish(3, {"arguments": words, "hooks": ["note_activations", "note_waiting"]})
    for rank, (found, run) in enumerate(zip(planned, runs, strict=True)):
        assert [found["activation_bytes"]] == pytest.approx(run.facts["activations"], rel=0.02), f"rank {rank}"
        assert found["in_flight"] == max(len(kept) for kept, _, _ in run.facts["kept"]), f"rank {rank}"
    assert planned[0]["activation_bytes"] > 1.5 * planned[1]["activation_bytes"]
