"""Trees of MindSpeed-MM's converter, imported, trained on by its own script, and exported to Hugging Face again.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed import test_mm_lane
from tests.mindspeed.mm.converted import convert
from tests.mindspeed.mm.model import TEXT_LAYERS, VISION_LAYERS
from tests.mindspeed.mm.samples import MadeSamples, collate
from tests.mindspeed.test_mm_lane import DEVICE, STEPS, assert_equal, numbers, start
from tests.mindspeed.test_mm_weights import (
    LISTS,
    SHARDED,
    assert_bitwise,
    converted,
    gathered,
    hugging_face,
    train,
    weights,
)
from tests.support.hosts import ROOT
from vtp_plugin.checkpoint.hf.hf_model import settings
from vtp_plugin.checkpoint.hf.read_config import read_model
from vtp_plugin.cli import main

pytestmark = test_mm_lane.pytestmark
VISION, TEXT = [[1, 0], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]]


def run(*words: object) -> None:
    """Run an action of the tools."""
    main(["checkpoint", *map(str, words)])


@functools.cache
def trees() -> tuple[Path, Path]:
    """Let the converter write the trees of an edge of one rank and a cloud of two."""
    folder = Path(tempfile.mkdtemp())
    for name, size in (("edge", 1), ("cloud", 2)):
        convert("hf_to_mm_ldt", hugging_face(), folder / name, VISION, TEXT, tp_size=size)
    return folder / "edge", folder / "cloud"


@functools.cache
def imported() -> Path:
    """Import both trees."""
    folder = Path(tempfile.mkdtemp()) / "imported"
    run("import", "--mm", *trees(), "--like", hugging_face(), "--to", folder)
    return folder


def test_the_small_writer_of_the_tests_writes_what_the_converter_writes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.support.vision_models import chunks_of, whole_tensors, write_tree

    published = {
        name: value for file in hugging_face().glob("*.safetensors") for name, value in load_file(file).items()
    }
    made = chunks_of(whole_tensors(published, heads=4, groups=2), VISION, TEXT)
    for tree, size in zip(trees(), (1, 2), strict=True):
        ours = tmp_path / tree.name
        write_tree(ours, made, tp_size=size)
        files = sorted(file.relative_to(tree) for file in tree.rglob("*.*") if file.is_file())
        assert files == sorted(file.relative_to(ours) for file in ours.rglob("*.*") if file.is_file())
        for file in files:
            if file.suffix == ".pt":
                found, expected = (torch.load(folder / file, weights_only=True) for folder in (ours, tree))
                assert found.keys() == expected.keys()
                for chunk in (name for name in expected if name.startswith("model")):
                    assert_bitwise(found[chunk], expected[chunk])
            else:
                assert (ours / file).read_text() == (tree / file).read_text()


def test_an_import_holds_what_megatron_stores_of_the_converters_files() -> None:
    _, sharded, _ = converted()
    assert_bitwise(gathered(imported(), 0), weights(gathered(sharded, 0)))


@pytest.mark.parametrize("layout", ["", "1,2", "U 1,2"])
def test_an_import_trains_as_converted_weights_on_one_rank(layout: str) -> None:
    _, _, expected = converted()
    assert_equal(numbers(train(layout, *SHARDED, "--load", str(imported()))), expected)


def test_what_a_u_has_trained_gives_the_same_loss_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next step of one rank of MindSpeed-MM, before it changes weights, and transformers with the export."""
    import transformers

    saving = ("--save", str(tmp_path / "run"), "--save-interval", str(STEPS))
    train("U 1,2", *SHARDED, "--load", str(imported()), *saving)
    run("export", "--from", tmp_path / "run", "--hf", tmp_path / "back")
    kind: Any = transformers.Qwen2_5_VLForConditionalGeneration
    model, told = kind.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager", torch_dtype=torch.float32
    )
    assert not any(told.values()), told
    # MindSpeed-MM has the sines and cosines of positions in bf16, whatever the model is in.
    positions = model.model.language_model.rotary_emb
    exact = positions.forward
    positions.forward = lambda *args: tuple(each.bfloat16().float() for each in exact(*args))
    drawn, losses = MadeSamples(), list[float]()
    for first in range(4 * STEPS, 4 * STEPS + 4, 2):
        batch = collate([drawn[index] for index in (first, first + 1)])
        with torch.no_grad():
            losses.append(float(model.eval()(**batch).loss))
    one_more = ("--no-load-rng", "--override-opt_param-scheduler", "--train-iters", str(STEPS + 1))
    output = train("", *SHARDED, "--load", str(tmp_path / "run"), *one_more)
    (found,) = numbers(output, 1)["losses"]
    assert found == pytest.approx(sum(losses) / 2, rel=1e-6)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = 4
    shutil.copytree(hugging_face(), tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        run("export", "--from", tmp_path / "run", "--hf", tmp_path / "no", "--like", tmp_path / "other")
    assert "text_decoder.num_query_groups is 2, and 4 is expected" in capsys.readouterr().err


def test_a_model_of_another_size_is_one_line(tmp_path: Path) -> None:
    """Its JSON says otherwise than the import."""
    words = (*DEVICE, "--vtp-size-list", "1,2", *SHARDED, "--load", str(imported()))
    code, output = start(3, *LISTS["1,2"], *words, is_run=True, is_tied=True)
    assert code != 0 and output.count("Traceback (most recent call last)") == 1, output[-6000:]
    assert "text_decoder.untie_embeddings_and_output_weights is False, and True is expected" in output


def test_its_own_example_has_the_entries_of_the_published_model() -> None:
    """Of 3 billion parameters, whose config is among those that the tests read."""
    config = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())["Qwen 2.5 VL 3B"]["config"]
    example = Path(test_mm_lane.TREES["VTP_MINDSPEED_MM"]) / "examples" / "qwen2.5vl" / "model_3b.json"
    entries = json.loads(example.read_text())
    for each in settings(read_model(config, example)):
        found = entries
        for name in each.flag.split("."):
            found = found[name]
        assert found == each.value, each.flag


def test_lists_of_the_lane_are_those_of_its_model() -> None:
    assert sum(map(sum, VISION)) == VISION_LAYERS and sum(map(sum, TEXT)) == TEXT_LAYERS
