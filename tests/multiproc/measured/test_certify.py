"""What owners of devices run to certify the plugin, tried on CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.device.certify import LAYOUTS, Outcome, table
from tests.device.test_options import MODEL
from tests.multiproc.cases.script_cases import Scripts
from tests.support.hosts import ROOT
from tests.support.pool import free_port


def certify(*words: str) -> tuple[int, str]:
    """Run the script on this machine's CPU."""
    command = [sys.executable, str(ROOT / "tests" / "device" / "certify.py"), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), "--steps", "3", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_all_layouts_are_certified() -> None:
    code, output = certify()
    assert code == 0, output
    verdicts = {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip(" |") for line in output.splitlines()}
    assert [verdicts[sizes] for sizes in LAYOUTS] == [
        "trains" if {*sizes} == {"1", ","} else "equal" for sizes in LAYOUTS
    ]


def test_what_does_not_fit_or_run_is_named() -> None:
    code, output = certify("--layouts", "1,1", "1,2", "--devices", "1")
    assert code == 1
    assert output.count("needs more than 1 devices on a machine") == 2


@pytest.mark.parametrize(
    ("words", "said"), [(("--device", "cuda"), "torch sees no such device"), (("--share",), "only GPUs can be shared")]
)
def test_what_cannot_run_is_one_line(words: tuple[str, ...], said: str) -> None:
    code, output = certify(*words)
    assert code == 1 and said in output and "Traceback" not in output, output


def test_a_wrong_loss_is_wrong() -> None:
    class Options:
        device, machines, share = "npu", 2, False

    outcomes = [Outcome("1,1", (2.0, 1.0)), Outcome("1,2", (2.0, 1.001)), Outcome("2,1", (2.0, 1.0))]
    lines, is_well = table(outcomes, Options())  # type: ignore[arg-type]
    assert not is_well
    assert [line.rsplit(" | ", 1)[1] for line in lines[-3:]] == ["trains |", "**wrong** |", "equal |"]


@pytest.mark.needs("our_example")
def test_flags_of_the_options_for_devices_train(scripts: Scripts) -> None:
    """All but Transformer Engine's layers."""
    local = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"]
    words = [*MODEL.split(), *local, "--vtp-device", "cpu", "--vtp-size-list", "1,2", "--train-iters", "1"]
    assert len(scripts.finish(3, {"arguments": words})[-1].steps) == 1
