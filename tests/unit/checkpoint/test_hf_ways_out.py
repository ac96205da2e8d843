"""What import and export tell users to do is done here, and works; a message without a case fails."""

from __future__ import annotations

import json
import os
import shutil
import struct
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rules.import_rules import ROOT
from tests.rules.ways_out import files_of, matches, messages
from tests.support.checkpoints import run_action
from tests.support.hf_models import (
    KINDS,
    SMALL,
    edit,
    export,
    imported,
    make,
    run_json,
    tensors_of,
    torch,
    transformers,
)
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.hf.hf_model import ASIDE, NOTE, RELEASE, check_note, origin_of, read_note
from vtp_plugin.errors import ConfigError

safetensors_of = pytest.importorskip("safetensors.torch")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class RefusedModel:
    """A model that is refused, and what the message tells to do about it.

    Attributes:
        spoil: changes a copy of the model.
        said: is in the message.
        way_out: likewise; what the user is told.
        mend: does that; it gets the folder, and the model as it was; without one the file is taken from there.
        kind: of the model.
        is_other: after that it is another model, which only must be taken.
    """

    spoil: Callable[[Path], object]
    said: str
    way_out: str
    mend: Callable[[Path, Path], object] | None = None
    kind: str = "llama-3"
    is_other: bool = False


def restore(folder: Path, whole: Path) -> None:
    """Download all again."""
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)


