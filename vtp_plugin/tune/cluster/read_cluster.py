"""Reads a cluster: its file, measured durations, profiles, memory of stages."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple, cast

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.layer_lists import Chunk
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activation_rows import Microbatch
from vtp_plugin.plan.memory.footprint import Training, footprints
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.lora import Lora
from vtp_plugin.tune.cluster.machines import Card, Cluster, Links, Nodes, Origin, Time
from vtp_plugin.tune.cluster.speed import (
    Batch,
    Link,
    Shares,
    Source,
    Speed,
    all_reduce_s,
    count,
    least_sure,
    part_parameters,
)
from vtp_plugin.util.typed_json import Count, PlainText, as_typed, read_toml_by

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
    kinds = layer_kinds(model, batch.lora)
    known = {kind: costs.layer(kinds.index(kind), has_experts=kind[0]) for kind in sorted(set(kinds))}
    num_frozen = batch.lora.first_layer(model.num_layers) if batch.lora else 0
    layers = [known[kind] if layer >= num_frozen else known[kind].frozen() for layer, kind in enumerate(kinds)]
    updates, sums = [layer.update_s for layer in layers], [layer.gradient_bytes for layer in layers]
    # Both ends of the model belong to the first and the last layer's stage.
    for layer, parameters in ((0, part_parameters(model, is_first=True)), (-1, part_parameters(model, is_last=True))):
        numel = 0.0 if batch.lora else count(parameters) / tp
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


def layer_kinds(model: GPTModel, lora: Lora | None) -> list[tuple[bool, bool]]:
    """Say of each layer whether it has experts, and whether it has adapters."""
    adapted = lora.layer_numbers(model.num_layers) if lora else ()
    has_experts = model.experts.layers if model.experts else (False,) * model.num_layers
    return [(has_experts[layer], layer in adapted) for layer in range(model.num_layers)]


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

    def frozen(self) -> _Layer:
        """Give what it costs where nothing up to it is trained: no gradient comes back so far."""
        return self._replace(backward_s=0.0, weights_s=0.0, peer_messages=(self.peer_messages[0], 0))


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
        if self.batch.lora is None:
            return seconds
        # Of a frozen part no gradient of weights is computed, and words have no other one. That of adapters counts for
        # nothing: it is smaller by the width of a layer over twice their rank.
        left_s = 0.0 if name == "embedding" else max(0.0, seconds.backward_s - seconds.weights_s)
        return seconds._replace(backward_s=left_s, weights_s=0.0)

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
        dense, routed = shared.layer(model, layer, batch.lora)
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


_FORMAT = 1
_OF_A_LINK = {"latency_us", "gbyte_per_s", "at_once", "source"}
_ALL_REDUCE = "all_reduce"


def features(model: GPTModel, *, itemsize_bytes: int, topk: int) -> dict[str, object]:
    """List the properties of a model that the times of its parts depend on, besides sizes and lengths.

    Args:
        model: the whole model; its number of layers does not matter.
        itemsize_bytes: bytes of one element of an activation.
        topk: number of experts of a token.

    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=16, vocab=16,
    ...     num_positions=0, is_gated=False, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=True)
    >>> found = features(model, itemsize_bytes=2, topk=1)
    >>> found["hidden"], found["itemsize_bytes"], "num_layers" in found, "topk" in found
    (8, 2, False, False)
    """
    found: dict[str, object] = {"itemsize_bytes": itemsize_bytes}
    for name, value in asdict(model).items():
        if isinstance(value, dict):
            found |= {f"{name}_{key}": each for key, each in value.items() if key != "layers"}
        elif value is not None and name not in ("num_layers", "num_predicting"):
            found[name] = value
    return found | ({"topk": topk} if model.experts is not None else {})


def check_origins(origins: Iterable[Origin], wanted: Mapping[str, object]) -> None:
    """Reject times of another model, or of several versions of Megatron.

    Args:
        origins: origins of all times of a cluster.
        wanted: properties that the model must have had, see :func:`features`.

    Raises:
        ConfigError: they do not fit.

    >>> check_origins([Origin(name="a", device="", megatron="0.19", model={"hidden": 8})], {"hidden": 8})
    """
    first: Origin | None = None
    for origin in origins:
        for name in sorted({*origin.model, *wanted}):
            got, need = origin.model.get(name), wanted.get(name)
            if got != need:
                raise ConfigError(
                    f"{origin.name} was measured with another model: {name} {got}, here {need}; profile this model"
                )
        first = first or origin
        if origin.megatron != first.megatron:
            raise ConfigError(
                f"{origin.name} was measured with Megatron {origin.megatron}, {first.name} with {first.megatron}; "
                "profile all devices with the one of the run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """The file of a card's times."""

    format: Count
    device: PlainText
    megatron: PlainText
    model: dict[PlainText, object]
    times: tuple[Time, ...] = ()


