"""Nothing of the samples leaves the edge: watched from outside, with a cloud that has neither data nor tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, num_ranks, succeeded
from tests.support.hosts import vocab_size

pytestmark = pytest.mark.needs("scripts_here")

FIRST_ID, NUM_IDS = 4000, 1000
# More tokens in a microbatch than Megatron has timers: 0.12 gathers the times of 24 in one message.
NUM_STEPS, NUM_MICROBATCHES, SEQ_LENGTH, MICRO_BATCH_SIZE, HIDDEN_SIZE = 2, 4, 14, 2, 64
SLICE = SEQ_LENGTH * MICRO_BATCH_SIZE * HIDDEN_SIZE // 2
WIDTH = {"float32": 4, "int64": 8, "int32": 4}
DATA_OPTIONS = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two datasets whose token ids are all between FIRST_ID and FIRST_ID + NUM_IDS."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    folder = tmp_path_factory.mktemp("edge")
    generator = torch.Generator().manual_seed(7)
    for name in ("one", "two"):
        builder = indexed_dataset.IndexedDatasetBuilder(f"{folder / name}.bin", dtype=numpy.uint16)
        for _ in range(20):
            document = torch.randint(FIRST_ID, FIRST_ID + NUM_IDS, (100,), generator=generator)
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder / name}.idx")
    return folder


def _run(
    scripts: Scripts,
    tmp_path: Path,
    data: Path,
    sizes: str,
    layers: str,
    *,
    hooks: Sequence[str],
    extra: Sequence[str] = (),
    edge_extra: Sequence[str] = (),
) -> list[ScriptRun]:
    """Train with the data on rank 0 alone; the others start in an empty folder and know of no data or tokenizer."""
    command = arguments(sizes, extra=["--layerwise-disaggregated-training", "--num-layer-list", layers, *extra])
    for word in DATA_OPTIONS:
        command.remove(word)
    command[command.index("--train-iters") + 1] = str(NUM_STEPS)
    command[command.index("--eval-iters") + 1] = "1"
    for name in ("--seq-length", "--max-position-embeddings"):
        command[command.index(name) + 1] = str(SEQ_LENGTH)
    edge = ["--data-path", "0.4", "one", "0.6", "two", "--split", "80,10,10", "--tokenizer-type", "NullTokenizer"]
    edge += ["--vocab-size", str(FIRST_ID + NUM_IDS)]
    edge += edge_extra
    cloud = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "not-here"]
    empty = tmp_path / "cloud"
    empty.mkdir()
    others = range(1, num_ranks(sizes))
    kwargs = {
        "arguments": command,
        "by_rank": {0: edge, **dict.fromkeys(others, cloud)},
        "folders": {0: str(data), **dict.fromkeys(others, str(empty))},
        "hooks": hooks,
    }
    runs = scripts.launch(num_ranks(sizes), kwargs)
    assert list(empty.iterdir()) == [], "the cloud wrote something"
    return runs


# One row of a microbatch then, as long as two: its documents end somewhere in it.
PACKED = ["--dataloader-inter-document-masking", "--micro-batch-size", "1", "--seq-length", "28"]
PACKED += ["--max-position-embeddings", "28", "--global-batch-size", "4"]


ADAPTERS = ["--vtp-lora-rank", "4", "--vtp-lora-layers", "edge"]


@pytest.mark.parametrize(
    ("sizes", "layers", "more"),
    [
        ("1,2", "1,1,2", []),
        pytest.param("1,2", "1,1,2", PACKED, id="packed", marks=pytest.mark.needs("fine_tuning")),
        pytest.param("1,2", "1,1,2", ADAPTERS, id="adapters", marks=[pytest.mark.needs("adapters"), pytest.mark.full]),
        pytest.param("1,2,2", "1,1,1,1", [], marks=pytest.mark.full),
    ],
)
def test_no_sample_leaves_the_edge(
    scripts: Scripts, tmp_path: Path, data: Path, sizes: str, layers: str, more: list[str]
) -> None:
    sites = ["--vtp-sites", ",".join(["edge", *["cloud"] * sizes.count(",")])]
    audit = ["--vtp-audit", str(tmp_path / "audit.jsonl"), "--vtp-record-crossing", str(tmp_path / "crossed")]
    packing = more if more == PACKED else []
    hooks = ["watch_edge", *(["packed_samples"] if packing else [])]
    runs = succeeded(_run(scripts, tmp_path, data, sizes, layers, hooks=hooks, extra=[*more, *sites, *audit]))
    edge, *cloud = (run.facts for run in runs)
    rows = 1 if packing else MICRO_BATCH_SIZE
    assert edge["num_samples"] >= 2 * NUM_STEPS * NUM_MICROBATCHES * rows
    assert all(facts["num_samples"] == 0 for facts in cloud), "a cloud rank has read samples"
    assert edge["findings"] == []
    losses = [step.loss for step in runs[0].steps if step.loss is not None] + runs[0].evaluations
    assert len(losses) == NUM_STEPS + 2
    close = [number for number in edge["numbers"] for loss in losses if abs(number - loss) < 1e-4 * loss]
    assert close == [], "a loss has left the edge"

    forms: Counter[tuple[str, str, int]] = edge["forms"]
    sent = {form: count for form, count in forms.items() if form[0] == "send"}
    # Warm-up of the channels, headers, and activations or gradients, whole or in a slice for each of two ranks.
    sizes_of = {"float32": {1, SLICE, 2 * SLICE}, "int64": {4}, **({"int32": {29}} if packing else {})}
    assert all(size in sizes_of.get(kind, ()) for _, kind, size in sent), sent
    assert sum(count for form, count in sent.items() if form[2] >= SLICE) >= 2 * NUM_STEPS * NUM_MICROBATCHES, sent
    # The audit says the same.
    lines = [json.loads(line) for line in (tmp_path / "audit.rank0.jsonl").read_text().splitlines()]
    totals = [line for line in lines if "total" in line and line["way"] == "sent"]
    assert sum(line["messages"] for line in totals) == sum(sent.values())
    assert sum(line["bytes"] for line in totals) == sum(n * size * WIDTH[kind] for (_, kind, size), n in sent.items())
    # What the cloud records is what the edge has sent: the same on all ranks of its first stage, and nowhere else.
    recorded = {rank: sorted((tmp_path / "crossed").glob(f"rank{rank}-*.npy")) for rank in range(len(runs))}
    first_stage = range(1, 1 + int(sizes.split(",")[1]))
    assert {rank for rank, files in recorded.items() if files} == {*first_stage}
    for files in zip(*(recorded[rank] for rank in first_stage), strict=True):
        first, *others = [np.load(file, allow_pickle=False) for file in files]
        assert first.size == 2 * SLICE and first.shape[:2] == (first.shape[0], rows)
        assert np.isfinite(first).all() and first.any() and all(np.array_equal(first, other) for other in others)
    forward = [line for line in lines if line.get("cargo") == "activation" and line["way"] == "sent" and line["bytes"]]
    assert len(recorded[1]) * len({line["peer"] for line in forward}) == len(forward)
    # Of packed rows the cloud learns where their documents end, once for each row that crosses, and nothing else.
    assert sum(line.get("cargo") == "lengths" for line in lines) == len(edge["lengths"])
    assert set(edge["lengths"]) == set(edge["ends"])
    assert not packing or max(len(set(ends)) for ends in edge["lengths"]) > 2, "no row has two documents"
    # What Megatron itself sums and compares cannot hold the tokens of one microbatch.
    numbers = {form for form in forms if form[0] != "send" and not form[0].startswith("store") and form[1] != "uint8"}
    assert all(size < MICRO_BATCH_SIZE * SEQ_LENGTH for _, _, size in numbers), sorted(numbers)


def test_planted_leaks_are_found(scripts: Scripts, tmp_path: Path, data: Path) -> None:
    """The watch sees token ids, labels, masks and positions, whatever carries them."""
    runs = succeeded(_run(scripts, tmp_path, data, "1,2", "1,1,2", hooks=["watch_edge", "plant_leaks"]))
    found = set(runs[0].facts["findings"])
    assert {
        ("send", "tokens"),
        ("allreduce_", "labels"),
        ("broadcast_", "position_ids"),
        ("allgather_", "loss_mask"),
        ("store set", "tokens"),
    } <= found
    assert ("broadcast_", "loss_mask") in found, "as a pickled object"


# Two ids of the samples in a row, as Python prints a list.
_TOKENS = re.compile(r"\b4\d{3}, 4\d{3}\b")
_SITES = ("--vtp-sites", "edge,cloud,cloud")


def _fail(
    scripts: Scripts, tmp_path: Path, data: Path, how: str, edge_extra: Sequence[str] = ()
) -> tuple[list[ScriptRun], str]:
    """Let the edge fail; return how the ranks went, and what has reached others: its posts and their output."""
    if how == "checkpoint":
        (data / "occupied").touch()
        edge_extra = [*edge_extra, "--save", str(data / "occupied"), "--save-interval", "1", "--ckpt-format", "torch"]
    hooks = ["record_posts", *([] if how == "checkpoint" else [how])]
    extra = [*_SITES, "--vtp-timeout-s", "200"]
    if how == "checkpoint":
        extra += ["--save", str(tmp_path / "saved"), "--save-interval", "1", "--ckpt-format", "torch"]
    runs = _run(scripts, tmp_path, data, "1,1,1", "1,1,1,1", hooks=hooks, extra=extra, edge_extra=edge_extra)
    assert all(run.exit_code not in (0, None) for run in runs), [(run.exit_code, run.output[-2000:]) for run in runs]
    posts = "\n".join(runs[0].facts["posts"])
    assert "vtp_size_list" in posts, "the posts were not seen"
    return runs, "\n".join([posts, *(run.output for run in runs[1:])])


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("fail_in_data", "ValueError"),
        ("fail_in_loss", "FloatingPointError"),
        ("checkpoint", "ConfigError"),  # of the lock on the folder, which is a file
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_no_error_of_the_edge_tells_of_its_data(
    scripts: Scripts, tmp_path: Path, data: Path, how: str, kind: str
) -> None:
    """Other sites read who failed, at which site and with what type of error; the edge itself reads all."""
    runs, reached = _fail(scripts, tmp_path, data, how)
    assert not _TOKENS.search(reached), reached[-4000:]
    assert str(data) not in reached, reached[-4000:]
    for run in runs[1:]:
        assert re.search(rf"rank 0( failed)?: {kind} at site edge, whose text stays there", run.output), run.output[
            -3000:
        ]
    if how.startswith("fail"):
        assert _TOKENS.search(runs[0].output), runs[0].output[-3000:]


def test_an_error_crosses_where_the_edge_shares_it(scripts: Scripts, tmp_path: Path, data: Path) -> None:
    """The same watch sees the sample then, so it would have seen it before."""
    runs, reached = _fail(scripts, tmp_path, data, "fail_in_data", ["--vtp-share-errors"])
    assert _TOKENS.search(reached) and str(data) in reached, reached[-3000:]
    for run in runs[1:]:
        assert re.search(r"rank 0 failed: ValueError: bad sample \[4\d{3}, ", run.output), run.output[-3000:]
