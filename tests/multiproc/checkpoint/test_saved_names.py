"""Whatever names torch and Megatron write into the index of a checkpoint, with any flag of saving, are read again."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path, PurePosixPath

import pytest
from torch.distributed.checkpoint.metadata import StorageMeta

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, assert_same_training
from tests.support.checkpoints import by_name, make_model, run_action
from tests.support.hosts import background_flags, reshardable_flags, resharding_flags, resume_tolerance
from vtp_plugin.checkpoint.format import index
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.format.safe_pickle import load_safely

pytestmark = [pytest.mark.needs("scripts_here")]
DISTRIBUTED = ("--use-distributed-optimizer",)
# By bucket is the form of unequal stages on every host; on 0.12 reshardable_flags() are none.
FORMS = {"plain": (), "bucket": DISTRIBUTED, "parameter": (*DISTRIBUTED, *reshardable_flags())}
CONSTANT = "--ckpt-assume-constant-structure"
SAVING: dict[str, tuple[str, ...]] = {
    "constant": (CONSTANT,),
    "none": (),
    "serial": ("--no-ckpt-fully-parallel-save",),
    "serial-constant": ("--no-ckpt-fully-parallel-save", CONSTANT),
    "background": background_flags(),
    "background-constant": (*background_flags(), CONSTANT),
    "no-rng": ("--no-save-rng", CONSTANT),
    "shared-load": ("--ckpt-fully-parallel-load", CONSTANT),
    "ignored": ("--dist-ckpt-format", "torch_dist", "--use-dist-ckpt", "--ckpt-fully-parallel-save", CONSTANT),
    "kept": ("--save-retain-interval", "1", CONSTANT),
    "older": ("--dist-ckpt-save-pre-mcore-014", CONSTANT),
    "saving": ("--distrib-optim-fully-reshardable-mem-efficient", CONSTANT),
    "copies": ("--ckpt-fully-parallel-save-process-group", "ep_dp", CONSTANT),
    "verified": ("--verify-integrity", CONSTANT),
    "workers": (*background_flags(), "--dist-ckpt-workers", "2", CONSTANT),
}
FIRST = [("bucket", "constant")]


def names_of(checkpoint: Path) -> set[tuple[str, str]]:
    """Return what an index names."""
    found: set[tuple[str, str]] = set()
    load_safely((checkpoint / index.INDEX).read_bytes(), lambda module, name: found.add((module, name)) or True)
    return found


@pytest.mark.needs(
    "worker_on_cpus", cases=tuple(f"{form}-{name}" for form in FORMS for name in ("background", "workers"))
)
@pytest.mark.needs(
    "flags_after_0_12", cases=tuple(f"{form}-{name}" for form in FORMS for name in ("older", "saving", "kept"))
)
@pytest.mark.needs(
    "flags_of_0_19", cases=tuple(f"{form}-{name}" for form in FORMS for name in ("copies", "verified", "workers"))
)
@pytest.mark.parametrize(
    ("form", "saving"),
    [
        pytest.param(form, saving, marks=() if (form, saving) in FIRST else pytest.mark.full, id=f"{form}-{saving}")
        for form, saving in itertools.product(FORMS, SAVING)
    ],
)
def test_what_a_run_saves_is_read(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, saving: str
) -> None:
    """Four saves, since the second and the third may be made of what the ones before have kept."""
    model, runs = FORMS[form], tmp_path / "runs"
    whole = scripts.train("1,2", [*model, *SAVING[saving], "--save", str(runs), "--save-interval", "1"])
    for step in range(1, 5):
        checkpoint = runs / f"iter_{step:07d}"
        assert {name for name in names_of(checkpoint) if not index._is_allowed(*name)} == set()
        for action in (["show", checkpoint], ["verify", checkpoint]):
            assert run_action(capsys, *action)[0] == 0
    for step in (2, 3):
        (runs / TRACKER).write_text(str(step))
        loading = [*model, *resharding_flags(), "--load", str(runs)]
        assert_same_training(scripts.train("2,1", loading), whole, first=step, tolerance=resume_tolerance())
        again = tmp_path / f"again{step}"
        assert run_action(capsys, "reshard", "--from", runs, "--to", again)[0] == 0
        assert run_action(capsys, "diff", runs, again)[0] == 0
        assert run_action(capsys, "diff", runs / "iter_0000001", again)[0] == 1


@pytest.mark.needs("worker_on_cpus", cases=("background",))
@pytest.mark.parametrize("saving", ["none", pytest.param("background", marks=pytest.mark.full)])
def test_a_run_ends_at_the_save_that_nobody_could_read(scripts: Scripts, tmp_path: Path, saving: str) -> None:
    """The checkpoint before stays the newest; in the format that the line names the run goes on."""
    saves = ["--save", str(tmp_path / "runs"), "--save-interval", "1", *SAVING[saving]]
    command = {"arguments": arguments("1,2", extra=[*DISTRIBUTED, *saves]), "hooks": ["name_a_date"]}
    words = "iter_0000002 cannot be read again: ", "names datetime.date", "save with --ckpt-format torch"
    assert_refused(scripts.launch(3, command), *words)
    assert (tmp_path / "runs" / TRACKER).read_text() == "1"
    assert [path.name for path in tmp_path.glob("runs/iter_*")] == ["iter_0000001"]
    way_out = ["--save", str(tmp_path / "other"), "--save-interval", "1", "--ckpt-format", "torch"]
    whole = scripts.train("1,2", [*DISTRIBUTED, *way_out], hooks=["name_a_date"])
    (tmp_path / "other" / TRACKER).write_text("2")
    runs = scripts.train("1,2", [*DISTRIBUTED, "--load", str(tmp_path / "other"), *way_out[-2:]])
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


def test_the_index_of_python_3_13_is_read(tmp_path: Path) -> None:
    """There, and nowhere else, the class of a path lies in a module of its own; torch stores the folder's path."""
    file = by_name(tmp_path / "a", make_model()) / index.INDEX
    stored = pickle.loads(file.read_bytes())
    stored.storage_meta = StorageMeta(checkpoint_id=PurePosixPath("runs"))
    name = b"cpathlib\nPurePosixPath\n"
    data = pickle.dumps(stored, 2)
    assert data.count(name) == 1
    file.write_bytes(data.replace(name, b"cpathlib._local\nPosixPath\n"))
    assert index.read_index(file.parent).tensors
