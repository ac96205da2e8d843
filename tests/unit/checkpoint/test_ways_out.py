"""Each line of checkpoints that names a way out, and the test that does what it says."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.rules.import_rules import ROOT
from tests.support.checkpoints import by_bucket, make_model, run_action
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK

Run = Callable[..., tuple[int, list[str]]]
_CHECKPOINT = "vtp_plugin/checkpoint"
FILES = (
    *(
        f"{_CHECKPOINT}/format/{name}.py"
        for name in (
            *("checkpoint_files", "contents", "index", "infer_map", "plan_copies", "resolver", "safe_pickle"),
            *("shard_map", "site_part"),
        )
    ),
    *(f"{_CHECKPOINT}/save/{name}.py" for name in ("atomic_dir", "saving")),
    f"{_CHECKPOINT}/load/stored_optimizer.py",
    "patches/core/optimizer/distrib_optimizer.py",
    *(f"{_CHECKPOINT}/tools/{name}.py" for name in ("merge_parts", "rewrite_optimizer", "verify", "writer")),
    *(
        f"patches/training/{name}.py"
        for name in ("atomic_checkpoint", "checkpointing", "choose_checkpoint", "vocab_utils")
    ),
)
_RUNS, _MOVED = "multiproc/checkpoint/test_way_outs.py", "multiproc/checkpoint/test_moved_optimizer.py"
_RESOLVER = "unit/checkpoint/test_resolver.py"
_AGAIN, _PADDED = "multiproc/checkpoint/test_written_again.py", "multiproc/checkpoint/test_padded_vocabulary.py"
# Ways out that ask for another file or folder: with an intact one every test of loads and tools passes.
OTHER_FILES = (
    *("copy it again", "copy the checkpoint again", "take another one", "give another folder", "load another folder"),
    *(
        "take a checkpoint whose origin you know",
        "give its path",
        "give a folder like iter_0000100",
        "look at the disk",
    ),
    "make the whole folder readable for every rank",
)
_FOLDER, _VERIFIED = "multiproc/elastic/test_one_run_a_folder.py", "unit/checkpoint/test_show_and_verify.py"
_RATES = "multiproc/checkpoint/test_other_rates.py"
# Words of a line, and the tests that do what it says.
_PARTS_OF_SITES = "multiproc/sites/test_parts.py"
DONE: dict[str, tuple[str, ...]] = {
    "the checkpoint before stays the newest; look at its output": (
        f"{_PARTS_OF_SITES}::test_a_site_whose_disk_fails_ends_the_run_and_both_keep_the_save_before",
    ),
    "so the first save was stopped: it restarts from scratch": (
        f"{_PARTS_OF_SITES}::test_a_run_whose_first_save_was_stopped_starts_from_scratch",
    ),
    "--save differs between the sites": (
        "multiproc/u_shape/test_edge_seed.py::test_each_site_keeps_its_part_and_dropout_goes_on",
    ),
    "holds {} as {} {}, another part as": (f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",),
    "is a whole checkpoint, and no part": (f"{_PARTS_OF_SITES}::test_merged_and_split",),
    "an encoder's layers is not known here": (f"{_PARTS_OF_SITES}::test_layers_of_an_encoder_are_not_split",),
    "are parts of site {}; give one": (f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",),
    "are parts of different {}": (f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",),
    "the part of site {} is not among": (f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",),
    "give --num-layer-list, such as 1,2,1": (
        f"{_PARTS_OF_SITES}::test_a_checkpoint_of_one_site_is_split_as_it_is_asked_for",
    ),
    "parts of one save fit together; copy them again": (
        f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",
    ),
    "one site has it; copy the parts again": (f"{_PARTS_OF_SITES}::test_parts_that_do_not_fit_are_not_merged",),
    "holds parameters of two sites; such a bucket": (
        f"{_PARTS_OF_SITES}::test_a_checkpoint_of_one_site_is_split_as_it_is_asked_for",
    ),
    "without the tensors of {}; give all of them": (f"{_PARTS_OF_SITES}::test_merged_and_split",),
    "if it should resume, give the folder": (
        "multiproc/training/test_brief_run.py::test_what_is_loaded_measured_and_saved_is_shown",
    ),
    "to make one: (umask 077": ("unit/checkpoint/test_edge_key_file.py::test_what_is_no_key",),
    "so others can read the key of the edge's layers": ("unit/checkpoint/test_edge_key_file.py::test_what_is_no_key",),
    "belongs to another run; each would overwrite": (f"{_FOLDER}::test_the_second_run_is_refused_on_all_ranks",),
    "is no plain file of one name": (f"{_FOLDER}::test_the_lock_is_written_nowhere_else",),
    "is a link; a run writes its name there": (f"{_FOLDER}::test_the_lock_is_written_nowhere_else",),
    "who saves there writes its name": (f"{_FOLDER}::test_the_lock_is_written_nowhere_else",),
    "each element must be stored once": (f"{_VERIFIED}::test_what_is_broken_is_named",),
    "has a part at {}; none may lie outside": (f"{_VERIFIED}::test_what_is_broken_is_named",),
    "is stored in {} of {} elements": (f"{_VERIFIED}::test_what_is_broken_is_named",),
    "tensors are read from these; download them": ("unit/checkpoint/test_hf_ways_out.py::test_the_way_out_works",),
    "quantised ones are not read": ("unit/checkpoint/test_hf_ways_out.py::test_the_way_out_works",),
    "nothing half-written is left": (
        "unit/checkpoint/test_hf_bad_input.py::test_what_was_stopped_is_one_line_and_leaves_nothing",
    ),
    "that needs the package safetensors": (
        "unit/cli/test_missing_packages.py::test_a_missing_package_is_one_line_and_exit_code_2",
    ),
    "the map does not belong to this checkpoint": (f"{_RUNS}::test_weights_load_without_the_map",),
    "and this vtp_plugin reads version {}; use the one that wrote it, or load": (
        f"{_RUNS}::test_weights_load_without_the_map",
    ),
    "was saved; start with its options": (f"{_MOVED}::test_the_optimizer_goes_on_in_another_layout",),
    "it was not trained then; start with the options of that run": (
        f"{_RUNS}::test_weights_load_where_more_is_trained",
    ),
    "where the optimizer's parameters lie cannot be worked out": (
        f"{_RUNS}::test_weights_load_without_the_map",
        f"{_RUNS}::test_the_layout_that_wrote_it_loads_without_the_map",
        "unit/checkpoint/test_infer_map.py::test_a_parameter_that_does_not_fit_is_named",
    ),
    "it must hold the iteration of a checkpoint": (
        "unit/checkpoint/test_show_and_verify.py::test_a_tracker_that_names_nothing_is_named",
    ),
    "has the format torch, one file for each rank": ("multiproc/checkpoint/test_checkpoint.py::test_converted",),
    "was saved with --ckpt-format torch by": ("multiproc/checkpoint/test_checkpoint.py::test_converted",),
    "experts have no optimizer of their own in it": (
        "multiproc/experts/test_written_experts.py::test_stock_megatron_goes_on_where_it_is_said",
    ),
    "experts have an optimizer of their own in it": (
        "multiproc/experts/test_written_experts.py::test_stock_megatron_goes_on_where_it_is_said",
    ),
    "only in one of them experts have an optimizer of their own": (
        f"{_RUNS}::test_weights_of_experts_load_without_their_optimizer",
    ),
    "of that nothing is made {}; leave --form out": (
        "unit/checkpoint/test_ways_out.py::test_without_its_form_it_is_written",
    ),
    "this version knows {}; take a newer vtp_plugin": (f"{_RUNS}::test_weights_load_without_the_map",),
    "holds different optimizers on different stages": (f"{_AGAIN}::test_uniform_megatron_goes_on",),
    "fix that, and resume from the one before": (
        "multiproc/elastic/test_killed.py::test_a_disk_that_fails_leaves_the_checkpoint_before",
    ),
    "no start could load it": (
        "multiproc/checkpoint/test_saved_names.py::test_a_run_ends_at_the_save_that_nobody_could_read",
    ),
    "holds a checkpoint; none is overwritten": ("unit/checkpoint/test_ways_out.py::test_another_folder_is_written",),
    "is not empty; nothing is overwritten": ("unit/checkpoint/test_ways_out.py::test_another_folder_is_written",),
    "holds a part of another checkpoint": ("unit/checkpoint/test_ways_out.py::test_another_folder_is_written",),
    "writes one checkpoint together; use a folder that all ranks share": (
        "multiproc/u_shape/test_u_training.py::test_sites_keep_their_parts_of_a_checkpoint",
    ),
    "is of another model ({}); give the flags": (f"{_MOVED}::test_the_optimizer_goes_on_in_another_layout",),
    "which this Megatron no longer reads": (f"{_AGAIN}::test_blocks_of_older_megatrons_go_on",),
    "in a form that only that layout can load": (f"{_AGAIN}::test_uniform_megatron_goes_on",),
    "leave it out, or copy the checkpoints into a folder": (f"{_RUNS}::test_a_step_is_chosen_in_one_way",),
    "leave one of them out": (f"{_RUNS}::test_a_step_is_chosen_in_one_way",),
    "a uniform run with tensor-parallel size 1 pads the same": (
        "multiproc/training/test_training.py::test_vocabulary_hint_is_true",
    ),
    "start with {} {}, now": (f"{_PADDED}::test_the_first_start_says_what_all_lists_share",),
    "loads with the same number only": (
        f"{_PADDED}::test_the_same_padding_keeps_the_loss",
        f"{_PADDED}::test_stages_that_cannot_cut_the_vocabulary_add_words",
    ),
    "to keep the loss, {}": (
        f"{_PADDED}::test_the_same_padding_keeps_the_loss",
        f"{_PADDED}::test_stages_that_cannot_cut_the_vocabulary_add_words",
    ),
    "Megatron takes the optimizer of the iteration that": (
        f"{_RESOLVER}::test_an_optimizer_with_a_file_of_its_own_is_that_of_the_tracker",
    ),
    "leave --non-persistent-ckpt-type out": (f"{_RESOLVER}::test_what_nobody_can_look_into_is_said",),
    "to resume from there give --vtp-load-newest-valid": (f"{_RESOLVER}::test_what_is_damaged_and_each_way_out",),
    "; without it this checkpoint cannot be loaded": (
        "multiproc/checkpoint/test_training_broken_files.py::test_an_older_checkpoint_is_loaded_instead",
    ),
    "a resume keeps its rates unless told otherwise": (f"{_RATES}::test_whose_rates_count_is_said",),
    "takes the rates of groups of parameters from": (f"{_RATES}::test_other_rates",),
    "tells groups of parameters apart by their rates": (f"{_RATES}::test_other_rates",),
    "loads into the same ones only; use the options": (f"{_RATES}::test_other_rates",),
    "no parameters were trained with {}; this run": (f"{_RATES}::test_other_rates",),
    "groups of parameters fit the one with": (f"{_RATES}::test_other_rates",),
    "without it changed bytes cannot be detected": (
        "multiproc/checkpoint/test_training_broken_files.py::test_an_older_checkpoint_is_loaded_instead",
    ),
}
# Those that nobody can try here, and why.
NOT_RUN = {
    "as older Megatrons do; parts are loaded from 0.19 on": "reshard of their forms is tested where it is",
    "layers; nobody knows whose it is": "Megatron stores all layers together, or each by its number",
    "cannot be locked ({}); nobody notices a second run": "a warning, on a file system without locks",
    "has none; use a newer torch": "every torch that is supported has them",
    "use the same --optimizer, or load only the weights": "Megatron on CPUs has one optimizer with state of its own",
    "has the format {}; stages of different sizes load": "zarr of 0.12, whose package is not here",
    "--use-precision-aware-optimizer is given": "it needs Transformer Engine",
    "is compressed; these tools read tensors as they are": "Megatron writes none",
    "whole tensors have one type; write it again with one": "Megatron writes none",
    "is a manifest of version {}": "there is one version",
}
# Parts of lines that others end.
PARTS = (
    *("{}: {}; {}", "{}; {}", "; ", "{}: {} is stored and not in it; {}", "{} is missing; {} names it"),
    *("{}: the optimizer's {} {}; {}", "{}: the optimizer's {} is not stored, and this run trains it; {}"),
)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _lines(file: str) -> Iterator[str]:
    """Yield the texts of a module with a semicolon, but for documentation and reasons of records."""
    tree = ast.parse((ROOT / file).read_text())
    passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    passed |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    passed |= {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in ("why", "remove_when", "unneeded")
        for part in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in passed and "; " in (text := _text(node)):
            yield text


def _new(files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the lines that no test does."""
    return [
        (file, line)
        for file in files
        for line in _lines(file)
        if line not in PARTS
        and not any(words in line for words in (*DONE, *NOT_RUN))
        and not any(words in line.rpartition("; ")[2] for words in OTHER_FILES)
        and not line.endswith("; {}")
    ]


