"""What of MindSpeed-MM's files and versions is refused, in one line each; without its tree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.errors import ConfigError, LayoutError, VtpError
from vtp_plugin.host.patching.pins import pins_in, read_pins
from vtp_plugin.host.rules.checks.stage_layers import check_counts, check_places
from vtp_plugin.plan.layout.layer_lists import LayerLists, read_rows
from vtp_plugin.runtime.step.companion_tensors import checked

pytest.importorskip("megatron.core")
from vtp_plugin.patches.mindspeed import known_mm, multimodal


def model(text: str = "qwen2_5_lm", vision: str = "qwen2vit", **rest: Any) -> SimpleNamespace:
    """What the JSON file of a model says."""
    return SimpleNamespace(
        model_id="qwen2_5vl",
        text_decoder=SimpleNamespace(model_id=text),
        image_encoder=SimpleNamespace(vision_encoder=SimpleNamespace(model_id=vision)),
        **rest,
    )


def test_its_qwen2_5_vl_is_known() -> None:
    assert not list(known_mm.problems_of_model(model(video_encoder=None, text_encoder=None)))
    assert not list(known_mm.problems_of_model(model(vision="qwen2_5_vit")))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (model(text="qwen2_5_omni_thinker"), "model_id qwen2_5_omni_thinker of text_decoder"),
        (model(text="qwen3_lm", vision="qwen3vit"), "model_id qwen3_lm of text_decoder"),
        (model(vision="glm4v_moe"), "model_id glm4v_moe of vision_encoder"),
        (model(audio_encoder=SimpleNamespace()), "audio_encoder of the model qwen2_5vl"),
        (SimpleNamespace(model_id="opensoraplan"), "model_id opensoraplan of --mm-model"),
    ],
    ids=["omni", "qwen3", "glm", "audio", "sora"],
)
def test_other_models_are_refused_by_name(other: SimpleNamespace, name: str) -> None:
    line, *_ = known_mm.problems_of_model(other)
    assert line.startswith(name) and "only Qwen2.5-VL" in line and "\n" not in line


@pytest.mark.parametrize(
    ("vision", "text", "is_u_shaped", "words"),
    [
        ([1, 1], [2, 2], False, "stage 1 has layers of it behind the first ones"),
        ([1, 1, 0], [0, 2, 2], False, "begins behind stage 0"),
        ([2, 0], [4, 0], False, "the last stage has the head"),
        ([2, 0, 0], [2, 0, 2], False, "stage 1 has none"),
        ([[2, 0], [0, 0]], [[0, 3], [1, 0]], True, "the edge has the embedding"),
        ([[2, 0], [0, 0]], [[1, 3], [0, 0]], True, "the edge has the embedding"),
    ],
    ids=[
        *("vision behind text", "vision on two stages", "no head"),
        *("an empty stage", "embedding in the cloud", "head in the cloud"),
    ],
)
def test_layers_on_ranks_that_cannot_have_them_are_refused(
    vision: list[Any], text: list[Any], is_u_shaped: bool, words: str
) -> None:
    line, *_ = check_places(LayerLists(read_rows(vision), read_rows(text)), is_u_shaped=is_u_shaped)
    assert words in line and line.startswith("pipeline_num_layers ") and "\n" not in line


@pytest.mark.parametrize(
    ("vision", "text", "is_u_shaped"),
    [([2, 0], [2, 2], False), ([[2, 0], [0, 0]], [[1, 1], [1, 1]], False), ([[2, 0], [0, 0]], [[1, 2], [1, 0]], True)],
    ids=["plain", "two chunks", "U"],
)
def test_layers_where_they_can_be_are_not(vision: list[Any], text: list[Any], is_u_shaped: bool) -> None:
    lists = LayerLists(read_rows(vision), read_rows(text))
    assert not [*check_places(lists, is_u_shaped=is_u_shaped), *check_counts(lists, 2, 4)]


def test_lists_of_other_numbers_of_layers_are_refused() -> None:
    lines = list(check_counts(LayerLists(((2, 0),), ((1, 2),)), 3, 4))
    assert [line.partition(";")[0] for line in lines] == [
        "pipeline_num_layers 2,0 of vision_encoder has 2 layers",
        "pipeline_num_layers 1,2 of text_decoder has 3 layers",
    ]


@pytest.mark.parametrize("given", [[], 4, "2,0", [1, [2, 0]], [-1, 3], [1.0, 3], [[1], []], [True, 3]], ids=str)
def test_what_is_no_list_of_layers_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="change the JSON") as refused:
        read_rows(given)
    assert "\n" not in str(refused.value)


NO_CHECKPOINT = dict.fromkeys(("load", "ckpt_step", "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir"))
"""Arguments of a run that loads nothing."""


def arguments(vision: list[Any] | None, text: list[Any] | None, chunks: int | None, **rest: Any) -> Any:
    """Arguments with a model of these lists."""
    described = model(patch=SimpleNamespace(layerwise_disaggregated_training=True), **rest)
    for part, layers in ((described.image_encoder.vision_encoder, vision), (described.text_decoder, text)):
        if layers is not None:
            part.pipeline_num_layers = layers
    sizes = {**dict.fromkeys(multimodal._SIZES, 8), **NO_CHECKPOINT}
    return SimpleNamespace(mm=SimpleNamespace(model=described), virtual_pipeline_model_parallel_size=chunks, **sizes)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the function that reads the JSON files: they are read."""
    name = "mindspeed_mm.configs.config"
    for parent in ("mindspeed_mm", "mindspeed_mm.configs"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(merge_mm_args=lambda args: None))


