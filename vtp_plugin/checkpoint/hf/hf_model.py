"""A published model: its family, its sizes, its vision part.

What must not be given beside a published model: options that change what it computes, whatever its shapes say.

A test tries every option of Megatron about the model and its experts: it is here, or logits stay as they are.

The note beside an import: which model the checkpoint is, so that a run with other flags is refused.

A run that loads an import stores in its checkpoints where that lies (:data:`ORIGIN`), and so do those that go on from
these: they are compared with the same note, and an export finds it. Who renames the file to :data:`ASIDE` goes on with
other flags on purpose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.megatron_flags import MEGATRON_FLAGS, flag_named
from vtp_plugin.plan.model.gpt_model import GPTModel, VisionTower
from vtp_plugin.util.text import argument_of
from vtp_plugin.util.typed_json import read_json

LOW: Final = 1.0
"""``low_freq_factor``, which Megatron has in its code."""
HIGH: Final = 4.0
"""``high_freq_factor``, likewise."""
ORIGINAL: Final = 8192
"""``original_max_position_embeddings``, likewise."""
# Far above what rounding to 32 bits does, far below what a factor does.
_TOLERANCE: Final = 1e-4


def frequencies(size: int, base: float, factor: float) -> list[float]:
    """Return the frequencies of rotary positions, slow ones stretched as in Llama 3.

    Follows https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py.

    Args:
        size: size of the part of a head that is rotated.
        base: base of the rotary positions.
        factor: factor by which positions are stretched; 1 leaves them as they are.

    >>> [round(each, 9) for each in frequencies(8, 500000.0, 32.0)]
    [1.0, 0.037606031, 0.000429557, 1.662e-06]
    """
    plain = [base ** (-2 * i / size) for i in range(size // 2)]
    return [each * (share + (1 - share) / factor) for each, share in zip(plain, _kept(plain), strict=True)]


def factor_of(found: Sequence[float], base: float) -> float | None:
    """Return the factor that frequencies were stretched by; None if they do not tell, or are others.

    Args:
        found: all frequencies.
        base: base of the rotary positions.

    >>> round(factor_of(frequencies(64, 500000.0, 8.0), 500000.0), 4), factor_of([1.0, 0.5, 0.1, 1e-6], 500000.0)
    (8.0, None)
    >>> factor_of(frequencies(4, 10.0, 8.0), 10.0)  # none of them is slow enough
    """
    size = 2 * len(found)
    plain = frequencies(size, base, 1.0)
    (*_, share), last = _kept(plain), found[-1] / plain[-1]
    if share == 1 or last <= share:
        return None
    factor = (1 - share) / (last - share)
    expected = frequencies(size, base, factor)
    is_so = all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(found, expected, strict=True))
    return factor if is_so else None


def problem_of_factor(found: Sequence[float], base: float, factor: float) -> Iterator[str]:
    """Say where a model's positions are stretched by another factor than the flag says.

    Args:
        found: frequencies of the model.
        base: base of its rotary positions.
        factor: factor that the flag gives.

    Yields:
        A line ``value; rule; way out``.

    >>> [*problem_of_factor(frequencies(64, 5e5, 8.0), 5e5, 8.0)]
    []
    >>> [line.partition(";")[0] for line in problem_of_factor(frequencies(64, 5e5, 8.0), 5e5, 32.0)]
    ['--rope-scaling-factor is 32, and the model was built with 8']
    """
    built = factor_of(found, base)
    if built is not None and not math.isclose(built, factor, rel_tol=_TOLERANCE):
        yield (
            f"--rope-scaling-factor is {factor:g}, and the model was built with {built:.6g}; the script does not hand "
            "the flag on, and the model would train with other positions than the flag says; give GPTModel "
            "rope_scaling_factor=args.rope_scaling_factor"
        )


def _kept(plain: Sequence[float]) -> list[float]:
    """Return the share of each frequency that stays: 1 for fast ones, 0 for slow ones, a ramp between them."""
    turns = (ORIGINAL * each / (2 * math.pi) for each in plain)
    return [min(max((each - LOW) / (HIGH - LOW), 0.0), 1.0) for each in turns]


Value = int | float | str | bool | None
_SWITCHES: Final = (
    *("--rotary-interleaved", "--qk-l2-norm", "--apply-layernorm-1p", "--apply-residual-connection-post-layernorm"),
    *("--squared-relu", "--quick-geglu", "--openai-gelu", "--use-mup"),
)
_EXPERT_SWITCHES: Final = ("--moe-router-force-load-balancing", "--moe-apply-probs-on-input")
_TEXT, _SEEING, _PROJECTOR = "text_decoder.", "image_encoder.vision_encoder.", "image_encoder.vision_projector."


@dataclass(frozen=True, slots=True)
class Neutral:
    """A flag of Megatron, or an entry of MindSpeed-MM's JSON file by its path, with the values that change nothing.

    Attributes:
        flag: name of the flag, or path of the entry.
        values: first what is so where nobody gives it, False of a switch; then what computes the same.
        has_weights: whether other values add weights to the model, which an import does not have.
    """

    flag: str
    values: tuple[Value, ...] = (None,)
    has_weights: bool = False


FLAGS: Final = (
    *(Neutral(flag, (False,)) for flag in _SWITCHES),
    Neutral("--rotary-percent", (1.0,)),
    Neutral("--rotary-seq-len-interpolation-factor", (None, 1)),
    Neutral("--no-rope-freq", (None, 0)),
    Neutral("--window-size"),
    Neutral("--glu-linear-offset", (0.0,)),
    Neutral("--activation-func-clamp-value"),
    Neutral("--softmax-type", ("vanilla",), has_weights=True),
    Neutral("--attention-output-gate", (False,), has_weights=True),
    Neutral("--multi-latent-attention", (False,), has_weights=True),
    Neutral("--experimental-attention-variant", has_weights=True),
    Neutral("--heterogeneous-layers-config-path", has_weights=True),
    Neutral("--mtp-num-layers", (None, 0), has_weights=True),
)
"""Of every family."""
DENSE_FLAGS: Final = (Neutral("--num-experts", has_weights=True),)
"""Of families without experts, besides."""
EXPERT_FLAGS: Final = (
    *(Neutral(flag, (False,)) for flag in _EXPERT_SWITCHES),
    Neutral("--moe-router-score-function", ("softmax",)),
    Neutral("--moe-router-topk-scaling-factor", (None, 1.0)),
    Neutral("--moe-router-group-topk"),
    # The others weigh a loss, and choose the experts alike.
    Neutral("--moe-router-load-balancing-type", ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")),
    Neutral("--moe-router-force-biased"),
    Neutral("--moe-input-jitter-eps", (None, 0.0)),
    Neutral("--moe-expert-capacity-factor"),
    Neutral("--moe-mlp-glu-interleave-size"),
    Neutral("--moe-layer-freq", (1,), has_weights=True),
    Neutral("--moe-router-enable-expert-bias", (False,), has_weights=True),
    Neutral("--moe-shared-expert-intermediate-size", has_weights=True),
    Neutral("--moe-latent-size", has_weights=True),
)
"""Of families with experts, besides."""
ENTRIES: Final = (
    Neutral(f"{_TEXT}position_embedding_type", ("mrope",)),
    Neutral(f"{_TEXT}rope_scaling.type", ("mrope", "default")),
    Neutral(f"{_TEXT}rope_scaling.factor", (1.0,)),
    Neutral(f"{_TEXT}rotary_interleaved", (False,)),
    Neutral(f"{_TEXT}window_size"),
    Neutral(f"{_TEXT}softmax_scale"),
    Neutral(f"{_TEXT}activation_func", ("silu",)),
    Neutral(f"{_TEXT}layernorm_zero_centered_gamma", (False,)),
    Neutral(f"{_TEXT}apply_residual_connection_post_layernorm", (False,)),
    Neutral(f"{_SEEING}activation_func", ("silu",)),
    Neutral(f"{_SEEING}layernorm_epsilon", (1e-6,)),
    Neutral(f"{_PROJECTOR}activation_func", ("gelu",)),
    Neutral(f"{_PROJECTOR}layernorm_epsilon", (1e-6,)),
)
"""Of a model that sees pictures, instead."""
_SAID = (
    *("--rotary-base", "--use-rope-scaling", "--rope-scaling-factor", "--norm-epsilon", "--moe-router-topk"),
    *("--moe-router-pre-softmax", f"{_TEXT}rope_theta", f"{_TEXT}layernorm_epsilon", f"{_TEXT}mrope_section"),
)
OF_FUNCTION: Final = frozenset(
    {*_SAID, *(each.flag for each in (*FLAGS, *EXPERT_FLAGS, *ENTRIES) if not each.has_weights)}
)
"""All that changes what is computed and no weight's shape, with what a model's config says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """The part of a model that sees, and what else its pictures need.

    Attributes:
        tower: sizes of the vision tower and the projector.
        sections: numbers of the channels whose positions are times, heights and widths.
        window: width in pixels of the windows that attention keeps to.
        whole_layers: numbers of the layers with attention to all of a picture.
        tokens_per_second: number of places in time that a second of a video has.
        picture_word: number of the word that stands where a picture does.
        start_word: number of the word before a picture.
    """

    tower: VisionTower
    sections: tuple[int, ...]
    window: int
    whole_layers: tuple[int, ...]
    tokens_per_second: int
    picture_word: int
    start_word: int

    def entries(self) -> Iterator[tuple[str, int | list[int]]]:
        """Yield the entries of MindSpeed-MM's JSON file that follow, by their paths in it."""
        tower = self.tower
        yield "text_decoder.mrope_section", [*self.sections]
        vision = {
            "num_layers": tower.num_layers,
            "hidden_size": tower.hidden,
            "ffn_hidden_size": tower.ffn,
            "num_attention_heads": tower.heads,
            "in_channels": tower.channels,
            "patch_size": tower.patch,
            "spatial_merge_size": tower.merge,
            "temporal_patch_size": tower.frames,
            "tokens_per_second": self.tokens_per_second,
            "window_attn_size": self.window,
            "fullatt_block_indexes": [*self.whole_layers],
        }
        projector = {"input_size": tower.hidden, "hidden_size": tower.out, "ffn_hidden_size": tower.merged}
        for part, entries in (("vision_encoder", vision), ("vision_projector", projector)):
            for name, value in entries.items():
                yield f"image_encoder.{part}.{name}", value
        yield "img_context_token_id", self.picture_word
        yield "vision_start_token_id", self.start_word


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
    def is_inverted(self) -> bool:
        """Whether it is a switch that stores the opposite, as ``--disable-bias-linear`` does."""
        return self.is_switch and bool(self.value) != self.is_given

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
            argument_of(row.flag),
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


