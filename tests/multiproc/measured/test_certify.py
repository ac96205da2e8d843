"""``vtp certify``: its short form passes, planted faults are named, and bad input is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.device.test_options import MODEL
from tests.multiproc.cases.script_cases import Scripts
from tests.multiproc.jobs.certify_job import FAULTS
from tests.support.pool import Pool, start_python
from vtp_plugin.certify.compare import Numbers, assemble
from vtp_plugin.certify.layouts import CertifiedRun, Choice, choose
from vtp_plugin.certify.report import judge_row

# What each planted fault is called: the tensor, how it differs, and where.
NAMED = {
    "sum_left_out": r"output of decoder\.layers\.3\.mlp\.linear_fc2 .*(share|differs) on ranks 1, 2",
    "gradient_by_tp": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is 2 times .* on ranks 1, 2",
    "gradient_of_stage": r"gradient of decoder\.layers\.2\.\S+ is 0\.5 times .* on rank 0",
    "rows_swapped": r"output of decoder\.layers\.3\.self_attention\.linear_qkv differs on ranks 1, 2",
    "one_nan": r"gradient of decoder\.layers\.3\.mlp\.linear_fc1\.weight has infinite numbers or NaN on rank 2",
    "one_rank_alone": r"gradient of decoder\.layers\.3\.mlp\.linear_fc2\.weight is 3 times .* on rank 2",
    "tied_copy_drifts": r"gradient of output_layer\.weight is 0\.25 times .* on ranks 1, 2",
    "output_halved": r"output of decoder\.layers\.4\.self_attention\.linear_proj is 0\.5 times .* on ranks 1, 2",
    "gradient_shares": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is one rank's share on ranks 1, 2",
    "one_rate": r"weight \S+ .*on ranks? [12]",
}
DEFAULT = ("sum_left_out", "gradient_shares", "one_nan")


@pytest.fixture(scope="module")
def references(pool: Pool) -> list[Numbers]:
    """The uniform run, and those with start weights that are changed by a rounding."""
    choice: Choice = choose(3, is_short=True, without={})
    return [numbers_of(pool, job) for job in choice.references]


def numbers_of(pool: Pool, job: CertifiedRun, fault: str = "") -> Numbers:
    kwargs: dict[str, Any] = {"run": job, "fault": fault}
    return assemble(pool.run(job.num_ranks, "tests.multiproc.jobs.certify_job:train", kwargs))


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.full]) for name in FAULTS]
)
def test_a_planted_fault_is_named(pool: Pool, references: list[Numbers], fault: str) -> None:
    job = CertifiedRun(shows=fault, sizes=(1, 2), is_sequence_parallel=fault != "sum_left_out")
    reference, *changed = references
    row = judge_row(job, numbers_of(pool, job, fault), 0.0, reference, changed)
    assert row.verdict == "differs"
    assert re.match(NAMED[fault], row.note), row.note


def test_short_form(tmp_path: Path) -> None:
    """All is well, a killed rank is named, and the report speaks of what is installed, until it is changed."""
    path = tmp_path / "report.json"
    printed = start_python("-m", "vtp_plugin", "certify", "--short", "--device", "cpu", "--out", str(path))
    assert "verdict: fine: 5 of 5 runs" in printed
    report = json.loads(path.read_text())
    assert [row["verdict"] for row in report["rows"]] == ["equal"] * 4 + ["named"]
    assert str(tmp_path) not in path.read_text() and "/" not in re.sub(r"https?://", "", path.read_text())
    assert "what is installed" in start_python("-m", "vtp_plugin", "certify", "--check", str(path))


@pytest.mark.full
def test_all_layouts_that_fit_four_ranks() -> None:
    printed = start_python("-m", "vtp_plugin", "certify", "--ranks", "4", "--device", "cpu")
    assert "verdict: fine" in printed and "not run: distributed optimizer, overlapped: needs 6 ranks" in printed


@pytest.mark.full
def test_started_by_torchrun() -> None:
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "vtp_plugin", "certify", "--short")
    assert start_python(*words).count("verdict: fine") == 1


@pytest.mark.needs("our_example")
def test_flags_of_the_options_for_devices_train(scripts: Scripts) -> None:
    """All but Transformer Engine's layers."""
    local = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"]
    words = [*MODEL.split(), *local, "--vtp-device", "cpu", "--vtp-size-list", "1,2", "--train-iters", "1"]
    assert len(scripts.finish(3, {"arguments": words})[-1].steps) == 1