def test_every_way_out_is_done() -> None:
    """A new line must be done by a test, and named here."""
    assert _new(FILES) == []
    lines = [line for file in FILES for line in _lines(file)]
    assert [words for words in (*DONE, *NOT_RUN) if not any(words in line for line in lines)] == []


def test_a_new_line_is_found(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text('raise ConfigError(f"{folder} is blue; it must be green; paint it")\n')
    assert _new([str(file)]) == [(str(file), "{} is blue; it must be green; paint it")]


def test_a_line_that_ends_with_what_a_variable_says_is_known() -> None:
    """Such variables hold one of the other files, or what ``way_out`` says of a folder."""
    ends = {line for file in FILES for line in _lines(file) if line.endswith("; {}")}
    constants = [
        _text(node.value)
        for file in FILES
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_COPY", "_TAKE_ANOTHER")
    ]
    assert ends and constants
    assert all(any(words in text for words in OTHER_FILES) for text in constants), constants


@pytest.mark.parametrize("test", sorted({test for tests in DONE.values() for test in tests}))
def test_each_test_that_is_named_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in _tests_of(file), test


@functools.cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an action; return exit code and lines, of the error stream if it was refused."""
    return partial(run_action, capsys)


def test_without_its_form_it_is_written(run: Run, tmp_path: Path) -> None:
    source = by_bucket(tmp_path / "a", make_model())
    words = ("reshard", "--from", source, "--to", tmp_path / "b")
    code, (line,) = run(*words, "--form", BY_BLOCK)
    assert code == 2 and line.endswith("leave --form out")
    assert run(*words)[0] == 0


def test_another_folder_is_written(run: Run, tmp_path: Path) -> None:
    source = by_bucket(tmp_path / "a", make_model())
    for number, what in enumerate(("metadata.json", "x", "partial")):
        folder = tmp_path / f"full{number}" / ("partial_iter_0000003" if what == "partial" else "iter_0000003")
        folder.mkdir(parents=True)
        (folder / ("vtp_journal.jsonl" if what == "partial" else what)).write_text("{}")
        code, (line,) = run("reshard", "--from", source, "--to", folder.parent)
        assert code == 2 and line.endswith("give another folder with --to"), line
        if what == "partial":
            (folder / "vtp_journal.jsonl").unlink()
            assert run("reshard", "--from", source, "--to", folder.parent)[0] == 0
    assert run("reshard", "--from", source, "--to", tmp_path / "other")[0] == 0
