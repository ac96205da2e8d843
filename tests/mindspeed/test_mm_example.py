"""The folder of MindSpeed-MM's example, in small: two scripts, its own data, two rings, replicas in the cloud.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`. Weights come from Hugging Face and go back there; the run is broken off
and resumed. The oracle is one rank of the unmodified script with the flags of the example and the same weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.mindspeed import test_mm_lane
from tests.mindspeed.launcher import launch
from tests.mindspeed.mm import own_data, samples
from tests.mindspeed.mm.converted import write_hugging_face
from tests.mindspeed.mm.model import write_files
from tests.mindspeed.test_mm_lane import SCRIPT, STEPS, TIMEOUT_S, Numbers, assert_equal, environment, numbers
from tests.support.hosts import ROOT
from tests.support.pool import free_port
from vtp_plugin.cli import main

pytestmark = test_mm_lane.pytestmark
FOLDER = ROOT / "examples" / "edge_cloud_mm"
VISION, TEXT = [[1, 3], [1, 0], [0, 0]], [[0, 0], [0, 4], [0, 0]]
BROKEN_OFF = 3
# Larger steps than for 32 billion parameters, and norms in the log.
SMALL = ("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--no-bias-swiglu-fusion")


def variables(folder: Path) -> dict[str, str]:
    """Say what makes the example small: five ranks, a tiny model in fp32."""
    return {
        **os.environ,
        **environment(has_own_data=True),
        "PYTHON": sys.executable,
        "MINDSPEED_MM": test_mm_lane.TREES["VTP_MINDSPEED_MM"],
        "SCRIPT": str(SCRIPT),
        "SIZE_LIST": "1,2",
        "DP_LIST": "1,2",
        "SITES": "edge,cloud",
        "MODEL": str(folder / "lists.json"),
        "DATA": str(folder / "data.json"),
        "TOOLS": str(folder / "tool.json"),
        "WEIGHTS": str(folder / "weights"),
        "CHECKPOINT": str(folder / "trained"),
        "SEQ_LENGTH": str(own_data.SEQUENCE),
        "VOCAB_SIZE": str(samples.VOCABULARY),
        "GLOBAL_BATCH_SIZE": "4",
        "STEPS": str(STEPS),
        "WORKERS": "0",
        "DEVICE_FLAGS": "--distributed-backend gloo --transformer-impl local",
        "OMP_NUM_THREADS": "1",
    }


def prepared(folder: Path) -> None:
    """Write data and model, and import weights, by the commands of the guide."""
    write_files(folder, [5], [4], has_own_data=True, is_frozen=True, is_projector_frozen=True)
    lists = ["--vision", json.dumps(VISION), "--text", json.dumps(TEXT), "--output", folder / "lists.json"]
    subprocess.run([sys.executable, FOLDER / "write_model.py", folder / "model.json", *lists], check=True)
    write_hugging_face(folder / "published", json.loads((folder / "model.json").read_text()))
    main(["checkpoint", "import", "--hf", str(folder / "published"), "--to", str(folder / "weights")])


def both_sites(folder: Path, *extra: str) -> str:
    """Start both scripts, each with a launcher of its own; return what the edge printed."""
    known = {**variables(folder), "MASTER_PORT": str(free_port())}
    started: dict[str, subprocess.Popen[str]] = {}
    for site, processes in (("edge", 1), ("cloud", 4)):
        with (folder / f"{site}.log").open("w") as log:
            started[site] = subprocess.Popen(
                [FOLDER / f"{site}.sh", "--vtp-device", "cpu", *SMALL, *extra],
                env={**known, "PROCESSES": str(processes)},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
    try:
        codes = {site: process.wait(timeout=TIMEOUT_S) for site, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
    edge, cloud = ((folder / f"{site}.log").read_text() for site in started)
    assert codes == {"edge": 0, "cloud": 0}, edge[-5000:] + cloud[-3000:]
    assert "exact loss" not in cloud
    return edge


def one_rank(folder: Path) -> Numbers:
    """The oracle: the flags of the example but the plugin's, on one rank without it."""
    script = f'set -euo pipefail; source "{FOLDER}/shared.sh"; printf "%s\\n" "${{SHARED[@]}}"'
    known = {**variables(folder), "MODEL": str(folder / "model.json"), "CHECKPOINT": str(folder / "of_one_rank")}
    flags = subprocess.run(["bash", "-c", script], env=known, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"--layerwise-disaggregated-training\n|--vtp-[\w-]+\n.*\n", "", flags)
    words = [*text.split("\n")[:-1], "--mm-data", str(folder / "data.json"), "--num-workers", "0", *SMALL]
    code, output = launch(SCRIPT, words, num_ranks=1, is_run=False, environment=known, timeout_s=TIMEOUT_S)
    assert code == 0, output[-6000:]
    return numbers(output)


def test_the_example_trains_resumes_and_goes_back_to_hugging_face(tmp_path: Path) -> None:
    import transformers

    kind: Any = transformers.Qwen2_5_VLForConditionalGeneration
    prepared(tmp_path)
    expected = one_rank(tmp_path)
    first = numbers(both_sites(tmp_path, "--exit-interval", str(BROKEN_OFF)), BROKEN_OFF)
    second = numbers(both_sites(tmp_path), STEPS - BROKEN_OFF)
    assert_equal({name: first[name] + second[name] for name in expected}, expected)
    trained, published, tuned = (str(tmp_path / name) for name in ("trained", "published", "tuned"))
    main(["checkpoint", "export", "--from", trained, "--hf", tuned, "--like", published])
    before, after = (
        dict(kind.from_pretrained(folder, torch_dtype=torch.float32).named_parameters())
        for folder in (published, tuned)
    )
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == name.startswith("model.visual."), name
