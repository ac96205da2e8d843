"""A seed of the edge's own: the cloud cannot draw the edge's layers, and the run is the one that it would be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, grad_norms, losses
from tests.support.hosts import host_name, resharding_flags
from tests.support.lines import error_line, warnings
from vtp_plugin.checkpoint.save.atomic_dir import EDGE_KEY, write_edge_key

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list"]
TWO_SITES = [*U_SHAPE, "1,2,1", "--vtp-sites", "edge,cloud"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
PREDICTION = ["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion"]
# Megatron 0.12 ends a run of another number of stages that does not leave the random states of the checkpoint alone.
ELSEWHERE = ["--no-load-rng"] if host_name() == "0.12" else []


def _key_file(folder: Path, content: bytes = bytes(range(200, 232)), mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize(("seed", "is_read"), [("shared", True), (None, False)], ids=["shared", "random"])
def test_the_cloud_reads_tokens_by_the_seed_alone(scripts: Scripts, seed: str | None, is_read: bool) -> None:
    """At the first step, and after ten steps by the first weights; with the edge's key it gets chance, 1 of 256."""
    steps = ["--train-iters", "11", "--global-batch-size", "4", "--lr", "1e-3"]
    extra = [*TWO_SITES, *steps, *([] if seed is None else ["--vtp-edge-seed", seed])]
    edge, cloud = scripts.train("1,1", extra, hooks=["invert_edge"])
    assert edge.facts["num_tokens"] == {0: 48, 10: 48} and cloud.facts["num_tokens"] == {}
    assert edge.facts["are_of_the_seed"] == is_read
    if is_read:
        assert edge.facts["tokens_read"] == {0: 48, 10: 48}
    else:
        assert all(num_read <= 4 for num_read in edge.facts["tokens_read"].values()), edge.facts["tokens_read"]


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        pytest.param("1,2", [], id="tied"),
        pytest.param("2,1", [*PREDICTION, "--untie-embeddings-and-output-weights"], id="prediction"),
    ],
)
def test_trains_as_one_rank_with_the_same_weights_and_resumes(
    scripts: Scripts, tmp_path: Path, sizes: str, extra: list[str]
) -> None:
    """One rank goes on from the first step's checkpoint, in another layout; so does the U itself, without a new key."""
    saving = ["--save", str(tmp_path), "--save-interval", "1"]
    whole = scripts.train(sizes, [*extra, *TWO_SITES, *resharding_flags(), *saving])
    key = (tmp_path / EDGE_KEY).read_bytes()
    assert len(key) == 32 and (tmp_path / EDGE_KEY).stat().st_mode & 0o777 == 0o600
    assert "drawn from a new random key (--vtp-edge-seed)" in whole[0].output
    assert not any("random key" in run.output for run in whole[1 if sizes[0] == "1" else 2 :])

    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("1")
    oracle = scripts.train("1", [*extra, *ELSEWHERE, *resharding_flags(), "--load", str(tmp_path)])
    assert_same_training(oracle, whole, first=1)
    assert len(losses(oracle)) == 3

    on = tmp_path / "on"
    loading = ["--load", str(tmp_path), "--save", str(on), "--save-interval", "4"]
    resumed = scripts.train(sizes, [*extra, *TWO_SITES, *resharding_flags(), *loading])
    assert_same_training(resumed, whole, first=1)
    assert (on / EDGE_KEY).read_bytes() == key
    assert f"drawn from the key in {tmp_path / EDGE_KEY}" in re.sub(r"\n\[vtp rank 0\] +", " ", resumed[0].output)
    assert not any("read tokens" in line for line in warnings(resumed[0].output))