def save_again(folder: Path, whole: Path) -> None:
    """Load with transformers, which must miss nothing, and save."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not found["missing_keys"], found
    shutil.rmtree(folder)
    model.save_pretrained(folder)


def change(folder: Path, name: str, make_new: Callable[[Any], Any], new_name: str | None = None) -> None:
    """Change a tensor, or leave it out where it becomes None."""
    for file in folder.glob("*.safetensors"):
        tensors = safetensors_of.load_file(file)
        if name in tensors:
            made = make_new(tensors.pop(name))
            tensors |= {} if made is None else {new_name or name: made.contiguous()}
            safetensors_of.save_file(tensors, file, {"format": "pt"})


def add(folder: Path, name: str, tensor: Any) -> None:
    """Put a tensor into the single file."""
    tensors = safetensors_of.load_file(folder / SINGLE)
    safetensors_of.save_file({**tensors, name: tensor}, folder / SINGLE, {"format": "pt"})


def rewrite(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)


def fifo(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)


def index(folder: Path, change_map: Callable[[dict[str, Any]], object]) -> None:
    """Change the index of a model in several files."""
    read = json.loads((folder / INDEX).read_text())
    change_map(read["weight_map"])
    (folder / INDEX).write_text(json.dumps(read))


def header(folder: Path, change_header: Callable[[dict[str, Any]], object], length: int | None = None) -> None:
    """Change the header of the single file."""
    data = (folder / SINGLE).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    read = json.loads(data[8 : 8 + size])
    change_header(read)
    text = json.dumps(read).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])


def split(folder: Path) -> None:
    """Put the weights into two files with an index."""
    tensors = safetensors_of.load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        safetensors_of.save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    places = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def splitting(then: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: (split(folder), then(folder))


def fields(**new: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / CONFIG, **new)


def without(*names: str) -> Callable[[Path, Path], None]:
    """Remove fields of the config."""

    def remove(folder: Path, _: Path) -> None:
        read = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({name: value for name, value in read.items() if name not in names}))

    return remove


def link(name: str, target: str) -> Callable[[Path], None]:
    def make_link(folder: Path) -> None:
        (folder.parent / "secret").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make_link


def removing(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, _: (folder / name).unlink()


def only_bin(folder: Path) -> None:
    """Save the weights as before safetensors."""
    torch.save(safetensors_of.load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def fuse_half(folder: Path) -> None:
    """Fuse the experts of one layer; transformers takes what it finds."""
    tensors = safetensors_of.load_file(folder / SINGLE)
    place = "model.layers.0.mlp.experts."
    for made, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        experts = [torch.cat([tensors.pop(f"{place}{i}.{part}.weight") for part in parts]) for i in range(6)]
        tensors[place + made] = torch.stack(experts)
    safetensors_of.save_file(tensors, folder / SINGLE, {"format": "pt"})


FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
DOWN = "model.layers.1.mlp.down_proj.weight"
SECOND = "model-00002-of-00002.safetensors"
LINKED = "is a link that leads out of the folder"
PUT = "put the file itself there, or remove it"
CASES = {
    "no config": RefusedModel(
        spoil=lambda folder: (folder / CONFIG).unlink(),
        said="config.json is missing or cannot be read",
        way_out="give the folder of a model as it is published",
    ),
    "config is a FIFO": RefusedModel(
        spoil=lambda folder: fifo(folder, CONFIG),
        said="config.json cannot be read: it is a FIFO",
        way_out="give the folder of a model as it is published",
    ),
    "config is nested": RefusedModel(
        spoil=lambda folder: rewrite(folder, CONFIG, '{"id2label": ' + "[" * 100_000),
        said="config.json is no JSON object (it is nested too deep)",
        way_out="download it again",
    ),
    "config is a list": RefusedModel(
        spoil=lambda folder: rewrite(folder, CONFIG, "[]"), said="is no JSON object;", way_out="download it again"
    ),
    "config is a link": RefusedModel(
        spoil=link(CONFIG, "../secret"),
        said=f"config.json {LINKED}",
        way_out=PUT,
    ),
    "license is a link": RefusedModel(
        spoil=link("LICENSE", "../secret"), said=f"LICENSE {LINKED}", way_out=PUT, mend=removing("LICENSE")
    ),
    "license is a link to nothing": RefusedModel(
        spoil=link("LICENSE", "/nowhere/id"), said=f"LICENSE {LINKED}", way_out=PUT, mend=removing("LICENSE")
    ),
    "license is a FIFO": RefusedModel(
        spoil=lambda folder: fifo(folder, "LICENSE"),
        said="LICENSE cannot be read: it is a FIFO",
        way_out="put a file there, or remove it",
        mend=removing("LICENSE"),
    ),
    "tokenizer is a link": RefusedModel(
        spoil=link("tokenizer.json", "../secret"),
        said=LINKED,
        way_out=PUT,
        mend=lambda folder, _: _in_its_place(folder),
    ),
    "weights are a link": RefusedModel(spoil=link(SINGLE, "../other/model.safetensors"), said=LINKED, way_out=PUT),
    "weights are a FIFO": RefusedModel(
        spoil=lambda folder: fifo(folder, SINGLE), said="cannot be read: it is a FIFO", way_out="download it again"
    ),
    "index is a FIFO": RefusedModel(
        spoil=splitting(lambda folder: fifo(folder, INDEX)),
        said=f"{INDEX} cannot be read: it is a FIFO",
        way_out="download it again",
    ),
    **{
        f"index names {name}": RefusedModel(
            spoil=splitting(lambda folder, name=name: index(folder, lambda places: places.update({HEAD: name}))),
            said="is no name of a file in the folder",
            way_out=PUT,
        )
        for name in ("../other/model.safetensors", "/etc/passwd", "a//b", "")
    },
    "index names a number": RefusedModel(
        spoil=splitting(lambda folder: index(folder, lambda places: places.update({HEAD: 3}))),
        said="is damaged (its weight_map names no files)",
        way_out="download it again",
    ),
    "index is torn": RefusedModel(
        spoil=splitting(lambda folder: rewrite(folder, INDEX, '{"weight_map": [')),
        said=f"{INDEX} is damaged",
        way_out="download it again",
    ),
    "index names a shard that is not there": RefusedModel(
        spoil=splitting(lambda folder: (folder / SECOND).unlink()),
        said=f"{SECOND} is missing; {INDEX} names it",
        way_out="download it again",
    ),
    "index names another shard": RefusedModel(
        spoil=splitting(lambda folder: index(folder, lambda places: places.update({HEAD: places[EMBEDDING]}))),
        said=f"{INDEX} names {HEAD}, and model-0000",
        way_out="download it again",
    ),
    "index leaves a tensor out": RefusedModel(
        spoil=splitting(lambda folder: index(folder, lambda places: places.pop(HEAD))),
        said=f"holds {HEAD}, and {INDEX} does not name it",
        way_out="download it again",
    ),
    "a tensor in two shards": RefusedModel(
        spoil=splitting(lambda folder: _twice(folder)),
        said=f"and {SECOND} hold {HEAD}",
        way_out="move what does not belong to the model out of the folder",
    ),
    **{
        f"two sets, {name}": RefusedModel(
            spoil=lambda folder, name=name, first=first: (
                split(folder) if first == INDEX else 0,
                _other_set(folder, name),
            ),
            said=f"holds {first} and {name}, which may be another set of weights",
            way_out="move what does not belong to the model out of the folder",
            mend=removing(name),
        )
        for first, name in (
            (INDEX, SINGLE),
            (INDEX, "model-00001-of-00003.safetensors"),
            (INDEX, "model.fp16.safetensors.index.json"),
            (SINGLE, "model.fp16.safetensors"),
            (SINGLE, "adapter_model.safetensors"),
        )
    },
    "only bin": RefusedModel(
        spoil=only_bin,
        said=f"holds neither {SINGLE} nor {INDEX}",
        way_out="save the model with transformers, which writes them",
        mend=save_again,
    ),
    **{
        f"header, {what}": RefusedModel(
            spoil=lambda folder, change_it=change_it, length=length: header(folder, change_it, length),
            said=f"{SINGLE} is damaged",
            way_out="download it again",
        )
        for what, change_it, length in (
            ("2^60 bytes", lambda _: None, 1 << 60),
            ("longer than the file", lambda _: None, 1 << 22),
            ("another type", lambda read: read[HEAD].update(dtype="F99"), None),
            ("a wrong type", lambda read: read[HEAD].update(dtype=["F32"]), None),
            ("a type of other length", lambda read: read[HEAD].update(dtype="F16"), None),
            (
                "offsets that overlap",
                lambda read: read[HEAD].update(data_offsets=read[EMBEDDING]["data_offsets"]),
                None,
            ),
            ("offsets behind the file", lambda read: read[HEAD].update(data_offsets=[0, 1 << 50]), None),
            ("a shape of 2^62", lambda read: read[HEAD].update(shape=[1 << 62, 48]), None),
            ("nested", lambda read: read.update(x=_nested(1000)), None),
        )
    },
    "a quantised type": RefusedModel(
        spoil=lambda folder: change(folder, DOWN, lambda value: value.to(torch.int8)),
        said="has the type I8",
        way_out="take the model that was quantised",
    ),
    "two types": RefusedModel(
        spoil=lambda folder: change(folder, DOWN, lambda value: value.half()),
        said="have the types float16 and float32",
        way_out="save the model with one type",
        mend=lambda folder, _: change(folder, DOWN, lambda value: value.float()),
        is_other=True,
    ),
    "missing": RefusedModel(
        spoil=lambda folder: change(folder, DOWN, lambda _: None),
        said=f"{DOWN} is missing;",
        way_out="download all files again",
    ),
    "unknown": RefusedModel(
        spoil=lambda folder: add(folder, "model.layers.0.self_attn.masked_bias", torch.ones(1)),
        said="model.layers.0.self_attn.masked_bias is no tensor of a model of the family llama",
        way_out="if transformers says that it misses none, load the model with it and use save_pretrained",
        mend=save_again,
    ),
    "some experts fused": RefusedModel(
        spoil=fuse_half,
        said="model.layers.1.mlp.experts.down_proj is missing, and model.layers.1.mlp.experts.0.down_proj.weight is",
        way_out="if transformers says that it misses none, load the model with it and use save_pretrained",
        mend=save_again,
        kind="qwen-3-moe",
    ),
    "a head without an embedding": RefusedModel(
        spoil=lambda folder: change(folder, EMBEDDING, lambda _: None),
        said=f"{EMBEDDING} is missing",
        way_out="download all files again",
    ),
    "another head, untied": RefusedModel(
        spoil=lambda folder: add(folder, HEAD, torch.randn(70, 48)),
        said=f"ties the output layer to the embedding, and {HEAD} differs from {EMBEDDING}",
        way_out="set tie_word_embeddings to false, or remove the tensor",
        mend=lambda folder, _: edit(folder / CONFIG, tie_word_embeddings=False),
        kind="qwen-2.5-tied",
        is_other=True,
    ),
    "another head, removed": RefusedModel(
        spoil=lambda folder: add(folder, HEAD, _nearly(safetensors_of.load_file(folder / SINGLE)[EMBEDDING])),
        said=f"ties the output layer to the embedding, and {HEAD} differs from {EMBEDDING}",
        way_out="transformers 5 computes with both, 4.54 to 4.57 with the embedding only",
        mend=lambda folder, _: change(folder, HEAD, lambda _: None),
        kind="llama-3-tied",
    ),
    "a head of another type": RefusedModel(
        spoil=lambda folder: add(folder, HEAD, safetensors_of.load_file(folder / SINGLE)[EMBEDDING].bfloat16()),
        said=f"{HEAD} has the type bfloat16, unlike {EMBEDDING}",
        way_out="or remove the tensor",
        mend=lambda folder, _: change(folder, HEAD, lambda _: None),
        kind="llama-3-tied",
    ),
    "a head of another shape": RefusedModel(
        spoil=lambda folder: add(folder, HEAD, torch.zeros(71, 48)),
        said=f"{HEAD} has the shape (71, 48), unlike {EMBEDDING}",
        way_out="or remove the tensor",
        mend=lambda folder, _: change(folder, HEAD, lambda _: None),
        kind="llama-3-tied",
    ),
    "other frequencies, removed": RefusedModel(
        spoil=lambda folder: add(folder, FREQUENCIES, 10000.0 ** -torch.arange(0, 1, 0.25)),
        said=f"{FREQUENCIES} holds other frequencies than rope_theta",
        way_out="or remove the tensor",
        mend=lambda folder, _: change(folder, FREQUENCIES, lambda _: None),
    ),
    "other frequencies, corrected": RefusedModel(
        spoil=lambda folder: add(folder, FREQUENCIES, 10000.0 ** -torch.arange(0, 1, 0.25)),
        said="transformers computes with those of config.json",
        way_out="correct config.json",
        mend=lambda folder, _: _with_base(folder),
        is_other=True,
    ),
    "another shape": RefusedModel(
        spoil=fields(intermediate_size=100),
        said="(96, 48), and (100, 48) is expected",
        way_out="download all files again",
    ),
    "a billion layers": RefusedModel(
        spoil=fields(num_hidden_layers=10**9), said="at most 100000 are read", way_out="download it again"
    ),
    "heads and groups": RefusedModel(
        spoil=fields(num_key_value_heads=5), said="num_key_value_heads 5", way_out="download it again"
    ),
    "a type of a field": RefusedModel(
        spoil=fields(hidden_size="48"),
        said='hidden_size is "48"; it must be a whole number',
        way_out="download it again",
    ),
    "an unknown field": RefusedModel(
        spoil=fields(left_by_a_tool={"a": 1}),
        said='left_by_a_tool is {"a": 1}, and no field of llama that is known; it may change what is computed',
        way_out="remove it from the file if transformers' LlamaForCausalLM does not read it",
        mend=without("left_by_a_tool"),
    ),
    "another class": RefusedModel(
        spoil=fields(architectures=["LlamaModel"]),
        said='architectures is ["LlamaModel"]; LlamaForCausalLM is expected',
        way_out='set the field to ["LlamaForCausalLM"]',
        mend=lambda folder, _: edit(folder / CONFIG, architectures=["LlamaForCausalLM"]),
    ),
    "another activation": RefusedModel(
        spoil=fields(hidden_act="gelu"), said='hidden_act is "gelu"; only "silu"', way_out="take another model"
    ),
    "positions twice": RefusedModel(
        spoil=fields(rope_theta=10000.0),
        said="say different things",
        way_out="remove the wrong one",
        mend=without("rope_theta"),
    ),
    "a base between whole numbers": RefusedModel(
        spoil=fields(rope_theta=10000.5, rope_parameters=None),
        said="Megatron's --rotary-base is a whole number",
        way_out="take another model",
    ),
    "another scaling": RefusedModel(
        spoil=fields(rope_parameters=None, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        said="Megatron has no scaling of positions but llama3",
        way_out="take another model",
    ),
}
# Of messages that a model alone does not show: the test that does what they say.
ELSEWHERE = {
    "{}: model_type is {}": "unit/checkpoint/test_hf.py::test_a_family_is_added_as_one_object",
    "pip install 'vtp-plugin[hf]'": "unit/cli/test_missing_packages.py::"
    "test_a_missing_package_is_one_line_and_exit_code_2",
    "give {}, and neither --padded-vocab-size nor": "unit/checkpoint/test_hf_tokenizer_size.py::"
    "test_the_flag_pads_to_the_model",
    "{}, which this run's flags are not: {}; {}": "unit/checkpoint/test_hf_ways_out.py::"
    "test_a_run_with_other_flags_is_told_once_which_model_it_is",
    "{} has no {}; {} was taken": "unit/checkpoint/test_hf_ways_out.py::test_a_function_that_no_config_says",
    "{} says so": "unit/checkpoint/test_hf_ways_out.py::test_ways_out_of_an_export",
    "give its own with --like": "unit/checkpoint/test_hf_ways_out.py::test_ways_out_of_an_export",
    "give its folder with --like": "unit/checkpoint/test_hf_ways_out.py::test_ways_out_of_an_export",
    "has vocab_size {}": "unit/checkpoint/test_hf_tokenizer_size.py::test_words_above_the_config_are_not_cut_off",
    "save it, which keeps what its layers use": (
        "multiproc/checkpoint/test_hf.py::test_a_run_computes_what_transformers_computes"
    ),
    "merge it first, and save it": "unit/checkpoint/test_hf_bad_input.py::test_adapters_are_merged_first",
    "{}; {}; {}": "multiproc/checkpoint/test_hf_runs.py::test_flags_that_contradict_an_import",
    "rope_scaling_factor=args.rope_scaling_factor": "multiproc/checkpoint/test_hf_runs.py::"
    "test_a_script_that_forgets_the_factor_computes_what_was_published_or_nothing",
    "all heads have one size": "unit/checkpoint/test_mm_trees.py::test_fields_that_change_what_is_computed",
    "a picture's tokens are as wide": "unit/checkpoint/test_mm_trees.py::test_fields_that_change_what_is_computed",
    "correct the wrong one": "unit/checkpoint/test_mm_trees.py::test_fields_that_change_what_is_computed",
    "it says which model was imported; import it again": "unit/checkpoint/test_hf_ways_out.py::test_a_damaged_note",
}
OFFLINE = ("import_hf", "export_hf", "writer")
NO_MESSAGES = (
    *("of a list, of each entry", "; default: "),
    # Of what is written: test_ways_out.py has them.
    *("nothing is overwritten", "none is overwritten", "only one of {} can be resumed", "whole tensors have one type"),
    *("nothing half-written is left", "was not written to its end", "{} cannot be written: {}; {}"),
)


def _in_its_place(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(text)


def _twice(folder: Path) -> None:
    first = folder / "model-00001-of-00002.safetensors"
    held = safetensors_of.load_file(first)
    safetensors_of.save_file({**held, HEAD: torch.zeros(70, 48)}, first, {"format": "pt"})
    if HEAD in held:
        safetensors_of.save_file({**safetensors_of.load_file(folder / SECOND), HEAD: held[HEAD]}, folder / SECOND)


def _other_set(folder: Path, name: str) -> None:
    if name.endswith(".json"):
        shutil.copy(folder / INDEX, folder / name)
    else:
        safetensors_of.save_file({HEAD: torch.zeros(70, 48)}, folder / name, {"format": "pt"})


def _nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def _nearly(tensor: Any) -> Any:
    made = tensor.clone()
    made[-1, -1] += 1e-3
    return made


def _with_base(folder: Path) -> None:
    without("rope_parameters", "rope_scaling", "rope_theta")(folder, folder)
    edit(folder / CONFIG, rope_theta=10000.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Small models by their kind."""
    place = tmp_path_factory.mktemp("models")

    def model_of(kind: str) -> Path:
        if not (place / kind).exists():
            make(KINDS[kind], place / kind, **SMALL)
        return place / kind

    return model_of


