"""A profile is written and read, refused where it does not fit, and timed with peers that do not exist."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.unit.tune.test_cluster import BATCH, MODEL, SHEET
from vtp_plugin.cli.main import main
from vtp_plugin.cli.profile import _lines_of_links, _quiet
from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.interface import AloneGroup, alone_in_world
from vtp_plugin.tune.cluster.machines import Links, Origin, Time
from vtp_plugin.tune.cluster.read_cluster import (
    check_origins,
    features,
    read_cluster,
    read_profile,
    speed_of,
    write_links,
    write_profile,
)
from vtp_plugin.tune.cluster.speed import Link

LAYER = Time(part="dense", tp=1, micro_batch_size=2, seq_length=16, forward_s=3.0, backward_s=6.0, weights_s=2.5)
TIMES = [
    LAYER,
    replace(LAYER, backward_s=9.5, is_recomputed=True),
    Time(part="head", tp=1, micro_batch_size=2, seq_length=16, forward_s=1.0, backward_s=2.0),
    Time(part="update", tp=1, micro_batch_size=2, seq_length=16, forward_s=0.5, backward_s=0.0),
]
ORIGIN = Origin(name="new.toml", device="a card", megatron="0.19.0", model=features(MODEL, itemsize_bytes=2, topk=2))
LINKS = Links(
    inside={"": Link(latency_s=5e-6, bytes_per_s=2e9)},
    across={("cloud", "edge"): Link(latency_s=0.02, bytes_per_s=1e8, at_once=2)},
    sums={"": {2: Link(latency_s=0.25, bytes_per_s=4.0)}, "old": {2: Link(latency_s=0.5, bytes_per_s=8.0)}},
)
CLUSTER = """
[cards.new]
profile = "new.toml"
[[nodes]]
cards = "new"
cards_per_node = 2
[links]
profile = "links.toml"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "new.toml").write_text(write_profile(ORIGIN, TIMES))
    (tmp_path / "links.toml").write_text(write_links(LINKS))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def test_what_is_written_is_read_again(folder: Path) -> None:
    assert read_profile(folder / "new.toml") == (ORIGIN, tuple(TIMES))
    cluster = read_cluster(folder / "cluster.toml")
    assert cluster.nodes[0].card.times == tuple(TIMES) and cluster.nodes[0].card.origin == ORIGIN
    links = cluster.links
    assert links.inside[""].latency_s == 5e-6 and links.across["cloud", "edge"] == LINKS.across["cloud", "edge"]
    assert links.sum_of("old", 2) == Link(latency_s=0.5, bytes_per_s=8.0)
    assert (links.sum_of("new", 2), links.sum_of("new", 3)) == (LINKS.sums[""][2], None)


def test_links_of_the_cluster_s_own_file_go_before_those_of_a_profile(folder: Path) -> None:
    with (folder / "cluster.toml").open("a") as file:
        file.write('[links.across."edge cloud"]\nlatency_us = 7\ngbyte_per_s = 1\n')
    assert read_cluster(folder / "cluster.toml").links.across["cloud", "edge"].latency_s == pytest.approx(7e-6)


def test_recomputed_layers_have_times_of_their_own_or_are_fitted() -> None:
    card = replace(SHEET, teraflops=None, times=tuple(TIMES))
    again = replace(BATCH, is_recomputed=True)
    assert speed_of(card, Links(), MODEL, BATCH, 1, 1).backward_s[0] == 6.0
    measured = speed_of(card, Links(), MODEL, again, 1, 1)
    assert (measured.backward_s[0], measured.source) == (9.5, "measured")
    # Without such a row the backward pass takes a forward pass more.
    fitted = speed_of(replace(card, times=(TIMES[0], *TIMES[2:])), Links(), MODEL, again, 1, 1)
    assert (fitted.backward_s[0], fitted.source) == (9.0, "fitted")
    assert fitted.last_s == measured.last_s == (1.0, 2.0)


