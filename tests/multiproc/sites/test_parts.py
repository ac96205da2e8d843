"""Two sites without a common disk: each saves and loads its own part of a `torch_dist` checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.cases.hf_cases import LAYOUTS, TRAINING
from tests.multiproc.cases.lora_cases import LLAMA_LIKE, LORA
from tests.multiproc.cases.script_cases import (
    JOB,
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    losses,
    num_ranks,
    succeeded,
)
from tests.multiproc.hooks.kill_hooks import ORDER
from tests.support.hf_models import KINDS, export, imported, make, tensors_of
from tests.support.hosts import (
    background_flags,
    exact_resume_tolerance,
    reshardable_flags,
    resharding_flags,
    resume_tolerance,
)
from tests.support.lines import error_line
from vtp_plugin.checkpoint.format.checkpoint_files import iterations
from vtp_plugin.checkpoint.format.index import digest_of, read_index
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.format.site_part import read_part
from vtp_plugin.checkpoint.save.atomic_dir import EDGE_KEY
from vtp_plugin.cli import main

pytestmark = pytest.mark.needs("scripts_here")

FULL = pytest.mark.full
DISTRIBUTED = ["--use-distributed-optimizer"]
RESHARDABLE = [*DISTRIBUTED, *reshardable_flags()]
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
CONSTANT = "--ckpt-assume-constant-structure"
_ROTARY = ["--position-embedding-type", "rope", "--no-rope-fusion"]
PREDICTION = ["--mtp-num-layers", "1", *_ROTARY, "--untie-embeddings-and-output-weights"]


def u_shape(layers: str) -> list[str]:
    sites = ",".join(["edge", *["cloud"] * (layers.count(",") - 1)])
    return ["--layerwise-disaggregated-training", "--num-layer-list", layers, "--vtp-sites", sites]


def by_site(sizes: str, dp: int, options: dict[str, Path]) -> dict[int, list[str]]:
    """Give each rank the folders of its site."""
    edge = int(sizes.split(",")[0]) * dp
    return {
        rank: [
            word for flag, root in options.items() for word in (flag, str(root / ("edge" if rank < edge else "cloud")))
        ]
        for rank in range(num_ranks(sizes, dp))
    }


def command(sizes: str, layers: str, extra: Sequence[str], *, dp: int = 1, **options: Path) -> dict[str, Any]:
    folders = {f"--{name.replace('_', '-')}": root for name, root in options.items()}
    words = arguments(sizes, dp=dp, extra=[*u_shape(layers), "--save-interval", "2", *extra])
    return {"arguments": words, "by_rank": by_site(sizes, dp, folders)}


def train(
    scripts: Scripts, sizes: str, layers: str, extra: Sequence[str] = (), *, dp: int = 1, **options: Path
) -> list[ScriptRun]:
    return scripts.finish(num_ranks(sizes, dp), command(sizes, layers, extra, dp=dp, **options))


def back_to(root: Path, iteration: int) -> None:
    """Leave nothing newer than an iteration."""
    for site in ("edge", "cloud"):
        for checkpoint in (root / site).glob("iter_*"):
            if int(checkpoint.name[5:]) > iteration:
                checkpoint.rename(root / f"{site}_{checkpoint.name}")
        (root / site / TRACKER).write_text(str(iteration))


@pytest.mark.parametrize(
    ("sizes", "layers", "extra", "dp"),
    [
        pytest.param("1,2", "1,2,1", [], 1, id="plain", marks=FULL),
        pytest.param("1,2", "1,2,1", [*DISTRIBUTED, *DROPOUT], 1, id="distributed"),
        pytest.param("2,1", "1,2,1", [*RESHARDABLE, *DROPOUT], 1, id="reshardable", marks=FULL),
        pytest.param("1,2", "1,2,1", [*DISTRIBUTED, "--ckpt-fully-parallel-load"], 2, id="parallel-load", marks=FULL),
        pytest.param("1,1,2", "1,1,1,1", ["--no-ckpt-fully-parallel-save"], 2, id="serial", marks=FULL),
        pytest.param("1,2", "1,2,1", [*background_flags()], 1, id="background", marks=FULL),
        pytest.param("1,2", "1,2,1", [CONSTANT, *DISTRIBUTED], 2, id="constant", marks=FULL),
        pytest.param("1,2", "1,2,1", ["--bf16", *DISTRIBUTED], 2, id="bf16", marks=FULL),
        pytest.param("2,2", "1,2,1", [*PREDICTION], 1, id="prediction", marks=FULL),
    ],
)
def test_each_site_resumes_from_its_own_part(
    scripts: Scripts, tmp_path: Path, sizes: str, layers: str, extra: list[str], dp: int
) -> None:
    whole = train(scripts, sizes, layers, extra, dp=dp, save=tmp_path)
    for site in ("edge", "cloud"):
        assert (tmp_path / site / TRACKER).read_text() == "4"
        part = read_part(tmp_path / site / "iter_0000002")
        assert part is not None and part.site == site
    assert (tmp_path / "edge" / EDGE_KEY).exists() and not (tmp_path / "cloud" / EDGE_KEY).exists()
    back_to(tmp_path, 2)
    runs = train(scripts, sizes, layers, extra, dp=dp, load=tmp_path)
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())


@pytest.mark.parametrize(
    ("source", "target", "extra"),
    [
        pytest.param(("2,2", "1,2,1"), ("2,1,2", "1,1,1,1"), DISTRIBUTED, id="other-cloud"),
        pytest.param(("1,1,1", "1,1,1,1"), ("2,2", "1,2,1"), [], id="both", marks=FULL),
        pytest.param(("1,2", "1,2,1"), ("2,2", "1,2,1"), RESHARDABLE, id="other-edge", marks=FULL),
    ],
)
def test_a_site_comes_back_with_another_list(
    scripts: Scripts, tmp_path: Path, source: tuple[str, str], target: tuple[str, str], extra: list[str]
) -> None:
    whole = train(scripts, *source, extra, save=tmp_path)
    back_to(tmp_path, 2)
    runs = train(scripts, *target, [*extra, *resharding_flags()], load=tmp_path)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@FULL
def test_adapters_are_saved_by_site_on_a_base_by_site(scripts: Scripts, tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    train(scripts, "1,2", "1,2,1", [*LLAMA_LIKE, "--train-iters", "2"], save=base)
    words = [*LLAMA_LIKE, *LORA]
    whole = train(scripts, "1,2", "1,2,1", words, save=own, pretrained_checkpoint=base)
    back_to(own, 2)
    runs = train(scripts, "1,2", "1,2,1", words, load=own, pretrained_checkpoint=base)
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())
    sizes = [sum(file.stat().st_size for file in (root / "cloud/iter_0000002").iterdir()) for root in (own, base)]
    assert sizes[0] < sizes[1]


@pytest.fixture(scope="module")
def whole(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScriptRun]]:
    """A run that saves after every step."""
    root = tmp_path_factory.mktemp("whole")
    return root, train(scripts, "1,2", "1,2,1", EVERY_STEP, save=root)


EVERY_STEP = ["--save-interval", "1", "--vtp-edge-seed", "shared", *DROPOUT]


def _killed(scripts: Scripts, root: Path, point: str, rank: int, save: int, act: str = "") -> list[ScriptRun]:
    order = {"point": point, "save": save, "rank": rank, "mutant": "", "log": str(root / "log"), "act": act}
    # The oldest goes as soon as it may.
    kwargs = command("1,2", "1,2,1", [*EVERY_STEP, "--vtp-keep-checkpoints", "1"], save=root)
    kwargs |= {"hooks": ["kill_in_save"], "timeout_s": 120.0}
    runs = scripts.run(3, JOB, kwargs, timeout_s=150.0, env={ORDER: json.dumps(order)})
    assert json.loads((root / "log").read_text())["point"] == point, [run.output[-1500:] for run in runs]
    assert all(run.exit_code not in (0, None) for run in runs), [run.output[-1500:] for run in runs]
    return runs


def test_a_site_whose_disk_fails_ends_the_run_and_both_keep_the_save_before(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    gone = tmp_path / "cloud/partial_iter_0000003"
    runs = _killed(scripts, tmp_path, "before manifest", 1, 3, act=f"rm -r {gone}")
    line = error_line(runs[0].output)
    assert "iteration 3 is partial: site cloud does not have its part whole" in line and "cloud/" not in line
    assert str(gone) in runs[1].output
    resumed = train(scripts, "1,2", "1,2,1", EVERY_STEP, load=tmp_path)
    assert losses(resumed) == losses(whole[1])[2:]


def test_a_full_disk_of_the_cloud_ends_the_run_and_both_keep_the_save_before(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    """A disk that holds two of its parts, and half of the third."""
    cloud = tmp_path / "cloud"
    cloud.mkdir()
    part_bytes = sum(file.stat().st_size for file in (whole[0] / "cloud/iter_0000003").iterdir())
    disk = ["mount", "-t", "tmpfs", "-o", f"size={int(2.5 * part_bytes)}", "tmpfs", str(cloud)]
    if (tried := subprocess.run(disk, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no small disk can be mounted: {tried.stderr.strip()}")
    try:
        runs = scripts.launch(3, command("1,2", "1,2,1", EVERY_STEP, save=tmp_path))
        assert all(run.exit_code not in (0, None) and "Traceback" not in run.output for run in runs)
        assert "at site cloud" in error_line(runs[0].output) and str(cloud) not in runs[0].output
        full = f"a checkpoint in {cloud} cannot be written: the file system is full; fix that, and resume"
        assert any(full in error_line(run.output) for run in runs[1:])
        here = [{*iterations(tmp_path / site, is_whole=True)} for site in ("edge", "cloud")]
        assert max(here[0] & here[1]) == 2 and all(
            (tmp_path / site / TRACKER).read_text() == "2" for site in ("edge", "cloud")
        )
        resumed = train(scripts, "1,2", "1,2,1", EVERY_STEP, load=tmp_path)
        assert losses(resumed) == losses(whole[1])[2:]
    finally:
        subprocess.run(["umount", str(cloud)], check=True)


def test_clocks_that_differ_change_nothing(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    """The cloud's is an hour ahead, and at the edge the oldest iteration is the youngest by its files."""
    kwargs = command("1,2", "1,2,1", EVERY_STEP, save=tmp_path)
    runs = scripts.finish(3, {**kwargs, "hooks": ["be_an_hour_ahead"]})
    assert losses(runs) == losses(whole[1])
    shutil.rmtree(tmp_path / "cloud/iter_0000004")
    for number, folder in enumerate(sorted((tmp_path / "edge").glob("iter_*"))):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (4e9 - 1e6 * number,) * 2)
    resumed = train(scripts, "1,2", "1,2,1", EVERY_STEP, load=tmp_path)
    assert losses(resumed) == losses(whole[1])[3:]


