"""Qwen 2.5 VL: from Hugging Face or from MindSpeed-MM's trees into one checkpoint, and back, byte by byte."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import run_action
from tests.support.hf_models import edit, run_json, tensors_of, torch, transformers
from tests.support.vision_models import (
    LISTS,
    SIZES,
    chunks_of,
    logits_of_pictures,
    make_vision,
    part_of,
    whole_tensors,
    write_tree,
)
from vtp_plugin.checkpoint.hf.read_config import read_config, read_model

HEADS, GROUPS = SIZES["vision"]["num_heads"], SIZES["text"]["num_key_value_heads"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, in bf16."""
    folder = tmp_path_factory.mktemp("published")
    make_vision(folder, dtype=torch.bfloat16)
    return folder


def write_trees(folder: Path, published: Path, lists: str, sizes: tuple[int, int], **besides: Any) -> tuple[Path, Path]:
    """Write the trees of an edge and a cloud, whole as the converter does."""
    made = chunks_of(whole_tensors(tensors_of(published), heads=HEADS, groups=GROUPS), *LISTS[lists])
    for name, size in zip(("edge", "cloud"), sizes, strict=True):
        write_tree(folder / name, made, tp_size=size, **besides)
    return folder / "edge", folder / "cloud"


def assert_same_tensors(back: Path, source: Path) -> None:
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and after[name].shape == value.shape, name
        assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name


def load_vision(folder: Path) -> Any:
    """Load a folder with transformers, which must find all that it needs and no more."""
    model, found = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[name] for name in found), found
    return model.eval()


@pytest.mark.parametrize("is_tied", [False, True])
def test_tensors_come_back_byte_by_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    source, middle, back = (tmp_path / name for name in ("source", "middle", "back"))
    model = make_vision(source, is_tied=is_tied, max_shard="100KB")
    monkeypatch.setattr("vtp_plugin.checkpoint.tools.writer.SLAB_BYTES", 1000)
    said = run_json(capsys, "import", "--hf", source, "--to", middle)
    assert said["family"] == "qwen2_5_vl" and said["flags"] == ["--ckpt-format torch_dist"]
    assert run_action(capsys, "verify", middle)[0] == 0
    run_json(capsys, "export", "--from", middle, "--hf", back)
    assert_same_tensors(back, source)
    assert filecmp.cmp(source / "config.json", back / "config.json", shallow=False)
    assert torch.equal(logits_of_pictures(load_vision(back)), logits_of_pictures(model))


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 1)])
def test_trees_of_two_sides_are_the_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path, lists: str, sizes: tuple[int, int]
) -> None:
    """Into the checkpoint that the published model makes, to the last bit; the sides need only the files they load."""
    edge, cloud = write_trees(tmp_path, published, lists, sizes)
    for folder, is_edge in ((edge, True), (cloud, False)):
        for place in (folder / "release").iterdir():
            if place.name.endswith("_000") is not is_edge:
                shutil.rmtree(place)
    run_json(capsys, "import", "--mm", edge, cloud, "--like", published, "--to", tmp_path / "of trees")
    run_json(capsys, "import", "--hf", published, "--to", tmp_path / "of model")
    code, lines = run_action(capsys, "diff", tmp_path / "of trees", tmp_path / "of model")
    assert code == 0, lines
    run_json(capsys, "export", "--from", tmp_path / "of trees", "--hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", published)


def test_a_tree_of_a_run_and_of_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path) -> None:
    """What a run saved has arguments and states beside weights, and an iteration; nothing of it is called."""
    state = {"text_decoder.output_layer._extra_state": None}
    whole = whole_tensors(tensors_of(published), heads=HEADS, groups=GROUPS)
    written: dict[str, Any] = {
        "args": Namespace(num_layers=4),
        "optimizer": {"param": torch.ones(3)},
        "rng_state": [Namespace(), tmp_path],
    }
    write_tree(tmp_path / "tree", [[{**whole}]], tp_size=2, iteration="7", **written)
    for file in (tmp_path / "tree").glob("*/*/model_optim_rng.pt"):
        read = torch.load(file, weights_only=False)
        torch.save({**read, "model": {**read["model"], **state}}, file)
    run_json(capsys, "import", "--mm", tmp_path / "tree", "--like", published, "--to", tmp_path / "middle")
    run_json(capsys, "export", "--from", tmp_path / "middle", "--hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", published)


