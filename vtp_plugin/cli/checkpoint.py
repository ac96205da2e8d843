"""`vtp checkpoint`: its subcommands.

``checkpoint``: what a checkpoint holds, whether it is whole, and how it compares with another, without a run.

Exit code: 0, all is well, or equal to the last bit; 1, something is broken, or differs; 2, it cannot be read.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents, kind_of
from vtp_plugin.checkpoint.format.index import MANIFEST
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, BY_BUCKET, BY_BUCKET_OLDER, BY_RANK, IN_MODEL_SPACE, PLAIN
from vtp_plugin.checkpoint.format.shard_map import MAP
from vtp_plugin.checkpoint.format.site_part import read_part, require_whole
from vtp_plugin.checkpoint.hf.hf_model import HFModel, free_flags, settings
from vtp_plugin.checkpoint.save.atomic_dir import EDGE_KEY, read_kept_key, write_edge_key
from vtp_plugin.checkpoint.tools.verify import Verification, form_for_any, loses_random_states, note_of_experts
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.command_base import Parser, add_json_flag, print_answer
from vtp_plugin.cli.terminal import progress
from vtp_plugin.config.flag import parse_layer_list, parse_sites
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.model.lora import arguments_of
from vtp_plugin.util.text import own_command, plain

if TYPE_CHECKING:
    from vtp_plugin.checkpoint.tools.compare_checkpoints import ComparedTensor
    from vtp_plugin.checkpoint.tools.import_hf import Import
    from vtp_plugin.checkpoint.tools.writer import Ending, PieceWriter


_SIZES = {
    "tp": ("vtp_size_list", "tensor_model_parallel_size"),
    "cp": ("vtp_cp_list", "context_parallel_size"),
    "dp": ("vtp_dp_list", "data_parallel_size"),
    "ep": ("vtp_ep_list", "expert_model_parallel_size"),
    "etp": ("vtp_etp_list", "expert_tensor_parallel_size"),
}
_MOVES = {
    IN_MODEL_SPACE: "any layout loads it",
    BY_BLOCK: "any layout of Megatron 0.12 to 0.15 loads it",
    BY_RANK: "only the layout that wrote it loads it; checkpoint reshard converts it for others",
    PLAIN: "any layout loads it",
}


def facts_of(contents: Contents) -> dict[str, Any]:
    """Return what there is to show, as JSON can hold it."""
    index = contents.index
    files = {extent.file for _, extent in index.extents()}
    return {
        "folder": contents.folder,
        "iteration": contents.common.get("iteration"),
        "format": "torch_dist",
        "num_files": len(files),
        "num_bytes": index.num_bytes,
        "form": contents.form,
        "has_map": contents.has_map,
        "experts": note_of_experts(contents),
        "steps": contents.steps() if contents.form is not None else [],
        "sizes": _sizes(contents.arguments),
        "tensors": [
            {
                "key": key,
                "state": kind_of(key),
                "dtype": tensor.dtype,
                "shape": list(tensor.flattened or tensor.shape),
                "num_pieces": len(tensor.extents),
                "num_bytes": sum(extent.length or 0 for _, extent in tensor.extents),
            }
            for key, tensor in index.tensors.items()
        ],
    }


def _sizes(arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the sizes of every stage, as far as the arguments say them; the last three only with more than one."""
    num_stages = arguments.get("pipeline_model_parallel_size") or 1
    found: dict[str, list[int]] = {}
    for name, (by_stage, of_all) in _SIZES.items():
        values = arguments.get(by_stage) or ([arguments[of_all]] * num_stages if arguments.get(of_all) else None)
        if values is not None:
            found[name] = list(values)
    return found


def lines_of(facts: Mapping[str, Any], *, is_verbose: bool) -> Iterator[str]:
    """Write what there is to show."""
    yield f"{facts['folder']}: iteration {facts['iteration']}, {facts['format']}"
    yield f"{format_bytes(facts['num_bytes'])} in {facts['num_files']} files"
    if sizes := facts["sizes"]:
        yield "saved with " + ", ".join(f"{name} {','.join(map(str, values))}" for name, values in sizes.items())
    yield from _of_optimizer(facts)
    states = dict.fromkeys(each["state"] for each in facts["tensors"])
    for state in states:
        tensors = [each for each in facts["tensors"] if each["state"] == state]
        dtypes = ", ".join(dict.fromkeys(each["dtype"] for each in tensors))
        size = format_bytes(sum(each["num_bytes"] for each in tensors))
        yield f"{state}: {len(tensors)} tensors, {dtypes}, {sum(each['num_pieces'] for each in tensors)} pieces, {size}"
        for each in tensors if is_verbose else ():
            shown = f"{each['dtype']} {each['shape']}, {each['num_pieces']} pieces, {format_bytes(each['num_bytes'])}"
            yield f"  {each['key']}: {shown}"