@pytest.mark.parametrize("how", ["apart", pytest.param("one folder", marks=FULL), pytest.param("sent", marks=FULL)])
def test_no_name_and_no_value_of_the_edges_weights_crosses(scripts: Scripts, tmp_path: Path, how: str) -> None:
    """The controls: one folder for both, whose plan names them, and a weight that is sent."""
    words = ["--train-iters", "2", *EVERY_STEP, "--untie-embeddings-and-output-weights"]
    kwargs = command("1,2", "1,2,1", words, save=tmp_path)
    if how == "one folder":
        kwargs = {"arguments": arguments("1,2", extra=[*u_shape("1,2,1"), *words, "--save", str(tmp_path / "one")])}
    hooks = ["watch_weights", *(["send_a_weight"] if how == "sent" else [])]
    facts = scripts.finish(3, {**kwargs, "hooks": hooks})[0].facts
    assert facts["num_planted"] > 40
    named = [name for name in facts["crossed"] if not name.startswith(("values", "state"))]
    valued = [name for name in facts["crossed"] if name.startswith("values")]
    assert (named != [], valued != []) == (how == "one folder", how == "sent"), facts["crossed"]


BEFORE = ("half a shard", "before metadata", "after metadata", "before manifest", "after manifest", "before the move")
BEHIND = ("before tracker", "half of the tracker", "after tracker")


