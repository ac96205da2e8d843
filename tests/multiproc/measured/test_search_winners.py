"""What a search finds for random small clusters trains, with the flags that it prints, as uniform stages do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import MODEL, assert_same_training, train
from tests.support.hosts import resharding_flags
from tests.support.pool import Pool
from vtp_plugin.cli.main import main
from vtp_plugin.tune.fit.fit_layout import without

pytestmark = [pytest.mark.needs("layouts"), pytest.mark.needs("scripts_here")]

MAX_CARDS = 6
SGD = ("--optimizer", "sgd", "--lr", "1e-1")
EXPERTS = (
    *("--num-experts", "6", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--no-bias-gelu-fusion", "--disable-bias-linear", "--sequence-parallel"),
)


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
    pool: Pool,
    path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    given: tuple[str, ...] = (),
    *,
    spread: tuple[str, ...] = (),
    cp: int = 1,
) -> list[int]:
    """Search, train what was found, and stages of one rank each; flags that were given are for both.

    ``spread`` are flags that spread a sequence, or experts, over more ranks: only what was found has them.
    """
    flags = [*MODEL, "--global-batch-size", "8", *asked, *given, *spread, "--cluster", str(path)]
    main(["search", *flags, "--json"])
    best = json.loads(capsys.readouterr().out)["best"][0]
    sizes, replicas = best["sizes"], best["num_replicas"]
    # Where stock Megatron can run it, the flags are Megatron's own, whose sizes follow from the list here.
    own = without(best["flags"], ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
    # Adam makes 1.6e-5 of a norm of rounding, on a processor without AVX-512.
    words = [*given, "--make-vocab-size-divisible-by", "128", *own, "--global-batch-size", "8", *SGD]
    # One rank a stage, with the same layers and the same padding of the vocabulary.
    ones = ",".join("1" for _ in sizes)
    last = len(words) - 1 - words[::-1].index("--make-vocab-size-divisible-by")
    divisor = int(words[last + 1]) * math.lcm(sizes[0], sizes[-1])
    alone = [*words, "--vtp-size-list", ones, "--make-vocab-size-divisible-by", str(divisor)]
    if spread:
        # Experts on several ranks draw other weights than on one, so both begin with the same ones.
        start = ["--save", str(path.parent / "start"), "--save-interval", "1", "--train-iters", "1"]
        train(pool, ones, [*alone, *start])
        load = ["--load", str(path.parent / "start"), "--finetune", *resharding_flags()]
        words, alone = [*words, *load], [*alone, *load]
    hooks = ["context_parallel"] if cp > 1 else []
    runs = train(pool, ",".join(map(str, sizes)), [*words, *spread], dp=replicas * cp, hooks=hooks)
    assert_same_training(runs, train(pool, ones, alone))
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "spread", "cp"),
    [
        pytest.param(EXPERTS, ("--expert-model-parallel-size", "2"), 1, id="experts"),
        pytest.param(("--lr", "1e-3"), ("--context-parallel-size", "2"), 2, id="context"),
    ],
)
def test_a_winner_with_spread_sequences_or_experts_trains(
    given: tuple[str, ...],
    spread: tuple[str, ...],
    cp: int,
    pool: Pool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 0.01\n[links.inside]\nlatency_us = 1\ngbyte_per_s = 200\n"
        "[links.between]\nlatency_us = 10\ngbyte_per_s = 25\n"
        "[[nodes]]\ncards = 'one'\ncards_per_node = 2\n[[nodes]]\ncards = 'one'\ncards_per_node = 4\n"
    )
    assert trains(pool, path, capsys, ["--vtp-stages", "2:3"], given, spread=spread, cp=cp) == [1, 2]


def test_a_winner_trains_as_uniform_stages_do(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(pool, tmp_path / "cluster.toml", capsys, 3)


@pytest.mark.full
@pytest.mark.parametrize("seed", [seed for seed in range(31) if seed != 3])
def test_winners_train_as_uniform_stages_do(
    seed: int, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(pool, tmp_path / "cluster.toml", capsys, seed)
