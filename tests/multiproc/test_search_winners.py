"""What a search finds for random small clusters trains, with the flags that it prints, as uniform stages do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.multiproc.script_cases import MODEL, assert_same_training, train
from tests.pool import Pool
from vtp_plugin.cli.main import main

pytestmark = [pytest.mark.needs("layouts"), pytest.mark.needs("scripts_here")]

MAX_CARDS = 6


def write_cluster(path: Path, seed: int) -> None:
    """Write one or two kinds of nodes, of at most six cards together."""
    chance = random.Random(seed)
    lines = ["[links.inside]", "latency_us = 1", "gbyte_per_s = 200", "[links.between]"]
    lines += ["latency_us = 10", f"gbyte_per_s = {chance.choice([1, 25])}"]
    left = MAX_CARDS
    for kind in range(chance.randint(1, 2)):
        cards = chance.randint(1, min(4, left))
        count = chance.randint(1, max(1, left // cards - (1 if kind == 0 else 0)))
        count = min(count, left // cards)
        left -= cards * count
        lines += [f"[cards.kind{kind}]", f"teraflops = {chance.choice([0.01, 0.02, 0.05])}"]
        lines += ["[[nodes]]", f"cards = 'kind{kind}'", f"cards_per_node = {cards}", f"count = {count}"]
        if not left:
            break
    path.write_text("\n".join(lines) + "\n")


def check(pool: Pool, path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    write_cluster(path, seed)
    trains(pool, path, capsys, ["--vtp-stages", f"{1 + seed % 2}:4"])


def trains(
    pool: Pool, path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], given: tuple[str, ...] = ()
) -> list[int]:
    """Search, train what was found, and stages of one rank each; flags that were given are for both."""
    flags = [*MODEL, "--global-batch-size", "8", *asked, *given, "--cluster", str(path)]
    main(["search", *flags, "--json"])
    best = json.loads(capsys.readouterr().out)["best"][0]
    sizes, replicas = best["sizes"], best["num_replicas"]
    words = [*given, *best["flags"], "--global-batch-size", "8"]
    runs = train(pool, ",".join(map(str, sizes)), words, dp=replicas)
    # One rank a stage, with the same layers and the same padding of the vocabulary.
    ones = ",".join("1" for _ in sizes)
    divisor = int(words[words.index("--make-vocab-size-divisible-by") + 1]) * math.lcm(sizes[0], sizes[-1])
    words[words.index("--vtp-size-list") + 1] = ones
    words += ["--make-vocab-size-divisible-by", str(divisor)]
    assert_same_training(runs, train(pool, ones, words))
    return [*sizes]


@pytest.mark.full
def test_a_u_that_was_found_trains_as_uniform_stages_do(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 0.01\n[links.inside]\nlatency_us = 1\ngbyte_per_s = 200\n"
        "[links.across.'cloud edge']\nlatency_us = 1000\ngbyte_per_s = 1\n"
        "[[nodes]]\ncards = 'one'\ncards_per_node = 1\nsite = 'edge'\n"
        "[[nodes]]\ncards = 'one'\ncards_per_node = 2\nsite = 'cloud'\n"
    )
    asked = ["--num-layer-list", "1,2,1", "--vtp-stages", "2:2"]
    assert trains(pool, path, capsys, asked, ("--layerwise-disaggregated-training",)) == [1, 2]


def test_a_winner_trains_as_uniform_stages_do(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(pool, tmp_path / "cluster.toml", capsys, 3)


@pytest.mark.full
@pytest.mark.parametrize("seed", [seed for seed in range(31) if seed != 3])
def test_winners_train_as_uniform_stages_do(
    seed: int, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(pool, tmp_path / "cluster.toml", capsys, seed)
