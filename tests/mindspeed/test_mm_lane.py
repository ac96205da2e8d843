"""MindSpeed-MM's own script, on CPU over gloo: stages of unequal size train Qwen2.5-VL as one rank does.

Opt-in: ``VTP_MINDSPEED_MM`` names a tree of MindSpeed-MM 26.1.0, ``VTP_MINDSPEED`` and ``VTP_MEGATRON_LM`` those that
it is made for. ``tests/npu_stub`` and ``tests/mindspeed/mm`` stand for what only an NPU has, and for the data set. The
oracle is one rank of the unmodified script, without the plugin; all runs start from one set of weights.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed.launcher import launch
from tests.mindspeed.mm.model import FLAGS, TEXT_LAYERS, VISION_LAYERS, write_files
from tests.multiproc.cases.script_cases import num_ranks
from tests.support.hosts import ROOT

TREES = {name: os.environ.get(name, "") for name in ("VTP_MINDSPEED_MM", "VTP_MINDSPEED", "VTP_MEGATRON_LM")}
needs_trees = pytest.mark.skipif(
    not all(TREES.values()), reason=f"no path in {' and '.join(name for name, path in TREES.items() if not path)}"
)
pytestmark = [pytest.mark.full, needs_trees]
SCRIPT = ROOT / "tests" / "mindspeed" / "mm" / "pretrain.py"
TIMEOUT_S = 900.0
STEPS = 5
DEVICE = ("--vtp-device", "cpu")
U_SHAPE = "--layerwise-disaggregated-training"
OF_THE_ORACLE = ("--use-distributed-optimizer", "--calculate-per-token-loss")
OWN_CHUNKS = ("--virtual-pipeline-model-parallel-size", "3")
_NUMBERS = re.compile(r"exact loss: ([\d.E+-]+|nan) \| exact norm: ([\d.E+-]+)")
Numbers = dict[str, list[float]]


def start(
    ranks: int,
    vision: Sequence[Any],
    text: Sequence[Any],
    *extra: str,
    is_run: bool = False,
    dp: int = 1,
    **model: bool,
) -> tuple[int, str]:
    """Start the script and return how it ended and what it wrote.

    Args:
        ranks: processes.
        vision: layers of the vision tower, per stage.
        text: layers of the language model, per stage.
        extra: flags besides the common ones.
        is_run: start it by ``python -m vtp_plugin run``, else without the plugin.
        dp: replicas of every stage.
        model: what :func:`~tests.mindspeed.mm.model.write_files` takes besides.
    """
    files = write_files(Path(tempfile.mkdtemp()), vision, text, is_bf16="--bf16" in extra, **model)
    words = [*FLAGS, *files, "--global-batch-size", str(4 * dp), *extra]
    known = environment(has_own_data=model.get("has_own_data", False))
    return launch(SCRIPT, words, num_ranks=ranks, is_run=is_run, environment=known, timeout_s=TIMEOUT_S)


def environment(*, has_own_data: bool) -> dict[str, str]:
    """Give the variables by which the script finds the trees, the stand-ins, and its data or made samples."""
    # MindSpeed calls make, which asks python3-config where the headers of this Python lie.
    tools = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), f"{sys.base_prefix}/bin"]
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "npu_stub"), *reversed(TREES.values())]),
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **({"VTP_TEST_OWN_DATA": "1", "HF_HUB_OFFLINE": "1"} if has_own_data else {}),
    }


def trained(*arguments: object, **options: object) -> Numbers:
    """Train as :func:`start` says, and return losses and norms, step by step."""
    code, output = start(*arguments, **options)  # pyright: ignore[reportArgumentType]
    assert code == 0, output[-6000:]
    return numbers(output)


def numbers(output: str, steps: int = STEPS) -> Numbers:
    """Return losses and norms, of so many steps, step by step."""
    found = [(float(loss), float(norm)) for loss, norm in _NUMBERS.findall(output)]
    assert len(found) == steps, output[-6000:]
    return {"losses": [loss for loss, _ in found], "norms": [norm for _, norm in found]}


@functools.cache
def oracle(*extra: str, dp: int = 1, vision: int = VISION_LAYERS, **model: bool) -> Numbers:
    """One rank per replica, without the plugin; each is run once."""
    return trained(dp, [vision], [TEXT_LAYERS], *extra, dp=dp, **model)


def assert_equal(found: Numbers, expected: Numbers, tolerance: float = 1e-5) -> None:
    """Compare losses and norms of all steps."""
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=tolerance), name


def assert_said_once(code: int, output: str, words: str) -> None:
    """Check that the first rank said what is wrong, for all of its machine; the one stack trace is the launcher's."""
    assert code != 0 and output.count("Traceback (most recent call last)") == 1, output[-6000:]
    said = [line for line in output.splitlines() if "] error: " in line and re.search(words, line)]
    assert len(said) == 1, output[-4000:]