def test_a_profile_may_say_what_of_a_backward_is_for_weights(folder: Path) -> None:
    """Older files do not: then it is half of what is not recomputed."""
    path = folder / "new.toml"
    assert path.read_text().count("weights_ms = 2500.0") == 2
    path.write_text(path.read_text().replace("weights_ms = 2500.0\n", ""))
    origin, times = read_profile(path)
    assert (origin, times) == (ORIGIN, tuple(replace(time, weights_s=None) for time in TIMES))
    again, twice = replace(BATCH, is_recomputed=True), replace(LAYER, micro_batch_size=4, backward_s=9.0, weights_s=3.5)
    for known, batch, seconds in (
        (TIMES, BATCH, 2.5),
        (TIMES, again, 2.5),
        ((*TIMES, twice), replace(BATCH, size=3), 3.0),
        (times, BATCH, 3.0),
        (times, again, 3.25),
    ):
        found = speed_of(replace(SHEET, teraflops=None, times=tuple(known)), Links(), MODEL, batch, 1, 1)
        assert (found.weights_s[0], found.weights_sums[-1]) == (seconds, seconds * MODEL.num_layers)
    of_sheet = speed_of(SHEET, Links(), MODEL, again, 1, 1)
    assert of_sheet.weights_s == of_sheet.forward_s and of_sheet.backward_s[0] == 3 * of_sheet.forward_s[0]


def test_sums_that_were_measured_go_before_those_that_follow_from_links() -> None:
    times = [replace(time, tp=2) for time in TIMES]
    card = replace(SHEET, name="new", teraflops=None, times=tuple(times))
    tensor, tokens = 2 * 16 * MODEL.hidden * 2, 2 * 16 * 4
    measured = speed_of(card, LINKS, MODEL, BATCH, 2, 1)
    each = 0.25 + tensor / 4.0
    assert measured.source == "measured"
    assert measured.forward_s[0] == pytest.approx(3.0 + 2 * each)
    assert measured.backward_s[0] == pytest.approx(6.0 + 2 * each)
    assert measured.last_s == pytest.approx((1.0 + 3 * (0.25 + tokens / 4.0), 2.0 + each))
    # Layers that run forward again sum again.
    again = speed_of(card, LINKS, MODEL, replace(BATCH, is_recomputed=True), 2, 1)
    assert again.backward_s[0] == pytest.approx(9.5 + 4 * each)
    ring = speed_of(card, replace(LINKS, sums={}), MODEL, BATCH, 2, 1)
    assert ring.source == "fitted"
    assert ring.forward_s[0] == pytest.approx(3.0 + 2 * 2 * (5e-6 + tensor / 2 / 2e9))


def test_measured_all_reduces_have_an_old_name(folder: Path) -> None:
    """``all_reduce`` was called ``sums``: a file may say either, in a table of links once."""
    path = folder / "links.toml"
    text = path.read_text()
    assert "[all_reduce.2]" in text and "[sums" not in text
    wanted = read_cluster(folder / "cluster.toml").links
    path.write_text(text.replace("[all_reduce", "[sums"))
    assert read_cluster(folder / "cluster.toml").links == wanted
    assert wanted.sum_of("old", 2) == Link(latency_s=0.5, bytes_per_s=8.0)

    # The cluster's own file goes before the profile's, whatever either calls it.
    with (folder / "cluster.toml").open("a") as file:
        file.write("[links.all_reduce.2]\nlatency_us = 7\ngbyte_per_s = 1\n")
    of_all = read_cluster(folder / "cluster.toml").links.sum_of("new", 2)
    assert of_all is not None and of_all.latency_s == pytest.approx(7e-6)
    with (folder / "cluster.toml").open("a") as file:
        file.write("[links.sums.4]\nlatency_us = 7\ngbyte_per_s = 1\n")
    text = r"cluster.toml: \[sums\] is the old name of \[all_reduce\]; give one of them$"
    with pytest.raises(ConfigError, match=text):
        read_cluster(folder / "cluster.toml")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("hidden = 24", "hidden = 32"), "new.toml was measured with another model: hidden 32, here 24; profile this"),
        (("is_gated = true", "is_gated = false"), "another model: is_gated False, here True"),
        (("hidden = 24\n", ""), "another model: hidden None, here 24"),
    ],
)
def test_times_of_another_model_are_refused(folder: Path, change: tuple[str, str], text: str) -> None:
    path = folder / "new.toml"
    path.write_text(path.read_text().replace(*change))
    origin, _ = read_profile(path)
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_origins([origin], ORIGIN.model)


