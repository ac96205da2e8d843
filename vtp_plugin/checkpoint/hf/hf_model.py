"""A published model, and the flags with which Megatron builds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vtp_plugin.checkpoint.hf.neutral_values import DENSE_FLAGS, ENTRIES, EXPERT_FLAGS, FLAGS, OF_FUNCTION, Value
from vtp_plugin.checkpoint.hf.vision_part import VisionPart
from vtp_plugin.host.megatron_flags import flag_named
from vtp_plugin.plan.model.gpt_model import GPTModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModel(GPTModel):
    """A GPT that was published, with what flags say of it besides sizes; its words are counted without padding.

    One that sees pictures is what MindSpeed-MM builds, of the entries of a JSON file instead of flags.

    Attributes:
        family: name of the family, the ``model_type`` of its config.
        max_positions: longest sequence that it was trained for.
        epsilon: epsilon of its norms.
        rotary_base: base of the rotary positions.
        rope_factor: factor by which the positions are stretched as in Llama 3; None if they are not.
        topk: number of experts of a token.
        is_topk_normalised: whether the weights of a token's experts add up to 1.
        dropout: dropout of attention.
        vision: the part that sees pictures; None without one.
        num_predicting: none has multi-token prediction.
        num_positions: positions are rotations.
        is_gated: all are.
        has_bias: none has biases but of queries, keys and values.
        has_norm_bias: all have RMSNorm.
        has_qkv_bias: see the base.
        has_query_norm: see the base.
        is_tied: see the base.
    """

    family: str
    max_positions: int
    epsilon: float
    rotary_base: int
    rope_factor: float | None = None
    topk: int = 0
    is_topk_normalised: bool = True
    dropout: float = 0.0
    vision: VisionPart | None = None
    num_predicting: int = 0
    num_positions: int = 0
    is_gated: bool = True
    has_bias: bool = False
    has_norm_bias: bool = False
    has_qkv_bias: bool = False
    has_query_norm: bool = False
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag of Megatron with its value, or an entry of MindSpeed-MM's JSON file of a model.

    Attributes:
        flag: name of the flag, or path of the entry.
        argument: name of the argument that is made of it; of an entry of which none is made, its path.
        value: value of that argument.
        is_switch: whether the flag takes no value.
        is_given: whether it must be given; else it must be left out.
        others: further values with which the same is computed; empty where a config says the value.
    """

    flag: str
    argument: str
    value: Value | list[int]
    is_switch: bool = False
    is_given: bool = True
    others: tuple[Value, ...] = ()

    @property
    def is_argument(self) -> bool:
        """Whether an argument is made of it."""
        return self.argument != self.flag

    @property
    def text(self) -> str:
        """The flag with its value, as one types it."""
        return self.flag if self.is_switch else f"{self.flag} {self.value}"

    @property
    def is_of_function(self) -> bool:
        """Whether another value changes what is computed, and no weight's shape."""
        return self.flag in OF_FUNCTION

    def allows(self, found: Any) -> bool:
        """Tell whether an argument is as it should be; a list for all layers, if each of its entries is.

        >>> setting = Setting("--moe-layer-freq", "moe_layer_freq", 1)
        >>> setting.allows(1), setting.allows([1, 1]), setting.allows([0, 1])
        (True, True, False)
        """
        if self.is_switch:
            return bool(found) == self.value
        entries = found if isinstance(found, list | tuple) else [found]
        return found == self.value or all(each in (self.value, *self.others) for each in entries)


def settings(model: HFModel) -> tuple[Setting, ...]:
    """Return the flags with which Megatron builds a model, those among them that must be left out.

    >>> model = HFModel(family="llama", num_layers=2, hidden=64, heads=4, groups=2, kv_channels=16, ffn=96, vocab=256,
    ...     max_positions=512, epsilon=1e-5, rotary_base=10000, is_tied=True)
    >>> [each.text for each in settings(model) if each.is_given][:3]
    ['--num-layers 2', '--hidden-size 64', '--ffn-hidden-size 96']
    """
    return tuple(_settings(model) if model.vision is None else _entries(model, model.vision))


