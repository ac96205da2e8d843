"""Certify: bad input is one line, a report is bound to what is installed, and faults are described."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vtp_plugin.certify.compare import Numbers, PartSketch, RankNumbers, assemble, finite, first_fault, judge
from vtp_plugin.certify.report import CertifyReport, Row, digest_of
from vtp_plugin.cli import certify
from vtp_plugin.cli.certify_workers import Answer
from vtp_plugin.cli.main import main
from vtp_plugin.util.typed_json import read_typed


def report(**changed: Any) -> CertifyReport:
    values: dict[str, Any] = {
        "versions": certify._versions(),
        "sources": certify._sources(),
        "device": "CPU",
        "num_ranks": 3,
        "is_short": True,
        "rows": (Row(shows="slices", layout="1,2", num_ranks=3, verdict="equal"),),
        "left_out": {},
        "seconds": 1,
    }
    return CertifyReport(**{**values, **changed}).signed()


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


def test_a_report_that_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(tmp_path / "r.json", json.dumps(asdict(report()) | {"num_ranks": 300}), capsys)
    assert code == 1 and "its fields were changed" in said


def test_the_digest_is_that_of_the_files(tmp_path: Path) -> None:
    """Whether the patches are a link, as in a checkout, or a folder, as where the plugin is installed."""
    for name in ("a/x/1.py", "b/x/1.py", "patches/2.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name[-4:])
    (tmp_path / "a/patches").symlink_to(tmp_path / "patches")
    (tmp_path / "b/patches").mkdir()
    (tmp_path / "b/patches/2.py").write_text("2.py"[-4:])
    one, other = (digest_of([tmp_path / name, tmp_path / name / "patches"]) for name in "ab")
    assert one == other != digest_of([tmp_path / "a", tmp_path / "b/x"])


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
    return assemble([RankNumbers(gradients={"w": part}) for part in parts])


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
    reference = assemble([RankNumbers(outputs={"a": PartSketch(values=(1.0,)), "b": PartSketch(values=(1.0,))})])
    run = assemble([RankNumbers(outputs={"a": PartSketch(values=(1.0,))})])
    assert first_fault(run, reference, judge(run, reference, {"output of a": 0.1, "output of b": 0.1})) == (
        "output of b is missing in one of the runs"
    )


def test_answers_cross_as_json() -> None:
    """Also numbers that are none."""
    answer = Answer(numbers=RankNumbers(losses=(1.5, float("inf")), changes={"w": PartSketch(values=(2.0,))}))
    read = read_typed(Answer, json.dumps(finite(asdict(answer))))
    assert read.numbers is not None and read.numbers.changes["w"].values == (2.0,)
    assert read.numbers.losses[0] == 1.5 and read.numbers.losses[1] != read.numbers.losses[1]
