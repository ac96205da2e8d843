"""``plan --bridge`` and ``draw --bridge``: modules on grids of their own."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest

from vtp_plugin.cli import main
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint

SVG = "{http://www.w3.org/2000/svg}"
TENSOR = ("--seq-length", "512", "--micro-batch-size", "6", "--hidden-size", "256", "--bf16")
THREE = ("vision=1,1,3", "language=2,1,2")


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return capsys.readouterr().out


def test_the_text_says_what_crosses_every_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "plan", "--bridge", "vision=1,1,2", "language=2,2,1", *TENSOR) == (
        "module    tp  cp  pp  dp  ranks  ranks at the bridge\n"
        "vision    1   1   1   2   0-1    0-1\n"
        "language  2   1   2   1   2-5    2-3\n"
        "world size 6\n"
        "bridge vision -> language: the batch counts 2 units of 3 samples, 768 KiB each\n"
        "  rank 0 -> rank 2: 1/4 of the tensor, S[0:256], units[0:1], 384 KiB\n"
        "  rank 1 -> rank 2: 1/4 of the tensor, S[0:256], units[1:2], 384 KiB\n"
        "  rank 0 -> rank 3: 1/4 of the tensor, S[256:512], units[0:1], 384 KiB\n"
        "  rank 1 -> rank 3: 1/4 of the tensor, S[256:512], units[1:2], 384 KiB\n"
        "  together 1.5 MiB for each microbatch over 4 links\n"
        "  then ranks 2-3 all-gather the whole tensor from their parts\n"
        "  gradients come back: the same parts over the same links\n"
    )


def test_context_parallel_ranks_add_up_their_gradients_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "plan", "--bridge", "vision=1,1,2", "language=1,1,1,2")
    assert "gradients come back: first ranks 2-3 reduce-scatter their values" in text
    assert "rank 0 -> rank 2: 1/4 of the tensor, S[0:1/2], units[0:1/2]" in text and "give --seq-length" in text


def test_json_has_the_plan_that_a_run_makes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output_of(capsys, "plan", "--bridge", *THREE, *TENSOR, "--json"))
    modules = [(one["name"], one["ranks"]) for one in found["modules"]]
    assert modules == [("vision", [0, 1, 2]), ("language", [3, 4, 5, 6])]
    (bridge,) = found["bridges"]
    assert (bridge["num_units"], bridge["unit_samples"]) == (6, 2)
    spec = BridgeSpec.between(
        "", BridgeEndpoint(ranks=(((0,),), ((1,),), ((2,),))), BridgeEndpoint(ranks=(((3, 4),), ((5, 6),))), num_dims=3
    )
    for direction, one in (("forward", spec), ("backward", spec.reversed())):
        transfers = one.plan((512, 6, 256)).transfers
        assert [(t["src"], t["dst"], t["bytes"]) for t in bridge[direction]["transfers"]] == [
            (t.src, t.dst, t.num_elements * 2 * 2) for t in transfers
        ]
    assert sum(t["bytes"] for t in bridge["forward"]["transfers"]) == 512 * 12 * 256 * 2


def test_the_picture_shows_every_rank_and_transfer_and_nothing_covers_a_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bridge.svg"
    words = ("draw", "--bridge", "vision=1,1,3", "sound=2,1,1", "language=2,2,2", "--output", str(file))
    assert output_of(capsys, *words) == f"wrote {file}\n"
    root = ET.parse(file).getroot()
    rects = [one for one in root.iter(SVG + "rect") if one.get("class") in ("member", "leader")]
    names = [one.text for one in root.iter(SVG + "text") if one.get("class") == "rank"]
    # Of the language model's two stages the first one is at the bridge.
    assert names == [f"rank {rank}" for rank in (0, 1, 2, 3, 4, 5, 6, 9, 10)]
    areas = [tuple(float(one.get(key, "")) for key in ("x", "y", "width", "height")) for one in rects]
    for (ax, ay, width, height), (bx, by, *_) in combinations(areas, 2):
        assert abs(ax - bx) >= width or abs(ay - by) >= height
    total = float(root.get("width", "")), float(root.get("height", ""))
    assert all(x + width < total[0] and y + height < total[1] for x, y, width, height in areas)
    place = dict(zip(names, areas, strict=True))
    titles = []
    for one in root.iter(SVG + "path"):
        if one.get("class") == "transfer":
            (title,) = one.iter(SVG + "title")
            found = re.match(r"(\d+) -> (\d+) ", title.text or "")
            assert found is not None
            numbers = [float(number) for number in re.findall(r"[\d.]+", one.get("d", ""))]
            (x, y, width, height), (to_x, to_y, *_) = (place[f"rank {rank}"] for rank in found.groups())
            assert numbers == [x + width, y + height / 2, to_x, to_y + height / 2]
            titles.append(found.groups())
    plan = json.loads(output_of(capsys, "plan", *words[1:-2], "--json"))
    wanted = [(str(t["src"]), str(t["dst"])) for one in plan["bridges"] for t in one["forward"]["transfers"]]
    assert titles == wanted


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("vision=1,1,3",), "give at least two modules"),
        (("vision=1,1,3", "vision=2,1,2"), "with different names"),
        (("vision=1,3", "language=2,1,2"), "--bridge vision=1,3: write NAME=TP,PP,DP"),
        (("vision=1,0,3", "language=2,1,2"), "--bridge vision=1,0,3: write NAME=TP,PP,DP"),
        ((*THREE, "--vtp-size-list", "1,2"), "give one of them"),
        ((*THREE, "--world-size", "8"), "--world-size 8, the modules have 7 ranks; leave it out"),
        (
            (*THREE, *TENSOR[:3], "4", *TENSOR[4:]),
            "is no multiple of the 6 units in which vision -> language is counted",
        ),
        ((*THREE, *TENSOR[:1], "0", *TENSOR[2:]), "must be at least 1"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(("plan", "--bridge", *words))
    text = capsys.readouterr().err
    assert error.value.code == 2 and line in text and text.count("\n") == 1


def test_simulate_shows_how_far_an_encoder_runs_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    """An encoder that shares nothing with the language model keeps what it is let; a slow bridge pays for that."""
    words = ("--bridge", "vision=1,1,2", "sound=1,1,1", "language=1,2,2", "--num-microbatches", "8", "--json")
    costs = ("--vtp-costs", "forward_ms=1,1,2,2", "latency_ms=9,9,0")
    found = [
        json.loads(output_of(capsys, "simulate", *words, *costs, *ahead))
        for ahead in ((), ("--vtp-in-flight", "8,8,2,1"))
    ]
    assert [[stage["in_flight"] for stage in one["stages"]] for one in found] == [[3, 3, 2, 1], [8, 8, 2, 1]]
    assert found[1]["step"] < 0.8 * found[0]["step"]
    assert found[0]["schedule"]["why"].startswith(
        "order: 1F1B of all modules, whose first stages are 0 vision, 1 sound"
    )
