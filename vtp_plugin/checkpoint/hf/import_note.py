"""The note beside an import: which model the checkpoint is, so that a run with other flags is refused.

A run that loads an import stores in its checkpoints where that lies (:data:`ORIGIN`), and so do those that go on from
these: they are compared with the same note, and an export finds it. Who renames the file to :data:`ASIDE` goes on with
other flags on purpose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from vtp_plugin.checkpoint.hf.hf_model import HFModel, Setting, expected_settings, neutral_settings
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.megatron_flags import MEGATRON_FLAGS
from vtp_plugin.util.untrusted_files import read_json

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
    """
    for each in wanted:
        found = arguments.get(name_in(arguments, each.argument), each.value)
        if each.allows(found):
            continue
        is_left_out = each.value is None or (each.is_switch and not each.is_given)
        said = ("given" if found else "not given") if each.is_switch else found
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
        said = tuple(map(_setting, note["settings"]))
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


def _setting(row: Any) -> Setting:
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
    for found in contradictions(note.settings, {**vars(args), **flat_entries(_json_model(args))}):
        if not found.setting.is_of_function:
            yield f"{found.problem}; {rule}; {found.way_out}"
        elif not note.is_aside:
            yield f"{found.problem}; {rule}; {found.way_out}, or, where you mean it, {how_to_go_on(begin)}"
    padded = getattr(args, "padded_vocab_size", None)
    if padded is None and not getattr(args, "pad_vocab_size", True):
        padded = getattr(args, "vocab_size", None)
    if padded is not None and padded < note.vocab:
        sizes = getattr(args, "vtp_size_list", None) or [getattr(args, "tensor_model_parallel_size", 1)]
        yield (
            f"the vocabulary has {padded} words, padding included, and {note.vocab} are expected; {rule}; give "
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
