"""How long the parts of a model take on a card: measured, fitted to what was measured, or from a data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.cluster.machines import Card, Links, Time
from vtp_plugin.errors import ConfigError
from vtp_plugin.footprint.model import Chunk, Model
from vtp_plugin.footprint.parameters import Parameter, chunk_parameters
from vtp_plugin.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.search.question import Source, Speed, least_sure
from vtp_plugin.search.stage import sum_s

# Adam reads and writes two moments and a master weight of 4 bytes each, reads the gradient and writes the weight.
_UPDATE_BYTES = 28
_LAYERS = ("dense", "experts")
# Megatron's loss over a vocabulary that is cut sums its largest logit, that of the label, and the exponentials.
_NUM_LOSS_SUMS, _LOSS_BYTES = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch, and how its numbers are kept.

    Attributes:
        size: samples.
        length: tokens of a sample.
        itemsize_bytes: of an activation.
        gradient_itemsize_bytes: of what replicas sum.
        topk: experts of a token.
        is_recomputed: whole layers run forward again before they run backward.
        shares_update: replicas share the optimizer's work.
    """

    size: int
    length: int
    itemsize_bytes: int
    gradient_itemsize_bytes: int
    topk: int
    is_recomputed: bool
    shares_update: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.size * self.length


def layer_flops(model: Model, batch: Batch, layer: int) -> float:
    """Count the operations of a layer's forward pass: two for each weight and token, and causal attention.

    >>> model = Model(num_layers=1, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=16, vocab=16,
    ...     num_positions=0, is_gated=False, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Batch(size=1, length=4, itemsize_bytes=2, gradient_itemsize_bytes=4, topk=1, is_recomputed=False,
    ...     shares_update=False)
    >>> layer_flops(model, batch, 0) == 2 * 4 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 8) + 2 * 4 * 4 * 8
    True
    """
    weights = 0.0
    for parameter in _parameters(model, layer):
        share = batch.topk / model.experts.number if parameter.is_expert and model.experts is not None else 1
        weights += parameter.numel * share
    channels = float(model.kv_channels)
    if (latent := model.latent) is not None:
        channels = (latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim) / 2
    # Scores and their sum take 2 S S channels of each head; causal, so half of it.
    return 2 * batch.num_tokens * weights + 2 * batch.num_tokens * batch.length * model.heads * channels


def _parameters(model: Model, *layers: int, is_first: bool = False, is_last: bool = False) -> tuple[Parameter, ...]:
    """List the parameters of some layers, and of an end of the model, on one rank."""
    chunk = Chunk(layers=layers, is_first=is_first, is_last=is_last, is_whole=False)
    return chunk_parameters(model, chunk, StageGrid(1), ExpertGrid(1, 1, 1))


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters)


def speed_of(card: Card, links: Links, model: Model, batch: Batch, tp: int, num_replicas: int) -> Speed:
    """Give what the parts of a model take on a stage, with the messages between its ranks.

    Args:
        card: of the stage.
        links: between its ranks, among others.
        model: the whole model.
        batch: a microbatch.
        tp: tensor-parallel size.
        num_replicas: of the stage.

    Raises:
        ConfigError: the card says nothing from which they follow.
    """
    sure: set[Source] = set()
    # Of activations [S, B, H], or of their slices, which takes as long; and of a number for each token.
    exchange = _sum_s(card, links, batch.num_tokens * model.hidden * batch.itemsize_bytes, tp)
    of_tokens = _sum_s(card, links, batch.num_tokens * _LOSS_BYTES, tp)
    if tp > 1 and links.sum_of(card.name, tp) is None:
        sure.add("fitted")

    def part(name: str, flops: float) -> tuple[float, float]:
        forward, backward, source = _part_s(card, name, flops, batch, tp)
        sure.add(source)
        return forward, backward

    def update(numel: float) -> float:
        seconds, source = _update_s(card, numel / num_replicas if batch.shares_update else numel)
        sure.add(source)
        return seconds

    layers, updates, sums = [], [], []
    known: dict[bool, tuple[tuple[float, float], float, int]] = {}
    for layer in range(model.num_layers):
        has_experts = model.experts is not None and model.experts.layers[layer]
        if has_experts not in known:
            numel = _numel(_parameters(model, layer)) / tp
            times = part("experts" if has_experts else "dense", layer_flops(model, batch, layer))
            known[has_experts] = times, update(numel), round(numel * batch.gradient_itemsize_bytes)
        (forward, backward), update_s, size = known[has_experts]
        layers.append((forward + 2 * exchange, backward + (4 if batch.is_recomputed else 2) * exchange))
        updates.append(update_s)
        sums.append(size)
    # Both ends of the model belong to the first and the last layer's stage.
    for layer, parameters in ((0, _parameters(model, is_first=True)), (-1, _parameters(model, is_last=True))):
        numel = _numel(parameters) / tp
        updates[layer] += update(numel)
        sums[layer] += round(numel * batch.gradient_itemsize_bytes)
    embedding = part("embedding", 0.0) if any(time.part == "embedding" for time in card.times) else (0.0, 0.0)
    head = part("head", 2.0 * batch.num_tokens * model.hidden * model.vocab)
    return Speed(
        forward_s=tuple(forward for forward, _ in layers),
        backward_s=tuple(backward for _, backward in layers),
        first_s=(embedding[0] + exchange, embedding[1]),
        last_s=(head[0] + _NUM_LOSS_SUMS * of_tokens, head[1] + exchange),
        update_s=tuple(updates),
        gradient_bytes=tuple(sums),
        source=least_sure(sure),
    )