@pytest.mark.parametrize("name", CASES)
def test_the_way_out_works(
    name: str, models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, nothing is written; then what the line says is done, and the model is imported as it was."""
    case, folder = CASES[name], tmp_path / "model"
    whole = models(case.kind)
    shutil.copytree(whole, folder)
    case.spoil(folder)
    capsys.readouterr()
    code, lines = run_action(capsys, "import", "--hf", folder, "--to", tmp_path / "to")
    assert code == 2 and len(lines) == 1 and case.said in lines[0] and case.way_out in lines[0], lines
    assert not (tmp_path / "to").exists()
    (case.mend or restore)(folder, whole)
    imported(folder, tmp_path / "to", capsys)
    if not case.is_other:
        run_json(capsys, "export", "--from", tmp_path / "to", "--hf", tmp_path / "back")
        before, after = tensors_of(whole), tensors_of(tmp_path / "back")
        assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)


def test_every_message_has_a_case(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is new, or said in another way, needs one."""
    said: list[str] = []
    for name, case in CASES.items():
        folder = tmp_path / name.replace("/", "|")
        shutil.copytree(models(case.kind), folder)
        case.spoil(folder)
        capsys.readouterr()
        said += run_action(capsys, "import", "--hf", folder, "--to", tmp_path / "to")[1]
    sources = [*files_of("vtp_plugin/checkpoint/hf"), *(f"vtp_plugin/checkpoint/tools/{name}.py" for name in OFFLINE)]
    found = {each for each in messages(sources) if not any(text in each for text in NO_MESSAGES)}
    assert [text for text in ELSEWHERE if not any(text in each for each in found)] == []
    left = {each for each in found if not any(text in each for text in ELSEWHERE)}
    assert sorted(each for each in left if not any(matches(each, line) for line in said)) == []
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), place