NOTE: Final = "vtp_model.json"
"""The name of the file."""
ASIDE: Final = f"{NOTE}.aside"
"""Its name where it was left aside: no flag that changes the function of the model is compared then."""
ORIGIN: Final = "vtp_import"
"""The argument of a run that says in which folder the import lies that it began with, and how many words that had."""
CARRIED: Final = "hugging_face"
"""The folder beside the checkpoint with the config and the tokenizer."""
RELEASE: Final = "release"
"""What Megatron calls weights without a step: it loads neither an optimizer nor random states with them."""

_OTHER_NAMES: Final = MappingProxyType({flag.argument: flag.renamed for flag in MEGATRON_FLAGS if flag.renamed})
_FOLLOWS: Final = MappingProxyType({"add_qkv_bias": "add_bias_linear"})  # Megatron sets the one where the other is set
_NOT_TAKEN: Final = tuple(flag.argument for flag in MEGATRON_FLAGS if not flag.is_taken)


def dump_note(model: HFModel) -> str:
    """Write a note.

    >>> model = HFModel(family="llama", num_layers=2, hidden=64, heads=4, groups=2, kv_channels=16, ffn=96, vocab=256,
    ...     max_positions=512, epsilon=1e-5, rotary_base=10000)
    >>> json.loads(dump_note(model))["settings"][0]
    ['--num-layers', 'num_layers', 2, False, True, []]
    """
    rows = [astuple(each) for each in expected_settings(model)]
    return json.dumps({"version": 2, "family": model.family, "vocab": model.vocab, "settings": rows}, indent=1)


