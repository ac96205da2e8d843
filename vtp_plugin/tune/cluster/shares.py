"""How the ranks of a stage share the tokens and the weights of a layer, and what they send each other for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.memory.parameters import Parameter, chunk_parameters
from vtp_plugin.plan.model.gpt_model import GPTModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch, and how its tensors are stored and computed.

    Attributes:
        size: number of samples.
        length: number of tokens of a sample.
        itemsize_bytes: bytes of one element of an activation.
        gradient_itemsize_bytes: bytes of one element of the gradients that replicas sum.
        topk: number of experts of a token.
        is_recomputed: whether whole layers are recomputed in the backward pass.
        shares_update: whether replicas share the optimizer's work.
        cp: context-parallel size: each rank has a share of the sequence.
        ep: expert-parallel size.
        etp: tensor-parallel size of the experts; None for that of the stage.
        is_gathered: whether ranks that share experts gather all tokens; else each sends the others their tokens.
    """

    size: int
    length: int
    itemsize_bytes: int
    gradient_itemsize_bytes: int
    topk: int
    is_recomputed: bool
    shares_update: bool
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    is_gathered: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of a microbatch's tokens on a context-parallel rank."""
        return self.size * self.length // self.cp


def part_parameters(
    model: GPTModel, *layers: int, is_first: bool = False, is_last: bool = False
) -> tuple[Parameter, ...]:
    """List the parameters of some layers, and of an end of the model, on one rank."""
    chunk = Chunk(layers=layers, is_first=is_first, is_last=is_last, is_whole=False)
    return chunk_parameters(model, chunk, StageGrid(1), ExpertGrid(1, 1, 1))


def count(parameters: Sequence[Parameter]) -> int:
    """Count the weights."""
    return sum(parameter.numel for parameter in parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How ranks of a stage share tokens, weights and messages.

    Attributes:
        tp: tensor-parallel size.
        etp: tensor-parallel size of the experts.
        peers: number of ranks that together have all experts once.
        num_copies: number of copies of every expert.
        activation_bytes: bytes of the activations of all tokens of a context-parallel rank.
        row_bytes: bytes of the tokens that ranks with the same experts gather, counted once for each of a token's
            experts.
        key_bytes: bytes of the keys and values that a rank hands on to its context-parallel neighbour.
        peer_bytes: bytes of a message between ranks that share experts.
        num_messages: number of such messages, one after another, in the forward pass of a layer.
        is_apart: whether the gradients of experts are summed separately from the others.
    """

    tp: int
    etp: int
    peers: int
    num_copies: float
    activation_bytes: int
    row_bytes: int
    key_bytes: int
    peer_bytes: int
    num_messages: int
    is_apart: bool

    @classmethod
    def of(cls, model: GPTModel, batch: Batch, tp: int, num_replicas: int) -> Shares:
        """Derive the shares from the sizes."""
        etp = batch.etp or tp
        peers, activation_bytes = etp * batch.ep, batch.num_tokens * model.hidden * batch.itemsize_bytes
        # Tokens are cut by tensor-parallel ranks before they go to experts; all ranks but the own one get some.
        own = activation_bytes // tp
        if batch.is_gathered:
            row_bytes, peer_bytes, num_messages = 0, own, 2 * (peers - 1)
        else:
            row_bytes, peer_bytes = batch.topk * own * etp, batch.topk * own // batch.ep
            num_messages = 2 * (batch.ep - 1)
        groups = max(1, model.groups // tp)
        channels = 2 * model.kv_channels
        if (latent := model.latent) is not None:
            groups = model.heads // tp
            channels = latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim
        return cls(
            tp=tp,
            etp=etp,
            peers=peers,
            num_copies=tp * batch.cp * num_replicas / peers,
            activation_bytes=activation_bytes,
            row_bytes=row_bytes,
            key_bytes=batch.num_tokens * groups * channels * batch.itemsize_bytes,
            peer_bytes=peer_bytes,
            num_messages=num_messages if model.experts is not None else 0,
            is_apart=peers != tp,
        )

    def layer(self, model: GPTModel, layer: int) -> tuple[float, float]:
        """Count the weights of a layer on a rank: those whose gradients all replicas sum, and the others."""
        parameters = part_parameters(model, layer)
        routed = count([parameter for parameter in parameters if parameter.is_expert])
        dense, own = (count(parameters) - routed) / self.tp, routed / self.peers
        return (dense, own) if self.is_apart else (dense + own, 0.0)
