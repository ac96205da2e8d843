"""Pages as data and as text: what each command puts on its page, and that no name becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.made_traces import U_COSTS, U, files_of, schedule_of, slowed, write
from tests.support.report_pages import COMMANDS, HOSTILE, MODEL, run_quietly, write_page_of
from vtp_plugin.cli import main, page_sections
from vtp_plugin.cli.page_sections import render
from vtp_plugin.plan.launch.launch_commands import Launch, NodeRanks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.report.page.report_page import MemoryBar, MemorySection, ReportPage, TextTable

GIB = 2**30
MOST_BYTES = 1_000_000


def page_of(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> ReportPage:
    """Return what a command would draw."""
    drawn: list[ReportPage] = []
    monkeypatch.setattr(page_sections, "render", lambda page, argv: drawn.append(page) or "")
    monkeypatch.setattr(page_sections, "write_file", lambda path, text: None)
    run_quietly(*words, "--output", "page.html")
    (page,) = drawn
    return page


class Elements(HTMLParser):
    """Which elements a page has, with their attributes; void ones are ended at once."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_plan_has_every_rank_on_its_node_and_in_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(monkeypatch, COMMANDS["plan"])
    assert page.title == "--vtp-size-list 4,8,8"
    assert page.launch is not None
    assert sorted(rank for node in page.launch.nodes for rank in node.ranks) == [*range(40)]
    assert [page.site_of(node) for node in page.launch.nodes] == ["edge", "cloud", "cloud", "cloud", "cloud"]
    commands = json.loads(run_quietly(*COMMANDS["plan"], "--json", "--output", "unwritten.html"))["launch"]["nodes"]
    assert [[*words] for _, words in page.launch.commands()] == [one["commands"] for one in commands]
    assert page.memory is not None and page.memory.has_limits
    assert {bar.limit_bytes for bar in page.memory.bars} == {80 * GIB}
    assert page.memory.kinds == ("weights", "gradients", "optimizer", "overhead", "activations")
    labels = [bar.label.split(", ") for bar in page.memory.bars]
    assert {stage for stage, _ in labels} == {"stage 0", "stage 1", "stage 2"}
    assert [cells[0] for cells, _ in page.crossings] == ["0->1", "1->2"]
    cells, lines = page.crossings[0]
    assert cells[1:4] == ("rank0", "1", "32 MiB") and any("rank 0 -> rank 8" in line for line in lines)
    assert len(page.stages.rows) == 3 and not page.step and not page.is_slurm
    batch = page_of(monkeypatch, [*COMMANDS["plan"], "--slurm"])
    assert batch.is_slurm and batch.launch is not None and batch.launch.slurm_lines()[0] == "#!/bin/bash"


def test_a_fitted_layout_has_its_devices_and_its_microbatches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "--have", "8,6", "--vtp-stages", "2", "--card-memory", "80GiB", *MODEL)
    page = page_of(monkeypatch, words)
    assert page.memory is not None and all(bar.fits and bar.limit_bytes == 80 * GIB for bar in page.memory.bars)
    assert (
        "drawn are those of as many microbatches as a stage has in flight when it holds the most" in page.memory.notes
    )
    assert page.launch is not None and [len(node.ranks) for node in page.launch.nodes] == [8, 4]


