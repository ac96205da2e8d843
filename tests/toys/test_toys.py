"""The recipes of docs/development/extending.md: toy changes that follow them touch those files and work."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.cases.core_cases import Run, assemble, largest_relative_difference
from tests.support.pool import Pool
from tests.toys import BY_NAME, HOUSE, TOYS, Toy, copies

MAX_FILES = 6


@pytest.fixture(name="toy", params=BY_NAME)
def toy_of(request: pytest.FixtureRequest) -> Toy:
    return BY_NAME[request.param]


def patch_of(toy: Toy) -> str:
    return (copies.PATCHES / f"{toy.name}.patch").read_text()


def test_every_patch_is_listed() -> None:
    assert {path.stem for path in copies.PATCHES.glob("*.patch")} == BY_NAME.keys()
    assert {toy.recipe for toy in TOYS} <= copies.recipes().keys()


def test_it_touches_the_files_that_its_recipe_names(toy: Toy) -> None:
    files, steps = copies.touched(patch_of(toy)), copies.recipes()[toy.recipe]
    assert 0 < len(files) <= MAX_FILES
    assert copies.unlike(files, steps) == [], f"docs/development/extending.md: {toy.recipe}: {steps}"


def copied(toy: Toy, tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    copies.copy_tree(root)
    copies.apply(toy.name, root)
    return root


def run_tests(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("toy", [name for name in BY_NAME if BY_NAME[name].case], indirect=True)
def test_it_trains_a_step_as_the_uniform_run(toy: Toy, tmp_path: Path) -> None:
    assert toy.case
    root = copied(toy, tmp_path)
    with Pool(max_workers=toy.case.world_size) as own:

        def trained(case: Any, options: dict[str, Any]) -> tuple[Run, str]:
            given = {"root": str(root), "target": toy.job, "kwargs": {"case": case, "options": options}}
            found = own.run(case.world_size, "tests.toys.jobs:in_copy", given)
            return assemble(case, [result for result, _ in found]), found[0][1]

        run, said = trained(toy.case, toy.options)
        oracle, _ = trained(toy.case.but(sizes=(1, 1), transport="auto"), {})
    assert toy.says in said
    assert run.weights.keys() == oracle.weights.keys()
    for ours, theirs in ((run.losses, oracle.losses), ([run.grad_norms], [oracle.grad_norms])):
        assert largest_relative_difference(torch.tensor(ours), torch.tensor(theirs)) <= 1e-5
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, oracle.weights[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("toy", [name for name in BY_NAME if BY_NAME[name].tries], indirect=True)
def test_tests_of_the_house_try_it(toy: Toy, tmp_path: Path) -> None:
    """Without its patch there are no such cases."""
    if toy.name == "family":
        pytest.importorskip("transformers", "4.57.1", reason="published models need it: vtp-plugin[hf]")
    done = run_tests(copied(toy, tmp_path), *toy.tries)
    assert done.returncode == 0 and f"{len(toy.tries)} passed" in done.stdout, done.stdout[-8000:]


@pytest.mark.full
def test_the_rules_of_the_house_hold_with_it(toy: Toy, tmp_path: Path) -> None:
    root = copied(toy, tmp_path)
    own = [name for name in copies.touched(patch_of(toy)) if Path(name).name.startswith("test_")]
    for words in (["-m", "not full", *dict.fromkeys((*HOUSE, *toy.tests, *own))], toy.grids):
        done = run_tests(root, *words) if words else None
        assert done is None or done.returncode == 0, done.stdout[-8000:]


def test_a_patch_that_does_not_fit_says_how_to_renew_it(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    copies.copy_tree(root)
    (root / sorted(copies.touched(patch_of(TOYS[0])))[0]).write_text("another\n")
    with pytest.raises(copies.ToyError, match="follow the recipe in docs/development/extending.md") as caught:
        copies.apply(TOYS[0].name, root)
    assert f"python -m tests.toys.renew pack {TOYS[0].name}" in str(caught.value)


def test_a_changed_copy_gives_its_patch_back(tmp_path: Path) -> None:
    toy = TOYS[0]
    assert copies.touched(copies.difference(copied(toy, tmp_path))) == copies.touched(patch_of(toy))


def test_examples() -> None:
    found = doctest.testmod(copies)
    assert found.attempted > 0 and not found.failed