def _sum_s(card: Card, links: Links, num_bytes: float, tp: int) -> float:
    """Give the time in which the ranks of a stage sum a tensor: as it was measured, or else in a ring."""
    if tp == 1:
        return 0.0
    measured = links.sum_of(card.name, tp)
    return sum_s(num_bytes, tp, links.inside_of(card.name)) if measured is None else measured.time_s(num_bytes)


def _part_s(card: Card, name: str, flops: float, batch: Batch, tp: int) -> tuple[float, float, Source]:
    """Give forward and backward of a part, without messages."""
    rows = [time for time in card.times if time.part == name]
    if rows:
        is_recomputed = batch.is_recomputed and name in _LAYERS
        if same := [time for time in rows if time.is_recomputed == is_recomputed]:
            return _fitted(same, batch, tp)
        # Such a layer's backward begins with its forward.
        forward, backward, _ = _fitted(rows, batch, tp)
        return forward, backward + (forward if is_recomputed else -forward), "fitted"
    if card.flops_per_s is None:
        parts = ", ".join(sorted({time.part for time in card.times})) or "none"
        raise ConfigError(
            f"cards.{card.name} has no times of {name} (it has {parts}) and no teraflops; profile this model on it"
        )
    forward = flops / tp / card.flops_per_s
    return forward, (3 if batch.is_recomputed and name in _LAYERS else 2) * forward, "data sheet"


def _fitted(rows: Sequence[Time], batch: Batch, tp: int) -> tuple[float, float, Source]:
    """Give the times of a part from rows that were measured, those nearest to what is asked."""
    for time in rows:
        if (time.tp, time.micro_batch_size, time.seq_length) == (tp, batch.size, batch.length):
            return time.forward_s, time.backward_s, "measured"

    def of(time: Time) -> float:
        """The work of a row: tokens, shared by the ranks; longer sequences cost more for each token."""
        return time.micro_batch_size * time.seq_length / time.tp

    same = [time for time in rows if time.seq_length == batch.length] or rows
    same = [time for time in same if time.tp == tp] or same
    wanted = batch.num_tokens / tp
    near = sorted(same, key=lambda time: abs(of(time) - wanted))[:2]
    if len(near) == 2 and of(near[0]) != of(near[1]):
        one, other = near
        share = (wanted - of(one)) / (of(other) - of(one))
        forward = one.forward_s + share * (other.forward_s - one.forward_s)
        backward = one.backward_s + share * (other.backward_s - one.backward_s)
        if forward > 0 and backward > 0:
            return forward, backward, "fitted"
    scale = wanted / of(near[0])
    return near[0].forward_s * scale, near[0].backward_s * scale, "fitted"


def _update_s(card: Card, numel: float) -> tuple[float, Source]:
    for time in card.times:
        if time.part == "update":
            return time.forward_s * numel / 1e6, "measured"
    if card.memory_bytes_per_s is None:
        return 0.0, "data sheet"
    return numel * _UPDATE_BYTES / card.memory_bytes_per_s, "data sheet"
