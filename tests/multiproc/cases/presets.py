"""Small versions of the public configurations of today's models, as command lines of megatron.training; no torch.

What is public of a model stays: kinds of heads, norms, biases and embeddings, rotary base and scaling, kind of router,
shared experts, dense first layers. Widths, lengths and numbers of layers, heads and experts are small. Halves of
``--ffn-hidden-size`` divide by 1, 2 and 3, since Megatron's warm-up halves a rank's part, of models with experts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    grad_norms,
    losses,
    num_ranks,
)
from tests.support.hosts import reshardable_flags, resharding_flags

TRAINING = """
    --num-layers 4 --seq-length 18 --max-position-embeddings 18 --micro-batch-size 3 --global-batch-size 18
    --clip-grad 0.5 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --dist-ckpt-optim-fully-reshardable --init-method-std 0.1 --train-iters 10
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --no-rope-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion
"""
NUM_SAVED, NUM_STEPS = 5, 5
EXPERTS = "--moe-token-dispatcher-type alltoall --moe-router-dtype fp32"
# A stage's ranks cut the latent keys with their positional part: 20 + 4.
LATENT = """--multi-latent-attention --num-attention-heads 12 --q-lora-rank 36 --kv-lora-rank 20 --qk-head-dim 6
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --rope-type yarn --rotary-scaling-factor 40"""

# What Megatron without the plugin says of such a model on a CPU.
STOCK_ERROR = "TypeError: DotProductAttention.__init__() got an unexpected keyword argument 'k_channels'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a model is trained.

    Attributes:
        sizes: tensor-parallel size of every stage.
        dp: number of replicas.
        flags: of every model.
        expert_flags: of a model with experts besides.
    """

    sizes: str
    dp: int = 1
    flags: tuple[str, ...] = ()
    expert_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model.

    Attributes:
        model: whose public configuration it is a small version of.
        flags: its command line.
        has_experts: it needs sequence parallelism where a stage is tensor-parallel.
        hooks: of the job that runs the script, with which it runs on a CPU.
        not_run: why a layout does not fit the model, by name: a part of the line that refuses it.
    """

    model: str
    flags: str
    has_experts: bool = False
    hooks: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)


UNIFORM = Layout(sizes="1,1", dp=2, expert_flags=("--expert-model-parallel-size", "2"))
LAYOUTS = {
    "1,2": Layout(sizes="1,2", expert_flags=("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1")),
    "2,3": Layout(sizes="2,3", expert_flags=("--vtp-ep-list", "2,3", "--vtp-etp-list", "1,1")),
    "1,2,2 U": Layout(
        sizes="1,2,2",
        flags=("--layerwise-disaggregated-training", "--num-layer-list", "1,1,1,1"),
        expert_flags=("--vtp-ep-list", "1,2,1", "--vtp-etp-list", "1,1,2"),
    ),
    "1,2 dp 2": Layout(sizes="1,2", dp=2, expert_flags=("--vtp-ep-list", "2,2", "--vtp-etp-list", "1,1")),
}

PRESETS = {
    "llama-3": Preset(
        model="Llama 3.1 8B",
        flags="""--hidden-size 64 --num-attention-heads 24 --kv-channels 4 --group-query-attention --num-query-groups 6
            --ffn-hidden-size 228 --untie-embeddings-and-output-weights
            --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8""",
    ),
    "qwen-2.5": Preset(
        model="Qwen 2.5 1.5B",
        flags="""--hidden-size 64 --num-attention-heads 12 --kv-channels 4 --group-query-attention --num-query-groups 2
            --ffn-hidden-size 372 --add-qkv-bias --norm-epsilon 1e-6 --rotary-base 1000000""",
        not_run={"2,3": "--num-query-groups 2"},
    ),
    "qwen-3": Preset(
        model="Qwen 3 0.6B",
        flags="""--hidden-size 64 --num-attention-heads 12 --kv-channels 8 --group-query-attention --num-query-groups 6
            --ffn-hidden-size 204 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 1000000""",
    ),
    "qwen-3-moe": Preset(
        model="Qwen 3 30B-A3B",
        flags=f"""--hidden-size 64 --num-attention-heads 24 --kv-channels 8 --group-query-attention --num-query-groups 6
            --ffn-hidden-size 204 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 1000000
            --untie-embeddings-and-output-weights {EXPERTS}
            --num-experts 12 --moe-router-topk 4 --moe-ffn-hidden-size 26
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3""",
        has_experts=True,
    ),
    "mixtral": Preset(
        model="Mixtral 8x7B",
        flags=f"""--hidden-size 64 --num-attention-heads 24 --kv-channels 4 --group-query-attention --num-query-groups 6
            --ffn-hidden-size 228 --untie-embeddings-and-output-weights --rotary-base 1000000 {EXPERTS}
            --num-experts 6 --moe-router-topk 2
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02""",
        has_experts=True,
    ),
    "deepseek-v2": Preset(
        model="DeepSeek V2",
        flags=f"""--hidden-size 64 {LATENT} --mscale 0.707 --mscale-all-dim 0.707
            --ffn-hidden-size 204 --norm-epsilon 1e-6 --untie-embeddings-and-output-weights {EXPERTS}
            --moe-layer-freq ([0]*1+[1]*3) --num-experts 12 --moe-router-topk 4 --moe-ffn-hidden-size 30
            --moe-shared-expert-intermediate-size 60 --moe-router-pre-softmax --moe-router-num-groups 6
            --moe-router-group-topk 2 --moe-router-topk-scaling-factor 16
            --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3e-3""",
        has_experts=True,
        hooks=("gathered_attention",),
    ),
    "deepseek-v3": Preset(
        model="DeepSeek V3",
        flags=f"""--hidden-size 192 {LATENT} --mscale 1.0 --mscale-all-dim 1.0
            --ffn-hidden-size 204 --norm-epsilon 1e-6 --untie-embeddings-and-output-weights {EXPERTS}
            --moe-layer-freq ([0]*2+[1]*2) --num-experts 12 --moe-router-topk 4 --moe-ffn-hidden-size 30
            --moe-shared-expert-intermediate-size 30 --moe-router-score-function sigmoid
            --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 4
            --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5
            --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
            --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3""",
        has_experts=True,
        hooks=("gathered_attention",),
    ),
}


def command(preset: Preset, layout: Layout) -> list[str]:
    """Give the flags of a preset on a layout, behind those of every script of the tests.

    >>> command(PRESETS["mixtral"], LAYOUTS["1,2"])[-5:]
    ['--sequence-parallel', '--vtp-ep-list', '1,2', '--vtp-etp-list', '1,1']
    """
    missing = () if reshardable_flags() else ("--dist-ckpt-optim-fully-reshardable",)
    words = [word for word in TRAINING.split() if word not in missing]
    words += [*preset.flags.split(), *layout.flags]
    if preset.has_experts and set(layout.sizes) - set("1,"):
        words.append("--sequence-parallel")
    return [*words, *(layout.expert_flags if preset.has_experts else ())]


def start(scripts: Scripts, preset: Preset, folder: Path) -> list[ScriptRun]:
    """Train on the uniform layout, and leave the checkpoint of the middle of the run in a folder."""
    saving = ["--save", str(folder), "--save-interval", str(NUM_SAVED)]
    words = [*command(preset, UNIFORM), *saving]
    runs = scripts.train(UNIFORM.sizes, words, dp=UNIFORM.dp, hooks=list(preset.hooks))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(NUM_SAVED))
    return runs


def go_on(scripts: Scripts, preset: Preset, layout: Layout, folder: Path) -> list[ScriptRun]:
    """Go on from the checkpoint on a layout."""
    words = [*command(preset, layout), *resharding_flags(), "--load", str(folder)]
    return scripts.train(layout.sizes, words, dp=layout.dp, hooks=list(preset.hooks))


def check_refused(scripts: Scripts, preset: Preset, layout: Layout, word: str) -> None:
    """Check that a layout is refused on all ranks, in a line with a word."""
    words = arguments(layout.sizes, dp=layout.dp, extra=command(preset, layout))
    assert_refused(scripts.launch(num_ranks(layout.sizes, layout.dp), {"arguments": words}), word)


def largest_difference(runs: Sequence[ScriptRun], reference: Sequence[ScriptRun]) -> float:
    """Give the largest relative difference of the losses and gradient norms of the steps behind the checkpoint.

    Raises:
        AssertionError: a step is missing.
    """
    differences: list[float] = []
    for values in (losses, grad_norms):
        got, wanted = values(runs), values(reference)[-NUM_STEPS:]
        assert len(got) == len(wanted) == NUM_STEPS, (got, wanted)
        differences += [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
    return max(differences)
