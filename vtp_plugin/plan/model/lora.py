"""Adapters (LoRA): which published matrices get a pair of factors, in which layers, and where Megatron keeps them.

Megatron fuses matrices that are published one by one: queries, keys and values, and gate and up. Each published matrix
gets its own pair here, as in PEFT; one pair for a fused matrix would be another model. Names of modules follow the
canonical LoRA of Megatron-Bridge 0.6 (``peft/canonical_lora.py``: ``adapter_q``, ``linear_in``, ``linear_out``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """A published matrix that can have a pair of factors.

    Attributes:
        published: its name in the published model, and in PEFT's ``target_modules``.
        block: module of a published layer that has it.
        linear: name of Megatron's layer that holds it.
        child: module of its pair beside that layer; empty where the layer holds no other matrix.
    """

    published: str
    block: str
    linear: str
    child: str = ""

    @property
    def place(self) -> str:
        """Where its pair is in a layer of Megatron's.

        >>> TARGETS[0].place, TARGETS[3].place
        ('self_attention.linear_qkv.adapter.adapter_q', 'self_attention.linear_proj.adapter')
        """
        return ".".join((self.module, ADAPTER, *([self.child] if self.child else [])))

    @property
    def module(self) -> str:
        """Where the layer that holds it is in a layer of Megatron's.

        >>> TARGETS[0].module, TARGETS[6].module
        ('self_attention.linear_qkv', 'mlp.linear_fc2')
        """
        return f"{'self_attention' if self.block == 'self_attn' else self.block}.{self.linear}"


EDGE, CLOUD = "edge", "cloud"
SITES: Final = (EDGE, CLOUD)
"""What ``--vtp-lora-layers`` takes in a U, for all layers of a site."""
ADAPTER: Final = "adapter"
"""The module of the pairs, inside the linear layer that they are beside."""
TARGETS: Final = (
    LoraTarget(published="q_proj", block="self_attn", linear="linear_qkv", child="adapter_q"),
    LoraTarget(published="k_proj", block="self_attn", linear="linear_qkv", child="adapter_k"),
    LoraTarget(published="v_proj", block="self_attn", linear="linear_qkv", child="adapter_v"),
    LoraTarget(published="o_proj", block="self_attn", linear="linear_proj"),
    LoraTarget(published="gate_proj", block="mlp", linear="linear_fc1", child="adapter_gate"),
    LoraTarget(published="up_proj", block="mlp", linear="linear_fc1", child="adapter_up"),
    LoraTarget(published="down_proj", block="mlp", linear="linear_fc2"),
)
"""All of them, those of one layer in the order in which Megatron fuses them."""
TARGET_NAMES: Final = (*(target.published for target in TARGETS), *dict.fromkeys(target.linear for target in TARGETS))
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
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[tuple[int, int], ...] = ()
    named: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank

    def reaches(self, block: str) -> bool:
        """Tell whether a module of a published layer has adapters.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",)).reaches("mlp")
        False
        """
        return any(target.block == block for target in TARGETS if target.published in self.targets)

    def layer_numbers(self, num_layers: int) -> tuple[int, ...]:
        """List the layers with adapters of a model.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",), layers=((0, 2), (5, 9))).layer_numbers(6)
        (0, 1, 5)
        """
        ranges = self.layers or ((0, num_layers),)
        return tuple(layer for layer in range(num_layers) if any(first <= layer < end for first, end in ranges))

    def num_frozen(self, layers: Sequence[int]) -> int:
        """Count the first virtual stages that have no adapters, so that nothing before them needs a gradient.

        Args:
            layers: number of layers of every virtual stage, along the model.

        >>> Lora(rank=2, alpha=4, targets=("q_proj",), layers=((3, 5),)).num_frozen((1, 2, 2))
        2
        """
        first = min(self.layer_numbers(sum(layers)), default=0)
        return sum(end <= first for end in accumulate(layers))

    def targets_of(self, linear: str, *, is_gated: bool) -> tuple[LoraTarget, ...]:
        """List the published matrices of a layer of Megatron's that have adapters.

        Args:
            linear: name of the layer.
            is_gated: the feed-forward layers of the model have a gate.

        >>> lora = Lora(rank=2, alpha=4, targets=("v_proj", "q_proj", "gate_proj", "up_proj"))
        >>> [target.child for target in lora.targets_of("linear_qkv", is_gated=True)]
        ['adapter_q', 'adapter_v']
        >>> [target.child for target in lora.targets_of("linear_fc1", is_gated=False)]
        ['adapter_up']
        """
        return tuple(target for target in self.pairs(is_gated=is_gated) if target.linear == linear)

    def pairs(self, *, is_gated: bool) -> tuple[LoraTarget, ...]:
        """List the published matrices of a layer that have adapters, in the order in which they are computed.

        >>> lora = Lora(rank=2, alpha=4, targets=("down_proj", "gate_proj", "q_proj"))
        >>> [target.published for target in lora.pairs(is_gated=False)]
        ['q_proj', 'down_proj']
        """
        return tuple(target for target in published_matrices(is_gated=is_gated) if target.published in self.targets)


def published_matrices(*, is_gated: bool) -> tuple[LoraTarget, ...]:
    """List the published matrices that a layer has; without a gate the feed-forward layer has but one in front."""
    return tuple(target for target in TARGETS if is_gated or target.published != "gate_proj")


def lora_of(arguments: Mapping[str, Any]) -> Lora | None:
    """Read the adapters of a run from its arguments, as they are stored with a checkpoint; None without any.

    >>> lora_of({"vtp_lora_rank": 4, "vtp_lora_targets": ["linear_fc2"], "vtp_lora_layers": "0:2,5:6"})
    ... # doctest: +NORMALIZE_WHITESPACE
    Lora(rank=4, alpha=4, targets=('down_proj',), layers=((0, 2), (5, 6)), named=('linear_fc2',))
    >>> edge = {"vtp_lora_rank": 4, "vtp_lora_layers": "edge", "num_layer_list": "2,4,3"}
    >>> lora_of(edge).layers, lora_of(edge | {"vtp_lora_layers": "cloud"}).layers
    (((0, 2), (6, 9)), ((2, 6),))
    """
    rank, alpha = arguments.get("vtp_lora_rank"), arguments.get("vtp_lora_alpha")
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
    (('q_proj', 'k_proj', 'v_proj', 'o_proj'), 7)
    """
    return tuple(target.published for target in TARGETS if not names or {target.published, target.linear} & set(names))