def read_profile(path: Path) -> tuple[Origin, tuple[Time, ...]]:
    """Read the times of a card.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    found = read_toml_by(partial(as_typed, _Profile), path)
    if found.format != _FORMAT:
        raise ConfigError(
            f"{path}: format {found.format} is another version's, this vtp_plugin reads {_FORMAT}; profile again"
        )
    _require_parts(found.times, str(path))
    return Origin(name=path.name, device=found.device, megatron=found.megatron, model=found.model), found.times


def _require_parts(times: Sequence[Time], where: str) -> None:
    if any(time.weights_s is not None and time.weights_s > time.backward_s for time in times):
        raise ConfigError(f"{where}: weights_ms must not be above backward_ms, of which it is a part")


def write_profile(origin: Origin, times: Iterable[Time]) -> str:
    """Give the text of a profile.

    >>> time = Time(part="head", tp=1, micro_batch_size=2, seq_length=8, forward_s=0.25, backward_s=0.5)
    >>> print(write_profile(Origin(name="", device="a card", megatron="0.19.0", model={"hidden": 8}), [time]))
    # Written by `python -m vtp_plugin profile`; name it in a cluster's file: `[cards.NAME] profile = "FILE"`.
    format = 1
    device = "a card"
    megatron = "0.19.0"
    <BLANKLINE>
    [model]
    hidden = 8
    <BLANKLINE>
    [[times]]
    part = "head"
    tp = 1
    micro_batch_size = 2
    seq_length = 8
    forward_ms = 250.0
    backward_ms = 500.0
    <BLANKLINE>
    """
    lines = [
        '# Written by `python -m vtp_plugin profile`; name it in a cluster\'s file: `[cards.NAME] profile = "FILE"`.'
    ]
    lines += _rows({"format": _FORMAT, "device": origin.device, "megatron": origin.megatron})
    lines += ["", "[model]", *_rows(origin.model)]
    for time in times:
        row: dict[str, object] = {"part": time.part, "tp": time.tp}
        row |= {"micro_batch_size": time.micro_batch_size, "seq_length": time.seq_length}
        row |= {"recomputed": True} if time.is_recomputed else {}
        row |= {"forward_ms": _ms(time.forward_s)} | (
            {} if time.part == "update" else {"backward_ms": _ms(time.backward_s)}
        )
        row |= {} if time.weights_s is None else {"weights_ms": _ms(time.weights_s)}
        lines += ["", "[[times]]", *_rows(row)]
    return "\n".join([*lines, ""])


_Tables = dict[PlainText, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkTables:
    """A file of links: each kind of link has one for all, or one for each name."""

    inside: _Tables = field(default_factory=dict[str, object])
    between: _Tables = field(default_factory=dict[str, object])
    across: dict[PlainText, Link] = field(default_factory=dict[str, Link])
    all_reduce: _Tables | None = None
    sums: _Tables | None = None  # the old name of `all_reduce`

    def links(self) -> Links:
        """Read the links."""
        across = {tuple(sorted(name.split())): link for name, link in self.across.items()}
        for name in self.across:
            if len(name.split()) != 2:
                raise ConfigError(f'[across."{name}"] must name two sites, such as "edge cloud"')
        if self.all_reduce is not None and self.sums is not None:
            raise ConfigError("[sums] is the old name of [all_reduce]; give one of them")
        sums = self.all_reduce or self.sums or {}
        kinds = {kind: as_typed(_Tables, each, kind) for kind, each in sums.items() if not kind.isdecimal()}
        return Links(
            inside=_by_name(self.inside, "inside"),
            between=_by_name(self.between, "between"),
            across=cast("dict[tuple[str, str], Link]", across),
            sums={kind: found for kind, each in ({"": sums} | kinds).items() if (found := _by_number(each, kind))},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links(_LinkTables):
    profile: PlainText = ""


def _by_number(table: Mapping[str, object], kind: str) -> dict[int, Link]:
    return {int(key): as_typed(Link, each, _ALL_REDUCE, kind, key) for key, each in table.items() if key.isdecimal()}


def _by_name(table: Mapping[str, object], name: str) -> dict[str, Link]:
    """Read links by name, and one for all others, whose numbers stand in the table itself."""
    own = {key: each for key, each in table.items() if key in _OF_A_LINK}
    found = {key: as_typed(Link, each, name, key) for key, each in table.items() if key not in own}
    return found | ({"": as_typed(Link, own, name)} if own else {})


def write_links(links: Links) -> str:
    """Give the text of a file of links.

    >>> line, sums = Link(latency_s=0.02, bytes_per_s=1e8, at_once=1), {2: Link(latency_s=2e-5, bytes_per_s=1e9)}
    >>> print(write_links(Links(across={("cloud", "edge"): line}, sums={"": sums})))
    # Written by `python -m vtp_plugin profile --links`; name it in a cluster's file: `[links] profile = "FILE"`.
    <BLANKLINE>
    [across."cloud edge"]
    latency_us = 20000.0
    gbyte_per_s = 0.1
    at_once = 1
    <BLANKLINE>
    [all_reduce.2]
    latency_us = 20.0
    gbyte_per_s = 1.0
    <BLANKLINE>
    """
    lines = [
        '# Written by `python -m vtp_plugin profile --links`; name it in a cluster\'s file: `[links] profile = "FILE"`.'
    ]
    tables = [*_tables("inside", links.inside), *_tables("between", links.between)]
    tables += _tables("across", {" ".join(sites): link for sites, link in links.across.items()})
    for kind, each in links.sums.items():
        of_kind = f"{_ALL_REDUCE}.{json.dumps(kind)}" if kind else _ALL_REDUCE
        tables += [(f"{of_kind}.{number}", link) for number, link in each.items()]
    for name, link in tables:
        row: dict[str, object] = {"latency_us": _rounded(1e6 * link.latency_s)}
        row |= {"gbyte_per_s": _rounded(link.bytes_per_s / 1e9)}
        row |= {} if link.at_once is None else {"at_once": link.at_once}
        lines += ["", f"[{name}]", *_rows(row)]
    return "\n".join([*lines, ""])


def _tables(name: str, links: Mapping[str, Link]) -> Iterator[tuple[str, Link]]:
    for key, link in links.items():
        yield f"{name}.{json.dumps(key)}" if key else name, link


def _rows(values: Mapping[str, Any]) -> Iterator[str]:
    """Write keys and values; texts, whole numbers and truth values are the same in TOML as in JSON."""
    for key, value in values.items():
        yield f"{key} = {json.dumps(value)}"


def _ms(seconds: float) -> float:
    return _rounded(1e3 * seconds)


def _rounded(value: float) -> float:
    """Round to what a measurement is worth.

    >>> _rounded(123.456789), _rounded(0.00012345678)
    (123.457, 0.000123457)
    """
    return float(f"{value:.6g}")


class HeldPart(NamedTuple):
    """A part of a model that a stage holds: one of its virtual stages.

    Attributes:
        tp: tensor-parallel size of the stage.
        num_replicas: number of replicas of the stage.
        start: first layer.
        end: first layer behind the part.
        is_first: whether it has the embedding.
        is_last: whether it has the head.
        in_flight: number of microbatches whose activations it keeps.
        waiting: number of microbatches that keep only what the gradients of their weights need.
    """

    tp: int
    num_replicas: int
    start: int
    end: int
    is_first: bool
    is_last: bool
    in_flight: int
    waiting: int = 0


class _Held(NamedTuple):
    """Bytes that the fullest rank of a stage holds: all the time, for one activation, for one microbatch that waits."""

    steady_bytes: int
    activation_bytes: int
    waiting_bytes: int


HeldBytes = Callable[[HeldPart], int]
"""Gives the bytes that a part adds to its stage's fullest rank."""