def _seeded() -> Iterator[Any]:
    """Yield 60 kills; by default one right behind the agreement: a failure before it has a test of its own."""
    default = [("before tracker", 0, 3)]
    every = [(point, rank, save) for point in (*BEFORE, *BEHIND) for rank in (0, 1) for save in (2, 3, 4)]
    drawn = random.Random(74).sample([each for each in every if each not in default], 49)
    shards = [("half a shard", 2, save) for save in (1, 2, 3, 4)] + [(point, 0, 1) for point in BEFORE]
    for each in (*default, *drawn, *shards):
        yield pytest.param(*each, id="-".join(map(str, each)).replace(" ", "-"), marks=() if each in default else FULL)


@pytest.mark.parametrize(("point", "rank", "save"), [*_seeded()])
def test_a_site_that_is_killed_between_the_phases_leaves_one_checkpoint_for_both(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path, point: str, rank: int, save: int
) -> None:
    _killed(scripts, tmp_path, point, rank, save)
    here = [set(iterations(tmp_path / site, is_whole=True)) for site in ("edge", "cloud")]
    common = max(here[0] & here[1], default=0)
    # Who strikes before its move has not confirmed; who comes to the tracker knows that both have.
    assert common == (save if point in BEHIND else save - 1), here
    runs = train(scripts, "1,2", "1,2,1", EVERY_STEP, load=tmp_path)
    assert losses(runs) == losses(whole[1])[common:] if common < 4 else not runs[0].steps
    if max(here[0] | here[1], default=0) > common > 0:
        assert f"iteration {save} is partial: site {'cloud' if rank else 'edge'} does not have" in _plain(runs[0])


