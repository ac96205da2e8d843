"""Adapters (LoRA): which published matrices get a pair of factors, in which layers, and where Megatron keeps them.

Megatron fuses matrices that are published one by one: queries, keys and values, and gate and up. Each published matrix
gets its own pair here, as in PEFT; one pair for a fused matrix would be another model. Names of modules follow the
canonical LoRA of Megatron-Bridge 0.6 (``peft/canonical_lora.py``: ``adapter_q``, ``linear_in``, ``linear_out``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """What says which published matrices the layers of a model have.

    Attributes:
        is_gated: the feed-forward layers have a gate.
        has_experts: a feed-forward layer is one of experts.
        is_latent: attention is multi-latent.
        has_latent_queries: its queries have a latent form, too.
    """

    is_gated: bool = False
    has_experts: bool = False
    is_latent: bool = False
    has_latent_queries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """A published matrix that can have a pair of factors.

    Attributes:
        published: its name in the published model, and in PEFT's ``target_modules``.
        block: module of a published layer that has it.
        linear: name of Megatron's layer that holds it.
        child: module of its pair beside that layer; empty where the layer holds no other matrix.
        needs: tells whether a model has it.
    """

    published: str
    block: str
    linear: str
    child: str = ""
    needs: Callable[[Matrices], bool] = lambda model: True

    @property
    def place(self) -> str:
        """Where its pair is in a layer of Megatron's.

        >>> TARGETS[0].place, TARGETS[8].place
        ('self_attention.linear_qkv.adapter.adapter_q', 'self_attention.linear_proj.adapter')
        """
        return ".".join((self.module, ADAPTER, *([self.child] if self.child else [])))

    def seconds(self, model: Matrices) -> tuple[str, ...]:
        """Name what follows A: B, or several where published matrices share an A.

        >>> TARGETS[0].seconds(Matrices()), TARGETS[-2].seconds(Matrices(is_gated=True))
        (('linear_out',), ('linear_out_gate', 'linear_out_up'))
        """
        if self.published != GATE_UP:
            return ("linear_out",)
        return ("linear_out_gate", "linear_out_up") if model.is_gated else ("linear_out_up",)

    @property
    def module(self) -> str:
        """Where the layer that holds it is in a layer of Megatron's.

        >>> TARGETS[0].module, TARGETS[-1].module
        ('self_attention.linear_qkv', 'mlp.experts.local_experts.{expert}.linear_fc2')
        """
        return f"{'self_attention' if self.block == 'self_attn' else self.block}.{self.linear}"


EDGE, CLOUD = "edge", "cloud"
SITES: Final = (EDGE, CLOUD)
"""What ``--vtp-lora-layers`` takes in a U, for all layers of a site."""
EXPERTS: Final = "mlp.experts.local_experts.{expert}"
"""Where an expert of a rank is in a layer of Megatron's."""
GATE_UP: Final = "experts.gate_up_proj"
"""The published matrix of an expert that Megatron's ``linear_fc1`` holds."""
ADAPTER: Final = "adapter"
"""The module of the pairs, inside the linear layer that they are beside."""


def _plain(published: str, linear: str = "linear_qkv", child: str = "") -> LoraTarget:
    return LoraTarget(
        published=published, block="self_attn", linear=linear, child=child, needs=lambda model: not model.is_latent
    )


def _latent(published: str, linear: str, *, has_queries: bool | None = None) -> LoraTarget:
    def needs(model: Matrices) -> bool:
        return model.is_latent and has_queries in (None, model.has_latent_queries)

    return LoraTarget(published=published, block="self_attn", linear=linear, needs=needs)


def _dense(
    published: str,
    linear: str,
    child: str = "",
    *,
    needs: Callable[[Matrices], bool] = lambda model: not model.has_experts,
) -> LoraTarget:
    return LoraTarget(published=published, block="mlp", linear=linear, child=child, needs=needs)


def _expert(published: str, linear: str) -> LoraTarget:
    return LoraTarget(
        published=f"experts.{published}", block=EXPERTS, linear=linear, needs=lambda model: model.has_experts
    )


