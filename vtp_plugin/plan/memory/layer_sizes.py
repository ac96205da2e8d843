"""A microbatch, and what one layer or one end of a chunk is on one rank: the sizes that rows are functions of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from vtp_plugin.plan.model.gpt_model import GPTModel

FULL_BYTES, INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens find their experts, in Megatron's names.

    Attributes:
        topk: number of experts of a token.
        has_sigmoid: scores are sigmoids, not a softmax.
        is_pre_softmax: a softmax is taken over all experts, before the best are chosen.
        num_groups: number of groups of experts, of which a token uses a few; 0 without groups.
        group_topk: number of groups that a token uses.
        has_aux_loss: experts are balanced by a loss.
        is_gathered: ranks gather all tokens, and each takes out those of its experts.
        is_grouped: the products of experts are computed together.
    """

    topk: int
    has_sigmoid: bool = False
    is_pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 1
    has_aux_loss: bool = False
    is_gathered: bool = False
    is_grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation: what is recomputed in the backward pass, and not kept for it.

    Attributes:
        core_attention: the probabilities of the attention.
        feed_forward: what a feed-forward layer without experts makes of its input.
        method: method for whole layers: ``uniform`` keeps the input of every group of layers, those of multi-token
            prediction included, ``block`` the inputs of the first layers of a chunk; empty for none.
        num_layers: number of layers of a group (``uniform``), or of the first ones (``block``).
    """

    core_attention: bool = False
    feed_forward: bool = False
    method: Literal["", "uniform", "block"] = ""
    num_layers: int = 0

    def parted(self, layers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Say how many inputs of layers a chunk keeps, and which of its layers keep all.

        >>> Recompute(method="uniform", num_layers=2).parted([3, 4, 5])
        (2, [])
        >>> Recompute(method="block", num_layers=2).parted([3, 4, 5])
        (2, [5])
        """
        if not self.method:
            return 0, layers
        if self.method == "uniform":
            return -(-len(layers) // self.num_layers), layers[:0]
        return min(self.num_layers, len(layers)), layers[self.num_layers :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A microbatch, and how the layers compute it.

    Attributes:
        length: length of the sequences, in tokens.
        size: number of sequences.
        itemsize_bytes: bytes of one element of the tensors between the layers.
        is_sharded: whether a rank has its slice of the sequence between the layers (sequence parallelism).
        has_rope: positions are rotations, in every layer by itself.
        is_fused: a gated feed-forward layer keeps its input and its output only.
        is_engine: layers are Transformer Engine's, with flash attention; else Megatron's local ones.
        has_fused_rope: Transformer Engine's layers rotate in one kernel, which keeps the angles only.
        has_hidden_dropout, has_attention_dropout: whether there is dropout between layers; and of attention
            probabilities.
        eight_bits: Transformer Engine's linear layers compute with 8 bits: with one scale for a tensor, or for a block.
        has_own_output: context parallelism gives the attention's output in a copy (a2a and all_gather; not p2p).
        routing: how tokens find their experts; None without experts.
        recompute: what is recomputed.
    """

    length: int
    size: int
    itemsize_bytes: int
    is_sharded: bool
    has_rope: bool
    is_fused: bool
    is_engine: bool = False
    has_fused_rope: bool = False
    has_hidden_dropout: bool = False
    has_attention_dropout: bool = False
    eight_bits: Literal["", "tensor", "block"] = ""
    has_own_output: bool = False
    routing: Routing | None = None
    recompute: Recompute = Recompute()

    @property
    def is_estimated(self) -> bool:
        """Whether no run on CPUs has shown the bytes: they are what the sources of Transformer Engine and torch say."""
        return self.is_engine or self.has_hidden_dropout or self.has_attention_dropout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A layer, or an end of a chunk, on one rank.

    Attributes:
        model, batch, tp, etp: whose sizes these are; tensor-parallel sizes of the stage, and of its experts.
        cp: context-parallel size of the stage.
        has_experts: the layer has some.
        num_again: inputs that recomputed layers keep in this chunk.
        num_layers: number of layers of the chunk, with those of multi-token prediction.
        length, positions, slices: tokens on the rank: of one sequence; of all sequences; and between the layers.
        heads, groups: attention heads and query groups of the rank; each rank has at least one group, cut out of the
            projection of all ranks.
        queries, keys, context: elements of a position: of queries; of keys, and as many values; of attention's output.
    """

    model: GPTModel
    batch: Microbatch
    tp: int
    etp: int = 1
    cp: int = 1
    has_experts: bool = False
    num_again: int = 0
    num_layers: int = 0
    length: int = field(init=False)
    positions: int = field(init=False)
    slices: int = field(init=False)
    heads: int = field(init=False)
    groups: int = field(init=False)
    queries: int = field(init=False)
    keys: int = field(init=False)
    context: int = field(init=False)

    def __post_init__(self) -> None:
        model, length, heads = self.model, self.batch.length // self.cp, self.model.heads // self.tp
        positions, groups = length * self.batch.size, max(1, model.groups // self.tp)
        slices = positions // (self.tp if self.batch.is_sharded else 1)
        width = model.kv_channels if model.latent is None else model.latent.v_head_dim
        derived = {"length": length, "positions": positions, "slices": slices, "heads": heads, "groups": groups}
        derived |= {"queries": heads * model.kv_channels, "keys": groups * model.kv_channels, "context": heads * width}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def numbers(self, numel: int) -> int:
        """Give the bytes of so many numbers."""
        return numel * self.batch.itemsize_bytes

    def inputs(self, numel: int) -> int:
        """Give the bytes of so many numbers that a linear layer keeps of its input."""
        if not self.batch.eight_bits:
            return self.numbers(numel)
        # mxfp8 has a byte of scale for 32 numbers, blockwise 4 for 128.
        return numel + (numel // 32 if self.batch.eight_bits == "block" else 0)
