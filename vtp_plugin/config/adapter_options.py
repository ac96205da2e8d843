"""Options about adapters (LoRA)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.config.flag import FlagGroup, declare, same
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.model.lora import SITES, TARGET_NAMES, Lora, lora_of
from vtp_plugin.util.text import question


def parse_targets(value: str | Sequence[str]) -> tuple[str, ...]:
    """Read the names of the layers that get adapters, one text or several.

    >>> parse_targets("q_proj v_proj"), parse_targets(["q_proj,linear_fc1"])
    (('q_proj', 'v_proj'), ('q_proj', 'linear_fc1'))

    Raises:
        ConfigError: a name is unknown, or the text has none.
    """
    names = tuple((value if isinstance(value, str) else " ".join(value)).replace(",", " ").split())
    if not names and not isinstance(value, str):
        return ()
    unknown = [name for name in names if name not in TARGET_NAMES]
    if unknown or not names:
        hint = question(unknown[0], TARGET_NAMES, most=1) if unknown else ""
        raise LayoutError(
            f"--vtp-lora-targets {' '.join(unknown)}; no stage holds such a layer; name some of "
            f"{', '.join(TARGET_NAMES)}{hint}"
        )
    return names


def parse_layers(value: str | Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Read the ranges of layers that get adapters, from a flag's text or from pairs of numbers.

    >>> parse_layers("0:4,28:32"), parse_layers([(0, 4)]), parse_layers("edge")
    (('0:4', '28:32'), ('0:4',), ('edge',))

    Raises:
        ConfigError: it is no range, or it is empty.
    """
    if not value and not isinstance(value, str):
        return ()
    words = value.split(",") if isinstance(value, str) else [f"{first}:{end}" for first, end in value]
    for word in words:
        first, _, end = word.strip().partition(":")
        if word.strip() not in SITES and not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            raise LayoutError(
                f"--vtp-lora-layers {','.join(words)} has the entry {word!r}; it is no range of layers; write the "
                "first layer, from 0, and the one behind the last, such as 0:4,28:32, or in a U edge or cloud"
            )
    return tuple(word.strip() for word in words)


adapter_option = functools.partial(declare, FlagGroup.ADAPTERS)


@dataclass(frozen=True, kw_only=True)
class AdapterFields:
    """Options about adapters (LoRA).

    Attributes:
        lora_rank: train adapters (LoRA) of this rank and freeze the model: a pair of factors for each published matrix,
            the same for all TP sizes; needs --vtp-size-list, equal sizes will do
        lora_alpha: with --vtp-lora-rank: the product of the factors is multiplied by this number divided by the rank;
            default: the rank, which multiplies by 1
        lora_dropout: with --vtp-lora-rank: the share of its inputs that each pair leaves out in a training step; drawn
            for whole tensors, so that it is the same for all TP sizes of as many stages
        lora_layers: with --vtp-lora-rank: which layers get adapters, as ranges of their numbers from 0, without the
            layer behind the colon, or in a U edge or cloud for all layers there; default: all
        lora_save_base: with --vtp-lora-rank: save the frozen model with every checkpoint; without this a checkpoint
            holds the adapters alone, and a run that resumes from it takes the model from --pretrained-checkpoint
    """

    lora_rank: int | None = adapter_option(same("vtp_lora_rank"), None, "N", type=int)
    lora_alpha: float | None = adapter_option(same("vtp_lora_alpha"), None, "32", type=float)
    lora_dropout: float = adapter_option(same("vtp_lora_dropout"), 0.0, "0.05", type=float)
    lora_targets: tuple[str, ...] = adapter_option(
        same("vtp_lora_targets", separator=" "),
        (),
        "NAME",
        help=f"with --vtp-lora-rank: what gets adapters, some of {', '.join(TARGET_NAMES)}, of which those that begin "
        "with linear are Megatron's layers and stand for all that they hold; default: all that the model has",
        nargs="+",
        parse=parse_targets,
    )
    lora_layers: tuple[str, ...] = adapter_option(same("vtp_lora_layers"), (), "0:4,28:32", parse=parse_layers)

    lora_save_base: bool = adapter_option(same("vtp_lora_save_base"), False)

    @property
    def lora(self) -> Lora | None:
        """The adapters that were asked for; None without any."""
        given = {
            "rank": self.lora_rank,
            "alpha": self.lora_alpha,
            "dropout": self.lora_dropout,
            "targets": self.lora_targets,
            "layers": ",".join(self.lora_layers),
        }
        found = {f"vtp_lora_{name}": value for name, value in given.items()}
        return lora_of({**found, "num_layer_list": self.parts_of_u})

    @property
    def parts_of_u(self) -> tuple[int, ...] | None:
        """Layers of every part of a U; None where ``--num-layer-list`` does not say them."""
        return None

    def check_adapters(self) -> None:
        """Reject adapters without a size, and what belongs to adapters without any."""
        if self.lora_rank is not None and self.lora_rank < 1:
            raise LayoutError(f"--vtp-lora-rank {self.lora_rank}; a rank is at least 1; give one, such as 16")
        if self.lora_alpha is not None and not (self.lora_alpha > 0 and math.isfinite(self.lora_alpha)):
            raise LayoutError(f"--vtp-lora-alpha {self.lora_alpha}; it is positive and finite; give twice the rank")
        others = {"alpha": self.lora_alpha, "targets": self.lora_targets, "layers": self.lora_layers}
        if named := [word for word in self.lora_layers if word in SITES and self.parts_of_u is None]:
            raise LayoutError(
                f"--vtp-lora-layers {named[0]} without --num-layer-list; that says what layers the sites of a U have; "
                "give it, or ranges of layers"
            )
        if not 0 <= self.lora_dropout < 1:
            raise LayoutError(f"--vtp-lora-dropout {self.lora_dropout}; it is a share below 1; give one, such as 0.05")
        others |= {"dropout": self.lora_dropout, "save-base": self.lora_save_base}
        for name, value in others.items():
            if value and self.lora_rank is None:
                raise LayoutError(
                    f"--vtp-lora-{name} without --vtp-lora-rank; only a rank makes adapters; give both or none"
                )