CountedTwice = Callable[[int, int, tuple[tuple[bool, bool], ...]], int]
"""Gives the bytes that a rank holds once, while a sum over its virtual stages counts them several times. Arguments:
tensor-parallel size, number of replicas, and for each virtual stage whether it has the embedding, and the head."""


class StageMemory:
    """Gives the bytes that the fullest rank of a stage holds.

    What a layer adds is the difference between a stage with two layers of its kind and one with one. With adapters on
    some layers alone, what the first stage keeps of the layers before them is counted, too: all but one keep nothing.

    Args:
        model: the whole model.
        training: how the model is kept while it is trained.
        batch: a microbatch; None where activations are not known.
        cp: context-parallel size of every stage, which share the batch's sequences.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.
    """

    def __init__(
        self,
        model: GPTModel,
        training: Training,
        batch: Microbatch | None,
        *,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
    ) -> None:
        self._model, self._training, self._batch = model, training, batch
        self._cp, self._ep, self._etp = cp, ep, etp
        self._sums = cache(self._sum_layers)
        self._twice = cache(self._count_twice)

    def held_bytes(self, part: HeldPart) -> int:
        """Answer as ``HeldBytes``."""
        tp, num_replicas, start, end, is_first, is_last, in_flight, num_waiting = part
        rows, ends = self._sums(tp, num_replicas)
        bare, below, above = ends[is_first, is_last], rows[start], rows[end]
        held = bare[0] + above[0] - below[0] + (bare[1] + above[1] - below[1]) * in_flight
        return held + (bare[2] + above[2] - below[2]) * num_waiting

    def counted_twice(self, tp: int, num_replicas: int, ends: tuple[tuple[bool, bool], ...]) -> int:
        """Answer as ``CountedTwice``: communicators, workspaces, blocks of the allocator."""
        return self._twice(tp, num_replicas, ends)

    def _sum_layers(self, tp: int, num_replicas: int) -> tuple[tuple[_Held, ...], dict[tuple[bool, bool], _Held]]:
        """Give prefix sums of what layers add, and what a stage without layers holds, by the model's ends on it."""

        def held(layers: tuple[int, ...], ends: tuple[bool, bool] = (False, False)) -> _Held:
            return self._fullest(tp, num_replicas, _chunk(layers, ends))

        kinds = layer_kinds(self._model, self._training.lora)
        firsts = {kind: kinds.index(kind) for kind in set(kinds)}
        one = {kind: held((layer,)) for kind, layer in firsts.items()}
        two = {kind: held((layer, layer)) for kind, layer in firsts.items()}
        added = [_Held(*map(operator.sub, two[kind], one[kind])) for kind in kinds]
        sums = (accumulate(column, initial=0) for column in zip(*added, strict=True))
        rows = tuple(_Held(*row) for row in zip(*sums, strict=True))
        whole = {(first, last): held((0,), (first, last)) for first, last in product((False, True), repeat=2)}
        return rows, {ends: _Held(*map(operator.sub, one, added[0])) for ends, one in whole.items()}

    def _count_twice(self, tp: int, num_replicas: int, ends: tuple[tuple[bool, bool], ...]) -> int:
        chunks = [_chunk((0,), own) for own in ends]
        apart = sum(self._fullest(tp, num_replicas, chunk)[0] for chunk in chunks)
        return apart - self._fullest(tp, num_replicas, *chunks)[0]

    def _fullest(self, tp: int, num_replicas: int, *chunks: Chunk) -> _Held:
        layout = PipelineLayout.from_sizes(
            (tp,), world_size=tp * self._cp * num_replicas, cp=self._cp, ep=self._ep, etp=self._etp
        )
        held = footprints(self._model, self._training, layout, (chunks,), self._batch)
        one = max(held, key=lambda one: one.steady_bytes)
        # Where it is not known what waits, nothing of an activation is free before the gradients of weights are there.
        waiting = one.activation_bytes if one.waiting_bytes is None else one.waiting_bytes
        return _Held(one.steady_bytes, one.activation_bytes or 0, waiting or 0)


