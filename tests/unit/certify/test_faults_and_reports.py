"""Certify: bad input is one line, a report is bound to what is installed, and faults are described."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from vtp_plugin.certify.compare import Numbers, PartSketch, RankNumbers, assemble, finite, first_fault, judge
from vtp_plugin.certify.layouts import CertifiedRun, choose_for_script
from vtp_plugin.certify.report import CertifyReport, Row, digest_of
from vtp_plugin.cli import certify
from vtp_plugin.cli.certify_workers import Answer, Workers
from vtp_plugin.cli.main import main
from vtp_plugin.runtime.step.sketch import sketch
from vtp_plugin.util.typed_json import read_typed


def report(**changed: Any) -> CertifyReport:
    values: dict[str, Any] = {
        "versions": certify._versions(),
        "sources": certify.digest_of(Path(certify.vtp_plugin.__file__).parent),
        "device": "CPU",
        "num_ranks": 3,
        "is_short": True,
        "rows": (Row(shows="slices", layout="1,2", num_ranks=3, verdict="equal"),),
        "left_out": {},
        "conclusion": "",
        "seconds": 1,
    }
    return CertifyReport(**{**values, **changed})


def check(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    path.write_text(text)
    with pytest.raises(SystemExit) as leave:
        main(["certify", "--check", str(path)])
    said = capsys.readouterr()
    return int(leave.value.code or 0), said.out + said.err


def test_a_report_speaks_of_what_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(tmp_path / "r.json", json.dumps(asdict(report())), capsys)
    assert code == 0 and said.endswith("it speaks of what is installed\n")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"sources": "0123456789abcdef"}, "problem: sources of the plugin 0123456789abcdef in the report, "),
        ({"versions": {"torch": "1.0"}}, "problem: torch 1.0 in the report, "),
    ],
)
def test_a_report_of_something_else(
    changed: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(tmp_path / "r.json", json.dumps(asdict(report(**changed))), capsys)
    assert code == 1 and line in said


def test_the_digest_is_that_of_the_files(tmp_path: Path) -> None:
    """Whether the patches are a link, as in a checkout, or a folder, as where the plugin is installed."""
    for name in ("a/x/1.py", "b/x/1.py", "patches/2.py", "b/patches/2.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name[-4:])
    (tmp_path / "a/patches").symlink_to(tmp_path / "patches")
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b") != digest_of(tmp_path / "b/x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"versions": 3}', "NaN"])
def test_what_is_no_report_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(tmp_path / "r.json", text, capsys)
    assert code == 2 and said.startswith("vtp_plugin: error: --check ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--ranks", "2", "--device", "cpu"), "2 ranks; stages of different sizes need 3, as 1,2 does"),
        (("--shrt",), "--shrt is unknown"),
        (("--check", "nowhere.json"), "nowhere.json cannot be read"),
        (("--out", "nowhere/r.json"), "--out nowhere/r.json: there is no folder nowhere"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["certify", *words])
    said = capsys.readouterr().err
    assert leave.value.code == 2 and line in said and said.count("\n") == 1, said


def run_of(*parts: PartSketch) -> Numbers:
    return assemble([RankNumbers(tensors={"gradient of": {"w": part}}) for part in parts])


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([PartSketch(values=(2.0, 4.0))], "gradient of w is 2 times that of the uniform run on rank 0"),
        (
            [PartSketch(values=(0.3, 2.0)), PartSketch(values=(0.7, 0.0))],
            "gradient of w is one rank's share on ranks 0, 1: a sum over these ranks is left out",
        ),
        (
            [PartSketch(values=(1.0,), count=2, is_cut=True), PartSketch(values=(6.0,), index=1, count=2, is_cut=True)],
            "gradient of w is 3 times that of the uniform run on rank 1",
        ),
        ([PartSketch(values=(float("nan"), 2.0))], "gradient of w has infinite numbers or NaN on rank 0"),
        ([PartSketch(values=(5.0, -3.0))], "gradient of w differs on rank 0, by no single factor"),
    ],
)
def test_a_fault_is_described(parts: list[PartSketch], line: str) -> None:
    reference, run = run_of(PartSketch(values=(1.0, 2.0))), run_of(*parts)
    assert first_fault(run, reference, judge(run, reference, {"gradient of w": 0.01})) == line


def test_what_one_run_lacks_is_named() -> None:
    reference = assemble([RankNumbers(tensors={"output of": {name: PartSketch(values=(1.0,)) for name in "ab"}})])
    run = assemble([RankNumbers(tensors={"output of": {"a": PartSketch(values=(1.0,))}})])
    assert first_fault(run, reference, judge(run, reference, {"output of a": 0.1, "output of b": 0.1})) == (
        "output of b is missing in one of the runs"
    )


def test_answers_cross_as_json() -> None:
    """Also numbers that are none."""
    tensors = {"weight": {"w": PartSketch(values=(2.0,))}}
    answer = Answer(numbers=RankNumbers(logged={"loss": (1.5, float("inf"))}, tensors=tensors))
    read = read_typed(Answer, json.dumps(finite(asdict(answer))))
    assert read.numbers is not None and read.numbers.tensors["weight"]["w"].values == (2.0,)
    first, second = read.numbers.logged["loss"]
    assert first == 1.5 and second != second


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_of_parts_is_that_of_the_whole(num_ranks: int, dtype: torch.dtype) -> None:
    """And one bit changes it."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    for dim in (0, 1):
        parts = [
            sketch("w", part, dim=dim, index=i, count=num_ranks, is_exact=True)
            for i, part in enumerate(whole.chunk(num_ranks, dim))
            if whole.shape[dim] % num_ranks == 0
        ]
        other = whole.clone()
        other[1, 3] *= 1 + 2.0**-6
        found = tuple(value for part in parts for value in part.values)
        assert found in ((), sketch("w", whole, dim=dim, is_exact=True).values)
        assert found != sketch("w", other, dim=dim, is_exact=True).values