TARGETS: Final = (
    _plain("q_proj", child="adapter_q"),
    _plain("k_proj", child="adapter_k"),
    _plain("v_proj", child="adapter_v"),
    _latent("q_proj", "linear_q_proj", has_queries=False),
    _latent("q_a_proj", "linear_q_down_proj", has_queries=True),
    _latent("q_b_proj", "linear_q_up_proj", has_queries=True),
    _latent("kv_a_proj_with_mqa", "linear_kv_down_proj"),
    _latent("kv_b_proj", "linear_kv_up_proj"),
    LoraTarget(published="o_proj", block="self_attn", linear="linear_proj"),
    _dense("gate_proj", "linear_fc1", "adapter_gate", needs=lambda model: model.is_gated and not model.has_experts),
    _dense("up_proj", "linear_fc1", "adapter_up"),
    _dense("down_proj", "linear_fc2"),
    _expert("gate_up_proj", "linear_fc1"),
    _expert("down_proj", "linear_fc2"),
)
"""All of them, those of one layer in the order in which Megatron fuses them; those of latent attention as DeepSeek-V3
names them, those of experts as PEFT's ``target_parameters``: gate and up of an expert share one A."""
TARGET_NAMES: Final = tuple(dict.fromkeys([*(each.published for each in TARGETS), *(each.linear for each in TARGETS)]))
"""What ``--vtp-lora-targets`` takes: published names, and Megatron's layers for all that they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapters of a run.

    Attributes:
        rank: rows of A, and columns of B.
        alpha: the product of the factors is multiplied by alpha / rank.
        targets: published names of the matrices that have some.
        layers: numbers of the layers with adapters, from 0, first one and the one behind the last of each range; empty
            for all.
        named: the names of the targets as they were given.
        dropout: share of the inputs of each pair that a training step leaves out.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[tuple[int, int], ...] = ()
    named: tuple[str, ...] = ()
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank

    def reaches(self, *blocks: str) -> bool:
        """Tell whether some modules of a published layer may have adapters.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",)).reaches("mlp", EXPERTS)
        False
        """
        return any(target.block in blocks for target in TARGETS if target.published in self.targets)

    def layer_numbers(self, num_layers: int) -> tuple[int, ...]:
        """List the layers with adapters of a model.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",), layers=((0, 2), (5, 9))).layer_numbers(6)
        (0, 1, 5)
        """
        ranges = self.layers or ((0, num_layers),)
        return tuple(layer for layer in range(num_layers) if any(first <= layer < end for first, end in ranges))

    def first_layer(self, num_layers: int) -> int:
        """Give the number of the first layer with adapters: nothing before it needs a gradient.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",), layers=((3, 5),)).first_layer(6)
        3
        """
        return min(self.layer_numbers(num_layers), default=0)

    def num_frozen(self, layers: Sequence[int]) -> int:
        """Count the first virtual stages that have no adapters, so that nothing before them needs a gradient.

        Args:
            layers: number of layers of every virtual stage, along the model.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",), layers=((3, 5),)).num_frozen((1, 2, 2))
        2
        """
        first = self.first_layer(sum(layers))
        return sum(end <= first for end in accumulate(layers))

    def pairs(self, model: Matrices) -> tuple[LoraTarget, ...]:
        """List the published matrices of a layer that have adapters, in the order in which they are computed.

        >>> lora = Lora(rank=2, alpha=4, targets=("down_proj", "gate_proj", "q_proj", "kv_b_proj"))
        >>> [target.published for target in lora.pairs(Matrices())]
        ['q_proj', 'down_proj']
        >>> [target.linear for target in lora.pairs(Matrices(is_latent=True))]
        ['linear_q_proj', 'linear_kv_up_proj', 'linear_fc2']
        """
        return tuple(target for target in published_matrices(model) if target.published in self.targets)


def published_matrices(model: Matrices) -> tuple[LoraTarget, ...]:
    """List the published matrices that a layer has; without a gate the feed-forward layer has but one in front."""
    return tuple(target for target in TARGETS if target.needs(model))


def matrices_of(arguments: Mapping[str, Any], *, has_experts: bool = False) -> Matrices:
    """Read which matrices the layers of a model have, those with experts or those without.

    Args:
        arguments: Megatron's arguments, or the fields of its config.
        has_experts: those with experts.

    >>> matrices_of({"swiglu": True, "multi_latent_attention": True, "q_lora_rank": None})
    Matrices(is_gated=True, has_experts=False, is_latent=True, has_latent_queries=False)
    """
    return Matrices(
        is_gated=any(arguments.get(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit")),
        has_experts=has_experts,
        is_latent=bool(arguments.get("multi_latent_attention")),
        has_latent_queries=bool(arguments.get("q_lora_rank")),
    )


def lora_of(arguments: Mapping[str, Any]) -> Lora | None:
    """Read the adapters of a run from its arguments, as they are stored with a checkpoint; None without any.

    >>> lora = lora_of({"vtp_lora_rank": 4, "vtp_lora_targets": ["linear_fc2"], "vtp_lora_layers": "0:2,5:6"})
    >>> lora.alpha, lora.targets, lora.layers, lora.named
    (4, ('down_proj', 'experts.down_proj'), ((0, 2), (5, 6)), ('linear_fc2',))
    >>> edge = {"vtp_lora_rank": 4, "vtp_lora_layers": "edge", "num_layer_list": "2,4,3"}
    >>> lora_of(edge).layers, lora_of(edge | {"vtp_lora_layers": "cloud"}).layers
    (((0, 2), (6, 9)), ((2, 6),))
    """
    rank, alpha, dropout = (arguments.get(f"vtp_lora_{name}") for name in ("rank", "alpha", "dropout"))
    if rank is None:
        return None
    named, layers = tuple(arguments.get("vtp_lora_targets") or ()), arguments.get("vtp_lora_layers") or ""
    ranges = [each for word in layers.split(",") if word for each in _ranges(word, arguments.get("num_layer_list"))]
    return Lora(
        rank=rank,
        alpha=rank if alpha is None else alpha,
        targets=published_targets(named),
        layers=tuple(ranges),
        named=named,
        dropout=dropout or 0.0,
    )


def _ranges(word: str, parts: str | Sequence[int] | None) -> list[tuple[int, int]]:
    """Read a range of layers, or the layers of a site of a U whose parts have so many."""
    if word not in SITES:
        first, _, end = word.partition(":")
        return [(int(first), int(end))]
    numbers = [*map(int, parts.split(",") if isinstance(parts, str) else parts or ())]
    total, last = sum(numbers), sum(numbers[:-1])
    edge = [(0, numbers[0]), (last, total)] if numbers else []
    found = edge if word == EDGE else [(numbers[0], last)] if numbers else []
    return [(first, end) for first, end in found if first < end]


def arguments_of(lora: Lora) -> dict[str, Any]:
    """Return the arguments that :func:`lora_of` reads.

    >>> arguments_of(Lora(rank=4, alpha=8, targets=("q_proj",), layers=((0, 2), (5, 6))))["vtp_lora_layers"]
    '0:2,5:6'
    """
    return {
        "vtp_lora_rank": lora.rank,
        "vtp_lora_alpha": float(lora.alpha),
        "vtp_lora_dropout": lora.dropout,
        "vtp_lora_targets": list(lora.targets),
        "vtp_lora_layers": ",".join(f"{first}:{end}" for first, end in lora.layers) or None,
    }


def is_adapter(key: str) -> bool:
    """Tell whether a parameter or a key of a checkpoint belongs to an adapter.

    >>> is_adapter("decoder.layers.mlp.linear_fc2.adapter.linear_in.weight"), is_adapter("output_layer.weight")
    (True, False)
    """
    return f".{ADAPTER}." in key


def published_targets(names: Sequence[str]) -> tuple[str, ...]:
    """Replace names of Megatron's layers by those of the matrices that they hold; no name stands for all.

    >>> published_targets(["linear_qkv", "o_proj"]), len(published_targets([]))
    (('q_proj', 'k_proj', 'v_proj', 'o_proj'), 13)
    """
    found = [each.published for each in TARGETS if not names or {each.published, each.linear} & set(names)]
    return tuple(dict.fromkeys(found))