def _chunk(layers: tuple[int, ...], ends: tuple[bool, bool]) -> Chunk:
    return Chunk(layers=layers, is_first=ends[0], is_last=ends[1], is_whole=all(ends))


def read_cluster(path: Path) -> Cluster:
    """Read a cluster.

    Args:
        path: path of the file; ``docs/guides/search.md`` says what stands in it.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a key is unknown, missing or of another type.
    """
    return read_toml_by(partial(parse_cluster, folder=path.parent), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    cards: PlainText
    cards_per_node: Count
    count: Count = 1
    name: PlainText | None = None
    site: PlainText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    cards: dict[PlainText, Card]
    links: _Links
    nodes: tuple[_Nodes, ...] = ()


def parse_cluster(values: Mapping[str, object], folder: Path) -> Cluster:
    """Read a cluster from what its file says.

    Args:
        values: the file's outermost table.
        folder: folder of the files that it names.

    Raises:
        ValueError: a key is unknown, missing or of another type.

    >>> cluster = parse_cluster({
    ...     "cards": {"old": {"memory": "32GiB", "teraflops": 100, "share": 0.5}},
    ...     "nodes": [{"cards": "old", "cards_per_node": 4, "count": 2}],
    ...     "links": {
    ...         "inside": {"latency_us": 5, "gbyte_per_s": 50}, "between": {"latency_us": 10, "gbyte_per_s": 10}}},
    ...     Path())
    >>> cluster.nodes[0].card.flops_per_s, cluster.links.between[""].bytes_per_s
    (50000000000000.0, 10000000000.0)
    """
    file = as_typed(_File, values)
    cards = {name: _card(name, card, folder) for name, card in file.cards.items()}
    if not file.nodes:
        raise ConfigError("no nodes; give [[nodes]] with `cards`, `cards_per_node` and `count`")
    for number, row in enumerate(file.nodes):
        if row.cards not in cards:
            known = ", ".join(cards)
            raise ConfigError(f"nodes[{number}] is of the kind {row.cards!r}; known kinds are {known}; use one of them")
    nodes = tuple(
        Nodes(
            name=f"{row.cards} {number}" if row.name is None else row.name,
            card=cards[row.cards],
            num_nodes=row.count,
            num_cards=row.cards_per_node,
            site=row.site,
        )
        for number, row in enumerate(file.nodes)
    )
    profile = file.links.profile
    measured = read_toml_by(partial(as_typed, _LinkTables), folder / profile).links() if profile else Links()
    return Cluster(nodes=nodes, links=measured | file.links.links())  # those in the file win


def _card(name: str, card: Card, folder: Path) -> Card:
    _require_parts(card.times, f"cards.{name}")
    if card.profile:
        origin, times = read_profile(folder / card.profile)
        card = replace(card, origin=origin, times=(*times, *card.times))
    if card.teraflops is None and not card.times:
        raise ConfigError(f"cards.{name} has neither `profile`, nor `times`, nor `teraflops`; give one of them")
    return replace(card, name=name)
