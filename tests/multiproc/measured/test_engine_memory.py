"""What ``plan`` says that Transformer Engine's layers keep, against Megatron's GPT of them, to 0.2 %.

Megatron's own part runs; of Transformer Engine's a stand-in (``tests/support/engine_stand_in.py``)
saves what its sources say.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.support.pool import start_python
from vtp_plugin.cli import main

pytestmark = pytest.mark.needs("engine_of_0_19")

PLAIN = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 160 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --vocab-size 64
    --make-vocab-size-divisible-by 64 --bf16
    --tokenizer-type NullTokenizer --lr 1e-3 --train-iters 1 --no-gradient-accumulation-fusion"""
DRY = "--attention-dropout 0 --hidden-dropout 0"
GATED = f"--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope {DRY}"
GROUPED = f"{GATED} --group-query-attention --num-query-groups 2"
LATENT = f"""{GATED} --no-rope-fusion --multi-latent-attention --rope-type rope --q-lora-rank 40 --kv-lora-rank 24
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"""
EXPERTS = f"""{GROUPED} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-layer-freq 2 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"""
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
SELECTED = "--recompute-granularity selective --recompute-modules"
WHOLE = "--recompute-granularity full --recompute-num-layers"
CASES = {
    "plain": "",
    "dry": DRY,
    "gated": GATED,
    "grouped": GROUPED,
    "unfused": f"{GROUPED} --no-rope-fusion --no-bias-swiglu-fusion",
    "normed": f"{GROUPED} --qk-layernorm",
    "normed-biased": f"{DRY} --qk-layernorm",
    "samples": f"{GROUPED} --micro-batch-size 3",
    "samples-dropped": "--micro-batch-size 2 --hidden-dropout 0.2",
    "attention-again": f"{GROUPED} {SELECTED} core_attn",
    "attention-again-plain": f"{SELECTED} core_attn",
    "feed-forward-again": f"{GATED} {SELECTED} core_attn mlp",
    "layers-again": f"{GATED} {WHOLE} 2 --recompute-method uniform",
    # With biases masks of layers that are computed again are saved, too, and at once forgotten.
    "layers-again-block": f"--disable-bias-linear --no-bias-gelu-fusion {WHOLE} 3 --recompute-method block",
    "experts": EXPERTS,
    "experts-grouped": f"{EXPERTS} --moe-grouped-gemm",
    "experts-unfused": f"{EXPERTS} --moe-grouped-gemm --no-bias-swiglu-fusion",
    "experts-shared": f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 32",
    "prediction": f"{GATED} --mtp-num-layers 2",
    "prediction-dropped": "--position-embedding-type rope --mtp-num-layers 1 --micro-batch-size 2",
    "prediction-again": f"{GATED} --mtp-num-layers 1 {WHOLE} 1 --recompute-method uniform",
    "prediction-dropped-again": f"""--position-embedding-type rope --mtp-num-layers 1 --disable-bias-linear
        --no-bias-gelu-fusion {WHOLE} 1 --recompute-method uniform""",
    "prediction-eight-bits": f"{GATED} --mtp-num-layers 1 --fp8-format hybrid",
    "latent": f"{LATENT} --qk-layernorm",
    "latent-unnormed": f"{LATENT} --micro-batch-size 2",
    "latent-experts": f"{LATENT} --qk-layernorm {EXPERTS.removeprefix(GROUPED)} --moe-grouped-gemm",
    "local-dropped": f"{LOCAL} --micro-batch-size 2",
    "local-dropped-again": f"{LOCAL} {SELECTED} core_attn",
    "local-experts-fused": f"{EXPERTS} {LOCAL} {DRY}",
    "eight-bits": f"{GROUPED} --fp8-format hybrid",
    "eight-bits-samples": f"{GROUPED} --fp8-format hybrid --micro-batch-size 2 --qk-layernorm",
    "eight-bits-latent": f"{LATENT} --qk-layernorm --fp8-format hybrid",
    "eight-bits-experts": f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 32 --fp8-format hybrid",
}
TOLERANCE = 0.002


def test_what_layers_of_transformer_engine_keep(capsys: pytest.CaptureFixture[str]) -> None:
    words = {name: [*shlex.split(PLAIN), *shlex.split(extra)] for name, extra in CASES.items()}
    planned: dict[str, int] = {}
    for name, flags in words.items():
        main(["plan", "--json", "--vtp-size-list", "1", *flags])
        (held,) = json.loads(capsys.readouterr().out)["memory"]
        assert sum(held["kept_bytes"].values()) == held["activation_bytes"]
        planned[name] = held["activation_bytes"]
    job = [f"{name}={shlex.join(flags)}" for name, flags in words.items()]
    printed = start_python("-m", "tests.multiproc.jobs.engine_memory_job", *job)
    counted = {name: int(number) for name, number in re.findall(r"^held (\S+) (\d+)$", printed, re.MULTILINE)}
    assert counted.keys() == CASES.keys()
    ratios = {name: round(planned[name] / counted[name], 4) for name in CASES}
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE} == {}, ratios
