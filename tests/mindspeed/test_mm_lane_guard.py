"""MindSpeed-MM's own script: no sample leaves the edge, which alone has files; videos train; what is refused.

Opt-in as ``test_mm_lane.py``, whose oracle and launcher are used here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed import test_mm_lane as own_script
from tests.mindspeed.mm import own_data, samples
from tests.mindspeed.mm.model import TEXT_LAYERS, VISION_LAYERS, write_files
from tests.support.hosts import ROOT

pytestmark = own_script.pytestmark
VISION, TEXT = [[VISION_LAYERS, 0], [0, 0]], [[1, 2], [1, 0]]
TWO_RINGS = [[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 3], [1, 0]]
SLICE = samples.SEQUENCE * 2 * 64 // 2  # of an activation [S, B, H], half
STEPS = 2
Started = tuple[int, str]


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the script that gives samples of another kind, watches, and goes to the edge's folder."""
    monkeypatch.setattr(own_script, "SCRIPT", ROOT / "tests" / "mindspeed" / "mm" / "guarded.py")


def model_file(
    folder: Path, change: Callable[[Any], None], vision: Sequence[Any] = VISION, text: Sequence[Any] = TEXT
) -> tuple[str, ...]:
    """Write the JSON of the model, changed, and return the flags that name it: they come after the others."""
    write_files(folder, vision, text)
    path = folder / "model.json"
    model = json.loads(path.read_text())
    change(model)
    path.write_text(json.dumps(model))
    return "--mm-model", str(path)


def assert_one_line(code: int, output: str, words: str) -> None:
    """Check that each rank ended with a line: the only stack trace is the launcher's."""
    assert code != 0 and output.count("Traceback (most recent call last)") == 1, output[-6000:]
    assert len(re.findall(words, output)) >= 3, output[-4000:]


def planted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    vision: Sequence[Any] = VISION,
    text: Sequence[Any] = TEXT,
) -> tuple[list[dict[str, Any]], str]:
    """Train two steps of a U on planted samples, watched; return what was seen on each rank, and the output."""
    monkeypatch.setenv("VTP_TEST_SAMPLES", "planted")
    monkeypatch.setenv("VTP_TEST_WATCH", how)
    size = str(samples.KINDS["planted"].vocabulary)

    def change(model: Any) -> None:
        model["text_decoder"]["vocab_size"] = int(size)

    audit = ("--vtp-audit", str(tmp_path / "audit.jsonl"))
    words = (*model_file(tmp_path, change, vision, text), "--vocab-size", size, "--train-iters", str(STEPS), *audit)
    code, output = own_script.start_u("1,2", vision, text, *words)
    assert code == 0, output[-6000:]
    found = [json.loads(line) for line in re.findall(r"watched: (\{.*\})", output)]
    return sorted(found, key=lambda each: each["rank"]), output


def test_no_sample_leaves_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (edge, *cloud), output = planted(tmp_path, monkeypatch, "watch")
    microbatches = 2 * STEPS
    assert edge["samples"] >= 2 * microbatches and edge["findings"] == []
    assert [rank["samples"] for rank in cloud] == [0, 0], "a cloud rank has read samples"
    # A warm-up's zero, positions and masks, and activations or gradients, whole or in halves.
    assert {tuple(form) for form in edge["sent"]} <= {
        ("float32", 1),
        ("int32", 4 * samples.SEQUENCE * 2),
        ("float32", SLICE),
        ("float32", 2 * SLICE),
    }
    assert ["int32", 4 * samples.SEQUENCE * 2] in edge["sent"]
    # Places in a sample: none is as large as an id.
    least, most = edge["positions"]
    assert least >= 0 and most < 4 * samples.SEQUENCE
    losses = [float(loss) for loss, _ in own_script._NUMBERS.findall(output)]
    assert len(losses) == STEPS
    assert not [number for number in edge["numbers"] for loss in losses if abs(number - loss) < 1e-4 * loss]
    # The audit says the same.
    lines = [json.loads(line) for line in (tmp_path / "audit.rank0.jsonl").read_text().splitlines()]
    crossed = [line for line in lines if line.get("cargo") == "positions" and line["way"] == "sent"]
    assert len(crossed) == microbatches
    assert {tuple(line["shape"]) for line in crossed} == {(samples.SEQUENCE, 2, 4)}