ROWS = [[1, 0], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (arguments(*ROWS, 2), "--virtual-pipeline-model-parallel-size 2 in a U-shape, with 3 rows"),
        (arguments([2, 0], [2, 2], 3), "--virtual-pipeline-model-parallel-size 3 in a U-shape, with 1 rows"),
        (arguments(None, [[1, 2], [1, 0]], None), "no pipeline_num_layers of vision_encoder"),
        (arguments([[2, 0], [0, 0]], None, None), "no pipeline_num_layers of text_decoder"),
        (arguments(*ROWS, 3, audio_encoder=SimpleNamespace()), "audio_encoder of the model"),
    ],
    ids=["chunks of another number", "one row", "no list of the vision tower", "no list of the model", "audio"],
)
def test_contradictions_of_a_u_are_refused(merged: None, args: Any, words: str) -> None:
    with pytest.raises(VtpError, match=words) as refused:
        multimodal.read_model(args, is_u_shaped=False)
    assert "\n" not in str(refused.value)


def test_chunks_as_its_lists_have_rows_are_taken_over(merged: None) -> None:
    args = arguments(*ROWS, 3)
    multimodal.read_model(args, is_u_shaped=False)
    assert args.virtual_pipeline_model_parallel_size is None and args.num_layer_list == "1,2,1"
    assert args.layerwise_disaggregated_training and not multimodal.has_switch(args.mm.model)


def problems(vision: list[Any], text: list[Any], chunks: int | None) -> list[str]:
    """What is said of lists of a plain pipeline of two stages."""
    args, layout = arguments(vision, text, chunks), SimpleNamespace(num_stages=2, tp_sizes=(1, 2), dp_sizes=(1, 1))
    args.mm.model.image_encoder.vision_encoder.num_attention_heads = 4
    return list(multimodal.problems(args, layout, is_u_shaped=False))  # pyright: ignore[reportArgumentType]


def test_rows_are_as_many_as_chunks() -> None:
    assert not problems([2, 0], [2, 2], None)
    assert not problems([[2, 0], [0, 0]], [[1, 1], [1, 1]], 2)
    for lists, chunks in ((([2, 0], [2, 2]), 2), (([[2, 0], [0, 0]], [[1, 1], [1, 1]]), None)):
        lines = problems(*lists, chunks)
        assert len(lines) == 2 and all(f"2 stages need {chunks or 1} x 2 numbers" in line for line in lines)


