"""A run with ``--brief`` trains and writes what another one does; its terminal shows the layout and the losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, losses
from tests.support.lines import error_lines

pytestmark = pytest.mark.needs("scripts_here")

STEP = re.compile(
    r"^iteration (\d)/4 \| lm loss (\S+) \| .* a step \| [\d,]+ tokens/s \| \d:\d\d:\d\d left$", re.MULTILINE
)
OF_MEGATRON = re.compile(r"\biteration +(\d)/ .*\blm loss: (\S+) \|")
U_SHAPE = ("--layerwise-disaggregated-training", "--num-layer-list", "1,1,2")


def steps(pattern: re.Pattern[str], output: str) -> list[tuple[str, float]]:
    """Give the logged iterations and their losses."""
    return [(number, float(loss)) for number, loss in pattern.findall(output)]


@pytest.mark.parametrize(
    ("extra", "writer"),
    [
        ((), 2),
        pytest.param(("--log-interval", "2"), 2, marks=pytest.mark.full),
        (U_SHAPE, 0),
    ],
    ids=["plain", "every second step", "u"],
)
def test_losses_are_those_that_megatron_prints(
    scripts: Scripts, tmp_path: Path, extra: tuple[str, ...], writer: int
) -> None:
    """And one rank, the one that prints them, has the writers of TensorBoard and W&B."""
    told = ("--wandb-project", "project", "--wandb-exp-name", "name", "--wandb-save-dir", str(tmp_path / "wandb"))
    extra = (*extra, *told, "--tensorboard-dir", str(tmp_path / "events"))
    loud = scripts.train("1,2", extra, hooks=["note_writers"])
    folders = dict.fromkeys(range(3), str(tmp_path))
    hooks = ["under_one_launcher", "note_writers"]
    brief = scripts.train("1,2", extra, how="brief", hooks=hooks, folders=folders)
    assert losses(brief) == losses(loud)
    (file,) = tmp_path.glob("vtp-run-*-of_tests.log")
    text = file.read_text()
    shown = steps(STEP, brief[writer].output)
    assert shown == steps(OF_MEGATRON, loud[writer].output) == steps(OF_MEGATRON, text) and len(shown) > 1
    name = f"all else that this node prints goes into {file}\n"
    for rank, run in enumerate(brief):
        assert (name in run.output) == (rank == 0), run.output
        assert ("TP sizes 1,2" in run.output) == (rank == writer), run.output
        assert bool(STEP.search(run.output)) == (rank == writer), run.output
        assert len(run.output.splitlines()) < 20, run.output
        for one in (run, loud[rank]):
            assert one.facts["writers"] == (rank == writer, rank == writer)
            assert ("lm loss" in one.facts["wandb"]) == (rank == writer)
    assert "- arguments -" in text and text.count("[vtp rank 0] done: 4 steps") == 1
    events = [path.read_bytes() for path in (tmp_path / "events").iterdir()]
    assert len(events) == 2 and all(b"lm loss" in each for each in events)


def test_what_is_loaded_measured_and_saved_is_shown(scripts: Scripts, tmp_path: Path) -> None:
    """A mistyped ``--load`` is told, at the step at which the run begins."""
    saved, missing = tmp_path / "saved", tmp_path / "mistyped"
    often = ("--eval-interval", "2", "--eval-iters", "1", "--save-interval", "4", "--save", str(saved))
    folders = dict.fromkeys(range(3), str(tmp_path))
    first = scripts.train("1,2", (*often, "--load", str(missing)), how="brief", folders=folders)
    again = scripts.train("1,2", (*often, "--load", str(saved)), how="brief", folders=folders)
    line = f"nothing in {missing}: begins at step 0 with new weights; if it should resume, give the folder"
    assert [line in " ".join(run.output.split()) for run in first] == [False, False, True], first[2].output
    shown, newest = first[2].output.splitlines(), saved / "iter_0000004"
    assert len([each for each in shown if re.fullmatch(r"evaluation \| lm loss \d\.\d+", each)]) >= 2, shown
    assert f"saved {newest}" in shown and re.match(rf"done: 4 steps, median .*, checkpoint {newest}", shown[-1]), shown
    assert f"loaded {saved}: begins at step 4" in again[2].output.splitlines()


@pytest.mark.parametrize(
    ("source", "code", "last", "text"),
    [
        (
            "print('why')\nraise SystemExit(3)\n",
            3,
            "why",
            "the script has ended itself (SystemExit: 3); its last lines say why",
        ),
        ("raise OSError('no such thing')\n", 1, "OSError: no such thing", "OSError: no such thing"),
    ],
    ids=["exit", "error"],
)
def test_the_end_of_a_script_is_shown(
    scripts: Scripts, tmp_path: Path, source: str, code: int, last: str, text: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    command = {"arguments": arguments("1"), "script": str(script), "how": "brief", "folders": {0: str(tmp_path)}}
    (run,) = scripts.launch(1, command)
    assert run.exit_code == code
    first, *others = error_lines(run.output)
    assert first == f"[vtp rank 0] error: {text}" and {*others} <= {first}, run.output
    assert f"\n{last}\n" in run.output.partition("the last lines of ")[2]