def of_script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, Any],
    *words: str,
) -> tuple[int, str]:
    """Certify a script of which each run computes given losses, or fails with a line."""
    (tmp_path / "train.py").touch()

    def run(_self: Any, job: CertifiedRun) -> list[Answer]:
        value = answers.get(f"{job.role} {job.seed}", answers.get(job.role, 1.0))
        if isinstance(value, str):
            return [Answer(line=value)] * job.num_ranks
        tensors = {"output of": {"a": PartSketch(values=(value * (1 + 1e-7 * job.seed), 1.0))}}
        return [Answer(numbers=RankNumbers(logged={"loss": (value,)}, tensors=tensors))] * job.num_ranks

    monkeypatch.setattr(Workers, "run", run)
    with pytest.raises(SystemExit) as leave:
        main(["certify", "--device", "cpu", "--ranks", "4", "--", str(tmp_path / "train.py"), *words])
    said = capsys.readouterr()
    return int(leave.value.code or 0), said.out if leave.value.code != 2 else said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("answers", "code", "line"),
    [
        ({}, 0, "conclusion: rounding: 1,2 computes what TP 1 does; from run to run TP 1 differs by 0.0e+00"),
        ({"list": 2.0}, 1, "conclusion: ours: output of a differs on ranks 0, 1, 2, by no single factor"),
        ({"list": 2.0, "uniform": 2.0}, 0, "conclusion: Megatron's own: its numbers depend on the TP size; stock Meg"),
        ({"uniform": 2.0}, 0, "conclusion: rounding: 1,2 computes what TP 1 does; from run to run TP 1 differs by 0.0"),
        ({"list": "no such flag", "uniform": 2.0}, 1, "conclusion: Megatron's own: its numbers depend on the TP size;"),
        ({"list": "no such flag"}, 1, "conclusion: not run: no such flag; from run to run"),
        ({"again": 2.0}, 2, "nothing can be judged by them; let it draw from --seed alone"),
        ({"start": "no end within 120 s"}, 2, "train.py with equal stages: no end within 120 s; "),
        ({"reference 1": 3.0}, 2, "cannot be compared: loss changes by 2.0e+00 when weights are rounded; "),
    ],
)
def test_why_a_script_differs(
    answers: dict[str, Any],
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, said = of_script(tmp_path, monkeypatch, capsys, answers, "--vtp-size-list", "1,2")
    assert line in said and found == code, said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--vtp-size-list", "2,4"), "2,4 needs 6 ranks, and 4 are there; 1,2 fits; give --ranks, or smaller sizes"),
        (("--vtp-size-list", "1,1,1,2"), "1,1,1,2 needs 5 ranks, and 4 are there; 1,1,1,2 needs 5; give --ranks"),
        (("--vtp-size-list", "1,x"), "x"),
        (("--vtp-size-lst", "1,2"), "--vtp-size-lst is unknown"),
        ((), "the script's flags have no --vtp-size-list"),
    ],
)
def test_a_script_that_cannot_be_compared_is_one_line(
    words: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = of_script(tmp_path, monkeypatch, capsys, {}, *words)
    assert code == 2 and said.startswith("vtp_plugin: error: ") and line in said, said


def test_runs_of_a_script_are_alike() -> None:
    """Equal padding, weights and steps; the uniform run has nothing of the list."""
    flags = "--hidden-dropout 0.1 --save x --vtp-size-list 2,3 --vtp-dp-list 1,2 --vtp-transport rank0 --lr 1"
    words = flags.split()
    runs = {run.layout: run.words for run in choose_for_script(words, 8).runs}
    assert list(runs) == ["TP 1", "TP 2", "TP 3", "2,3 dp 1,2"]
    for layout, kept in runs.items():
        text = " ".join(kept)
        assert "--save" not in text and "--exit-interval 3" in text and kept.index("--lr") < kept.index("--load")
        assert text.rindex("--hidden-dropout 0 ") > text.index("--hidden-dropout 0.1")
        assert ("--vtp" in text) == (layout[0] != "T")
    padding = [kept[kept.index("--make-vocab-size-divisible-by") + 1] for kept in runs.values()]
    assert padding == ["768", "384", "256", "128"]