def _plain(run: ScriptRun) -> str:
    return " ".join(run.output.replace("[vtp rank 0]", "").split())


def _resume_of(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], root: Path, extra: Sequence[str] = ()
) -> list[ScriptRun]:
    return scripts.launch(3, command("1,2", "1,2,1", [*EVERY_STEP, *extra], load=root))


def _copied(whole: tuple[Path, list[ScriptRun]], root: Path) -> None:
    for site in ("edge", "cloud"):
        shutil.copytree(whole[0] / site, root / site)


def test_what_one_site_lost_is_left_out_and_named(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    """It confirmed iteration 4 and lost it, 3 is cut off at the edge, and 2 is of another run there."""
    _copied(whole, tmp_path)
    shutil.rmtree(tmp_path / "cloud/iter_0000004")
    (tmp_path / "edge/iter_0000003/.metadata").write_bytes(b"")
    note = tmp_path / "cloud/iter_0000002/vtp_part.json"
    note.write_text(note.read_text().replace('"save": "', '"save": "0')[:-3] + '"}')
    runs = succeeded(_resume_of(scripts, whole, tmp_path))
    assert losses(runs) == losses(whole[1])[1:]
    said = _plain(runs[0])
    for iteration, site in ((4, "cloud"), (3, "edge"), (2, "cloud")):
        assert f"iteration {iteration} is partial: site {site} does not have its part of that save whole" in said
    assert "iter_0000004 is missing" in runs[1].output and "cloud/iter" not in runs[0].output


def test_a_run_whose_first_save_was_stopped_starts_from_scratch(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    """No site has noted it: nothing was ever whole on both."""
    shutil.copytree(whole[0] / "edge/iter_0000001", tmp_path / "edge/iter_0000001")
    runs = succeeded(_resume_of(scripts, whole, tmp_path))
    assert losses(runs) == losses(whole[1]) and "so the first save was stopped: it restarts from scratch" in _plain(
        runs[0]
    )


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("other run", "iteration 1 is partial: site cloud"),
        ("one side", "iteration 1 is partial: site cloud"),
        ("other site", "the part of site edge"),
        ("step", "there is none of --ckpt-step 7"),
    ],
)
def test_parts_that_do_not_belong_together_end_all_ranks(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path, trouble: str, words: str
) -> None:
    shutil.copytree(whole[0] / "edge", tmp_path / "edge")
    for iteration in (2, 3, 4):
        shutil.rmtree(tmp_path / f"edge/iter_000000{iteration}")
    if trouble in ("other run", "step"):
        shutil.copytree(whole[0] / "cloud", tmp_path / "cloud")
        for note in () if trouble == "step" else (tmp_path / "cloud").glob("*/vtp_part.json"):
            note.write_text(note.read_text().replace(json.loads(note.read_text())["save"], "0" * 32))
    elif trouble == "other site":
        shutil.copytree(tmp_path / "edge", tmp_path / "cloud")
    runs = _resume_of(scripts, whole, tmp_path, ["--ckpt-step", "7"] if trouble == "step" else [])
    assert all(run.exit_code not in (0, None) and "Traceback" not in run.output for run in runs)
    assert all(words in error_line(run.output) for run in runs), [error_line(run.output) for run in runs]