def name_in(arguments: Mapping[str, Any], argument: str) -> str:
    """Return the name that an argument has in a run: newer Megatrons name some as the field that they come to.

    >>> name_in({"layernorm_epsilon": 1e-5}, "norm_epsilon"), name_in({"norm_epsilon": 1e-5}, "norm_epsilon")
    ('layernorm_epsilon', 'norm_epsilon')
    """
    other = _OTHER_NAMES.get(argument, argument)
    return other if other in arguments else argument


class Contradiction(NamedTuple):
    """A flag that is not as a model's.

    Attributes:
        problem: its value with the expected one.
        way_out: what to give instead.
        setting: how it should be.
    """

    problem: str
    way_out: str
    setting: Setting


def contradictions(wanted: Iterable[Setting], arguments: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Compare flags with what Megatron's parser made of them.

    Args:
        wanted: the flags of a model.
        arguments: arguments of a run; those that it does not have are not compared.

    >>> [found] = contradictions((Setting("--num-layers", "num_layers", 2),), {"num_layers": 4})
    >>> found.problem, found.way_out
    ('--num-layers is 4, and 2 is expected', 'give --num-layers 2')
    >>> [found] = contradictions((Setting("--swiglu", "swiglu", True, is_switch=True),), {"swiglu": False})
    >>> found.problem, found.way_out
    ('--swiglu is not given, and is expected', 'give --swiglu')
    >>> [found] = contradictions((Setting("--window-size", "window_size", None),), {"window_size": (6, 0)})
    >>> found.problem, found.way_out
    ('--window-size is (6, 0), and is not expected', 'leave --window-size out')
    >>> both = (
    ...     Setting("--disable-bias-linear", "add_bias_linear", False, is_switch=True),
    ...     Setting("--add-qkv-bias", "add_qkv_bias", False, is_switch=True, is_given=False),
    ... )
    >>> [found] = contradictions(both, {"add_bias_linear": True, "add_qkv_bias": True})
    >>> found.problem, found.way_out
    ('--disable-bias-linear is not given, and is expected', 'give --disable-bias-linear')
    """
    for each in wanted:
        found = arguments.get(name_in(arguments, each.argument), each.value)
        if each.allows(found) or (found and arguments.get(_FOLLOWS.get(each.argument, ""))):
            continue
        is_left_out = each.value is None or (each.is_switch and not each.is_given)
        said = ("given" if bool(found) != each.is_inverted else "not given") if each.is_switch else found
        expected = (
            "is not expected" if is_left_out else "is expected" if each.is_switch else f"{each.value} is expected"
        )
        way_out = f"leave {each.flag} out" if is_left_out else f"give {each.text}"
        yield Contradiction(f"{each.flag} is {said}, and {expected}", way_out, each)


@dataclass(frozen=True, slots=True)
class Note:
    """What a note says.

    Attributes:
        family: family of the model.
        vocab: number of the model's words, without padding.
        settings: what a run is compared with.
        is_aside: whether it was left aside.
    """

    family: str
    vocab: int
    settings: tuple[Setting, ...]
    is_aside: bool = False


def read_note(load_dir: str) -> Note | None:
    """Read the note of an import; None where a run loads something else.

    Args:
        load_dir: value of ``--load``; what is no path is not looked at.

    Raises:
        ConfigError: it is damaged.
    """
    release = Path(load_dir) / RELEASE
    file = next((release / name for name in (NOTE, ASIDE) if (release / name).is_file()), None)
    if "://" in load_dir or file is None:
        return None
    try:
        note = read_json(file)
        said = tuple(map(_setting_of_note, note["settings"]))
        # An older note, or that of a newer plugin, may not say all that this one compares.
        own = neutral_settings(
            has_experts="--num-experts" in [each.flag for each in said if each.is_given],
            is_seeing=any(not each.is_argument for each in said),
        )
        known = {each.flag for each in own}
        both = (*(each for each in said if each.flag not in known), *own)
        return Note(str(note["family"]), int(note["vocab"]), both, is_aside=file.name == ASIDE)
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is damaged; it says which model was imported; import it again") from None


def _setting_of_note(row: Any) -> Setting:
    """Read a setting.

    Raises:
        ValueError: it is none.
        TypeError: it is none.
    """
    *own, others = row if len(row) > 5 else (*row, ())
    read = Setting(*own, others=tuple(others))
    if [type(each) for each in (read.flag, read.argument, read.is_switch, read.is_given)] != [str, str, bool, bool]:
        raise ValueError("no flag")
    return read


def origin_of(load_dir: str | None, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what checkpoints of a run say of the import that it began with; None where it did not.

    Args:
        load_dir: folder that it loads from.
        arguments: arguments that are stored with what it loads, or its own.
    """
    if load_dir is not None and (note := read_note(load_dir)) is not None:
        return {"folder": str(Path(load_dir).absolute()), "vocab": note.vocab}
    match arguments.get(ORIGIN):
        case {"folder": str(folder), "vocab": int(vocab)} if folder.isprintable():
            return {"folder": folder, "vocab": vocab}
        case _:
            return None


def take_settings(load_dir: str, args: Any) -> None:
    """Set arguments of a run to those of the import that it loads, where Megatron does not take them from a checkpoint.

    Args:
        load_dir: value of ``--load``; what is no path is not looked at.
        args: Megatron's, parsed, with ``--use-checkpoint-args``.

    Raises:
        ConfigError: the note is damaged.
    """
    if (note := read_note(load_dir)) is not None:
        taken = (each for each in note.settings if each.argument in _NOT_TAKEN)
        vars(args).update({name_in(vars(args), each.argument): each.value for each in taken})


def check_note(load_dir: str, args: Any) -> Iterator[str]:
    """Say which flags of a run contradict the import that it loads, or began with; nothing in another run.

    Args:
        load_dir: value of ``--load``; what is no path is not looked at.
        args: Megatron's, parsed; with :data:`ORIGIN` where the checkpoint that is loaded has it.

    Yields:
        A line ``value; rule; way out``.

    Raises:
        ConfigError: the note is damaged.
    """
    origin = origin_of(load_dir, vars(args))
    if origin is None or (note := read_note(origin["folder"])) is None:
        return
    begin = load_dir if Path(load_dir).absolute() == Path(origin["folder"]) else origin["folder"]
    rule = f"{begin} was imported as a model of the family {note.family}"
    wrong = [
        each
        for each in contradictions(note.settings, {**vars(args), **flat_entries(_json_model(args))})
        if not (each.setting.is_of_function and note.is_aside)
    ]
    if wrong:
        ways = [each.way_out for each in wrong]
        if not all(each.setting.is_of_function for each in wrong):
            flags = " ".join(each.text for each in note.settings if each.is_given)
            ways = [f"start with the flags that the import printed: {flags}"]
        if meant := [each.setting.flag for each in wrong if each.setting.is_of_function]:
            ways[-1] += f", or, where you mean {' and '.join(meant)}, {how_to_go_on(begin)}"
        problems = "; ".join(each.problem for each in wrong)
        yield f"{rule}, which this run's flags are not: {problems}; {'; '.join(ways)}"
    padded = getattr(args, "padded_vocab_size", None)
    if padded is None and not getattr(args, "pad_vocab_size", True):
        padded = getattr(args, "vocab_size", None)
    if padded is not None and padded < note.vocab:
        sizes = getattr(args, "vtp_size_list", None) or [getattr(args, "tensor_model_parallel_size", 1)]
        yield (
            f"the vocabulary has {padded} tokens, padding included, and {note.vocab} are expected; {rule}; give "
            f"{padding_flag(note.vocab, math.lcm(sizes[0], sizes[-1]))}, and neither --padded-vocab-size nor "
            "--no-pad-vocab-size"
        )


def how_to_go_on(folder: str | Path) -> str:
    """Say how an import is trained, or exported, as another function than was published.

    Args:
        folder: folder of the import.
    """
    return f"rename {Path(folder) / RELEASE / NOTE} to {ASIDE}"


def _json_model(args: Any) -> Mapping[str, Any]:
    """Return what MindSpeed-MM's JSON file of the model says; nothing in another run."""
    model = getattr(getattr(args, "mm", None), "model", None)
    return {} if model is None else model.to_dict()


def flat_entries(entries: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the entries of a JSON file by their paths.

    >>> flat_entries({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, Mapping):
            found |= flat_entries(value, f"{path}{name}.")
        else:  # MindSpeed-MM puts functions in the place of their names
            found[path + name] = getattr(value, "__name__", value) if callable(value) else value
    return found


def padding_flag(num_words: int, multiple: int) -> str:
    """Return the flag with which Megatron pads the words of a tokenizer to those of a model, whatever the tokenizer is.

    A tokenizer with words of its own does not look at ``--vocab-size``, and before 0.15 Megatron has no
    ``--padded-vocab-size``.

    Args:
        num_words: number of the model's words; the tokenizer has no more.
        multiple: number that the padded vocabulary must also be a multiple of, for the stages that hold a part of it.

    >>> padding_flag(152064, 2), padding_flag(97, 2)
    ('--make-vocab-size-divisible-by 76032', '--make-vocab-size-divisible-by 49')
    """
    return f"--make-vocab-size-divisible-by {-(-num_words // multiple)}"