def test_ways_out_of_an_export(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config of another model, or none: the own one, with ``--like``."""
    whole, start = models("llama-3"), tmp_path / "start"
    imported(whole, start, capsys)
    shutil.rmtree(start / "hugging_face")
    for name, new in {"theta": {"rope_parameters": {"rope_theta": 1e4}}, "words": {"vocab_size": 71}}.items():
        shutil.copytree(whole, tmp_path / name)
        edit(tmp_path / name / CONFIG, **new)
    for like, said in {
        "": "the tokenizer come from the published model; give its folder with --like",
        "theta": "is expected; ",
        "words": "describes another model; give its own with --like",
    }.items():
        words = ["--like", tmp_path / like] if like else []
        code, (line,) = run_action(capsys, "export", "--from", start, "--hf", tmp_path / "out", *words)
        assert code == 2 and said in line and "--like" in line, line
    run_json(capsys, "export", "--from", start, "--hf", tmp_path / "out", "--like", whole)
    before, after = tensors_of(whole), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)


def test_two_names_of_one_tensor(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import has the norm before experts under both: they are compared to the last bit before one is left out."""
    imported(models("qwen-3-moe"), tmp_path / "start", capsys)
    run_json(capsys, "reshard", "--from", tmp_path / "start", "--to", tmp_path / "apart")  # each has its own bytes
    apart = tmp_path / "apart" / RELEASE
    shutil.copytree(tmp_path / "start" / "hugging_face", tmp_path / "apart" / "hugging_face")
    run_json(capsys, "export", "--from", tmp_path / "apart", "--hf", tmp_path / "out")
    norm = tensors_of(models("qwen-3-moe"))["model.layers.1.post_attention_layernorm.weight"].numpy().tobytes()
    (file,) = apart.glob("*.distcp")
    data = file.read_bytes()
    assert data.count(norm) == 2
    at = data.rindex(norm) + len(norm) - 1
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    code, (line,) = run_action(capsys, "export", "--from", tmp_path / "apart", "--hf", tmp_path / "other")
    assert code == 2 and "mlp.linear_fc1.layer_norm_weight and decoder.layers.pre_mlp_layernorm.weight differ" in line


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"family": "llama", "vocab": 70, "settings": [[1, 2, 3, 4, 5]]}']
)
def test_a_damaged_note(
    text: str, models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; importing again makes a whole one."""
    imported(models("llama-3"), tmp_path / "start", capsys)
    (tmp_path / "start" / RELEASE / NOTE).write_text(text)
    with pytest.raises(ConfigError, match="is damaged; it says which model was imported; import it again"):
        read_note(str(tmp_path / "start"))
    imported(models("llama-3"), tmp_path / "again", capsys)
    note = read_note(str(tmp_path / "again"))
    assert note is not None and note.vocab == SMALL["vocab_size"]


def _trained_with(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Let checkpoints say that a run with these arguments has written them."""
    given = Contents.arguments.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Contents, "arguments", property(lambda self: {**given(self), **arguments}))


