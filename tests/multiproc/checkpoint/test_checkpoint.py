"""Checkpoints of megatron.training: resumed in the same list, and loaded into another one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.saved_runs import train_stock
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    losses,
    num_ranks,
)
from tests.support.hosts import (
    background_flags,
    exact_resume_tolerance,
    is_usual,
    reshardable_flags,
    resharding_flags,
    resume_tolerance,
)
from vtp_plugin.util.text import own_command

pytestmark = pytest.mark.needs("scripts_here")


DISTRIBUTED = ["--use-distributed-optimizer"]
RESHARDABLE = [*DISTRIBUTED, *reshardable_flags()]
LEGACY = ["--ckpt-format", "torch"]
# Its masks depend on the random states of every rank, so a resumed run shows whether they were stored.
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
INTERLEAVED = ["--num-virtual-stages-per-pipeline-rank", "2"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]

Writer = Callable[..., tuple[Path, list[ScriptRun]]]


@pytest.fixture(scope="module")
def written(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Runs of four steps that save after every second one; each is made once."""
    known: dict[tuple[object, ...], tuple[Path, list[ScriptRun]]] = {}

    def write(
        sizes: str, extra: Sequence[str] = (), *, dp: int = 1, stock: bool = False
    ) -> tuple[Path, list[ScriptRun]]:
        key = (sizes, tuple(extra), dp, stock)
        if key not in known:
            folder = tmp_path_factory.mktemp("written")
            saving = [*extra, "--save", str(folder), "--save-interval", "2"]
            if stock:
                known[key] = folder, train_stock(scripts, sizes, saving, dp=dp)
            else:
                known[key] = folder, scripts.train(sizes, saving, dp=dp)
            _assert_clean(known[key][1])
            # Resume from step 2. --ckpt-step does not reach the distributed optimizer's file of the old format.
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
        return known[key]

    return write


def _resume(scripts: Scripts, folder: Path, sizes: str, extra: Sequence[str], *, dp: int = 1) -> list[ScriptRun]:
    """Train the last two steps from the checkpoint of the second one."""
    runs = scripts.train(sizes, [*extra, "--load", str(folder)], dp=dp)
    assert "successfully loaded checkpoint" in runs[0].output
    assert [len(run.steps) for run in runs] == [2] * len(runs)
    _assert_clean(runs)
    return runs


def _assert_clean(runs: Sequence[ScriptRun]) -> None:
    """Check that Megatron found nothing odd in what the ranks stored, or in what they found."""
    odd = re.compile(r"differs from common state dict|common state dict.*differ|Unexpected keys|Missing keys", re.I)
    for run in runs:
        lines = [line for line in run.output.splitlines() if odd.search(line) and not is_usual(line)]
        assert not lines, lines


@pytest.mark.needs("exact_bf16_resume", cases=("2,1-bf16",))
@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("1,2", DROPOUT, 1, id="1,2-dropout", marks=pytest.mark.full),
        pytest.param("2,1", [*DISTRIBUTED, *DROPOUT], 2, id="2,1-distributed"),
        pytest.param("1,2", [*LEGACY, *DROPOUT], 1, id="1,2-legacy", marks=pytest.mark.full),
        pytest.param("2,3", DROPOUT, 1, id="2,3-dropout", marks=pytest.mark.full),
        pytest.param("1,2", [*DISTRIBUTED, *DROPOUT], 2, id="1,2-distributed", marks=pytest.mark.full),
        pytest.param("1,2", [*RESHARDABLE, *DROPOUT], 2, id="1,2-reshardable", marks=pytest.mark.full),
        pytest.param("2,1", [*DISTRIBUTED, *LEGACY], 2, id="2,1-distributed-legacy", marks=pytest.mark.full),
        pytest.param("1,2", [*INTERLEAVED, *DROPOUT], 1, id="1,2-interleaved", marks=pytest.mark.full),
        pytest.param("1,2", ["--bf16", *DISTRIBUTED], 2, id="1,2-bf16-distributed", marks=pytest.mark.full),
        pytest.param("2,1", ["--bf16"], 1, id="2,1-bf16", marks=pytest.mark.full),
        pytest.param(
            "1,2",
            ["--no-ckpt-fully-parallel-save", "--use-tp-pp-dp-mapping"],
            2,
            id="1,2-serial-save",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "2,1", ["--ckpt-fully-parallel-load", *DISTRIBUTED], 2, id="2,1-parallel-load", marks=pytest.mark.full
        ),
        pytest.param("1,2", ["--untie-embeddings-and-output-weights"], 1, id="1,2-untied", marks=pytest.mark.full),
    ],
)
def test_save_and_resume(scripts: Scripts, written: Writer, sizes: str, extra: list[str], dp: int) -> None:
    """The resumed run repeats the uninterrupted one bit by bit, random states included."""
    folder, whole = written(sizes, extra, dp=dp)
    runs = _resume(scripts, folder, sizes, extra, dp=dp)
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())
    assert not any("mismatch" in run.output for run in runs), "Megatron took the checkpoint for one of another layout"


