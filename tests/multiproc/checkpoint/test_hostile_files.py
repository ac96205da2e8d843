"""A checkpoint of somebody who means harm runs nothing: each file that a run reads, each format, each way to load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, num_ranks
from tests.support.hostile_files import NAME, is_there, spoil
from tests.support.lines import error_line
from vtp_plugin.checkpoint.format.index import MANIFEST, dump_manifest, make_manifest

pytestmark = pytest.mark.needs("scripts_here")

LEGACY = ["--ckpt-format", "torch"]
DISTRIBUTED = ["--use-distributed-optimizer"]
LATEST = "iter_0000002"
Written = Callable[..., Path]


@pytest.fixture(scope="module")
def written(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Folders with a checkpoint each; each is made once."""
    known: dict[tuple[str, ...], Path] = {}

    def write(sizes: str, *extra: str) -> Path:
        if (sizes, *extra) not in known:
            folder = known[(sizes, *extra)] = tmp_path_factory.mktemp("written")
            scripts.train(sizes, [*extra, "--save", str(folder), "--save-interval", "2", "--train-iters", "2"])
        return known[(sizes, *extra)]

    return write


def _case(name: str, sizes: str, *extra: str, wrote: str = "1,2", full: bool = True) -> Any:
    marks = [pytest.mark.full] if full else []
    shown = "-".join((name, wrote, "into", sizes, *(word.strip("-") for word in extra)))
    return pytest.param(name, wrote, sizes, list(extra), id=shown, marks=marks)


@pytest.mark.parametrize(
    ("name", "wrote", "sizes", "extra"),
    [
        _case("mp_rank_*/model_optim_rng.pt", "2,1", *LEGACY, full=False),
        _case("mp_rank_*/model_optim_rng.pt", "1,2", *LEGACY, "--finetune"),
        _case("mp_rank_*/model_optim_rng.pt", "1,1", *LEGACY, wrote="1,1"),
        _case("mp_rank_01_001/model_optim_rng.pt", "1,2", *LEGACY),
        _case("mp_rank_*/distrib_optim.pt", "1,2", *LEGACY, *DISTRIBUTED),
        _case(".metadata", "2,1", full=False),
        _case(".metadata", "1,2", "--finetune"),
        _case(".metadata", "1,2", "--use-checkpoint-args"),
        _case(".metadata", "1,1", wrote="1,1"),
        _case(".metadata", "1,2", "--pretrained-checkpoint"),
        _case("common.pt", "2,1"),
        _case("common.pt", "1,2", "--finetune"),
        _case("object common_state", "2,1"),
        _case("object rng_state", "1,2", full=False),
        _case("object optimizer", "1,2", *DISTRIBUTED),
        _case("tensor", "2,1"),
    ],
)
def test_a_run_refuses_and_runs_nothing(
    scripts: Scripts, written: Written, tmp_path: Path, name: str, wrote: str, sizes: str, extra: list[str]
) -> None:
    """At ea29e9d the marker is there; a tensor is the exception, which torch reads safely by itself."""
    formats = [word for word in extra if word in (*LEGACY, *DISTRIBUTED)]
    folder = Path(shutil.copytree(written(wrote, *formats), tmp_path / "copy"))
    if not is_there(folder / LATEST, name):
        pytest.skip("this Megatron writes no such file")
    spoil(folder / LATEST, name, tmp_path / "marker")
    loading = [*extra, *([] if "--pretrained-checkpoint" in extra else ["--load"]), str(folder)]
    runs = scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes, extra=loading)})
    assert not (tmp_path / "marker").exists()
    assert all(run.exit_code not in (0, None) for run in runs)
    for line in (error_line(run.output) for run in runs):
        assert line and f"names {NAME}" in line and "whose origin you know" in line, line
    assert not any("Traceback" in run.output for run in runs), [run.output[-3000:] for run in runs]


@pytest.mark.full
def test_a_format_that_nobody_looks_into_is_refused(scripts: Scripts, written: Written, tmp_path: Path) -> None:
    """Arrays of zarr may be pickles; Megatron 0.12 still reads that format."""
    folder = Path(shutil.copytree(written("1,2"), tmp_path / "copy"))
    config = folder / LATEST / "metadata.json"
    config.write_text(config.read_text().replace("torch_dist", "zarr"))
    (folder / LATEST / MANIFEST).write_text(dump_manifest(make_manifest(folder / LATEST)))
    runs = scripts.launch(3, {"arguments": arguments("2,1", extra=["--load", str(folder)])})
    assert_refused(runs, "has the format 'zarr'; stages of different sizes load torch_dist")