def test_each_site_keeps_its_part_and_dropout_goes_on(scripts: Scripts, tmp_path: Path) -> None:
    """With a folder for each site the key lies in the edge's; masks of dropout go on as in the whole run, bitwise."""
    folders = {rank: tmp_path / ("edge" if rank == 0 else "cloud") for rank in range(2)}
    command = arguments("1,1", extra=[*TWO_SITES, *DROPOUT, "--ckpt-format", "torch"])
    saving = {rank: ["--save", str(folder)] for rank, folder in folders.items()}
    whole = scripts.finish(2, {"arguments": [*command, "--save-interval", "2"], "by_rank": saving})
    assert (tmp_path / "edge" / EDGE_KEY).exists() and not (tmp_path / "cloud" / EDGE_KEY).exists()
    for folder in folders.values():
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
    places = {rank: ["--load", str(folder)] for rank, folder in folders.items()}
    loading = {"arguments": command, "by_rank": places}
    runs = scripts.finish(2, loading)
    assert losses(runs) == losses(whole)[2:] and grad_norms(runs) == grad_norms(whole)[2:]

    (tmp_path / "edge" / EDGE_KEY).unlink()
    _refuse_on_edge(scripts.launch(2, loading), "has no vtp_edge_key/key: the key .* is lost", "--vtp-edge-seed FILE")
    own = ["--vtp-edge-seed", str(_key_file(tmp_path))]
    again = {"arguments": command, "by_rank": {rank: [*words, *own] for rank, words in places.items()}}
    assert losses(scripts.finish(2, again)) == losses(whole)[2:]


def _whole_weights(runs: Sequence[ScriptRun], tp: int) -> dict[str, Any]:
    """Join the slices of the edge's ranks, replica by replica, which must hold the same."""
    joined: list[dict[str, Any]] = []
    for first in range(0, len(runs), tp):
        stage = [run.facts["weights"] for run in runs[first : first + tp]]
        joined.append({})
        for name, (values, dim) in stage[0].items():
            parts = [rank[name][0] for rank in stage]
            if dim is None:
                assert all(np.array_equal(part, values) for part in parts), name
            joined[-1][name] = values if dim is None else np.concatenate(parts, dim)
    for name, values in joined[0].items():
        assert all(np.array_equal(values, replica[name]) for replica in joined), name
    return joined[0]


def test_all_ranks_of_the_edge_draw_one_model_and_the_cloud_gets_no_key(scripts: Scripts, tmp_path: Path) -> None:
    """Two replicas of two ranks draw what one rank draws of the same key; other keys, and the seed, give others."""
    extra = [*TWO_SITES, *DROPOUT, *PREDICTION, "--train-iters", "1"]
    own = ["--vtp-edge-seed", str(_key_file(tmp_path))]
    hooks = ["note_edge", "watch_key"]
    runs = scripts.train("2,1", [*extra, *own], dp=2, hooks=hooks)
    assert [run.facts["place"] for run in runs] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (0, 1)]
    weights = _whole_weights(runs[:4], 2)
    # What embedding, prediction and head share is drawn once; Megatron allocates a head besides, and does not use it.
    word = weights["0 embedding.word_embeddings.weight"]
    assert np.array_equal(weights["1 embedding.word_embeddings.weight"], word)

    roots = {run.facts["edge_key"] for run in runs[:4]}
    assert len(roots) == 1 and None not in roots and all(run.facts["edge_key"] is None for run in runs[4:])
    for rank, run in enumerate(runs):
        assert run.facts["is_in"]["cloud"] is False and run.facts["is_in"]["store"] is False, rank
        assert run.facts["num_messages"][0] > 0 and run.facts["num_messages"][1] > 10
        assert str(_key_file(tmp_path).read_bytes()) not in run.output
    assert runs[0].facts["is_in"]["edge"] is True, "the watch does not see the key where it is sent"

    for options, is_same in (([*own], True), ([], False), (["--vtp-edge-seed", "shared"], False)):
        one = scripts.train("1,1", [*extra, *options], hooks=["note_edge"])
        drawn = _whole_weights(one[:1], 1)
        assert drawn.keys() == weights.keys()
        random = [name for name, values in drawn.items() if values.std() > 0]
        assert len(random) > 10
        for name, values in drawn.items():
            assert np.array_equal(values, weights[name]) == (is_same or name not in random), (options, name)
        # Masks of dropout, too: the first rank's states, which follow from the seed otherwise.
        assert (one[0].facts["states"] == runs[0].facts["states"]) == is_same
        # The cloud's layers are those of the seed, whatever the edge does.
        assert all(
            np.array_equal(one[1].facts["weights"][name][0], runs[4].facts["weights"][name][0])
            for name in one[1].facts["weights"]
        )
    states = [run.facts["states"] for run in runs[:4]]
    assert states[0] == states[2] and states[1] == states[3]
    assert states[0]["device"] == states[1]["device"]
    assert states[0]["model-parallel-rng"] != states[1]["model-parallel-rng"]


