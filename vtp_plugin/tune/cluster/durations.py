"""How long the parts of a model take on a card: measured, fitted to what was measured, or from a data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.tune.cluster.machines import Card, Links, Time
from vtp_plugin.tune.cluster.shares import Batch, Shares, count, part_parameters
from vtp_plugin.tune.cluster.speed import Source, Speed, all_reduce_s, least_sure

# Adam reads and writes two moments and a master weight of 4 bytes each, reads the gradient and writes the weight.
_UPDATE_BYTES = 28
_LAYERS = ("dense", "experts")
# Megatron's loss over a vocabulary that is cut sums its largest logit, that of the label, and the exponentials.
_NUM_LOSS_SUMS, _LOSS_BYTES = 3, 4


def layer_flops(model: GPTModel, batch: Batch, layer: int) -> float:
    """Count the operations of a layer's forward pass on a context-parallel rank, all ranks that share it together.

    Two for each weight and token, and causal attention, whose scores context parallelism shares out evenly.

    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=16, vocab=16,
    ...     num_positions=0, is_gated=False, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Batch(size=1, length=4, itemsize_bytes=2, gradient_itemsize_bytes=4, topk=1, is_recomputed=False,
    ...     shares_update=False)
    >>> layer_flops(model, batch, 0) == 2 * 4 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 8) + 2 * 4 * 4 * 8
    True
    """
    weights = 0.0
    for parameter in part_parameters(model, layer):
        share = batch.topk / model.experts.number if parameter.is_expert and model.experts is not None else 1
        weights += parameter.numel * share
    channels = float(model.kv_channels)
    if (latent := model.latent) is not None:
        channels = (latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim) / 2
    # Scores and their sum take 2 S S channels of each head; causal, so half of it.
    return 2 * batch.num_tokens * weights + 2 * batch.num_tokens * batch.length * model.heads * channels


def speed_of(card: Card, links: Links, model: GPTModel, batch: Batch, tp: int, num_replicas: int) -> Speed:
    """Give the durations of a model's layers on a stage, with the messages between its ranks.

    Args:
        card: the kind of card that the stage has.
        links: all links, among them those between the stage's ranks.
        model: the whole model.
        batch: a microbatch.
        tp: tensor-parallel size.
        num_replicas: number of replicas of the stage.

    Raises:
        ConfigError: nothing is known of the card from which they follow.
    """
    costs = _Costs(card, links, model, batch, tp, num_replicas)
    shared, exchange = costs.shared, costs.exchange_s
    kinds = [model.experts is not None and model.experts.layers[layer] for layer in range(model.num_layers)]
    known = {kind: costs.layer(kinds.index(kind), has_experts=kind) for kind in sorted(set(kinds))}
    layers = [known[kind] for kind in kinds]
    updates, sums = [layer.update_s for layer in layers], [layer.gradient_bytes for layer in layers]
    # Both ends of the model belong to the first and the last layer's stage.
    for layer, parameters in ((0, part_parameters(model, is_first=True)), (-1, part_parameters(model, is_last=True))):
        numel = count(parameters) / tp
        updates[layer] += costs.update_s(numel, 0.0)
        sums[layer] += round(numel * batch.gradient_itemsize_bytes)
    has_embedding = any(time.part == "embedding" for time in card.times)
    embedding = costs.part("embedding", 0.0) if has_embedding else _NO_TIME
    head = costs.part("head", 2.0 * batch.num_tokens * model.hidden * model.vocab)
    # A sum scatters, and then gathers.
    gather, broadcast = exchange / 2, links.inside_of(card.name).time_s(shared.activation_bytes) if tp > 1 else 0.0
    of_tokens = _sum_s(card, links, batch.num_tokens * _LOSS_BYTES, tp)
    routed = tuple(layer.expert_bytes for layer in layers)
    return Speed(
        forward_s=tuple(layer.forward_s for layer in layers),
        backward_s=tuple(layer.backward_s for layer in layers),
        weights_s=tuple(layer.weights_s for layer in layers),
        first_s=(embedding.forward_s + exchange, embedding.backward_s),
        last_s=(head.forward_s + _NUM_LOSS_SUMS * of_tokens, head.backward_s + exchange),
        update_s=tuple(updates),
        gradient_bytes=tuple(sums),
        expert_bytes=routed if any(routed) else (),
        source=least_sure(costs.sure),
        peers=shared.peers,
        peer_bytes=shared.peer_bytes,
        peer_messages=tuple(layer.peer_messages for layer in layers) if shared.num_messages else (),
        gather_s=gather,
        broadcast_s=broadcast,
    )


class _PartTime(NamedTuple):
    """How long a part takes without messages; the fields are named as those of :class:`Speed`."""

    forward_s: float
    backward_s: float
    weights_s: float


_NO_TIME = _PartTime(0.0, 0.0, 0.0)


class _Layer(NamedTuple):
    """What a layer costs; the fields are named as those of :class:`Speed`."""

    forward_s: float
    backward_s: float
    weights_s: float
    update_s: float
    gradient_bytes: int
    expert_bytes: int
    peer_messages: tuple[int, int]


class _Costs:
    """What the parts of a model cost on a stage; ``sure`` collects the sources of their times."""

    def __init__(self, card: Card, links: Links, model: GPTModel, batch: Batch, tp: int, num_replicas: int) -> None:
        self.card, self.model, self.batch, self.tp, self.num_replicas = card, model, batch, tp, num_replicas
        self.shared = shared = Shares.of(model, batch, tp, num_replicas)
        # Of activations [S, B, H], or of their slices, which takes as long.
        self.exchange_s = _sum_s(card, links, shared.activation_bytes, tp)
        # The ranks that share an expert gather the rows of all of them, and each sums its part of what comes out.
        self.rows_s = _sum_s(card, links, shared.row_bytes, shared.etp)
        self.ring_s = (batch.cp - 1) * links.inside_of(card.name).time_s(shared.key_bytes) if batch.cp > 1 else 0.0
        is_fitted = any(size > 1 and links.sum_of(card.name, size) is None for size in (tp, shared.etp))
        self.sure: set[Source] = {"fitted"} if is_fitted or batch.cp > 1 else set()

    def part(self, name: str, flops: float) -> _PartTime:
        """Give the seconds of a part."""
        seconds, source = _part_s(self.card, name, flops, self.batch, self.tp)
        self.sure.add(source)
        return seconds

    def update_s(self, dense: float, routed: float) -> float:
        """Give the optimizer's seconds for dense weights, and for those of experts that are summed separately."""
        if self.batch.shares_update:
            dense, routed = dense / (self.num_replicas * self.batch.cp), routed / self.shared.num_copies
        seconds, source = _update_s(self.card, dense + routed)
        self.sure.add(source)
        return seconds

    def layer(self, layer: int, *, has_experts: bool) -> _Layer:
        """Give what a layer costs."""
        batch, model, shared = self.batch, self.model, self.shared
        dense, routed = shared.layer(model, layer)
        seconds = self.part("experts" if has_experts else "dense", layer_flops(model, batch, layer))
        # The sum of attention, and that of what comes behind it.
        own = 2 * self.exchange_s
        if has_experts and model.experts is not None:
            own = self.exchange_s * (2 if model.experts.shared_ffn else 1) + self.rows_s
        passes = 2 if batch.is_recomputed else 1
        # Backward keys and values go round, and their gradients.
        return _Layer(
            forward_s=seconds.forward_s + own + self.ring_s,
            backward_s=seconds.backward_s + passes * (own + self.ring_s) + self.ring_s,
            weights_s=seconds.weights_s,
            update_s=self.update_s(dense, routed),
            gradient_bytes=round(dense * batch.gradient_itemsize_bytes),
            expert_bytes=round(routed * batch.gradient_itemsize_bytes),
            peer_messages=(shared.num_messages, passes * shared.num_messages) if has_experts else (0, 0),
        )


