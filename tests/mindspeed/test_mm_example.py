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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed import test_mm_lane
from tests.mindspeed.launcher import launch
from tests.mindspeed.mm import own_data, samples
from tests.mindspeed.mm.converted import write_hugging_face
from tests.mindspeed.mm.model import write_files
from tests.mindspeed.test_mm_lane import SCRIPT, STEPS, TIMEOUT_S, Numbers, assert_equal, environment, numbers
from tests.mindspeed.test_mm_weights import Tensors, assert_near, gathered, weights
from tests.multiproc.cases.example_runs import start_sites
from tests.support.hosts import ROOT
from tests.support.pool import free_port
from vtp_plugin.cli import main

pytestmark = test_mm_lane.pytestmark
FOLDER = ROOT / "examples" / "edge_cloud_mm"
BROKEN_OFF = 3
# Larger steps than for 32 billion parameters, and norms in the log.
SMALL = ("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--no-bias-swiglu-fusion")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the example: sizes and replicas of the stages, the edge first, and layers of every chunk and stage."""

    sizes: tuple[int, ...]
    dp_sizes: tuple[int, ...]
    vision: list[list[int]]
    text: list[list[int]]

    @property
    def processes(self) -> dict[str, int]:
        """Number of ranks of each site."""
        edge, *cloud = (size * dp for size, dp in zip(self.sizes, self.dp_sizes, strict=True))
        return {"edge": edge, "cloud": sum(cloud)}


FORMS = {
    "in small": Form(sizes=(1, 2), dp_sizes=(1, 2), vision=[[1, 3], [1, 0], [0, 0]], text=[[0, 0], [0, 4], [0, 0]]),
    # As deep as in the document, and as many stages; half as wide.
    "as deep": Form(
        sizes=(1, 2, 2, 2, 2),
        dp_sizes=(1, 1, 1, 1, 1),
        vision=[[3, 7, 7, 7, 7], [1, 0, 0, 0, 0], [0] * 5],
        text=[[0] * 5, [0, 16, 16, 16, 16], [0] * 5],
    ),
}


def variables(folder: Path, form: Form) -> dict[str, str]:
    """Say what makes the example small: few ranks, a tiny model in fp32."""
    return {
        **os.environ,
        **environment(has_own_data=True),
        "PYTHON": sys.executable,
        "MINDSPEED_MM": test_mm_lane.TREES["VTP_MINDSPEED_MM"],
        "SCRIPT": str(SCRIPT),
        "SIZE_LIST": ",".join(map(str, form.sizes)),
        "DP_LIST": ",".join(map(str, form.dp_sizes)),
        "SITES": ",".join(["edge", *["cloud"] * (len(form.sizes) - 1)]),
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


def prepared(folder: Path, form: Form) -> None:
    """Write data and model, and import weights, by the commands of the guide."""
    num_vision, num_text = (sum(map(sum, rows)) for rows in (form.vision, form.text))
    write_files(
        folder, [num_vision], [num_text], num_text=num_text, has_own_data=True, is_frozen=True, is_projector_frozen=True
    )
    lists = ["--vision", json.dumps(form.vision), "--text", json.dumps(form.text), "--output", folder / "lists.json"]
    subprocess.run([sys.executable, FOLDER / "write_model.py", folder / "model.json", *lists], check=True)
    write_hugging_face(folder / "published", json.loads((folder / "model.json").read_text()))
    main(["checkpoint", "import", "--hf", str(folder / "published"), "--to", str(folder / "weights")])


def both_sites(folder: Path, form: Form, *extra: str) -> str:
    """Start both scripts, each with a launcher of its own; return what the edge printed."""
    known = {**variables(folder, form), "MASTER_PORT": str(free_port())}
    commands = {site: [FOLDER / f"{site}.sh", "--vtp-device", "cpu", *SMALL, *extra] for site in form.processes}
    environments = {site: {**known, "PROCESSES": str(number)} for site, number in form.processes.items()}
    edge, cloud = start_sites(folder, commands, environments, timeout_s=TIMEOUT_S).values()
    assert "exact loss" not in cloud
    return edge


def one_rank(folder: Path, form: Form) -> Numbers:
    """The oracle: the flags of the example but the plugin's, on one rank without it."""
    script = f'set -euo pipefail; source "{FOLDER}/shared.sh"; printf "%s\\n" "${{SHARED[@]}}"'
    known = {**variables(folder, form), "MODEL": str(folder / "model.json"), "CHECKPOINT": str(folder / "of_one_rank")}
    flags = subprocess.run(["bash", "-c", script], env=known, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"--layerwise-disaggregated-training\n|--vtp-[\w-]+\n.*\n", "", flags)
    words = [*text.split("\n")[:-1], "--mm-data", str(folder / "data.json"), "--num-workers", "0", *SMALL]
    code, output = launch(SCRIPT, words, num_ranks=1, is_run=False, environment=known, timeout_s=TIMEOUT_S)
    assert code == 0, output[-6000:]
    return numbers(output)


def without_key_biases(tensors: Tensors, model: dict[str, Any]) -> Tensors:
    """Leave out what Adam makes of nothing: keys shift all scores of a query alike, so their biases have no gradient.

    What is left of it is rounding, which Adam takes for a direction.
    """
    groups, heads = model["num_query_groups"], model["num_attention_heads"]
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("text_decoder.") and name.endswith("linear_qkv.bias"):
            by_head = tensor.unflatten(-1, (groups, heads // groups + 2, -1))
            kept[name] = torch.cat([by_head[..., :-2, :], by_head[..., -1:, :]], dim=-2)
    return kept


@pytest.mark.parametrize("form", FORMS.values(), ids=[*FORMS])
def test_the_example_trains_resumes_and_goes_back_to_hugging_face(tmp_path: Path, form: Form) -> None:
    import transformers

    kind: Any = transformers.Qwen2_5_VLForConditionalGeneration
    prepared(tmp_path, form)
    expected = one_rank(tmp_path, form)
    first = numbers(both_sites(tmp_path, form, "--exit-interval", str(BROKEN_OFF)), BROKEN_OFF)
    second = numbers(both_sites(tmp_path, form), STEPS - BROKEN_OFF)
    assert_equal({name: first[name] + second[name] for name in expected}, expected)
    ours, theirs = (weights(gathered(tmp_path / name, STEPS)) for name in ("trained", "of_one_rank"))
    model = json.loads((tmp_path / "model.json").read_text())["text_decoder"]
    assert_near(without_key_biases(ours, model), without_key_biases(theirs, model))
    trained, published, tuned = (str(tmp_path / name) for name in ("trained", "published", "tuned"))
    main(["checkpoint", "export", "--from", trained, "--hf", tuned, "--like", published])
    before, after = (
        dict(kind.from_pretrained(folder, torch_dtype=torch.float32).named_parameters())
        for folder in (published, tuned)
    )
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == name.startswith("model.visual."), name