def data(path: str) -> Any:
    """Arguments with a file of data that names a folder with tokenizer and processor."""
    preprocess = SimpleNamespace(model_name_or_path=path)
    parts = SimpleNamespace(dataset_param=SimpleNamespace(preprocess_parameters=preprocess))
    return SimpleNamespace(mm=SimpleNamespace(data=parts), mm_data="data.json")


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    (line,) = known_mm.problems_of_files(data(f"{tmp_path}/none"))
    assert line.startswith(f"model_name_or_path {tmp_path}/none of --mm-data data.json is not there")
    for there in (str(tmp_path), "Qwen/Qwen2.5-VL-7B-Instruct"):
        assert not list(known_mm.problems_of_files(data(there)))
    (line,) = known_mm.problems_of_files(SimpleNamespace(mm=SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    assert line.startswith("no --mm-data")


def test_pictures_beside_videos_are_refused_when_they_are_read() -> None:
    """In a plain pipeline, too: each of its iterators is looked at."""
    pictures, videos = {"image_grid_thw": 1}, {"video_grid_thw": 1}
    batches = [iter([pictures, videos, {}, {**pictures, **videos}]), None]
    first, none = checked(batches, known_mm.require_one_kind)
    assert none is None and [next(first) for _ in range(3)] == [pictures, videos, {}]
    with pytest.raises(ConfigError, match="a batch with pictures and videos"):
        next(first)


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Packages whose functions are those that are relied on, and pins of them."""

    def lay(package: str = "", name: str = "", body: str = "return 1") -> Path:
        for each, targets in known_mm.TARGETS.items():
            _lay(tmp_path, each, targets, body if each == package else "return 1", name)
        return tmp_path

    lay()
    pins = {known_mm.WRITTEN_FOR[each]: pins_in(tmp_path, targets) for each, targets in known_mm.TARGETS.items()}
    assert {name: found.keys() for name, found in pins.items()} == {
        name: found.keys() for name, found in read_pins(known_mm.PINS).items()
    }
    monkeypatch.setattr(known_mm, "_root", lambda package: tmp_path)
    monkeypatch.setattr(known_mm, "read_pins", lambda path: pins)
    return lay


def _lay(root: Path, package: str, targets: tuple[str, ...], body: str, name: str) -> None:
    """Write the modules of targets; one of them, by its name, with another body, or without it."""
    by_module: dict[str, list[str]] = {}
    for target in targets:
        by_module.setdefault(target.partition(":")[0], []).append(target)
    for module, found in by_module.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        classes: dict[str, list[str]] = {}
        lines: list[str] = []
        for target in found:
            what = body if target == name else "return 1"
            owner, _, function = target.partition(":")[2].rpartition(".")
            if what:
                text = f"def {function}():\n    {what}\n"
                classes.setdefault(owner, []).append("".join(f"    {line}\n" for line in text.splitlines()))
                lines += [] if owner else [text]
        for owner, methods in classes.items():
            lines += [f"class {owner}:\n" + "".join(methods)] if owner else []
        path.write_text("\n\n".join(lines))


def test_the_versions_that_it_was_written_for_are_known(trees: Callable[..., Path]) -> None:
    assert not list(known_mm.problems_of_versions("0.12.1")) and not list(known_mm.changes_of_versions())


@pytest.mark.parametrize("package", known_mm.TARGETS)
def test_what_has_changed_is_named(trees: Callable[..., Path], package: str) -> None:
    for name in known_mm.TARGETS[package]:
        trees(package, name, "return 2")
        assert list(known_mm.changes_of_versions()) == [f"{name} is not as in {known_mm.WRITTEN_FOR[package]}"]
        assert not list(known_mm.problems_of_versions("0.12.1"))


def test_layers_are_counted_only_where_it_counts_them_as_it_was_seen_to(trees: Callable[..., Path]) -> None:
    """Once MindSpeed-MM has changed that function, the mend is off."""
    assert known_mm.counts_layers_wrong()
    trees("mindspeed_mm", known_mm.LAYER_COUNT, "return 2")
    assert not known_mm.counts_layers_wrong()


@pytest.mark.parametrize("package", known_mm.TARGETS)
def test_a_version_without_what_is_needed_is_refused(trees: Callable[..., Path], package: str) -> None:
    name = known_mm.TARGETS[package][0]
    root = trees(package, name, "")
    (line,) = known_mm.problems_of_versions("0.12.1")
    assert line.startswith(f"{package} in {root} has no {name};") and known_mm.WRITTEN_FOR[package] in line


def test_another_megatron_is_refused(trees: Callable[..., Path]) -> None:
    (line,) = known_mm.problems_of_versions("0.16.1")
    assert line.startswith("MindSpeed-MM on Megatron 0.16.1;") and "core_v0.12.1" in line


def test_each_refusal_of_lists_is_of_the_layout() -> None:
    with pytest.raises(LayoutError, match="no pipeline_num_layers of text_decoder"):
        multimodal._lists(arguments([2, 0], None, None))