def test_a_function_that_no_config_says(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run and an export end, also with a note of version 1, until the note is left aside; then the export says so."""
    start = tmp_path / "start"
    imported(models("llama-3"), start, capsys)
    note = json.loads((start / RELEASE / NOTE).read_text())
    run = Namespace(rotary_percent=0.5, window_size=(6, 0), no_rope_freq=[0, 0], num_layers=2, softmax_type="vanilla")
    for rows in (note["settings"], [row[:5] for row in note["settings"] if row[2] == 2]):
        (start / RELEASE / NOTE).write_text(json.dumps({**note, "settings": rows}))
        (said,) = check_note(str(start), run)
        assert said.split("; ")[:-2] == [
            f"{start} was imported as a model of the family llama, which this run's flags are not: "
            "--rotary-percent is 0.5, and 1.0 is expected",
            "--window-size is (6, 0), and is not expected",
        ]
    file = start / RELEASE / NOTE
    rename = f"rename {file} to {ASIDE}"
    ways = "; give --rotary-percent 1.0; leave --window-size out, or, where you mean --rotary-percent and --window-size"
    assert said.endswith(f"{ways}, {rename}"), said
    _trained_with(monkeypatch, rotary_percent=0.5, load=str(start))
    code, (line,) = run_action(capsys, "export", "--from", start, "--hf", tmp_path / "out")
    assert code == 2 and "--rotary-percent is 0.5" in line and line.endswith(rename), line
    assert "give --rotary-percent 1.0 in a run that resumes from it, and export what that saves" in line
    file.rename(file.with_name(ASIDE))
    assert [*check_note(str(start), run)] == []
    (line,) = check_note(str(start), Namespace(num_layers=4, rotary_percent=0.5))
    assert "--num-layers is 4, and 2 is expected" in line and "rename" not in line
    export(start, tmp_path / "out", None)
    said = capsys.readouterr().err
    assert f"the note of {start} was left aside: " in said and "(--rotary-percent is 0.5" in said
    file.with_name(ASIDE).unlink()
    _trained_with(monkeypatch, rotary_percent=1.0, load=str(start))
    export(start, tmp_path / "again", None)
    assert f"{start} has no {NOTE}; {start / 'hugging_face'} was taken" in capsys.readouterr().err


def test_a_run_with_other_flags_is_told_once_which_model_it_is(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows from a switch that is missing is not held against it, and a switch that stores the opposite is said
    as it was given.
    """
    start = tmp_path / "start"
    flags = run_json(capsys, "import", "--hf", models("llama-3"), "--to", start)["flags"]
    run = Namespace(num_layers=4, add_bias_linear=True, add_qkv_bias=True)
    (line,) = check_note(str(start), run)
    problems = "--num-layers is 4, and 2 is expected; --disable-bias-linear is not given, and is expected"
    said = f"which this run's flags are not: {problems}; start with the flags that the import printed: "
    assert line == f"{start} was imported as a model of the family llama, {said}{' '.join(flags)}"
    (line,) = check_note(str(start), Namespace(num_layers=2, add_bias_linear=False, add_qkv_bias=True))
    assert ": --add-qkv-bias is given, and is not expected; start" in line


def test_an_import_knows_how_many_words_it_had(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do the runs that go on from it, where its folder is gone, too."""
    imported(models("llama-3"), tmp_path / "start", capsys)
    shutil.copytree(models("llama-3"), tmp_path / "like")
    edit(tmp_path / "like" / CONFIG, vocab_size=60)
    words = ("export", "--from", tmp_path / "start", "--hf", tmp_path / "out", "--like")
    for folder in (tmp_path / "start", tmp_path / "gone"):
        code, (line,) = run_action(capsys, *words, tmp_path / "like")
        assert code == 2 and "the import had 70 tokens" in line and line.endswith("has vocab_size 70"), line
        (tmp_path / "start" / RELEASE / NOTE).unlink(missing_ok=True)
        _trained_with(monkeypatch, vtp_import=origin_of(None, {"vtp_import": {"folder": str(folder), "vocab": 70}}))
    assert run_action(capsys, *words, models("llama-3"))[0] == 0