def test_a_tied_head_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MindSpeed-MM stores it in the last chunk, as a copy of the embedding; a head of its own would be lost."""
    source = tmp_path / "source"
    make_vision(source, is_tied=True)
    whole = whole_tensors(tensors_of(source), heads=HEADS, groups=GROUPS)
    words = whole["text_decoder.embedding.word_embeddings.weight"]
    for name, head in (("copy", words), ("other", words + 1)):
        made = chunks_of({**whole, "text_decoder.output_layer.weight": head}, *LISTS["as documented"])
        write_tree(tmp_path / name, made, tp_size=2)
    copy, other = tmp_path / "copy", tmp_path / "other"
    run_json(capsys, "import", "--mm", copy, copy, "--like", source, "--to", tmp_path / "middle")
    run_json(capsys, "export", "--from", tmp_path / "middle", "--hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", source)
    capsys.readouterr()
    code, (line,) = run_action(capsys, "import", "--mm", other, other, "--like", source, "--to", tmp_path / "to")
    assert code == 2 and "text_decoder.output_layer.weight differs from text_decoder.embedding" in line


def test_nothing_that_a_file_names_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path
) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return (os.mkdir, (str(tmp_path / "was here"),))

    edge, cloud = write_trees(tmp_path, published, "one ring", (1, 1), rng_state=Hostile())
    run_json(capsys, "import", "--mm", edge, cloud, "--like", published, "--to", tmp_path / "middle")
    assert not (tmp_path / "was here").exists()


def _change(folder: Path, change: Callable[[dict[str, Any]], object], place: str = "mp_rank_00_001") -> None:
    """Change what the file of a rank holds."""
    file = folder / "release" / place / "model_optim_rng.pt"
    read = torch.load(file, weights_only=True)
    change(read)
    torch.save(read, file)


_NORM = "text_decoder.decoder.layers.1.input_layernorm.weight"
_QKV = "text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"


def _other_lists(edge: Path, cloud: Path, published: Path) -> None:
    shutil.rmtree(cloud)
    made = chunks_of(whole_tensors(tensors_of(published), heads=HEADS, groups=GROUPS), *LISTS["one ring"])
    write_tree(cloud, made, tp_size=2)


def _other_lists_in_part(edge: Path, cloud: Path, published: Path) -> None:
    _other_lists(edge, cloud, published)
    shutil.rmtree(edge / "release" / "mp_rank_00_001")
    shutil.rmtree(cloud / "release" / "mp_rank_00_000")
    shutil.rmtree(cloud / "release" / "mp_rank_01_000")


def _other_size(edge: Path, cloud: Path, published: Path) -> None:
    shutil.rmtree(cloud / "release" / "mp_rank_01_001")
    shutil.rmtree(cloud / "release" / "mp_rank_01_000")


def _canonical(edge: Path, cloud: Path, published: Path) -> None:
    for place in ("mp_rank_00_001", "mp_rank_01_001"):
        _change(cloud, lambda read: read["model1"].update({_QKV.replace("linear_qkv", "q_proj"): torch.ones(2)}), place)


def _for_both(cloud: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for place in ("mp_rank_00_001", "mp_rank_01_001"):
        _change(cloud, change, place)


BAD: dict[str, tuple[Callable[[Path, Path, Path], object], str]] = {
    "other lists": (
        _other_lists,
        "are of different lists: chunk 0 of stage 1 has 0 of image_encoder.encoder.blocks.layers in one and 2",
    ),
    "other lists, in part": (
        _other_lists_in_part,
        "they hold 3 layers of text_decoder instead of 4 and 3 layers of image_encoder instead of 5; config.json",
    ),
    "other size": (_other_size, r"linear_qkv.weight has the shape .* on rank 0 of 1, and .* is expected"),
    "no stage": (
        lambda edge, cloud, _: [shutil.rmtree(path) for path in (cloud / "release").glob("*_001")],
        "cloud holds no rank of stage 1, of 2",
    ),
    "no rank": (
        lambda edge, cloud, _: shutil.rmtree(cloud / "release" / "mp_rank_00_001"),
        "release holds ranks 1 of stage 1; one of those before them is missing",
    ),
    "no file": (
        lambda edge, cloud, _: (cloud / "release" / "mp_rank_01_001" / "model_optim_rng.pt").unlink(),
        "mp_rank_01_001/model_optim_rng.pt is missing; a rank's weights lie in it",
    ),
    "cut file": (
        lambda edge, cloud, _: (cloud / "release" / "mp_rank_01_001" / "model_optim_rng.pt").write_bytes(b"PK"),
        "mp_rank_01_001/model_optim_rng.pt is damaged",
    ),
    "no tree": (lambda edge, cloud, _: shutil.rmtree(cloud), "cloud holds no latest_checkpointed_iteration.txt"),
    "no layer": (
        lambda edge, cloud, _: (
            shutil.rmtree(edge / "release" / "mp_rank_00_001"),
            _for_both(
                cloud, lambda read: [read["model1"].pop(name) for name in [*read["model1"]] if ".layers.1." in name]
            ),
        ),
        "they hold 3 layers of text_decoder instead of 4; config.json of .* convert again, or give with --like",
    ),
    "no first layer": (
        lambda edge, cloud, _: _for_both(
            cloud, lambda read: [read["model1"].pop(name) for name in [*read["model1"]] if ".layers.0." in name]
        ),
        "text_decoder.decoder.layers.0 is missing in chunk 1 of stage 1, which has later ones",
    ),
    "no tensor": (
        lambda edge, cloud, _: _for_both(cloud, lambda read: read["model1"].pop(_NORM)),
        "text_decoder.decoder.layers.2.input_layernorm.weight is missing",
    ),
    "no tensor on a rank": (
        lambda edge, cloud, _: _change(cloud, lambda read: read["model1"].pop(_NORM)),
        f"only one of ranks 0 and 1 of stage 1 holds {_NORM} of chunk 1",
    ),
    "other type": (
        lambda edge, cloud, _: _change(cloud, lambda read: read["model1"].update({_QKV: read["model1"][_QKV].float()})),
        "linear_qkv.weight has the type bfloat16 and float32, not one of",
    ),
    "eight bits": (
        lambda edge, cloud, _: _for_both(
            cloud, lambda read: read["model1"].update({_QKV: read["model1"][_QKV].to(torch.int8)})
        ),
        "linear_qkv.weight has the type bfloat16 and int8, not one of",
    ),
    "canonical": (_canonical, "q_proj.weight is no tensor of a model of the family qwen2_5_vl"),
    "experts": (
        lambda edge, cloud, _: (cloud / "release" / "mp_rank_00_001").rename(cloud / "release" / "mp_rank_00_001_000"),
        "is of a run with experts in parallel",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_trees_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path, what: str) -> None:
    spoil, words = BAD[what]
    edge, cloud = write_trees(tmp_path, published, "layers of text on the edge", (1, 2))
    spoil(edge, cloud, published)
    capsys.readouterr()
    code, lines = run_action(capsys, "import", "--mm", edge, cloud, "--like", published, "--to", tmp_path / "to")
    assert code == 2 and len(lines) == 1 and lines[0].count(";") >= 2, lines
    assert re.search(words, lines[0]), lines[0]
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mm", "a", "b"), "--mm without --like; the trees do not say how many heads"),
        (("--mm", "a", "b", "c", "--like", "d"), "--mm with 3 folders"),
        (("--hf", "a", "--like", "b"), "--like b with --hf"),
    ],
)
def test_flags_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, (line,) = run_action(capsys, "import", *words, "--to", tmp_path / "to")
    assert code == 2 and message in line


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_config": {"hidden_act": "gelu"}}, 'vision_config: hidden_act is "gelu"; only "silu"'),
        ({"vision_config": {"deepstack": 3}}, "vision_config: deepstack is 3, and no field of qwen2_5_vl"),
        ({"vision_config": {"num_heads": 7}}, "hidden_size of vision_config is 96, and num_heads 7; all heads have"),
        ({"vision_config": {"out_hidden_size": 48}}, "out_hidden_size of vision_config is 48, and hidden_size 96"),
        ({"text_config": {"rope_scaling": {"type": "mrope"}, "rope_parameters": None}}, "mrope_section is missing"),
        ({"new_field": 1}, "new_field is 1, and no field of qwen2_5_vl that is known"),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings is true and false, beside text_config and in it",
        ),
    ],
)
def test_fields_that_change_what_is_computed(
    tmp_path: Path, published: Path, fields: dict[str, Any], message: str
) -> None:
    config = read_config(published)
    for name, value in fields.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message) as error:
        read_model(config, tmp_path / "config.json")
    assert "\n" not in str(error.value) and str(error.value).count(";") >= 2
    read_model(read_config(published), tmp_path / "config.json")  # as it was published


def test_a_flat_config_is_the_same_model(tmp_path: Path, published: Path) -> None:
    """As the model was published: the fields of the language model beside those of pictures."""
    config = read_config(published)
    flat = {**config, **config["text_config"], "model_type": config["model_type"]}
    flat["architectures"] = config["architectures"]
    del flat["text_config"]
    assert read_model(flat, tmp_path) == read_model(config, tmp_path)


def test_another_model_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path) -> None:
    run_json(capsys, "import", "--hf", published, "--to", tmp_path / "middle")
    shutil.copytree(published, tmp_path / "other")
    config = json.loads((published / "config.json").read_text())
    edit(tmp_path / "other" / "config.json", vision_config={**config["vision_config"], "depth": 4, "num_heads": 6})
    capsys.readouterr()
    words = ("--from", tmp_path / "middle", "--hf", tmp_path / "back", "--like", tmp_path / "other")
    code, (line,) = run_action(capsys, "export", *words)
    assert code == 2 and "image_encoder.encoder.blocks.layers" in line and "describes another model" in line


class Entries:
    """Stands for MindSpeed-MM's, whose attributes are the entries of a JSON file."""

    def __init__(self, **entries: object) -> None:
        vars(self).update(entries)