def test_activations_are_those_of_the_microbatches_in_flight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A first stage of three keeps three, in a plan as in a simulation."""
    page = page_of(monkeypatch, COMMANDS["simulate"])
    planned = ["plan", *COMMANDS["simulate"][1:3], "--card-memory", "80GiB", *MODEL]
    told = json.loads(run_quietly(*planned, "--json", "--output", str(tmp_path / "plan.html")))["memory"]
    same = page_of(monkeypatch, planned).memory
    assert page.memory is not None and same is not None
    kept = [dict(bar.pieces)["activations"] for bar in page.memory.bars]
    assert [kept[stage] / told[rank]["activation_bytes"] for stage, rank in enumerate((0, 1, 5))] == [3, 2, 1]
    assert page.memory.bars == same.bars
    assert page.step.count("<rect") > 72 and "simulated step" in page.notes[0]
    assert page.table is not None and page.table.marked == 1
    assert page.launch is not None and not page.launch.program
    assert "nodes are assumed" in page.about_nodes[0]


@pytest.mark.parametrize(
    "words",
    [
        ("--layerwise-disaggregated-training", "--num-layer-list", "8,8,9,8"),
        ("--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "30"),
    ],
    ids=["U", "interleaved"],
)
def test_what_several_chunks_keep_is_drawn_as_planned(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    """Where backwards are split, what waits is drawn apart from activations."""
    words = ("--vtp-size-list", "1,4,4", *MODEL, "--global-batch-size", "12", *words, "--vtp-schedule", "planned")
    words += ("--vtp-split-backward", "--transformer-impl", "local", "--no-gradient-accumulation-fusion")
    simulated, planned = (page_of(monkeypatch, [command, *words]).memory for command in ("simulate", "plan"))
    assert simulated is not None and planned is not None and simulated.bars == planned.bars
    assert any(dict(bar.pieces)["waiting for gradients of weights"] for bar in simulated.bars)


def test_a_search_has_the_best_layout_beside_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(monkeypatch, COMMANDS["search"])
    assert " % faster than the best of stock Megatron: --vtp-size-list " in page.title and page.title not in page.notes
    assert "<h1>" + page.title in render(page, ["search"])
    assert page.table is not None and page.table.marked == 0
    names = ", ".join(row[0] for row in page.table.rows)
    assert "stock" in names and "equal" in names
    assert ">best: " in page.step and ">stock: " in page.step
    assert page.memory is not None and all(bar.fits and bar.limit_bytes for bar in page.memory.bars)
    assert page.launch is not None
    assert all(words[0].startswith("torchrun ") for _, words in page.launch.commands())
    assert any("takes" in note and "times as long" in note for note in page.notes)


def test_a_trace_has_what_was_measured_beside_what_was_predicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, files_of(schedule_of(U, U_COSTS), U_COSTS, slowed(U_COSTS, forward={1: 15.0})))
    page = page_of(monkeypatch, ["trace", str(tmp_path)])
    assert page.table is not None and page.table.rows[0][:5] == ("1", "1", "forward", "160.00", "280.00")
    assert ">run<" in page.step and ">plan<" in page.step and page.about_step == "Step 2: the run above its plan"


def test_bars_say_what_does_not_fit() -> None:
    bars = (
        MemoryBar(label="rank 0", pieces=(("weights", 6 * GIB), ("overhead", 0)), limit_bytes=4 * GIB),
        MemoryBar(label="rank 1", pieces=(("weights", 3 * GIB), ("overhead", 0)), limit_bytes=None),
    )
    section = MemorySection(bars=bars)
    assert [bar.fits for bar in bars] == [False, True] and section.kinds == ("weights",)
    assert section.percent(6 * GIB) == 100.0 and MemorySection(bars=(bars[1],)).has_limits is False
    text = render(ReportPage(title="", memory=section), ["plan"])
    assert "6 GiB of 4 GiB: does not fit" in text and text.count("does not fit") == 1


def test_an_empty_page_has_no_section() -> None:
    found = Elements(render(ReportPage(title="t"), ["plan"])).found
    assert [attributes["class"] for tag, attributes in found if tag == "section"] == ["made"]


def test_no_text_becomes_markup() -> None:
    """Each text of a page, wherever it stands: in an element, an attribute, a command."""
    row = (HOSTILE, '"><img src=x onerror=alert(1)>')
    bar = MemoryBar(label=row[1], pieces=((row[1], 1),), limit_bytes=1)
    page = ReportPage(
        title=HOSTILE,
        notes=row,
        table=TextTable(header=row, rows=[row], lines=[]),
        about_table=HOSTILE,
        memory=MemorySection(bars=(bar,)),
        launch=Launch(
            layout=PipelineLayout.from_sizes((1,), world_size=1),
            nodes=(NodeRanks(name=row[1], ranks=(0,)),),
            program=(HOSTILE,),
        ),
        sites=(HOSTILE,),
        is_slurm=True,
    )
    found = Elements(render(page, [HOSTILE, HOSTILE])).found
    assert [tag for tag, _ in found if tag in ("script", "img")] == ["script"]
    assert not any(name.startswith("on") for _, attributes in found for name in attributes)


@pytest.mark.parametrize("name", ["plan", "simulate", "search", "trace", "bridges", "longest"])
def test_a_page_is_one_small_file(name: str, tmp_path: Path) -> None:
    """It loads nothing, runs one script, and what a user named is no markup."""
    path = write_page_of(name, tmp_path)
    text = path.read_text(encoding="ascii")
    assert len(text) < MOST_BYTES
    page = Elements(text)
    assert page.open == []
    loading = [
        (tag, key, value)
        for tag, attributes in page.found
        for key, value in attributes.items()
        if (key in ("src", "srcset", "action", "data") or (key.endswith("href") and not (value or "").startswith("#")))
    ]
    assert loading == [] and not re.search(r"@import|url\((?!#)", text)
    assert [tag for tag, _ in page.found].count("script") == 1
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    path.rename(tmp_path / "first")
    if name not in ("trace", "longest"):
        assert write_page_of(name, tmp_path).read_bytes() == (tmp_path / "first").read_bytes()


def test_names_may_have_any_letters(tmp_path: Path) -> None:
    path = tmp_path / "\u8fb9\u7f18.html"
    run_quietly("plan", "--vtp-size-list", "1,2", "--output", str(path))
    assert "&#36793;&#32536;.html" in path.read_text(encoding="ascii")


def test_a_device_has_a_memory_where_a_page_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("plan",), ("draw", "--output", str(tmp_path / "x.svg"))):
        with pytest.raises(SystemExit):
            main([*words, "--vtp-size-list", "1,2", "--card-memory", "80GiB"])
        assert "--card-memory is for --have, and for a page (--output FILE.html)" in capsys.readouterr().err


def test_trace_takes_its_older_flag(tmp_path: Path) -> None:
    write(tmp_path, files_of(schedule_of(U, U_COSTS), U_COSTS, U_COSTS))
    for flag in ("--out", "--output"):
        run_quietly("trace", str(tmp_path), flag, str(tmp_path / f"{flag}.html"))
    assert len([*tmp_path.glob("--out*.html")]) == 2
