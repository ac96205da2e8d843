"""The note beside an import: which model the checkpoint is, so that a run with other flags is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from vtp_plugin.errors import ConfigError
from vtp_plugin.published.model import Model, Setting, settings

NOTE: Final = "vtp_model.json"
"""The name of the file."""
CARRIED: Final = "hugging_face"
"""The folder beside the checkpoint with the config and the tokenizer."""
RELEASE: Final = "release"
"""What Megatron calls weights without a step: it loads neither an optimizer nor random states with them."""


def dump_note(model: Model) -> str:
    """Write a note.

    >>> model = Model(family="llama", num_layers=2, hidden=64, heads=4, groups=2, head_dim=16, ffn=96, vocab=256,
    ...     max_positions=512, epsilon=1e-5, rotary_base=10000)
    >>> json.loads(dump_note(model))["settings"][0]
    ['--num-layers', 'num_layers', 2, False, True]
    """
    rows = [astuple(each) for each in settings(model)]
    return json.dumps({"version": 1, "family": model.family, "vocab": model.vocab, "settings": rows}, indent=1)


def contradictions(wanted: Iterable[Setting], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Compare flags with what Megatron's parser made of them.

    Args:
        wanted: the flags of a model.
        arguments: of a run; what it has not is not compared.

    Yields:
        For each that differs: what it is and what is expected, and the way out.

    >>> [*contradictions((Setting("--num-layers", "num_layers", 2),), {"num_layers": 4})]
    [('--num-layers is 4, and 2 is expected', 'give --num-layers 2')]
    >>> [*contradictions((Setting("--swiglu", "swiglu", True, is_switch=True),), {"swiglu": False})]
    [('--swiglu is not given, and is expected', 'give --swiglu')]
    """
    for each in wanted:
        found = arguments.get(each.argument, each.value)
        if each.is_switch and bool(found) != each.value:
            if each.is_given:
                yield f"{each.flag} is not given, and is expected", f"give {each.flag}"
            else:
                yield f"{each.flag} is given, and is not expected", f"leave {each.flag} out"
        elif not each.is_switch and found != each.value:
            yield f"{each.flag} is {found}, and {each.value} is expected", f"give {each.text}"


def check_note(load_dir: str, args: Any) -> Iterator[str]:
    """Say which flags of a run contradict the import that it loads; nothing where it loads something else.

    Args:
        load_dir: the folder, as in ``--load``; what is no path is not looked at.
        args: Megatron's, parsed.

    Yields:
        A line ``value; rule; way out``.

    Raises:
        ConfigError: the note is damaged.
    """
    file = Path(load_dir) / RELEASE / NOTE
    if "://" in load_dir or not file.is_file():
        return
    try:
        note = json.loads(file.read_text())
        wanted, vocab, family = [Setting(*row) for row in note["settings"]], int(note["vocab"]), str(note["family"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is damaged; it says which model was imported; import it again") from None
    rule = f"{load_dir} was imported as a model of the family {family}"
    for problem, way_out in contradictions(wanted, vars(args)):
        yield f"{problem}; {rule}; {way_out}"
    padded = getattr(args, "padded_vocab_size", None)
    if padded is not None and padded < vocab:
        yield (
            f"the vocabulary has {padded} words, padding included, and {vocab} are expected; {rule}; raise "
            "--vocab-size, or --make-vocab-size-divisible-by"
        )
