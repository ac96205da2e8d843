"""Megatron's flags that the plugin reads outside a run: one row for each.

Commands that take the flags of a run (``plan``, ``search`` and others) declare those of :data:`RUN_FLAGS` and
:data:`MODEL_FLAGS`, in this order. A model from Hugging Face says by rows of all three tables with which flags Megatron
builds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vtp_plugin.util.text import argument_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlag:
    """A flag of Megatron's command line.

    Attributes:
        name: name on the command line, with its dashes.
        help: text in the ``--help`` of the plugin's commands; empty where they do not take it.
        type: what one value is read by; bool for a switch, which takes none.
        metavar: placeholder of the value in ``--help``; None for a switch, and where the choices are shown.
        nargs: number of values, see :meth:`argparse.ArgumentParser.add_argument`; so are `default` and `choices`.
        stored_as: name of the argument that Megatron's parser makes of it; empty where it is that of the flag.
        renamed: name of that argument since Megatron 0.16; empty where it is the same.
        is_taken: whether ``load_args_from_checkpoint`` of Megatron 0.12 to 0.19 takes it from a checkpoint.
    """

    name: str
    help: str = ""
    type: Callable[[str], Any] = str
    metavar: str | None = None
    nargs: str | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    stored_as: str = ""
    renamed: str = ""
    is_taken: bool = True

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.type is bool

    @property
    def argument(self) -> str:
        """Name of the argument that Megatron's parser makes of it.

        >>> flag_named("--num-layers").argument, flag_named("--disable-bias-linear").argument
        ('num_layers', 'add_bias_linear')
        """
        return self.stored_as or argument_of(self.name)

    def declare(self, group: argparse._ArgumentGroup) -> None:
        """Declare it for a command, which has it under its own name."""
        if self.is_switch:
            group.add_argument(self.name, action="store_true", help=self.help)
        else:
            group.add_argument(
                self.name,
                type=self.type,
                metavar=self.metavar,
                nargs=self.nargs,
                default=self.default,
                choices=self.choices,
                help=self.help,
            )


def _number(name: str, text: str, default: Any = None) -> MegatronFlag:
    return MegatronFlag(name=name, help=text, type=int, metavar="N", default=default)


def _switch(name: str, text: str = "", stored_as: str = "", *, is_taken: bool = True) -> MegatronFlag:
    return MegatronFlag(name=name, help=text, type=bool, stored_as=stored_as, is_taken=is_taken)


def _text(name: str, text: str, default: str | None = None, metavar: str = "TEXT", stored_as: str = "") -> MegatronFlag:
    return MegatronFlag(name=name, help=text, metavar=metavar, default=default, stored_as=stored_as)


def _values(name: str, text: str, *default: str) -> MegatronFlag:
    return MegatronFlag(name=name, help=text, metavar="VALUE", nargs="+", default=default or None)


def _dropout(name: str) -> MegatronFlag:
    return MegatronFlag(name=name, help="default 0.1; 0 keeps no mask", type=float, metavar="SHARE", default=0.1)


RUN_FLAGS: tuple[MegatronFlag, ...] = (
    _number("--tensor-model-parallel-size", "may be left out, or the largest size of the list"),
    _number("--pipeline-model-parallel-size", "may be left out, or the number of stages"),
    _number("--context-parallel-size", "of all stages; default 1"),
    _number("--expert-model-parallel-size", "of all stages; default 1"),
    _number("--expert-tensor-parallel-size", "of all stages; default: each stage's own tensor-parallel size"),
    _number("--num-virtual-stages-per-pipeline-rank", "model chunks of every stage (interleaved schedule)"),
    _number("--num-layers-per-virtual-pipeline-stage", "the same, counted in layers; needs --num-layers"),
    _number("--num-layers", "of the model"),
    _number("--seq-length", "S of the tensors [S, B, H] that cross"),
    _number("--micro-batch-size", "B of the tensors"),
    _number("--hidden-size", "H of the tensors"),
    _number("--global-batch-size", "samples of a step; gives the number of microbatches, with --micro-batch-size"),
    _switch("--use-tp-pp-dp-mapping", "rank order: a replica with all its stages is one block of ranks"),
    _switch("--sequence-parallel", "every rank of a stage holds its slice of the sequence between layers"),
    _switch("--bf16", "2 bytes for each number; without --bf16 and --fp16 4"),
    _switch("--fp16", "as --bf16"),
    _switch("--sft", "several samples share a row: microbatches of one row"),
    _switch("--dataloader-inter-document-masking", "as --sft"),
    _text("--pipeline-model-parallel-layout", "another way to say --num-layer-list", metavar="LAYOUT"),
)
"""What is where, and what crosses."""

MODEL_FLAGS: tuple[MegatronFlag, ...] = (
    _number("--num-attention-heads", "needed to see memory, as are --num-layers, --hidden-size and --vocab-size"),
    _number("--num-query-groups", "with --group-query-attention"),
    _number("--kv-channels", "default: the hidden size over the heads"),
    _number("--ffn-hidden-size", "default: as in Megatron"),
    _number("--vocab-size", "of the tokenizer; it is padded"),
    _number("--make-vocab-size-divisible-by", "default 128"),
    _number("--padded-vocab-size", "instead of --vocab-size"),
    _number("--max-position-embeddings", "of a learned position embedding"),
    # A run refuses expert sizes without experts. For a command the model may not be given at all.
    _number("--num-experts", "of a layer", argparse.SUPPRESS),
    _number("--moe-ffn-hidden-size", "of an expert"),
    _number("--moe-shared-expert-intermediate-size", "of all shared experts of a layer together"),
    _number("--q-lora-rank", "with --multi-latent-attention, as the next four"),
    _number("--kv-lora-rank", "default 32", 32),
    _number("--qk-head-dim", "default 128", 128),
    _number("--qk-pos-emb-head-dim", "default 64", 64),
    _number("--v-head-dim", "default 128", 128),
    _number("--mtp-num-layers", "layers of multi-token prediction"),
    _number("--decoder-first-pipeline-num-layers", "layers of the first stage"),
    _number("--decoder-last-pipeline-num-layers", "layers of the last stage"),
    _number("--ddp-bucket-size", "elements of a gradient bucket, with --overlap-grad-reduce"),
    _switch("--group-query-attention", "heads share keys and values"),
    _switch("--swiglu", "gated feed-forward layers"),
    _switch("--disable-bias-linear", "linear layers without biases", "add_bias_linear"),
    _switch("--add-qkv-bias", "but queries, keys and values with one"),
    _switch("--qk-layernorm", "norms of queries and keys", is_taken=False),
    _switch("--untie-embeddings-and-output-weights", "the output layer has weights of its own"),
    _switch("--multi-latent-attention", "DeepSeek's attention"),
    _switch("--use-distributed-optimizer", "replicas share the state of the optimizer"),
    _switch("--overlap-grad-reduce", "gradients are summed in buckets"),
    _switch("--grad-reduce-in-bf16", "gradients of 2 bytes, with --bf16"),
    _switch("--no-bias-swiglu-fusion", "a gated layer keeps more activations", "bias_swiglu_fusion"),
    _switch("--accumulate-allreduce-grads-in-fp32", "gradients of 4 bytes, with --fp16"),
    _text("--normalization", "LayerNorm, the default, or RMSNorm", "LayerNorm"),
    _text("--position-embedding-type", "learned_absolute, the default, has weights", "learned_absolute"),
    _text("--moe-layer-freq", "which layers have experts: every N-th, or a pattern such as ([0]*1+[1]*3)", "1"),
    _text("--optimizer", "adam, the default, or sgd", "adam"),
    # Checks of options ask whether it was given.
    _text("--transformer-impl", "transformer_engine, the default, or local", "transformer_engine"),
    _text("--vocab-file", "of the tokenizer; not read, give --vocab-size"),
    # From here on: what a rank keeps of activations.
    _number("--moe-router-topk", "experts of a token, default 2", 2),
    _number("--moe-router-num-groups", "of experts, of which a token uses --moe-router-group-topk"),
    _number("--moe-router-group-topk", "groups of a token"),
    _number("--recompute-num-layers", "of a group, or how many are recomputed"),
    _switch("--moe-grouped-gemm", "the experts' products are computed together, and keep as much"),
    _switch(
        "--no-rope-fusion",
        "with Transformer Engine's layers: each layer keeps cosines and sines",
        "apply_rope_fusion",
    ),
    _switch("--moe-router-pre-softmax", "a softmax over all experts, before the best are chosen"),
    _switch("--recompute-activations", "as --recompute-granularity selective"),
    _text(
        "--attention-backend",
        "auto, flash or fused, for activations; others of Transformer Engine keep probabilities",
    ),
    _text(
        "--fp8-format",
        "e4m3 or hybrid: inputs of linear layers are kept in 8 bits, as are copies of weights",
        stored_as="fp8",
    ),
    _text("--fp8-recipe", "delayed, the default, tensorwise, mxfp8 or blockwise"),
    _text("--fp4-format", "activations with 4 bits are not known", stored_as="fp4"),
    _text("--fp4-recipe", "activations with 4 bits are not known"),
    _text("--moe-token-dispatcher-type", "alltoall or allgather, for activations; those of flex are not known"),
    _text("--moe-router-score-function", "softmax, the default, or sigmoid"),
    _text("--moe-router-dtype", "fp32, or as the model; for activations not fp64"),
    _text("--recompute-granularity", "full, or selective: --recompute-modules"),
    _text("--recompute-method", "uniform or block, of whole layers"),
    _values("--cp-comm-type", "p2p, the default, a2a or all_gather, which keep the attention's output twice", "p2p"),
    _values(
        "--moe-router-load-balancing-type",
        "aux_loss, the default, seq_aux_loss, global_aux_loss or none",
        "aux_loss",
    ),
    _values("--moe-aux-loss-coeff", "0, the default, keeps nothing for such a loss"),
    _values(
        "--recompute-modules", "core_attn, the default, and mlp; activations with others are not known", "core_attn"
    ),
    _dropout("--attention-dropout"),
    _dropout("--hidden-dropout"),
    MegatronFlag(
        name="--distributed-backend",
        help="whose buffers are counted; nccl by default; hccl for what runs as nccl on an NPU",
        choices=("nccl", "hccl", "gloo"),
        default="nccl",
    ),
)
"""What a rank holds."""

HF_FLAGS: tuple[MegatronFlag, ...] = (
    MegatronFlag(name="--norm-epsilon", type=float, renamed="layernorm_epsilon", is_taken=False),
    MegatronFlag(name="--rotary-base", type=int),
    _switch("--use-rope-scaling", is_taken=False),
    MegatronFlag(name="--rope-scaling-factor", type=float, is_taken=False),
    MegatronFlag(name="--apply-layernorm-1p", type=bool, renamed="layernorm_zero_centered_gamma"),
)
"""What only a model from Hugging Face is written with, or must not be given beside one and has two names."""

MEGATRON_FLAGS = (*RUN_FLAGS, *MODEL_FLAGS, *HF_FLAGS)
"""All rows."""


def flag_named(name: str) -> MegatronFlag:
    """Return the row of a flag.

    Raises:
        KeyError: there is none.
    """
    return {flag.name: flag for flag in MEGATRON_FLAGS}[name]
