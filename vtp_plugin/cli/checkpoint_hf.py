"""``checkpoint import`` and ``checkpoint export``: published models, without a run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.hf.hf_model import HFModel, free_flags, settings
from vtp_plugin.checkpoint.hf.import_note import padding_flag
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.parser import print_json
from vtp_plugin.cli.terminal import progress
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.printable import plain

if TYPE_CHECKING:
    from vtp_plugin.checkpoint.tools.import_hf import Import

_GUIDE = "docs/guides/hugging-face.md"


def add_import(actions: Any, end: Callable[[Any, Callable[[argparse.Namespace], None]], None]) -> None:
    """Declare ``import``.

    Args:
        actions: subparsers that the action is added to.
        end: declares the flags that all actions have.
    """
    parser = actions.add_parser(
        "import",
        help="make a checkpoint of a model as it is published on Hugging Face, or converted by MindSpeed-MM",
        description="Make a checkpoint of weights, which every layout loads, of a model as it is published on Hugging "
        "Face, or of the trees that MindSpeed-MM's converters write, and print the flags with which Megatron builds "
        "it. If it was killed, the same command resumes it.",
        epilog=f"Which models, and what of their config: {_GUIDE}.\nKeys of --json: folder, family, num_bytes, flags "
        "(that must be given), free_flags, vocab_flag (for a tokenizer with fewer words), passed (fields of the config "
        "that change nothing), entries (of MindSpeed-MM's --mm-model, by their paths; null for other models).",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, metavar="DIR", help="folder with config.json and *.safetensors")
    source.add_argument(
        "--mm",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folders that MindSpeed-MM's hf_to_mm_ldt has written: the edge's and the cloud's; or one of hf_to_mm",
    )
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="with --mm: folder of the model that was converted, with config.json"
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
    from vtp_plugin.checkpoint.tools.import_hf import write_import

    plan = _plan_import(options)
    with progress(plan.num_bytes, "import") as on_written:
        write_import(plan, options.target, on_written)
    if plan.passed:
        names = plain(", ".join(plan.passed))
        print(f"passed over in config.json, since they change nothing: {names}", file=sys.stderr)
    model = plan.model
    if options.json:
        facts = {"folder": str(options.target), "family": model.family, "num_bytes": plan.num_bytes}
        print_json("checkpoint import", {**facts, **_flags_of(model), "passed": [*plan.passed]})
        return
    wrote = f"wrote {options.target}: {format_bytes(plan.num_bytes)}; load it with --load"
    told = _flags_of(model)
    if model.vision is not None:
        print(f"{wrote} {shlex.quote(str(options.target))} {' '.join(told['flags'])}; --mm-model needs these entries:")
        print("\n".join(f"{path} {value}" for path, value in told["entries"].items()))
        return
    print(f"{wrote} {shlex.quote(str(options.target))}, and with:")
    print(" ".join(told["flags"]), " ".join(told["free_flags"]), sep="\n")  # whole lines, so that they can be pasted
    print(
        f"a tokenizer with fewer words: {told['vocab_flag']}; before Megatron 0.15, or where a stage's size does not "
        f"divide that: {padding_flag(model.vocab, 1)}, divided by the tensor-parallel size and rounded up"
    )


def _plan_import(options: argparse.Namespace) -> Import:
    from vtp_plugin.checkpoint.tools.import_hf import plan_import
    from vtp_plugin.checkpoint.tools.import_mm import plan_import_mm

    if options.hf is not None:
        if options.like is not None:
            raise ConfigError(f"--like {options.like} with --hf; --hf has a config of its own; leave it out")
        return plan_import(options.hf, options.target)
    if len(options.mm) > 2:
        raise ConfigError(f"--mm with {len(options.mm)} folders; there are two sides; give the edge's and the cloud's")
    if options.like is None:
        raise ConfigError(
            "--mm without --like; the trees do not say how many heads the model has; give the folder of the model that "
            "was converted, with config.json"
        )
    return plan_import_mm(options.mm, options.like, options.target)


def _flags_of(model: HFModel) -> dict[str, Any]:
    """Return how a run builds a model: flags of Megatron, or entries of MindSpeed-MM's JSON file."""
    if model.vision is None:
        flags, free = [each.text for each in settings(model) if each.is_given], [*free_flags(model)]
        return {"flags": flags, "free_flags": free, "vocab_flag": f"--padded-vocab-size {model.vocab}", "entries": None}
    entries = {each.flag: each.value for each in settings(model)}
    flags = ["--ckpt-format torch_dist"]
    return {
        "flags": flags,
        "free_flags": [],
        "vocab_flag": None,
        "entries": {**entries, "text_decoder.vocab_size": model.vocab},
    }


def _export(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.export_hf import find_like, plan_export, write_export

    contents = Contents(find_checkpoint(options.source))
    plan = plan_export(contents, options.like or find_like(contents, options.source), options.hf)
    with progress(plan.num_bytes, "export") as on_written:
        write_export(plan, options.hf, on_written)
    if plan.said:
        print(plan.said, file=sys.stderr)
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