def neutral_settings(*, has_experts: bool, is_seeing: bool) -> tuple[Setting, ...]:
    """Return what must not be given otherwise beside a model of a family, though no config says it.

    Args:
        has_experts: whether the family has experts.
        is_seeing: whether it sees pictures.

    >>> [each.text for each in neutral_settings(has_experts=False, is_seeing=False) if not each.is_switch][:1]
    ['--rotary-percent 1.0']
    """
    rows = ENTRIES if is_seeing else (*FLAGS, *(EXPERT_FLAGS if has_experts else DENSE_FLAGS))
    return tuple(
        Setting(
            row.flag,
            row.flag.removeprefix("--").replace("-", "_"),
            row.values[0],
            is_switch=isinstance(row.values[0], bool),
            is_given=False,
            others=(*row.values[1:], None),  # nobody says otherwise
        )
        for row in rows
    )


def expected_settings(model: HFModel) -> tuple[Setting, ...]:
    """Return all with which a run is compared: :func:`settings`, and what must not be given otherwise."""
    neutral = neutral_settings(has_experts=model.experts is not None, is_seeing=model.vision is not None)
    return (*settings(model), *neutral)


def _entries(model: HFModel, vision: VisionPart) -> Iterator[Setting]:
    # MindSpeed-MM makes arguments of these.
    sizes = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
    }
    for name, value in sizes.items():
        yield Setting(f"text_decoder.{name}", name, value)
    others = {
        # Its argument is changed by Megatron, which counts the operations of a step.
        "num_query_groups": model.groups,
        "layernorm_epsilon": model.epsilon,
        "rope_theta": float(model.rotary_base),
        "untie_embeddings_and_output_weights": not model.is_tied,
    }
    for path, value in (*((f"text_decoder.{name}", value) for name, value in others.items()), *vision.entries()):
        yield Setting(path, path, value)


def _settings(model: HFModel) -> Iterator[Setting]:
    yield _setting("--num-layers", model.num_layers)
    yield _setting("--hidden-size", model.hidden)
    yield _setting("--ffn-hidden-size", model.ffn)
    yield _setting("--num-attention-heads", model.heads)
    if model.groups != model.heads:
        yield _switch("--group-query-attention")
        yield _setting("--num-query-groups", model.groups)
    yield _setting("--kv-channels", model.kv_channels)
    yield _setting("--position-embedding-type", "rope")
    yield _setting("--rotary-base", model.rotary_base)
    yield _switch("--use-rope-scaling", model.rope_factor is not None)
    if model.rope_factor is not None:
        yield _setting("--rope-scaling-factor", model.rope_factor)
    yield _setting("--normalization", "RMSNorm")
    yield _setting("--norm-epsilon", model.epsilon)
    yield _switch("--swiglu")
    yield _setting("--disable-bias-linear", value=False)
    yield _switch("--add-qkv-bias", model.has_qkv_bias)
    yield _switch("--qk-layernorm", model.has_query_norm)
    yield _switch("--untie-embeddings-and-output-weights", not model.is_tied)
    if model.experts is not None:
        yield _setting("--num-experts", model.experts.number)
        yield _setting("--moe-router-topk", model.topk)
        yield _setting("--moe-ffn-hidden-size", model.experts.ffn)
        yield _switch("--moe-router-pre-softmax", not model.is_topk_normalised)


def _setting(name: str, value: int | float | str | bool, *, is_given: bool = True) -> Setting:
    flag = flag_named(name)
    return Setting(name, flag.argument, value, is_switch=flag.is_switch, is_given=is_given)


def _switch(name: str, is_given: bool = True) -> Setting:
    return _setting(name, is_given, is_given=is_given)


def free_flags(model: HFModel) -> tuple[str, ...]:
    """Return flags that a run may give otherwise than the model was published with: lengths, and dropout."""
    return (
        f"--max-position-embeddings {model.max_positions}",
        f"--attention-dropout {model.dropout}",
        "--hidden-dropout 0.0",
    )