def _of_optimizer(facts: Mapping[str, Any]) -> Iterator[str]:
    form = facts["form"]
    if form is None:
        yield "no optimizer"
        return
    moves = _MOVES.get(form, "unknown to this version")
    if form in (BY_BUCKET, BY_BUCKET_OLDER):
        moves = (
            f"with {MAP}: any layout loads it"
            if facts["has_map"]
            else f"without {MAP}: any layout loads it if where its parameters lie can be worked out"
        )
    steps = ", ".join(f"{step:g}" for step in facts["steps"]) or "unknown"
    yield f"optimizer {form}, {moves}; steps {steps}"
    if facts["experts"]:
        yield facts["experts"]


_GUIDE = "docs/guides/hugging-face.md"


def _add_import(actions: Any) -> None:
    parser = actions.add_parser(
        "import",
        help="make a checkpoint of a model as it is published on Hugging Face, or converted by MindSpeed-MM",
        description="Make a checkpoint of weights, which every layout loads, of a model as it is published on Hugging "
        "Face, or of the trees that MindSpeed-MM's converters write, and print the flags with which Megatron builds "
        "it. If it was killed, the same command resumes it.",
        epilog=f"Which models, and what of their config: {_GUIDE}.\nKeys of --json: folder, family, num_bytes, flags "
        "(that must be given), free_flags, vocab_flag (for a tokenizer with fewer tokens), passed (fields of the "
        "config that change nothing), entries (of MindSpeed-MM's --mm-model, by their paths; null for other models).",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    _add_folder(source, "--hf", "folder with config.json and *.safetensors")
    converted = "folders that MindSpeed-MM's hf_to_mm_ldt has written: the edge's and the cloud's; or one of hf_to_mm"
    _add_folder(source, "--mm", converted, nargs="+")
    _add_folder(source, "--peft", "adapters (LoRA) that PEFT has saved: adapter_config.json and weights")
    model = "with --mm or --peft: folder, with config.json, of the model that was converted or that has the adapters"
    _add_folder(parser, "--like", model)
    _add_folder(parser, "--to", "folder for --load; it must be new", dest="target", required=True)
    _end(parser, _import)


def _add_export(actions: Any) -> None:
    parser = actions.add_parser(
        "export",
        help="make a model as it is published on Hugging Face of a checkpoint",
        description="Make a folder that transformers loads of the weights of a checkpoint, whatever layout and form it "
        "was saved in.",
        epilog="Keys of --json: folder, family, num_bytes, num_files.",
    )
    _add_folder(parser, "--from", "folder of a checkpoint, or of several: the newest", dest="source", required=True)
    to = parser.add_mutually_exclusive_group(required=True)
    _add_folder(to, "--hf", "folder to write to; it must be new")
    _add_folder(to, "--peft", "write the adapters alone to this new folder, as PEFT loads them")
    merged = "with --hf: folder of a checkpoint with adapters, which are added to the weights in fp32 and rounded once"
    _add_folder(parser, "--merge", merged)
    carried = "folder with config.json and the tokenizer; default: what an import has carried along"
    _add_folder(parser, "--like", carried)
    _end(parser, _export)


def _import(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.import_hf import write_import

    plan = _plan_import(options)
    with progress(plan.num_bytes, "import") as on_written:
        write_import(plan, options.target, on_written)
    if plan.passed:
        names = plain(", ".join(plan.passed))
        print(f"passed over in config.json, since they change nothing: {names}", file=sys.stderr)
    model, told = plan.model, _flags_of(plan.model)
    quoted = shlex.quote(str(options.target))
    wrote = f"wrote {options.target}: {format_bytes(plan.num_bytes)}; load it with --load {quoted}"
    if plan.lora is not None:
        layers = arguments_of(plan.lora)["vtp_lora_layers"]
        flags = [f"--vtp-lora-rank {plan.lora.rank}", f"--vtp-lora-alpha {plan.lora.alpha:g}"]
        flags.append(f"--vtp-lora-targets {' '.join(plan.lora.targets)}")
        flags += [f"--vtp-lora-layers {layers}"] if layers else []
        told["flags"] = flags
        lines = [f"{wrote}, its base with --pretrained-checkpoint, and with:", " ".join(flags)]
    elif model.vision is not None:
        lines = [f"{wrote} {' '.join(told['flags'])}; --mm-model needs these entries:"]
        lines += [f"{path} {value}" for path, value in told["entries"].items()]
    else:
        lines = [f"{wrote}, and with:", " ".join(told["flags"]), " ".join(told["free_flags"])]  # whole, to be pasted
        lines.append(f"if the tokenizer has fewer than {model.vocab} tokens, add {told['vocab_flag']}")
    facts = {"folder": options.target, "family": model.family, "num_bytes": plan.num_bytes}
    print_answer(options, {**facts, **told, "passed": plan.passed}, lines)


def _plan_import(options: argparse.Namespace) -> Import:
    from vtp_plugin.checkpoint.tools.import_hf import plan_import, plan_import_mm
    from vtp_plugin.checkpoint.tools.peft import plan_import_peft

    if options.hf is not None:
        if options.like is not None:
            raise ConfigError(f"--like {options.like} with --hf; --hf has a config of its own; leave it out")
        return plan_import(options.hf, options.target)
    if options.peft is not None:
        if options.like is None:
            raise ConfigError(
                f"--peft {options.peft} without --like; adapters do not say how many heads the model has; give the "
                "folder of the published model, with config.json"
            )
        return plan_import_peft(options.peft, options.like, options.target)
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
    entries = {each.flag: each.value for each in settings(model)} | {"text_decoder.vocab_size": model.vocab}
    return {"flags": ["--ckpt-format torch_dist"], "free_flags": [], "vocab_flag": None, "entries": entries}


def _export(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.export_hf import find_like, plan_export, write_export
    from vtp_plugin.checkpoint.tools.peft import read_adapters

    contents = Contents(find_checkpoint(options.source))
    require_whole(contents.folder)
    like = options.like or find_like(contents, options.source)
    if options.peft is not None:
        _export_peft(options, contents, like)
        return
    adapters = None if options.merge is None else read_adapters(Contents(find_checkpoint(options.merge)), like)
    plan = plan_export(contents, like, options.hf, adapters)
    with progress(plan.num_bytes, "export") as on_written:
        write_export(plan, options.hf, on_written)
    if plan.said:
        print(plan.said, file=sys.stderr)
    if plan.num_unproved:
        print(
            f"left out as padding: {plan.num_unproved} rows above the config's vocab_size; nothing here says how many "
            "tokens the run's tokenizer had; if more, give with --like a folder whose config.json has their number",
            file=sys.stderr,
        )
    number = len(plan.files)
    count = "1 file" if number == 1 else f"{number} files"
    line = f"wrote {options.hf}: {format_bytes(plan.num_bytes)} in {count}, as transformers loads it"
    facts = {"folder": options.hf, "family": plan.model.family, "num_bytes": plan.num_bytes, "num_files": number}
    print_answer(options, facts, (line,))


def _export_peft(options: argparse.Namespace, contents: Contents, like: Path) -> None:
    from vtp_plugin.checkpoint.tools.peft import read_adapters, write_peft

    if options.merge is not None:
        raise ConfigError(
            f"--merge {options.merge} with --peft; merged adapters are part of the weights; give --hf, or leave it out"
        )
    adapters = read_adapters(contents, like)
    with progress(adapters.num_bytes, "export") as on_written:
        write_peft(adapters, like, options.peft, on_written)
    facts = {"folder": options.peft, "family": "peft", "num_bytes": adapters.num_bytes, "num_files": 1}
    line = f"wrote {options.peft}: {format_bytes(adapters.num_bytes)}, as PEFT loads it on the model of {like}"
    print_answer(options, facts, (line,))


_MAX_NAMED = 5
_FOLDER = "folder of a checkpoint of the format torch_dist; of a folder of several, the newest is meant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    _add_show(actions)
    _add_verify(actions)
    _add_diff(actions)
    _add_reshard(actions)
    _add_merge(actions)
    _add_split(actions)
    _add_import(actions)
    _add_export(actions)


def _add_show(actions: Any) -> None:
    show = actions.add_parser(
        "show",
        help="print what a checkpoint holds",
        description="Print iteration, sizes, form of the optimizer, and what is stored.",
        epilog="Keys of --json: folder, iteration, format, num_files, num_bytes, form, has_map, experts, steps, sizes "
        "(of every stage), tensors (key, state, dtype, shape, num_pieces, num_bytes).",
    )
    _add_folder(show, "folder", _FOLDER)
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
    _add_folder(verify, "folder", _FOLDER)
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
    _add_folder(reshard, "--from", _FOLDER, dest="source", required=True)
    _add_folder(reshard, "--to", "folder for --load; it must be new", dest="target", required=True)
    reshard.add_argument(
        "--form",
        choices=[IN_MODEL_SPACE, BY_BLOCK],
        help=f"of a distributed optimizer: {BY_BLOCK} for Megatron 0.12 to 0.14, {IN_MODEL_SPACE} for 0.15 and later; "
        "by default that of the Megatron that wrote it",
    )
    _end(reshard, _reshard)


def _add_merge(actions: Any) -> None:
    merge = actions.add_parser(
        "merge",
        help="make one checkpoint of the parts that the sites of a run keep",
        description="Write one checkpoint of all parts of a save, as one folder for all sites would hold it; pieces "
        "are copied byte by byte. Run it where all parts may be seen. If it was stopped, the same command resumes it.",
        epilog="Keys of --json: folder, num_pieces, num_bytes, num_bytes_found (written by an earlier attempt).",
    )
    _add_folder(
        merge,
        "--from",
        "folders of the parts; of a folder of several, the newest",
        nargs="+",
        dest="sources",
        required=True,
    )
    _add_folder(merge, "--to", "folder for --load; it must be new", dest="target", required=True)
    _end(merge, _merge)


def _add_split(actions: Any) -> None:
    split = actions.add_parser(
        "split",
        help="make parts of a checkpoint, one for each site of a run",
        description="Write the part of each site, as the sites of a U would save it, to DIR/edge and DIR/cloud. Run it "
        "where all of it may be seen, and give each site its own. If it was stopped, the same command resumes it.",
        epilog="Keys of --json: folders (by site), num_pieces, num_bytes, num_bytes_found (by an earlier attempt).",
    )
    _add_folder(split, "--from", _FOLDER, dest="source", required=True)
    _add_folder(split, "--to", "folder for the folders of the sites; these must be new", dest="target", required=True)
    split.add_argument("--num-layer-list", metavar="LIST", help="layers of the U's parts; default: the run's")
    split.add_argument("--vtp-sites", metavar="LIST", help="site of every stage; default: the run's")
    _end(split, _split)


def _add_folder(parser: Any, name: str, text: str, **more: Any) -> None:
    parser.add_argument(name, type=Path, metavar="DIR", help=text, **more)


def _end(parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], None]) -> None:
    """Declare what all actions have."""
    add_json_flag(parser)
    parser.set_defaults(action=action)


def run(options: argparse.Namespace) -> None:
    """Do what was asked for."""
    if options.unknown:
        raise ConfigError(f"{options.unknown[0]} is unknown; see: {own_command()} checkpoint --help")
    options.action(options)


def _show(options: argparse.Namespace) -> None:
    facts = facts_of(Contents(find_checkpoint(options.folder)))
    print_answer(options, facts, lines_of(facts, is_verbose=options.verbose))


def _verify(options: argparse.Namespace) -> None:
    work = Verification(find_checkpoint(options.folder, takes_any=True))
    problems: list[str] = []
    with progress(work.num_bytes, "verify") as on_read:
        for problem in work.problems(on_read):
            problems.append(problem)
            if not options.json:
                print(problem)
    how = "" if work.manifest is not None else f"; it has no {MANIFEST}, so sums of torch.save were compared"
    intact = f"{work.folder} is intact: {format_bytes(work.num_bytes)} were read{how}"
    print_answer(options, {"folder": work.folder, "problems": problems}, () if problems else (intact,))
    sys.exit(1 if problems else 0)


def _diff(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.load.stored_optimizer import require_masters
    from vtp_plugin.checkpoint.tools.compare_checkpoints import Comparison

    a, b = (Contents(find_checkpoint(folder)) for folder in (options.a, options.b))
    if (read_part(a.folder) is None) != (read_part(b.folder) is None):
        require_whole(a.folder)
        require_whole(b.folder)
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
    lines = chain(_lines(found, sys.maxsize if options.verbose else _MAX_NAMED), _steps(steps))
    print_answer(options, {"tensors": found, "steps": steps, "is_equal": is_equal}, lines)
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


def _steps(steps: Sequence[Sequence[float]]) -> Iterator[str]:
    if any(steps):
        ours, theirs = (", ".join(f"{step:g}" for step in each) or "none" for each in steps)
        yield f"steps: {ours}" + ("" if steps[0] == steps[1] else f" in A, {theirs} in B")


def _reshard(options: argparse.Namespace) -> None:
    contents = Contents(find_checkpoint(options.source))
    form = form_for_any(contents, options.form)
    from vtp_plugin.checkpoint.load.stored_optimizer import require_masters
    from vtp_plugin.checkpoint.tools.rewrite_optimizer import plan_rewrite

    if form != contents.form:
        require_masters(contents)
    require_whole(contents.folder)
    target = options.target / _name_of(contents)
    key = _key_beside(contents.folder.parent)
    work, ending = plan_rewrite(contents, target, form)
    counts = _write("reshard", [(work, ending, options.target, key)])
    note = note_of_experts(contents)
    lines = [f"wrote {target}: {_said(counts)}; load it with --load {shlex.quote(str(options.target))}"]
    if form == contents.form:
        held = "there is no optimizer" if form is None else f"the optimizer was {form} before, and is copied"
        lines.append(f"{held}: any layout loads that")
    if key is not None:
        lines.append(f"{EDGE_KEY}, the key of the edge's layers, is copied, too; leave it out of what you give away")
    if note:
        lines.append(note)
    if loses_random_states(contents):
        lines.append("random states are left out: those of unequal stages have no place in another layout")
    print_answer(options, {"folder": target, "form": form, **counts, "experts": note}, lines)


def _name_of(contents: Contents) -> str:
    """Return the name of a checkpoint's folder, or that of its iteration where it has another one."""
    name = contents.folder.resolve().name
    is_usual = re.fullmatch(r"iter_\d{7,}|release", name)
    return name if is_usual else f"iter_{contents.common.get('iteration') or 0:07d}"


def _write(what: str, planned: Sequence[tuple[PieceWriter, Ending, Path, bytes | None]]) -> dict[str, int]:
    """Write checkpoints, each into a folder of its own, with the edge's key beside those that get it; count them."""
    from vtp_plugin.checkpoint.tools.writer import holding, writing_to

    total, found = sum(piece.num_bytes for work, *_ in planned for piece in work.pieces), 0
    with progress(total, what) as on_written:
        for work, ending, folder, key in planned:
            with holding(folder):
                found += (before := work.find_written())
                on_written(before)
                with writing_to(work.final):
                    work.write(ending, on_written)
                    if key is not None:
                        write_edge_key(folder, key)
    num_pieces = sum(len(work.pieces) for work, *_ in planned)
    return {"num_pieces": num_pieces, "num_bytes": total, "num_bytes_found": found}


def _said(counts: Mapping[str, int]) -> str:
    found = counts["num_bytes_found"]
    before = f", {format_bytes(found)} of it by an earlier attempt" if found else ""
    return f"{format_bytes(counts['num_bytes'])}{before}"


def _key_beside(folder: Path) -> bytes | None:
    return read_kept_key(folder, f"--from {folder}") if (folder / EDGE_KEY).exists() else None


def _merge(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.merge_parts import plan_merge

    parts = [Contents(find_checkpoint(source)) for source in options.sources]
    target = options.target / _name_of(parts[0])
    work, ending = plan_merge(parts, target)
    key = next((key for part in parts if (key := _key_beside(part.folder.parent)) is not None), None)
    counts = _write("merge", [(work, ending, options.target, key)])
    line = f"wrote {target}: {_said(counts)}, of {len(parts)} sites; any layout loads it with --load {options.target}"
    print_answer(options, {"folder": target, **counts}, (line,))


def _split(options: argparse.Namespace) -> None:
    from vtp_plugin.checkpoint.tools.merge_parts import cut_of, plan_split

    contents = Contents(find_checkpoint(options.source))
    layers = None if options.num_layer_list is None else parse_layer_list(options.num_layer_list)
    sites = None if options.vtp_sites is None else parse_sites(options.vtp_sites)
    cut = cut_of(contents, layers, sites)
    folders = {site: options.target / site for site in dict.fromkeys(cut.sites)}
    planned = plan_split(contents, cut, {site: folder / _name_of(contents) for site, folder in folders.items()})
    key = _key_beside(contents.folder.parent)
    works = [(*planned[site], folder, key if site == cut.sites[0] else None) for site, folder in folders.items()]
    counts = _write("split", works)
    lines = [f"wrote {folder}, the part of site {site}" for site, folder in folders.items()]
    print_answer(options, {"folders": folders, **counts}, lines)