def test_the_oracle_trains() -> None:
    found = oracle()
    assert found["losses"][-1] < found["losses"][0]
    assert all(norm > 1.0 for norm in found["norms"])


def test_its_own_tensor_parallelism_equals_the_oracle() -> None:
    assert_equal(trained(2, [VISION_LAYERS], [TEXT_LAYERS], "--tensor-model-parallel-size", "2"), oracle())


def test_its_own_pipeline_equals_the_oracle() -> None:
    assert_equal(trained(2, [VISION_LAYERS, 0], [2, 2], "--pipeline-model-parallel-size", "2"), oracle())


@pytest.mark.parametrize(
    ("sizes", "vision", "text", "extra", "dp"),
    [
        pytest.param("1,2", [2, 0], [2, 2], (), 1, marks=pytest.mark.core),
        ("2,1", [2, 0], [2, 2], (), 1),
        ("1,2,1", [2, 0, 0], [1, 2, 1], (), 1),
        ("1,2", [2, 0], [2, 2], ("--sequence-parallel",), 1),
        ("1,2", [2, 0], [2, 2], ("--use-distributed-optimizer", "--calculate-per-token-loss"), 2),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else str(value),
)
def test_a_pipeline_equals_the_oracle(
    sizes: str, vision: list[int], text: list[int], extra: tuple[str, ...], dp: int
) -> None:
    words = (*DEVICE, "--vtp-size-list", sizes, *extra)
    found = trained(num_ranks(sizes, dp), vision, text, *words, is_run=True, dp=dp)
    assert_equal(found, oracle(*(word for word in extra if word in OF_THE_ORACLE), dp=dp))


def start_u(
    sizes: str,
    vision: Sequence[Any],
    text: Sequence[Any],
    *extra: str,
    is_own: bool = False,
    dp: int = 1,
    **model: bool,
) -> tuple[int, str]:
    """Start a U; by MindSpeed-MM's own switch, or by the plugin's flag."""
    words = (*DEVICE, "--vtp-size-list", sizes, *(() if is_own else (U_SHAPE,)), *extra)
    return start(num_ranks(sizes, dp), vision, text, *words, is_run=True, has_switch=is_own, dp=dp, **model)


@pytest.mark.parametrize(
    ("sizes", "vision", "text", "is_own", "extra", "dp"),
    [
        pytest.param("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], False, (), 1, marks=pytest.mark.core),
        ("1,1,2", [[2, 0, 0], [0, 0, 0]], [[1, 1, 1], [1, 0, 0]], False, (), 1),
        ("1,2", [[1, 0], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]], True, OWN_CHUNKS, 1),
        ("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], False, OF_THE_ORACLE, 2),
    ],
    ids=["1,2", "1,1,2", "by its own switch", "dp 2"],
)
def test_a_u_equals_the_oracle(
    tmp_path: Path,
    sizes: str,
    vision: list[list[int]],
    text: list[list[int]],
    is_own: bool,
    extra: tuple[str, ...],
    dp: int,
) -> None:
    audit = tmp_path / "audit.jsonl"
    code, output = start_u(sizes, vision, text, *extra, "--vtp-audit", str(audit), is_own=is_own, dp=dp)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(*(word for word in extra if word in OF_THE_ORACLE), dp=dp))
    records = [json.loads(line) for file in tmp_path.glob("audit.*") for line in file.read_text().splitlines()]
    crossed = {(record["cargo"], record["dtype"]) for record in records if "cargo" in record}
    floats = {(kind, "float32") for kind in ("activation", "gradient", "warm-up")}
    assert crossed == {*floats, ("positions", "int32")}, crossed


@pytest.mark.parametrize(
    ("sizes", "dp_sizes", "is_u", "extra"),
    [
        ("1,1", (1, 2), True, ()),
        ("1,2", (1, 2), True, OF_THE_ORACLE),
        ("1,1", (2, 1), True, ()),
        ("1,2", (1, 2), False, OF_THE_ORACLE),
    ],
    ids=["U 1,1", "U 1,2", "U with a wide edge", "plain"],
)
def test_stages_of_other_numbers_of_replicas_equal_the_oracle(
    sizes: str, dp_sizes: tuple[int, ...], is_u: bool, extra: tuple[str, ...]
) -> None:
    """Every microbatch goes to one replica, so the oracle has as many as read the data."""
    vision, text = ([[2, 0], [0, 0]], [[1, 2], [1, 0]]) if is_u else ([2, 0], [2, 2])
    found = trained_by(sizes, dp_sizes, vision, text, *extra, *((U_SHAPE,) if is_u else ()))
    assert_equal(found, oracle(*extra, dp=dp_sizes[0]))


def trained_by(
    sizes: str, dp_sizes: Sequence[int], vision: Sequence[Any], text: Sequence[Any], *extra: str, **model: bool
) -> Numbers:
    """Train stages of so many replicas; the first stage reads the data."""
    ranks = sum(int(tp) * dp for tp, dp in zip(sizes.split(","), dp_sizes, strict=True))
    words = (*DEVICE, "--vtp-size-list", sizes, "--vtp-dp-list", ",".join(map(str, dp_sizes)), *extra)
    return trained(ranks, vision, text, *words, is_run=True, dp=dp_sizes[0], **model)


def test_replicas_that_would_share_a_microbatch_are_refused() -> None:
    words = (*DEVICE, "--vtp-size-list", "1,1", "--vtp-dp-list", "1,2", "--vtp-dp-mode", "split", U_SHAPE)
    code, output = start(3, [[2, 0], [0, 0]], [[1, 2], [1, 0]], *words, is_run=True)
    assert code != 0 and "cannot be cut by samples" in output, output[-4000:]


def test_a_u_with_a_frozen_vision_tower_equals_its_oracle() -> None:
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], is_frozen=True)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(is_frozen=True))


