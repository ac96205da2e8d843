"""The note beside an import: which model the checkpoint is, so that a run with other flags is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vtp_plugin.checkpoint.hf.hf_model import HFModel, Setting, settings
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.megatron_flags import MEGATRON_FLAGS
from vtp_plugin.util.untrusted_files import read_json

NOTE: Final = "vtp_model.json"
"""The name of the file."""
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
    ['--num-layers', 'num_layers', 2, False, True]
    """
    rows = [astuple(each) for each in settings(model)]
    return json.dumps({"version": 1, "family": model.family, "vocab": model.vocab, "settings": rows}, indent=1)


def name_in(arguments: Mapping[str, Any], argument: str) -> str:
    """Return the name that an argument has in a run: newer Megatrons name some as the field that they come to.

    >>> name_in({"layernorm_epsilon": 1e-5}, "norm_epsilon"), name_in({"norm_epsilon": 1e-5}, "norm_epsilon")
    ('layernorm_epsilon', 'norm_epsilon')
    """
    other = _OTHER_NAMES.get(argument, argument)
    return other if other in arguments else argument


def contradictions(wanted: Iterable[Setting], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Compare flags with what Megatron's parser made of them.

    Args:
        wanted: the flags of a model.
        arguments: arguments of a run; those that it does not have are not compared.

    Yields:
        For each flag that differs: its value with the expected one, and the way out.

    >>> [*contradictions((Setting("--num-layers", "num_layers", 2),), {"num_layers": 4})]
    [('--num-layers is 4, and 2 is expected', 'give --num-layers 2')]
    >>> [*contradictions((Setting("--swiglu", "swiglu", True, is_switch=True),), {"swiglu": False})]
    [('--swiglu is not given, and is expected', 'give --swiglu')]
    """
    for each in wanted:
        found = arguments.get(name_in(arguments, each.argument), each.value)
        if each.is_switch and bool(found) != each.value:
            if each.is_given:
                yield f"{each.flag} is not given, and is expected", f"give {each.flag}"
            else:
                yield f"{each.flag} is given, and is not expected", f"leave {each.flag} out"
        elif not each.is_switch and found != each.value:
            yield f"{each.flag} is {found}, and {each.value} is expected", f"give {each.text}"


@dataclass(frozen=True, slots=True)
class Note:
    """What a note says.

    Attributes:
        family: family of the model.
        vocab: number of the model's words, without padding.
        settings: the flags with which Megatron builds the model.
    """

    family: str
    vocab: int
    settings: tuple[Setting, ...]


def read_note(load_dir: str) -> Note | None:
    """Read the note of an import; None where a run loads something else.

    Args:
        load_dir: value of ``--load``; what is no path is not looked at.

    Raises:
        ConfigError: it is damaged.
    """
    file = Path(load_dir) / RELEASE / NOTE
    if "://" in load_dir or not file.is_file():
        return None
    try:
        note = read_json(file)
        return Note(str(note["family"]), int(note["vocab"]), tuple(map(_setting, note["settings"])))
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is damaged; it says which model was imported; import it again") from None


def _setting(row: Any) -> Setting:
    """Read a setting.

    Raises:
        ValueError: it is none.
        TypeError: it is none.
    """
    read = Setting(*row)
    if [type(each) for each in (read.flag, read.argument, read.is_switch, read.is_given)] != [str, str, bool, bool]:
        raise ValueError("no flag")
    return read


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
    """Say which flags of a run contradict the import that it loads; nothing where it loads something else.

    Args:
        load_dir: value of ``--load``; what is no path is not looked at.
        args: Megatron's, parsed.

    Yields:
        A line ``value; rule; way out``.

    Raises:
        ConfigError: the note is damaged.
    """
    if (note := read_note(load_dir)) is None:
        return
    rule = f"{load_dir} was imported as a model of the family {note.family}"
    for problem, way_out in contradictions(note.settings, {**vars(args), **flat_entries(_json_model(args))}):
        yield f"{problem}; {rule}; {way_out}"
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
        found |= flat_entries(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value}
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