def test_layers_of_the_other_site_are_refused_and_named(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    runs = scripts.launch(3, command("1,2", "1,1,2", EVERY_STEP, load=whole[0]))
    assert all(run.exit_code not in (0, None) and "Traceback" not in run.output for run in runs)
    line = error_line(runs[0].output)
    assert (
        "is this site's part, and lacks elements of decoder.layers." in line and "checkpoint merge, then split" in line
    )


def test_ranks_of_one_site_must_share_its_folder(scripts: Scripts, tmp_path: Path) -> None:
    kwargs = command("1,2", "1,2,1", [], save=tmp_path)
    kwargs["by_rank"][2] = ["--save", str(tmp_path / "elsewhere")]
    runs = scripts.launch(3, kwargs)
    assert all(run.exit_code not in (0, None) and "Traceback" not in run.output for run in runs)
    assert "is not the folder of rank 1, the first of site cloud" in error_line(runs[2].output)


def test_the_cloud_keeps_nothing_of_the_edge(scripts: Scripts, tmp_path: Path) -> None:
    """Names and values of the edge's weights are searched for; the control, one folder for both, finds them."""
    words = ["--train-iters", "2", *EVERY_STEP]
    train(scripts, "1,2", "1,2,1", words, save=tmp_path)
    folder = tmp_path / "one"
    shared = [*u_shape("1,2,1"), *words, "--save", str(folder)]
    scripts.train("1,2", shared)
    planted = [*_planted(tmp_path / "edge/iter_0000002")]
    assert len(planted) > 20
    found = {
        root: [name for name, data in planted if data in content]
        for root in (tmp_path / "cloud", tmp_path / "edge", folder)
        for content in [b"".join(file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file())]
    }
    assert found[tmp_path / "cloud"] == []
    assert found[folder] == found[tmp_path / "edge"] == [name for name, _ in planted]


def _planted(checkpoint: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and some values of all tensors that the edge alone has, and of its layers."""
    from vtp_plugin.checkpoint.format.checkpoint_files import find_payload

    for key, tensor in read_index(checkpoint).tensors.items():
        if "decoder.layers." not in key:
            yield key, key.encode()
        for _, extent in tensor.extents:
            payload = find_payload(checkpoint, extent)
            with payload.file.open("rb") as file:
                file.seek(payload.offset)
                values = file.read(64)
            if len(set(torch.frombuffer(bytearray(values), dtype=torch.float32).tolist())) == 16:
                yield f"{key} {extent.offset}", values


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([*DISTRIBUTED, *LLAMA_LIKE], id="distributed"),
        pytest.param(RESHARDABLE, id="reshardable", marks=FULL),
    ],
)
def test_merged_and_split(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    """Merged parts are what one folder holds, map and pieces to the byte; of split ones each site loads its own."""
    words = [*extra, "--train-iters", "4", "--vtp-edge-seed", "shared"]
    one, parts = tmp_path / "one", tmp_path / "parts"
    whole = scripts.train("1,2", [*u_shape("1,2,1"), *words, "--save", str(one), "--save-interval", "2"])
    train(scripts, "1,2", "1,2,1", words, save=parts)
    back_to(parts, 2)
    for folder in ("two", "again"):
        sources = [str(parts / site) for site in ("cloud", "edge")]
        assert _checkpoint(capsys, "merge", "--from", *sources, "--to", str(tmp_path / folder)) == 0
    single, merged, again = (root / "iter_0000002" for root in (one, tmp_path / "two", tmp_path / "again"))
    assert _checkpoint(capsys, "diff", str(single), str(merged)) == 0
    assert _checkpoint(capsys, "verify", str(merged)) == 0 and _checkpoint(capsys, "verify", str(parts / "cloud")) == 0
    assert _pieces(single) == _pieces(merged)
    for name in {file.name for file in merged.iterdir()} - {"vtp_manifest.json"}:
        assert (merged / name).read_bytes() == (again / name).read_bytes(), name
        if name.endswith(".json"):
            assert (merged / name).read_bytes() == (single / name).read_bytes(), name

    assert _checkpoint(capsys, "split", "--from", str(merged), "--to", str(tmp_path / "split")) == 0
    for site in ("edge", "cloud"):
        assert _pieces(tmp_path / "split" / site / "iter_0000002") == _pieces(parts / site / "iter_0000002")
    sources = [str(tmp_path / "split" / site) for site in ("edge", "cloud")]
    assert _checkpoint(capsys, "merge", "--from", *sources, "--to", str(tmp_path / "joined")) == 0
    assert _pieces(tmp_path / "joined/iter_0000002") == _pieces(merged)
    runs = train(scripts, "1,2", "1,2,1", words, load=tmp_path / "split")
    assert_same_training(runs, whole, first=2, tolerance=exact_resume_tolerance())


@FULL
def test_what_is_exported_of_merged_parts_is_what_one_folder_gives(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, layout = tmp_path / "published", LAYOUTS["1,2 U"]
    make(KINDS["llama-3"], published)
    flags = imported(published, tmp_path / "start", capsys)
    words = [*flags, *TRAINING, *layout.flags, "--vtp-sites", "edge,cloud", "--vtp-edge-seed", "shared"]
    words += ["--train-iters", "2", "--pretrained-checkpoint", str(tmp_path / "start")]
    scripts.train(layout.sizes, [*words, "--save", str(tmp_path / "one")])
    folders = by_site(layout.sizes, 1, {"--save": tmp_path / "parts"})
    scripts.finish(num_ranks(layout.sizes), {"arguments": arguments(layout.sizes, extra=words), "by_rank": folders})
    sources = [str(tmp_path / "parts" / site) for site in ("edge", "cloud")]
    assert _checkpoint(capsys, "merge", "--from", *sources, "--to", str(tmp_path / "merged")) == 0
    for name in ("one", "merged"):
        export(tmp_path / name, tmp_path / f"{name} exported", published)
    exported = [
        {file.name: file.read_bytes() for file in (tmp_path / f"{name} exported").iterdir()}
        for name in ("one", "merged")
    ]
    assert exported[0] == exported[1] and any(name.endswith(".safetensors") for name in exported[0])
    assert tensors_of(tmp_path / "one exported").keys() == tensors_of(published).keys()


def _checkpoint(capsys: pytest.CaptureFixture[str], *words: str) -> int:
    try:
        main(["checkpoint", *words])
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def _pieces(checkpoint: Path) -> dict[tuple[str, object], str]:
    """Give the hash of every stored piece, but of what all ranks share, which has the arguments of one folder."""
    index = read_index(checkpoint)
    boxes = [(key, box, extent) for key, tensor in index.tensors.items() for box, extent in tensor.extents]
    boxes += [(key, None, extent) for key, extent in index.objects.items() if not key.startswith("common_state/")]
    return {(key, box): digest_of(checkpoint, replace(extent)) for key, box, extent in boxes}


def test_parts_that_do_not_fit_are_not_merged(
    whole: tuple[Path, list[ScriptRun]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edge, cloud = (whole[0] / site for site in ("edge", "cloud"))
    other = tmp_path / "other"
    shutil.copytree(cloud / "iter_0000004", other)
    note = other / "vtp_part.json"
    note.write_text(note.read_text().replace(json.loads(note.read_text())["save"], "0" * 32))
    twice = tmp_path / "twice"
    shutil.copytree(edge / "iter_0000004", twice)
    (twice / "vtp_part.json").write_text((cloud / "iter_0000004/vtp_part.json").read_text())
    lacks = tmp_path / "lacks"
    shutil.copytree(cloud / "iter_0000004", lacks)
    stored = pickle.loads((lacks / ".metadata").read_bytes())
    del stored.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks[1:]
    (lacks / ".metadata").write_bytes(pickle.dumps(stored))
    for sources, words in (
        ([edge], "the part of site cloud is not among"),
        ([edge, edge / "iter_0000004"], "are parts of site edge; give one"),
        ([edge, cloud / "iter_0000003"], "are parts of different iterations, 4 and 3;"),
        ([edge, other], "are parts of different runs, or of one run that saved that iteration twice;"),
        ([edge, twice], "stored twice"),
        ([edge, lacks], "none may be missing"),
    ):
        found = ["--from", *map(str, sources), "--to", str(tmp_path / "new")]
        assert _checkpoint(capsys, "merge", *found) == 2
        said = capsys.readouterr().err
        assert words in said and len(said.strip().splitlines()) == 1, said
    for needy in (
        ["reshard", "--from", str(edge), "--to", str(tmp_path / "new")],
        ["export", "--from", str(edge), "--hf", str(tmp_path / "new")],
        ["split", "--from", str(edge), "--to", str(tmp_path / "new")],
    ):
        assert _checkpoint(capsys, *needy) == 2
        said = capsys.readouterr().err
        assert "is the part of site edge, without the tensors of cloud" in said and "checkpoint merge --from" in said
    assert not (tmp_path / "new").exists()


def test_layers_of_an_encoder_are_not_split(
    whole: tuple[Path, list[ScriptRun]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [str(whole[0] / site) for site in ("edge", "cloud")]
    assert _checkpoint(capsys, "merge", "--from", *sources, "--to", str(tmp_path / "one")) == 0
    file = tmp_path / "one/iter_0000004/.metadata"
    stored = pickle.loads(file.read_bytes())
    old, name = "decoder.layers.mlp.linear_fc1.weight", "image_encoder.encoder.layers.mlp.weight"
    stored.state_dict_metadata[name] = stored.state_dict_metadata.pop(old)
    stored.storage_data = {
        replace(index, fqn=name) if index.fqn == old else index: place for index, place in stored.storage_data.items()
    }
    file.write_bytes(pickle.dumps(stored))
    assert _checkpoint(capsys, "split", "--from", str(tmp_path / "one"), "--to", str(tmp_path / "new")) == 2
    assert f"holds {name}, and which site has an encoder's layers is not known here" in capsys.readouterr().err


def test_a_save_by_site_makes_one_round_trip_where_one_folder_makes_many(scripts: Scripts, tmp_path: Path) -> None:
    """Of the third save, which no check of the first ones adds to; Megatron's timers, which log it, make their own."""
    words = ["--train-iters", "3", *EVERY_STEP]
    apart = command("1,2", "1,2,1", words, save=tmp_path / "parts")
    one = {"arguments": arguments("1,2", extra=[*u_shape("1,2,1"), *words, "--save", str(tmp_path / "one")])}
    numbers = [
        scripts.finish(3, {**each, "hooks": ["count_world"]})[0].facts["world_collectives"][-1] for each in (apart, one)
    ]
    assert numbers[0] == 1 < numbers[1], numbers


def test_a_checkpoint_of_one_site_is_split_as_it_is_asked_for(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a U nobody knows which layers the edge has; two sites then begin with the weights of one process."""
    one, parts = tmp_path / "one", tmp_path / "parts"
    whole = scripts.train("1", [*DISTRIBUTED, "--save", str(one), "--save-interval", "2"])
    (one / TRACKER).write_text("2")
    split = ["split", "--from", str(one), "--to", str(parts)]
    for words, said in (
        (split, "layers unknown at sites edge; each stage has some of 4 layers"),
        ([*split, "--num-layer-list", "1,2,1"], "holds parameters of two sites; such a bucket is not cut;"),
    ):
        assert _checkpoint(capsys, *words) == 2
        assert said in capsys.readouterr().err
    assert _checkpoint(capsys, "reshard", "--from", str(one), "--to", str(tmp_path / "written")) == 0
    split[2] = str(tmp_path / "written")
    assert _checkpoint(capsys, *split, "--num-layer-list", "1,2,1") == 0
    runs = train(scripts, "1,2", "1,2,1", [*DISTRIBUTED, *resharding_flags()], load=parts)
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@FULL
def test_parts_that_are_not_persistent_resume(
    scripts: Scripts, whole: tuple[Path, list[ScriptRun]], tmp_path: Path
) -> None:
    often = [*EVERY_STEP, "--save-interval", "100", "--non-persistent-ckpt-type", "global"]
    often += ["--non-persistent-save-interval", "2"]
    train(scripts, "1,2", "1,2,1", [*often, "--exit-interval", "2"], save=tmp_path)
    assert (
        not [*tmp_path.glob("*/iter_*")] and len([*tmp_path.glob("*/non_persistent/iter_0000002/vtp_part.json")]) == 2
    )
    runs = train(scripts, "1,2", "1,2,1", often, load=tmp_path)
    assert losses(runs) == losses(whole[1])[2:]
