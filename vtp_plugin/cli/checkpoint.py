"""``checkpoint``: what a checkpoint holds, whether it is whole, and how it compares with another, without a run.

Exit code: 0, all is well, or equal to the last bit; 1, something is broken, or differs; 2, it cannot be read.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.manifest import MANIFEST
from vtp_plugin.checkpoint.format.optimizer_formats import BY_BLOCK, IN_MODEL_SPACE
from vtp_plugin.checkpoint.save.edge_key_file import EDGE_KEY, read_kept_key, write_edge_key
from vtp_plugin.checkpoint.tools.reshardable import form_for_any, loses_random_states, note_of_experts
from vtp_plugin.checkpoint.tools.verify import Verification
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.checkpoint_hf import add_export, add_import
from vtp_plugin.cli.checkpoint_show import facts_of, lines_of
from vtp_plugin.cli.parser import Parser, print_json
from vtp_plugin.cli.terminal import progress
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.own_command import own_command

if TYPE_CHECKING:
    from vtp_plugin.checkpoint.tools.compare_checkpoints import ComparedTensor

_MAX_NAMED = 5
_FOLDER = "folder of a checkpoint of the format torch_dist; of a folder of several, the newest is meant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    _add_show(actions)
    _add_verify(actions)
    _add_diff(actions)
    _add_reshard(actions)
    add_import(actions, _end)
    add_export(actions, _end)


def _add_show(actions: Any) -> None:
    show = actions.add_parser(
        "show",
        help="print what a checkpoint holds",
        description="Print iteration, sizes, form of the optimizer, and what is stored.",
        epilog="Keys of --json: folder, iteration, format, num_files, num_bytes, form, has_map, experts, steps, sizes "
        "(of every stage), tensors (key, state, dtype, shape, num_pieces, num_bytes).",
    )
    show.add_argument("folder", type=Path, metavar="DIR", help=_FOLDER)
    show.add_argument("--verbose", action="store_true", help="name every tensor, with type, shape, pieces and bytes")
    _end(show, _show)


def _add_verify(actions: Any) -> None:
    verify = actions.add_parser(
        "verify",
        help="read all of a checkpoint, and say what is damaged",
        description="Read all of a checkpoint: are all files there and complete, does every piece have the hash of its "
        "manifest, is every element stored once, does the map fit? Without a manifest: can each piece be read, are the "
        "checksums that torch.save writes right?",
        epilog="Exit code 0: all is intact; 1: something is damaged; 2: there is no manifest, and no index.\n"
        "Keys of --json: folder, problems.",
    )
    verify.add_argument("folder", type=Path, metavar="DIR", help=_FOLDER)
    _end(verify, _verify)


def _add_diff(actions: Any) -> None:
    diff = actions.add_parser(
        "diff",
        help="compare two checkpoints, tensor by tensor, whatever layout each was saved in",
        description="Compare weights, master weights, moments and steps, by name.",
        epilog="Exit code 0: all is equal to the last bit; 1: something differs; 2: a checkpoint cannot be read.\n"
        "Keys of --json: tensors (state, name, is_equal, problem, relative), steps (of A, of B), is_equal.",
    )
    diff.add_argument("a", type=Path, metavar="A", help=_FOLDER)
    diff.add_argument("b", type=Path, metavar="B", help="another one")
    diff.add_argument("--weights-only", action="store_true", help="leave the optimizers out")
    diff.add_argument("--verbose", action="store_true", help="name every tensor that differs")
    _end(diff, _diff)


def _add_reshard(actions: Any) -> None:
    reshard = actions.add_parser(
        "reshard",
        help="convert a checkpoint, so that any uniform Megatron of its version loads it with its optimizer",
        description="Write a copy of a checkpoint with its optimizer stored by parameter; what is stored so already is "
        "copied as it is. If it was stopped, the same command resumes it.",
        epilog="Keys of --json: folder, form, num_pieces, num_bytes, num_bytes_found (written by an earlier attempt), "
        "experts (which layouts load their optimizer; null without experts).",
    )
    reshard.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help=_FOLDER)
    reshard.add_argument(
        "--to", dest="target", type=Path, required=True, metavar="DIR", help="folder for --load; it must be new"
    )
    reshard.add_argument(
        "--form",
        choices=[IN_MODEL_SPACE, BY_BLOCK],
        help=f"of a distributed optimizer: {BY_BLOCK} for Megatron 0.12 to 0.14, {IN_MODEL_SPACE} for 0.15 and later; "
        "by default that of the Megatron that wrote it",
    )
    _end(reshard, _reshard)


def _end(parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], None]) -> None:
    """Declare what all actions have."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(action=action)


def run(options: argparse.Namespace) -> None:
    """Do what was asked for."""
    if options.unknown:
        raise ConfigError(f"{options.unknown[0]} is unknown; see: {own_command()} checkpoint --help")
    options.action(options)


def _show(options: argparse.Namespace) -> None:
    facts = facts_of(Contents(find_checkpoint(options.folder)))
    if options.json:
        print_json("checkpoint show", facts)
    else:
        print("\n".join(lines_of(facts, is_verbose=options.verbose)))