@pytest.mark.parametrize("name", ["ZERO_IDS", "AHEAD"])
def test_what_is_wrong_on_purpose_fails_by_far(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The controls: positions of ids that are all zero, as in the cloud of MindSpeed-MM's feature; a batch too many.

    With it the edge's last chunk has the labels of the batch behind its own.
    """
    monkeypatch.setenv(f"VTP_TEST_{name}", "1")
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]])
    assert code == 0, output[-6000:]
    found, expected = numbers(output)["norms"][0], oracle()["norms"][0]
    assert abs(found - expected) > 1e-3 * expected


def test_a_chunk_that_is_not_finalized_fails_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the edge's last chunk is left out, so its replicas train with gradients of their own samples."""
    monkeypatch.setenv("VTP_TEST_ONE_CHUNK", "1")
    code, output = start_u("1,2", [[2, 0], [0, 0]], [[1, 2], [1, 0]], *OF_THE_ORACLE, dp=2)
    assert code == 0, output[-6000:]
    found, expected = numbers(output)["norms"][0], oracle(*OF_THE_ORACLE, dp=2)["norms"][0]
    assert abs(found - expected) > 1e-2 * expected


@pytest.mark.parametrize(
    ("sizes", "vision", "text", "is_own", "extra", "words"),
    [
        ("1,2", [[1, 1], [0, 0]], [[1, 2], [1, 0]], False, (), r"1,1 / 0,0 of vision_encoder .*goes round twice"),
        ("1,2", [2, 0, 0], [2, 1, 1], False, (), r"pipeline_num_layers .*; .*; change the JSON of the model"),
        pytest.param(
            *("1,3", [0, 2], [2, 2], None, (), "num_attention_heads 4 of vision_encoder; stage 1 "),
            marks=pytest.mark.core,
        ),
        ("1,2", [1, 1], [0, 4], None, (), "pipeline_num_layers 0,4 of text_decoder begins behind stage 0; "),
        ("1,2", [2, 0, 0], [2, 1, 1], None, (), "pipeline_num_layers 2,0,0 of vision_encoder; 2 stages need 1 x 2 "),
    ],
    ids=["two rings in two rows", "no rows", "heads", "a cut tower", "too many stages"],
)
def test_what_does_not_fit_is_one_line(
    sizes: str, vision: list[Any], text: list[Any], is_own: bool | None, extra: tuple[str, ...], words: str
) -> None:
    if is_own is None:  # a plain pipeline
        words_given = (*DEVICE, "--vtp-size-list", sizes, *extra)
        code, output = start(num_ranks(sizes, 1), vision, text, *words_given, is_run=True)
    else:
        code, output = start_u(sizes, vision, text, *extra, is_own=is_own)
    assert_said_once(code, output, words)