@pytest.mark.full
def test_non_persistent_checkpoint_resumes(scripts: Scripts, written: Writer, tmp_path: Path) -> None:
    _, whole = written("1,2", DROPOUT)
    often = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "2", *DROPOUT]
    scripts.train("1,2", [*often, "--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "2"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["non_persistent", "vtp_lock.json"]
    runs = scripts.train("1,2", [*often, "--load", str(tmp_path)])
    assert losses(runs) == losses(whole)[2:]


def test_dropout_shows_random_states(scripts: Scripts, written: Writer) -> None:
    """Without the stored random states the resumed run is another one, so the test above sees them."""
    folder, whole = written("1,2", DROPOUT)
    runs = _resume(scripts, folder, "1,2", [*DROPOUT, "--no-load-rng"])
    assert losses(runs) != losses(whole)[2:]


@pytest.mark.parametrize(
    ("source", "stock", "target", "extra", "dp"),
    [
        pytest.param("1,1", False, "1,2", [], 1, id="1,1-to-1,2", marks=pytest.mark.full),
        pytest.param("1,1", True, "2,3", [], 1, id="stock-1,1-to-2,3"),
        pytest.param("1,1", True, "2,1", RESHARDABLE, 2, id="stock-1,1-to-2,1-reshardable", marks=pytest.mark.full),
        pytest.param("1,2", False, "1,1", [], 1, id="1,2-to-1,1"),
        pytest.param("1,1", True, "1,2", [], 1, id="stock-1,1-to-1,2", marks=pytest.mark.full),
        pytest.param("1,1", False, "2,1", [], 1, id="1,1-to-2,1", marks=pytest.mark.full),
        pytest.param("1,1", False, "1,4", [], 1, id="1,1-to-1,4", marks=pytest.mark.full),
        pytest.param("1,1", False, "1,2,1,2", [], 1, id="1,1-to-four-stages", marks=pytest.mark.full),
        pytest.param("1,1", False, "3", [], 1, id="1,1-to-one-stage", marks=pytest.mark.full),
        pytest.param("2,3", False, "1,2", [], 1, id="2,3-to-1,2", marks=pytest.mark.full),
        pytest.param("1,1", False, "1,2", RESHARDABLE, 2, id="1,1-to-1,2-reshardable", marks=pytest.mark.full),
        pytest.param("1,2", False, "2,1", RESHARDABLE, 2, id="1,2-to-2,1-reshardable", marks=pytest.mark.full),
        pytest.param("2,1", False, "1,1", RESHARDABLE, 2, id="2,1-to-1,1-reshardable", marks=pytest.mark.full),
    ],
)
def test_load_into_another_list(
    scripts: Scripts, written: Writer, source: str, stock: bool, target: str, extra: list[str], dp: int
) -> None:
    """Weights and optimizer states of any list go on in any other."""
    folder, whole = written(source, extra, dp=dp, stock=stock)
    runs = _resume(scripts, folder, target, [*extra, *resharding_flags()], dp=dp)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.needs("random_states_of_other_lists")
def test_random_states_of_another_list_are_left_out(scripts: Scripts, written: Writer) -> None:
    """All ranks take the same decision about a checkpoint of another layout, and say so."""
    folder, _ = written("1,1")
    runs = scripts.train("1,2", ["--load", str(folder)])
    assert "(TP, PP) mismatch" in runs[0].output


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param("1,2", "2,1", id="legacy"), pytest.param("1,1", "1,2", id="legacy-missing-file")],
)
def test_what_only_its_own_list_can_load_is_refused(
    scripts: Scripts, written: Writer, source: str, target: str
) -> None:
    """Every rank leaves with the same line, also those that could go on alone."""
    folder, _ = written(source, LEGACY)
    command = arguments(target, extra=[*LEGACY, "--load", str(folder)])
    assert_refused(
        scripts.launch(num_ranks(target), {"arguments": command}),
        f"checkpoint {folder} ",
        f"by --vtp-size-list {source}, and only",
        f"not --vtp-size-list {target};",
        "--ckpt-format torch_dist",
    )


@pytest.mark.needs("optimizer_by_rank")
@pytest.mark.full
def test_an_optimizer_of_one_object_for_each_rank_is_refused(scripts: Scripts, written: Writer) -> None:
    """Stages of different sizes store it by bucket: see ``test_moved_optimizer.py``, case ``serial``."""
    extra = [*DISTRIBUTED, "--no-ckpt-fully-parallel-save"]
    folder, _ = written("2,2", extra, dp=2)
    command = arguments("2,1", dp=2, extra=[*extra, "--load", str(folder)])
    assert_refused(
        scripts.launch(num_ranks("2,1", 2), {"arguments": command}),
        f"checkpoint {folder} holds a distributed optimizer of --vtp-size-list 2,2 in a form that only that layout",
        "save it without --no-ckpt-fully-parallel-save, write it again with "
        f"{own_command()} checkpoint reshard --from {folder} --to DIR",
    )


