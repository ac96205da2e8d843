"""MindSpeed-MM's own layout: vision layers in the cloud, so that a microbatch goes round twice.

Opt-in as :mod:`tests.mindspeed.test_mm_lane`, whose oracle this takes: one rank of the unmodified script. The vision
tower is half as wide as the language model; its last layer, of five, has full attention.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed.test_mm_lane import (
    OF_THE_ORACLE,
    OWN_CHUNKS,
    U_SHAPE,
    assert_equal,
    assert_said_once,
    needs_trees,
    numbers,
    oracle,
    start_u,
    trained_by,
)

pytestmark = [pytest.mark.full, needs_trees]
VISION, TEXT = [[1, 3], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]]
NUM_VISION, VISION_WIDTH = 5, 32
ENDS = [[1, 1, 2], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 2, 2], [0, 0, 0]]
COSTS = ("--vtp-costs", "forward_ms=1,1,1,1,1")


def audited(folder: Path) -> list[dict[str, Any]]:
    """Return what the audit of all ranks has seen."""
    records = [json.loads(line) for file in folder.glob("audit.*") for line in file.read_text().splitlines()]
    return [record for record in records if "cargo" in record]


@pytest.mark.parametrize(
    ("sizes", "vision", "text", "extra"),
    [
        ("1,2", VISION, TEXT, ()),
        ("1,2,2", *ENDS, OWN_CHUNKS),
        ("2,1", [[2, 1], [2, 0], [0, 0]], [[0, 0], [0, 3], [1, 0]], ()),
    ],
    ids=["1,2", "ends without layers", "edge 2"],
)
def test_two_rings_equal_the_oracle(
    tmp_path: Path, sizes: str, vision: list[list[int]], text: list[list[int]], extra: tuple[str, ...]
) -> None:
    audit = ("--vtp-audit", str(tmp_path / "audit.jsonl"))
    code, output = start_u(sizes, vision, text, *extra, *audit, is_own=bool(extra))
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(vision=NUM_VISION))
    assert "vision layers 1,4 have full attention" in output
    floats = {(kind, "float32") for kind in ("activation", "gradient", "warm-up")}
    whole = {("positions", "int32"), ("grids", "int32"), ("shape header", "int64")}
    assert {(record["cargo"], record["dtype"]) for record in audited(tmp_path)} == floats | whole


@pytest.mark.parametrize(
    ("sizes", "dp_sizes", "extra", "is_frozen"),
    [("1,1", (1, 2), (), False), ("1,2", (1, 2), OF_THE_ORACLE, False), ("1,1", (2, 1), (), True)],
    ids=["1,1 1,2", "1,2 1,2 distributed optimizer", "frozen 2,1"],
)
def test_unequal_replicas_equal_the_oracle(
    sizes: str, dp_sizes: tuple[int, ...], extra: tuple[str, ...], is_frozen: bool
) -> None:
    """As MindSpeed-MM's example has them: every microbatch goes to one replica."""
    frozen = {"is_frozen": is_frozen, "is_projector_frozen": is_frozen}
    found = trained_by(sizes, dp_sizes, VISION, TEXT, U_SHAPE, *extra, **frozen)
    assert_equal(found, oracle(*extra, dp=dp_sizes[0], vision=NUM_VISION, **frozen))


def test_two_replicas_of_three_stages_equal_the_oracle() -> None:
    code, output = start_u("1,1,1", *ENDS, *OF_THE_ORACLE, dp=2)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(*OF_THE_ORACLE, dp=2, vision=NUM_VISION))


@pytest.mark.parametrize("is_projector_frozen", [True, False], ids=["and its projector", "alone"])
def test_a_frozen_tower_gets_no_gradient(tmp_path: Path, is_projector_frozen: bool) -> None:
    """As MindSpeed-MM's JSON has it; nor does it keep activations for a backward that nobody needs."""
    audit = ("--vtp-audit", str(tmp_path / "audit.jsonl"), "--vtp-log-level", "DEBUG")
    frozen = {"is_frozen": True, "is_projector_frozen": is_projector_frozen}
    code, output = start_u("1,2", VISION, TEXT, *audit, *COSTS, **frozen)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(vision=NUM_VISION, **frozen))
    assert "kept activations by chunk 0+" in output
    widths = {
        kind: {one["shape"][-1] for one in audited(tmp_path) if one["cargo"] == kind}
        for kind in ("activation", "gradient")
    }
    assert VISION_WIDTH in widths["activation"] and VISION_WIDTH not in widths["gradient"]


def test_tied_embeddings_on_two_chunks_equal_their_oracle() -> None:
    code, output = start_u("1,2", VISION, TEXT, is_tied=True)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), oracle(vision=NUM_VISION, is_tied=True))


@pytest.mark.parametrize("name", ["ZERO_IDS", "UNCOUNTED", "MIXED_UP"])
def test_what_crosses_or_is_counted_wrong_fails_by_far(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The controls: positions of zero ids, layers as MindSpeed-MM counts them, sizes of other pictures."""
    monkeypatch.setenv(f"VTP_TEST_{name}", "1")
    code, output = start_u("1,2", VISION, TEXT)
    monkeypatch.delenv(f"VTP_TEST_{name}")
    assert code == 0, output[-6000:]
    assert ("have full attention" in output) == (name != "UNCOUNTED")
    found, expected = numbers(output)["norms"], oracle(vision=NUM_VISION)["norms"]
    off = max(abs(mine - theirs) / theirs for mine, theirs in zip(found, expected, strict=True))
    print(f"{name}: norms are off by {off:.1e}")
    assert off > 1e-4


@pytest.mark.parametrize(
    ("vision", "text", "extra", "words"),
    [
        (VISION, TEXT, ("--sequence-parallel",), "--sequence-parallel with vision layers in the cloud"),
        ([[1, 3], [1, 1], [0, 0]], TEXT, (), "the second one its last layers on the edge"),
        ([[1, 2, 1], [1, 0, 0], [0] * 3], [[0] * 3, [1, 1, 1], [1, 0, 0]], (), "2 stages need 3 x 2 numbers"),
    ],
    ids=["sequence parallelism", "a chunk that it cannot build", "other stages"],
)
def test_what_two_rings_cannot_do_is_one_line(
    vision: list[list[int]], text: list[list[int]], extra: tuple[str, ...], words: str
) -> None:
    assert_said_once(*start_u("1,2", vision, text, *extra), re.escape(words))