def _verify(options: argparse.Namespace) -> None:
    work = Verification(find_checkpoint(options.folder, takes_any=True))
    problems: list[str] = []
    with progress(work.num_bytes, "verify") as on_read:
        for problem in work.problems(on_read):
            problems.append(problem)
            if not options.json:
                print(problem)
    if options.json:
        print_json("checkpoint verify", {"folder": str(work.folder), "problems": problems})
    elif not problems:
        how = "" if work.manifest is not None else f"; it has no {MANIFEST}, so sums of torch.save were compared"
        print(f"{work.folder} is intact: {format_bytes(work.num_bytes)} were read{how}")
    sys.exit(1 if problems else 0)


def _diff(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.load.masters import require_masters
    from vtp_plugin.checkpoint.tools.compare_checkpoints import Comparison

    a, b = (Contents(find_checkpoint(folder)) for folder in (options.a, options.b))
    for each in () if options.weights_only else (a, b):
        require_masters(each)
    comparison = Comparison(a, b, is_weights_only=options.weights_only)
    found: list[ComparedTensor] = []
    with progress(len(comparison.keys), "diff", is_bytes=False) as on_compared:
        for each in comparison:
            found.append(each)
            on_compared(1)
    steps = [] if options.weights_only else [a.steps(), b.steps()]
    is_equal = all(each.is_equal for each in found) and (not steps or steps[0] == steps[1])
    if options.json:
        tensors = [{name: getattr(each, name) for name in each.__slots__} for each in found]
        print_json("checkpoint diff", {"tensors": tensors, "steps": steps, "is_equal": is_equal})
    else:
        for line in (*_lines(found, sys.maxsize if options.verbose else _MAX_NAMED), *_steps(*steps)):
            print(line)
    sys.exit(0 if is_equal else 1)


def _lines(found: list[ComparedTensor], most: int) -> Iterator[str]:
    """Write a line for each state, and one for each of some tensors that differ; the largest differences first."""
    for state, group in groupby(found, key=lambda each: each.state):
        of_state = list(group)
        other = sorted(
            (each for each in of_state if not each.is_equal), key=lambda each: (not each.problem, -each.relative)
        )
        verdict = f"{len(other)} differ" if other else "equal to the last bit"
        yield f"{state}: {len(of_state)} tensors, {verdict}"
        for each in other[:most]:
            yield f"  {each.name}: {each.problem or f'at most {each.relative:.2g} of the largest value'}"
        if len(other) > most:
            yield f"  ... {len(other) - most} more; --verbose names all"


def _steps(ours: list[float] | None = None, theirs: list[float] | None = None) -> Iterator[str]:
    if ours is not None and theirs is not None and (ours or theirs):
        texts = [", ".join(f"{step:g}" for step in steps) or "none" for steps in (ours, theirs)]
        yield f"steps: {texts[0]}" + ("" if ours == theirs else f" in A, {texts[1]} in B")


def _reshard(options: argparse.Namespace) -> None:
    contents = Contents(find_checkpoint(options.source))
    form = form_for_any(contents, options.form)
    from vtp_plugin.checkpoint.load.masters import require_masters
    from vtp_plugin.checkpoint.tools.reshard import reshard
    from vtp_plugin.checkpoint.tools.staging import holding, writing_to

    if form != contents.form:
        require_masters(contents)
    name = contents.folder.resolve().name
    if not re.fullmatch(r"iter_\d{7,}|release", name):
        name = f"iter_{contents.common.get('iteration') or 0:07d}"
    target = options.target / name
    kept = contents.folder.parent
    key = read_kept_key(kept, f"--from {options.source}") if (kept / EDGE_KEY).exists() else None
    work, ending = reshard(contents, target, form)
    total = sum(piece.num_bytes for piece in work.pieces)
    with progress(total, "reshard") as on_written, holding(options.target):
        found = work.find_written()
        on_written(found)
        with writing_to(target):
            work.write(ending, on_written)
            if key is not None:
                write_edge_key(options.target, key)
    if options.json:
        counts = {"num_pieces": len(work.pieces), "num_bytes": total, "num_bytes_found": found}
        said = {"folder": str(target), "form": form, **counts, "experts": note_of_experts(contents)}
        print_json("checkpoint reshard", said)
        return
    before = f", {format_bytes(found)} of it by an earlier attempt" if found else ""
    print(f"wrote {target}: {format_bytes(total)}{before}; load it with --load {shlex.quote(str(options.target))}")
    if form == contents.form:
        held = "there is no optimizer" if form is None else f"the optimizer was {form} before, and is copied"
        print(f"{held}: any layout loads that")
    if key is not None:
        print(f"{EDGE_KEY}, the key of the edge's layers, is copied, too; leave it out of what you give away")
    if note := note_of_experts(contents):
        print(note)
    if loses_random_states(contents):
        print("random states are left out: those of unequal stages have no place in another layout")