def _refuse_on_edge(runs: Sequence[ScriptRun], *words: str) -> None:
    """Check that all ranks end, the edge with these words in one line, the cloud without a path of the edge's."""
    assert all(run.exit_code not in (0, None) for run in runs), [run.output[-2000:] for run in runs]
    assert not any("Traceback" in run.output for run in runs), [run.output[-3000:] for run in runs]
    lines = [error_line(run.output) for run in runs]
    assert all(re.search(word, lines[0]) for word in words), lines
    for line in lines[1:]:
        assert "rank 0" in line and "ConfigError at site edge, whose text stays there" in line, lines


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        pytest.param(None, 0, r"--vtp-edge-seed: .*/key cannot be read \(No such file or directory\)", id="missing"),
        pytest.param(bytes(15), 0o600, "/key has 15 bytes; a key has 16 to 4096", id="short"),
        pytest.param(bytes(32), 0o644, "/key has mode 0644, .*; chmod 600", id="mode"),
    ],
)
def test_what_is_no_key_ends_all_ranks(
    scripts: Scripts, tmp_path: Path, content: bytes | None, mode: int, words: str
) -> None:
    if content is not None:
        _key_file(tmp_path, content, mode)
    by_rank = {0: ["--vtp-edge-seed", str(tmp_path / "key")]}
    runs = scripts.launch(2, {"arguments": arguments("1,1", extra=TWO_SITES), "by_rank": by_rank})
    _refuse_on_edge(runs, words)
    assert str(tmp_path) not in runs[1].output


def test_another_key_than_the_checkpoints_ends_all_ranks(scripts: Scripts, tmp_path: Path) -> None:
    write_edge_key(tmp_path, bytes(40))
    own = ["--vtp-edge-seed", str(_key_file(tmp_path)), "--load", str(tmp_path)]
    runs = scripts.launch(2, {"arguments": arguments("1,1", extra=[*TWO_SITES, *own])})
    _refuse_on_edge(runs, "/key holds another key than .*/vtp_edge_key/key, .*; leave the flag out")


@pytest.mark.parametrize(
    ("seed", "extra"),
    [
        pytest.param("random", [], id="no-u"),
        pytest.param("shared", [], id="no-u-shared"),
        pytest.param("key", [], id="no-u-file"),
        pytest.param("random", [*U_SHAPE, "1,2,1"], id="no-sites"),
        pytest.param("random", [*U_SHAPE, "1,2,1", "--vtp-sites", "edge,edge"], id="one-site"),
    ],
)
def test_a_run_without_two_sites_takes_no_such_seed(scripts: Scripts, seed: str, extra: list[str]) -> None:
    runs = scripts.launch(2, {"arguments": arguments("1,1", extra=[*extra, "--vtp-edge-seed", seed])})
    assert all(run.exit_code not in (0, None) and "Traceback" not in run.output for run in runs)
    lines = {error_line(run.output).partition("--vtp-edge-seed")[2] for run in runs}
    assert len(lines) == 1 and " is for a U-shaped pipeline of two sites; " in lines.pop()


def test_weights_that_others_have_are_named(scripts: Scripts, tmp_path: Path) -> None:
    """A start from a checkpoint without a key of the edge's says that the cloud can have these weights, too."""
    scripts.train("1", ["--save", str(tmp_path), "--save-interval", "2", "--train-iters", "2"])
    options = [*ELSEWHERE, "--load", str(tmp_path), "--finetune", "--train-iters", "1"]
    for seed, is_said in ([], True), (["--vtp-edge-seed", "shared"], False):
        runs = scripts.train("1,1", [*TWO_SITES, *options, *seed])
        said = [["read tokens from activations" in line for line in warnings(run.output)] for run in runs]
        assert any(said[0]) == is_said and not any(said[1])
    assert "(--vtp-edge-seed shared): the cloud has it too" in re.sub(r"\n\[vtp rank 0\] +", " ", runs[0].output)