def _sum_s(card: Card, links: Links, num_bytes: float, tp: int) -> float:
    """Give the seconds in which the ranks of a stage all-reduce a tensor: as measured, else for a ring."""
    if tp == 1 or not num_bytes:
        return 0.0
    measured = links.sum_of(card.name, tp)
    return all_reduce_s(num_bytes, tp, links.inside_of(card.name)) if measured is None else measured.time_s(num_bytes)


def _part_s(card: Card, name: str, flops: float, batch: Batch, tp: int) -> tuple[_PartTime, Source]:
    """Give the seconds of a part."""
    rows = [time for time in card.times if time.part == name]
    shares = batch.cp > 1 or (name == "experts" and (batch.ep > 1 or (batch.etp or tp) != tp))
    if rows:
        is_recomputed = batch.is_recomputed and name in _LAYERS
        if same := [time for time in rows if time.is_recomputed == is_recomputed]:
            seconds, source = _fitted(same, batch, tp)
            # Timed on one card that has all experts, and the whole sequence.
            return seconds, "fitted" if shares else source
        # Such a layer's backward begins with its forward.
        seconds, _ = _fitted(rows, batch, tp)
        again = seconds.forward_s if is_recomputed else -seconds.forward_s
        return seconds._replace(backward_s=seconds.backward_s + again), "fitted"
    if card.flops_per_s is None:
        parts = ", ".join(sorted({time.part for time in card.times})) or "none"
        raise ConfigError(
            f"cards.{card.name} has no times of {name} (it has {parts}) and no teraflops; profile this model on it"
        )
    forward = flops / tp / card.flops_per_s
    # Both parts of a backward take as long as the forward.
    passes = 3 if batch.is_recomputed and name in _LAYERS else 2
    return _PartTime(forward, passes * forward, forward), "data sheet"


def _fitted(rows: Sequence[Time], batch: Batch, tp: int) -> tuple[_PartTime, Source]:
    """Fit the times of a part to measured ones, those nearest to what is asked for."""
    for time in rows:
        is_whole = batch.cp == 1
        if is_whole and (time.tp, time.micro_batch_size, time.seq_length) == (tp, batch.size, batch.length):
            return _seconds(time), "measured"

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
        pairs = zip(_seconds(one), _seconds(other), strict=True)
        forward, backward, weights = (first + share * (second - first) for first, second in pairs)
        if forward > 0 and backward > 0:
            return _PartTime(forward, backward, min(max(0.0, weights), backward)), "fitted"
    scale = wanted / of(near[0])
    return _PartTime(*(scale * value for value in _seconds(near[0]))), "fitted"


def _seconds(time: Time) -> _PartTime:
    return _PartTime(time.forward_s, time.backward_s, time.of_weights_s)


def _update_s(card: Card, numel: float) -> tuple[float, Source]:
    for time in card.times:
        if time.part == "update":
            return time.forward_s * numel / 1e6, "measured"
    if card.memory_bytes_per_s is None:
        return 0.0, "data sheet"
    return numel * _UPDATE_BYTES / card.memory_bytes_per_s, "data sheet"
