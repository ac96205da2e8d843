"""``checkpoint import`` and ``checkpoint export``: published models, without a run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.hf.hf_model import free_flags, settings
from vtp_plugin.checkpoint.hf.import_note import padding_flag
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.parser import print_json
from vtp_plugin.cli.progress_bar import progress
from vtp_plugin.util.printable import plain

_GUIDE = "docs/hugging-face.md"


def add_import(actions: Any, end: Callable[[Any, Callable[[argparse.Namespace], None]], None]) -> None:
    """Declare ``import``.

    Args:
        actions: subparsers that the action is added to.
        end: declares the flags that all actions have.
    """
    parser = actions.add_parser(
        "import",
        help="make a checkpoint of a model as it is published on Hugging Face",
        description="Make a checkpoint of weights, which every layout loads, of a model as it is published on Hugging "
        "Face, and print the flags with which Megatron builds it. If it was killed, the same command goes on.",
        epilog=f"Which models, and what of their config: {_GUIDE}.\nKeys of --json: folder, family, num_bytes, flags "
        "(that must be given), free_flags, vocab_flag (for a tokenizer with fewer words), passed (fields of the config "
        "that change nothing).",
    )
    parser.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="folder with config.json and *.safetensors"
    )
    parser.add_argument(
        "--to", dest="target", type=Path, required=True, metavar="DIR", help="folder for --load; it must be new"
    )
    end(parser, _import)


def add_export(actions: Any, end: Callable[[Any, Callable[[argparse.Namespace], None]], None]) -> None:
    """Declare ``export``; as :func:`add_import`."""
    parser = actions.add_parser(
        "export",
        help="make a model as it is published on Hugging Face of a checkpoint",
        description="Make a folder that transformers loads of the weights of a checkpoint, whatever layout and form it "
        "was saved in.",
        epilog="Keys of --json: folder, family, num_bytes, num_files.",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of a checkpoint, or of several: the newest",
    )
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder to write to; it must be new")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="folder with config.json and the tokenizer; default: what an import has carried along",
    )
    end(parser, _export)


def _import(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.import_hf import plan_import, write_import

    plan = plan_import(options.hf, options.target)
    with progress(plan.num_bytes, "import") as on_written:
        write_import(plan, options.target, on_written)
    if plan.passed:
        names = plain(", ".join(plan.passed))
        print(f"passed over in config.json, since they change nothing: {names}", file=sys.stderr)
    flags, free = [each.text for each in settings(plan.model) if each.is_given], free_flags(plan.model)
    words = f"--padded-vocab-size {plan.model.vocab}"
    if options.json:
        facts = {"folder": str(options.target), "family": plan.model.family, "num_bytes": plan.num_bytes}
        lists = {"flags": flags, "free_flags": [*free], "vocab_flag": words, "passed": [*plan.passed]}
        print_json("checkpoint import", {**facts, **lists})
        return
    target = shlex.quote(str(options.target))
    print(f"wrote {options.target}: {format_bytes(plan.num_bytes)}; load it with --load {target}, and with:")
    print(" ".join(flags), " ".join(free), sep="\n")  # whole lines, so that they can be pasted
    print(
        f"a tokenizer with fewer words: {words}; before Megatron 0.15, or where a stage's size does not divide that: "
        f"{padding_flag(plan.model.vocab, 1)}, divided by the tensor-parallel size and rounded up"
    )


def _export(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.export_hf import find_like, plan_export, write_export

    contents = Contents(find_checkpoint(options.source))
    plan = plan_export(contents, options.like or find_like(contents, options.source), options.hf)
    with progress(plan.num_bytes, "export") as on_written:
        write_export(plan, options.hf, on_written)
    if plan.num_unproved:
        print(
            f"left out as padding: {plan.num_unproved} rows above the config's vocab_size; nothing here says how many "
            "words the run's tokenizer had; if more, give with --like a folder whose config.json has their number",
            file=sys.stderr,
        )
    if options.json:
        facts = {"folder": str(options.hf), "family": plan.model.family, "num_bytes": plan.num_bytes}
        print_json("checkpoint export", {**facts, "num_files": len(plan.files)})
        return
    count = "1 file" if len(plan.files) == 1 else f"{len(plan.files)} files"
    print(f"wrote {options.hf}: {format_bytes(plan.num_bytes)} in {count}, as transformers loads it")