def test_what_the_run_read_of_its_json_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], published: Path
) -> None:
    """The argument for groups is changed by Megatron; 12 heads of 8 in 6 groups have the shapes of 4 of 24 in 2."""
    run_json(capsys, "import", "--hf", published, "--to", tmp_path / "middle")
    file = tmp_path / "middle" / "release" / "common.pt"
    common = torch.load(file, weights_only=False)
    vars(common["args"]).update(
        num_query_groups=12, mm=Entries(model=Entries(text_decoder=Entries(num_query_groups=6)))
    )
    torch.save(common, file)
    run_json(capsys, "export", "--from", tmp_path / "middle", "--hf", tmp_path / "back")
    common["args"].mm.model.text_decoder.num_query_groups = 2
    torch.save(common, file)
    capsys.readouterr()
    code, (line,) = run_action(capsys, "export", "--from", tmp_path / "middle", "--hf", tmp_path / "no")
    assert code == 2 and "text_decoder.num_query_groups is 2, and 6 is expected" in line


def test_the_writer_cuts_a_gated_layer_as_it_should() -> None:
    """Each rank has a part of both halves."""
    name = "image_encoder.encoder.blocks.layers.0.mlp.linear_fc1.bias"
    assert part_of(name, torch.arange(8), 1, 2).tolist() == [2, 3, 6, 7]