def test_times_of_several_versions_are_refused() -> None:
    other = replace(ORIGIN, name="old.toml", megatron="0.16.1")
    with pytest.raises(ConfigError, match="old.toml was measured with Megatron 0.16.1, new.toml with 0.19.0; profile"):
        check_origins([ORIGIN, other], ORIGIN.model)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("format = 1", "format = 2"), "new.toml: format 2 is another version's, this vtp_plugin reads 1"),
        (('part = "head"', 'part = "tail"'), 'new.toml has "tail" at [times]'),
        (("tp = 1", "tp = 0"), "has 0 at [times][0][tp], which must be a whole number from 1 on"),
        (
            ("weights_ms = 2500.0", "weights_ms = 6001"),
            "weights_ms must not be above backward_ms, of which it is a part",
        ),
        (("recomputed = true", "recomputed = 1"), "has 1 at [times][1][recomputed], which is no bool"),
        (("[model]", "[model"), "new.toml is no TOML"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(folder: Path, change: tuple[str, str], text: str) -> None:
    path = folder / "new.toml"
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_cluster(folder / "cluster.toml")


MODEL_WORDS = [
    *("--num-layers", "4", "--hidden-size", "48", "--num-attention-heads", "12", "--seq-length", "48"),
    *("--max-position-embeddings", "48", "--micro-batch-size", "1", "--vocab-size", "127"),
]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--vtp-size-list", "1,2"], "--vtp-size-list 1,2 with profile, which is for all layouts; leave it out"),
        (["--tp-sizes", "5"], "--tp-sizes 5: --num-attention-heads 12, --ffn-hidden-size 192"),
        (["--rounds", "0"], "--rounds 0; give at least one"),
        (["--hidden-size", "0"], "profile needs to know the model: give --hidden-size"),
        (["--out", "none/new.toml"], "--out none/new.toml: there is no folder none; make it"),
        (["--links"], "--links needs all ranks; start it with the run's launcher"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["profile", *MODEL_WORDS, "--out", str(tmp_path / "new.toml"), *words])
    assert left.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vtp_plugin: error: ") and text in line


def test_what_megatron_prints_is_shown_only_where_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with _quiet():
        print("a banner")
        print("a warning", file=sys.stderr)
    assert capsys.readouterr() == ("", "")
    said = "^profile: error: unrecognized arguments: --x; Megatron's parser rejects"
    with pytest.raises(ConfigError, match=said), _quiet():
        print("usage:\n" * 700 + "profile: error: unrecognized arguments: --x", file=sys.stderr)
        sys.exit(2)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(AssertionError), _quiet():
        print("line\n" * 700 + "the last one\x1b[2J")
        raise AssertionError
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[0] == "the last lines that Megatron printed:"
    assert len(err.splitlines()) == 41 and err.endswith("the last one\\x1b[2J\n")


def test_a_cpu_gets_the_flags_that_it_needs() -> None:
    """In front of the user's, so that these count."""
    from vtp_plugin.patches.profile_parts import _needed_on
    from vtp_plugin.platform.cpu import CpuPlatform

    needed = ["--no-gradient-accumulation-fusion", "--no-persist-layer-norm"]
    cpu = CpuPlatform("test")
    assert _needed_on(cpu, ["--bf16"]) == [*needed, "--transformer-impl", "local"]
    assert _needed_on(cpu, ["--transformer-impl=local"]) == needed == _needed_on(cpu, ["--transformer-impl", "x"])
    assert _needed_on(cast(Any, SimpleNamespace(name="cuda")), []) == []


def test_links_are_printed_one_by_one() -> None:
    assert [*_lines_of_links(LINKS)] == [
        "inside a node: 5 us, 2 GB/s",
        "between sites cloud and edge: 20,000 us, 0.1 GB/s, 2 at a time",
        "all-reduce of 2 ranks: 250,000 us, 0.000000004 GB/s",
        "all-reduce of 2 ranks old: 500,000 us, 0.000000008 GB/s",
    ]


def test_a_machine_that_was_too_busy_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rounds that lie apart: each line has their scatter, the end has a warning if one line's is too large."""
    from vtp_plugin.cli import profile
    from vtp_plugin.patches import profile_parts

    quiet, busy = [1.0, 1.0, 1.25, 1.0], [1.0, 2.0, 1.0, 3.0, 1.0]
    session: Any = SimpleNamespace(choose_platform=lambda: SimpleNamespace(card_name=lambda: "a card"))
    monkeypatch.setattr(profile, "_device", lambda options: contextlib.nullcontext(session))
    out = tmp_path / "new.toml"
    for rounds_s, scattered in ((quiet, "6 %"), (busy, "100 %")):
        timed = [profile_parts.Timed([LAYER], quiet), profile_parts.Timed([TIMES[-1]], rounds_s)]
        monkeypatch.setattr(profile_parts, "time_parts", lambda asked, session, timed=timed: iter(timed))
        main(["profile", *MODEL_WORDS, "--tp-sizes", "1", "--out", str(out)])
        _, layer, optimizer, *rest = capsys.readouterr().out.splitlines()
        assert layer.endswith(" ms (2500 ms for gradients of weights); rounds scatter by 6 %")
        assert optimizer.endswith(f"for each million parameters; rounds scatter by {scattered}")
        said = [line for line in rest if line.startswith("warning: the machine was too busy to believe these times: ")]
        assert len(said) == (rounds_s is busy) and all("scatter by 100 %, above 20 %" in line for line in said)
        main(["profile", *MODEL_WORDS, "--tp-sizes", "1", "--out", str(out), "--json"])
        assert json.loads(capsys.readouterr().out)["scatter"] == (1.0 if rounds_s is busy else 0.0625)


def test_peers_that_do_not_exist_hold_what_this_process_holds() -> None:
    own = torch.arange(6.0).reshape(6, 1)
    with alone_in_world(3, "cpu"):
        assert dist.get_world_size() == 3 and dist.get_rank() == 0
        gathered = torch.empty(18, 1)
        dist.all_gather_into_tensor(gathered, own)
        assert torch.equal(gathered, own.repeat(3, 1))
        parts = [torch.empty(6, 1) for _ in range(3)]
        dist.all_gather(parts, own)
        assert all(torch.equal(part, own) for part in parts)
        part = torch.empty(2, 1)
        dist.reduce_scatter_tensor(part, own)
        assert torch.equal(part, own[:2])
        dist.reduce_scatter(part, [own[2:4], own[:2], own[:2]])
        assert torch.equal(part, own[2:4])
        swapped = torch.empty(9, 1)
        dist.all_to_all_single(swapped, own, [3, 3, 3], [2, 2, 2])
        assert torch.equal(swapped.flatten(), torch.tensor([0.0, 1, 2, 3, 4, 5, 0, 1, 2]))
        summed = own.clone()
        dist.all_reduce(summed)
        dist.barrier()
        assert torch.equal(summed, own)
        group = dist.new_group([0, 2])
        assert isinstance(group, AloneGroup) and group.size() == 2
        assert dist.new_group([1, 2]) == dist.GroupMember.NON_GROUP_MEMBER
    assert not dist.is_initialized()