def test_no_sample_leaves_the_edge_of_two_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of both rings, sizes of pictures in the first, positions in the second; the edge's other calls."""
    (edge, *cloud), _ = planted(tmp_path, monkeypatch, "watch", *TWO_RINGS)
    assert edge["samples"] >= 2 * 2 * STEPS and edge["findings"] == []
    assert [rank["samples"] for rank in cloud] == [0, 0], "a cloud rank has read samples"
    assert {kind for kind, _ in edge["sent"]} == {"float32", "int32", "int64"}
    assert {count for kind, count in edge["sent"] if kind == "int64"} == {4}
    least, most = edge["positions"]
    assert least >= 0 and most < 4 * samples.SEQUENCE
    lines = [json.loads(line) for line in (tmp_path / "audit.rank0.jsonl").read_text().splitlines()]
    sent = [line["cargo"] for line in lines if "cargo" in line and line["way"] == "sent"]
    assert set(sent) == {"activation", "gradient", "positions", "grids", "shape header", "warm-up"}
    assert sent.count("positions") == sent.count("grids") == 2 * STEPS


@pytest.mark.parametrize("how", ["watch", "leak"])
def test_no_picture_of_its_own_data_leaves_the_edge_of_two_rings(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """By MindSpeed-MM's loader, from JPEGs, in batches of their own lengths; the control ships a row of pixels."""
    monkeypatch.setenv("VTP_TEST_WATCH", how)
    words = ("--seq-length", str(own_data.SEQUENCE), "--variable-seq-lengths", "--train-iters", str(STEPS))
    code, output = own_script.start_u("1,2", *TWO_RINGS, *words, has_own_data=True)
    assert code == 0, output[-6000:]
    edge, *cloud = sorted(map(json.loads, re.findall(r"watched: (\{.*\})", output)), key=lambda each: each["rank"])
    assert edge["samples"] >= 2 * 2 * STEPS and [rank["samples"] for rank in cloud] == [0, 0]
    assert edge["findings"] == ([["send", "pixels"]] if how == "leak" else [])
    assert {kind for kind, _ in edge["sent"]} == {"float32", "int32", "int64", *(["float64"] if how == "leak" else [])}


def test_planted_leaks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same watch sees pixels, tokens and a single label, whatever carries them."""
    (edge, *_), _ = planted(tmp_path, monkeypatch, "leak")
    found = {tuple(each) for each in edge["findings"]}
    assert {("send", "pixels"), ("broadcast_", "labels"), ("broadcast_", "tokens")} <= found, found


def files_of_the_edge(folder: Path) -> tuple[str, ...]:
    """Write a folder with tokenizer, processor and data, and the JSON that names them; return its flag."""
    for name in ("model", "data"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(f"the {name}")
    preprocess = {"model_name_or_path": "./model"}
    dataset = {"dataset_type": "huggingface", "preprocess_parameters": preprocess}
    dataset["basic_parameters"] = {"dataset": "./data"}
    content = {"dataset_param": dataset, "dataloader_param": {"dataloader_mode": "sampler"}}
    (folder / "data.json").write_text(json.dumps(content))
    return "--mm-data", "data.json"


def at_the_edge(*words: str) -> Started:
    """Start a U whose ranks have command lines of their own: the script starts itself by ``vtp_plugin run``."""
    return own_script.start(3, VISION, TEXT, *own_script.DEVICE, "--vtp-size-list", "1,2", own_script.U_SHAPE, *words)


def test_only_the_edge_needs_tokenizer_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others start in an empty folder, and know of no data, no tokenizer and no processor."""
    monkeypatch.setenv("VTP_TEST_EDGE", str(tmp_path))
    code, output = at_the_edge(*files_of_the_edge(tmp_path))
    assert code == 0, output[-6000:]
    monkeypatch.delenv("VTP_TEST_EDGE")  # the oracle has no edge
    own_script.assert_equal(own_script.numbers(output), oracle_of("pictures"))
    assert set(re.findall(r"rank (\d) opens (\./\w+): the (\w+)", output)) == {
        ("0", "./model", "model"),
        ("0", "./data", "data"),
    }


@pytest.mark.parametrize("is_u_shaped", [True, False], ids=["U", "plain"])
def test_a_missing_tokenizer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_u_shaped: bool) -> None:
    words = files_of_the_edge(tmp_path)
    if is_u_shaped:
        monkeypatch.setenv("VTP_TEST_EDGE", str(tmp_path))
        (tmp_path / "model" / "file").unlink()
        (tmp_path / "model").rmdir()
        code, output = at_the_edge(*words)
    else:
        code, output = plain("1,2", [2, 0], [2, 2], "--mm-data", str(tmp_path / "data.json"))
    own_script.assert_said_once(code, output, r"model_name_or_path \./model of --mm-data \S*data\.json is not there")


def plain(sizes: str, vision: Sequence[Any], text: Sequence[Any], *extra: str) -> Started:
    """Start a plain pipeline."""
    words = (*own_script.DEVICE, "--vtp-size-list", sizes, *extra)
    return own_script.start(own_script.num_ranks(sizes, 1), vision, text, *words, is_run=True)


_ORACLES: dict[str, own_script.Numbers] = {}