@pytest.mark.parametrize(
    "extra", [pytest.param([], id="sharded", marks=pytest.mark.full), pytest.param(LEGACY, id="legacy")]
)
def test_ranks_that_find_different_checkpoints_are_refused(
    scripts: Scripts, written: Writer, tmp_path: Path, extra: list[str]
) -> None:
    """A folder that is not shared between the nodes: one rank does not see the checkpoint."""
    folder, _ = written("1,2", extra)
    command = arguments("1,2", extra=[*extra, "--load", str(folder)])
    runs = scripts.launch(3, {"arguments": command, "by_rank": {2: ["--load", str(tmp_path)]}})
    assert_refused(runs, "ranks disagree: checkpoint found in --load is True on rank 0, 1 and False on rank 2")


@pytest.mark.full
def test_weights_alone_load_into_another_list(scripts: Scripts, written: Writer) -> None:
    """The way out that the refusal names."""
    folder, _ = written("1,1", DISTRIBUTED, dp=2)
    wanted = _resume(scripts, folder, "1,1", [*DISTRIBUTED, "--no-load-optim"], dp=2)
    runs = _resume(scripts, folder, "1,2", [*DISTRIBUTED, "--no-load-optim", *resharding_flags()], dp=2)
    assert_same_training(runs, wanted)


_MODEL_OPTIONS = {
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels", "--seq-length"),
    *("--max-position-embeddings", "--make-vocab-size-divisible-by"),
}


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        pytest.param("1,2", [], id="1,2"),
        pytest.param("2,1", ["--sequence-parallel"], id="2,1-sharded", marks=pytest.mark.full),
        pytest.param("1,2", U_SHAPE, id="1,2-u-shape", marks=pytest.mark.full),
    ],
)
def test_options_of_the_model_from_a_checkpoint(
    scripts: Scripts, written: Writer, target: str, extra: list[str]
) -> None:
    """The command line says nothing about the model; its options and the checks of sizes come from the checkpoint."""
    folder, whole = written("1,1")
    words = arguments(target, extra=[*extra, *resharding_flags(), "--load", str(folder), "--use-checkpoint-args"])
    command, words = [], iter(words)
    for word in words:
        if word in _MODEL_OPTIONS:
            next(words)
        else:
            command.append(word)
    runs = scripts.finish(num_ranks(target), {"arguments": command})
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


def test_sizes_from_a_checkpoint_are_checked(scripts: Scripts, written: Writer) -> None:
    """12 heads do not divide by 5: every rank reads that in the checkpoint, and leaves."""
    folder, _ = written("1,1")
    words = arguments("1,5", extra=["--load", str(folder), "--use-checkpoint-args"])
    position = words.index("--num-attention-heads")
    runs = scripts.launch(6, {"arguments": words[:position] + words[position + 2 :]})
    assert_refused(runs, "--num-attention-heads 12, ", ": stage 1 has TP 5, which does not divide them")


@pytest.mark.needs("worker_on_cpus")
@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("1,2", [], 1, id="1,2"),
        pytest.param("2,1", DISTRIBUTED, 2, id="2,1-distributed", marks=pytest.mark.full),
    ],
)
def test_saved_in_the_background(
    scripts: Scripts, written: Writer, tmp_path: Path, sizes: str, extra: list[str], dp: int
) -> None:
    """A run that another process saves trains as one that waits, and is resumed to the last bit."""
    background = [*extra, *background_flags()]
    _, whole = written(sizes, extra, dp=dp)
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    runs = scripts.train(sizes, [*background, *saving], dp=dp)
    assert "scheduled an async checkpoint save" in runs[0].output
    assert_same_training(runs, whole, tolerance=0.0)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = _resume(scripts, tmp_path, sizes, background, dp=dp)
    assert_same_training(resumed, whole, first=2, tolerance=exact_resume_tolerance())


@pytest.mark.full
def test_converted(scripts: Scripts, written: Writer, tmp_path: Path) -> None:
    """A sharded checkpoint of another list becomes the files of this one, and these become a sharded one again."""
    folder, whole = written("1,1")
    to_files = ["--ckpt-convert-format", "torch", "--ckpt-convert-save", str(tmp_path)]
    assert all(not run.steps for run in scripts.train("1,2", ["--load", str(folder), *resharding_flags(), *to_files]))
    runs = _resume(scripts, tmp_path / "torch", "1,2", LEGACY)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
    to_shards = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path)]
    scripts.train("1,2", [*LEGACY, "--load", str(tmp_path / "torch"), *to_shards])
    runs = _resume(scripts, tmp_path / "torch_dist", "2,1", resharding_flags())
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())