def oracle_of(kind: str, *extra: str) -> own_script.Numbers:
    """One rank without the plugin, on samples of a kind; each is run once. The variable says the kind."""
    if kind not in _ORACLES:
        _ORACLES[kind] = own_script.trained(1, [VISION_LAYERS], [TEXT_LAYERS], *extra)
    return _ORACLES[kind]


def test_videos_alone_train_in_two_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTP_TEST_SAMPLES", "videos")

    def change(model: Any) -> None:
        model["img_context_token_id"] = samples.VIDEO

    code, output = own_script.start_u("1,2", *TWO_RINGS, *model_file(tmp_path, change, *TWO_RINGS))
    assert code == 0, output[-6000:]
    alone = model_file(tmp_path, change, [3], [TEXT_LAYERS])
    own_script.assert_equal(own_script.numbers(output), own_script.trained(1, [3], [TEXT_LAYERS], *alone))


@pytest.mark.parametrize("is_u_shaped", [True, False], ids=["U", "plain"])
def test_videos_alone_train_as_the_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_u_shaped: bool) -> None:
    """One to three in a sample, of unequal sizes and rates, padding on either side."""
    monkeypatch.setenv("VTP_TEST_SAMPLES", "videos")

    def change(model: Any) -> None:
        model["img_context_token_id"] = samples.VIDEO  # as MindSpeed-MM says for videos

    if is_u_shaped:
        code, output = own_script.start_u("1,2", VISION, TEXT, *model_file(tmp_path, change))
    else:
        code, output = plain("1,2", [2, 0], [2, 2], *model_file(tmp_path, change, [2, 0], [2, 2]))
    assert code == 0, output[-6000:]
    alone = model_file(tmp_path, change, [VISION_LAYERS], [TEXT_LAYERS])
    own_script.assert_equal(own_script.numbers(output), oracle_of("videos", *alone))


@pytest.mark.parametrize("is_u_shaped", [True, False], ids=["U", "plain"])
def test_pictures_beside_videos_are_refused(monkeypatch: pytest.MonkeyPatch, is_u_shaped: bool) -> None:
    monkeypatch.setenv("VTP_TEST_SAMPLES", "mixed")
    code, output = (
        own_script.start_u("1,2", VISION, TEXT)
        if is_u_shaped
        else plain("1,2", [2, 0], [2, 2], "--vtp-timeout-s", "60")
    )
    assert_one_line(code, output, "a batch with pictures and videos; MindSpeed-MM reads either")


LINES = "import vtp_plugin; vtp_plugin.apply()"
AFTER_ADAPTOR = "import mindspeed.megatron_adaptor"
AFTER_IMPORTS = "from mindspeed_mm.utils.utils import compute_token_level_loss"
BEFORE_ADAPTOR = "from typing import Dict, Any"


def with_lines(monkeypatch: pytest.MonkeyPatch, below: str) -> Started:
    """Start the script with the two lines in it, without ``run``."""
    monkeypatch.setenv("VTP_TEST_LINES", json.dumps([below, LINES]))
    return own_script.start(3, [2, 0], [2, 2], *own_script.DEVICE, "--vtp-size-list", "1,2")


@pytest.mark.parametrize("below", [AFTER_ADAPTOR, AFTER_IMPORTS], ids=["after the adaptor", "after all imports"])
def test_two_lines_in_the_right_order(monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    code, output = with_lines(monkeypatch, below)
    assert code == 0, output[-6000:]
    own_script.assert_equal(own_script.numbers(output), oracle_of("pictures"))


def test_two_lines_before_the_adaptor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = with_lines(monkeypatch, BEFORE_ADAPTOR)
    assert_one_line(code, output, r"MindSpeed's adaptor is imported after vtp_plugin\.apply\(\)")


def other_language(model: Any) -> None:
    """A model of another kind."""
    model["text_decoder"]["model_id"] = "qwen3_lm"


def more_layers(model: Any) -> None:
    """Another number of layers than the lists have."""
    model["text_decoder"]["num_layers"] = 5


@pytest.mark.parametrize(
    ("change", "vision", "text", "extra", "words"),
    [
        (other_language, [2, 0], [2, 2], (), "model_id qwen3_lm of text_decoder"),
        (more_layers, [2, 0], [2, 2], (), "pipeline_num_layers 2,2 of text_decoder has 4 layers; its num_layers is 5"),
        (None, [1, 1], [2, 2], (), "stage 1 has layers of it behind the first ones"),
        (None, [2, 0], [2, 2], ("--virtual-pipeline-model-parallel-size", "2"), "2 stages need 2 x 2 numbers"),
    ],
    ids=["another model", "numbers of layers", "vision behind text", "chunks"],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path,
    change: Callable[[Any], None] | None,
    vision: list[int],
    text: list[int],
    extra: tuple[str, ...],
    words: str,
) -> None:
    flags = () if change is None else model_file(tmp_path, change, vision, text)
    own_script.assert_said_once(*plain("1,2", vision, text, *flags, *extra), re.escape(words))
