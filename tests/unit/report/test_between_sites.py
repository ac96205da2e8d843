"""What crosses between sites: bytes, how fast, how long stages wait, and what the kernel counts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm import work
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.step import step_times
from vtp_plugin.runtime.step.step_times import StepSums
from vtp_plugin.trace.explain import TimeShare, on_one_clock
from vtp_plugin.trace.stretches import Cause, Owner, Stretch, owner_line, read_step, step_line
from vtp_plugin.trace.sums import RankPlace, SiteTraffic, traffic_between
from vtp_plugin.util.typed_json import read_typed

THERE, BACK = "boundary 0->1, forward, microbatch 0", "boundary 0->1, backward, microbatch 0"
INSIDE = "boundary 1->2, forward, microbatch 0"
PLACES = {
    0: RankPlace(stage=0, site="edge", network="a"),
    1: RankPlace(stage=1, site="cloud", network="b"),
    2: RankPlace(stage=1, site="cloud", network="b"),
    3: RankPlace(stage=2, site="cloud", network="c"),
}


def share(rank: int, *noted: tuple[Cause, str, float, float, int], num_resent: int | None = None) -> TimeShare:
    stretches = tuple(
        Stretch(cause=cause, name=name, start_s=start_s, end_s=end_s, num_bytes=num_bytes)
        for cause, name, start_s, end_s, num_bytes in noted
    )
    worker = PLACES[rank].stage
    return TimeShare(rank=rank, worker=worker, start_s=0.0, end_s=10.0, stretches=stretches, num_resent=num_resent)


# An activation of 1,000 bytes is sent at 2 s and there at 4 s; its gradient is sent at 6 s and there at 6.5 s.
STEP = [
    share(
        0,
        (Cause.SEND, THERE, 2.0, 2.1, 1000),
        (Cause.POST, BACK, 2.1, 2.2, 500),
        (Cause.WAIT, BACK, 3.0, 6.5, 0),
        num_resent=2,
    ),
    share(
        1,
        (Cause.POST, THERE, 0.5, 1.0, 1000),
        (Cause.WAIT, THERE, 1.0, 4.0, 0),
        (Cause.FINISH, THERE, 4.0, 4.1, 0),
        (Cause.SEND, INSIDE, 5.0, 5.1, 777),
        (Cause.SEND, BACK, 6.0, 6.1, 500),
        num_resent=3,
    ),
    # It gets its copy of the activation inside the stage.
    share(2, (Cause.FINISH, THERE, 1.5, 4.1, 0), num_resent=4),
    share(3, (Cause.POST, INSIDE, 0.0, 0.1, 777), (Cause.WAIT, INSIDE, 0.1, 5.2, 0), num_resent=50),
]


def test_a_step_is_summed_up_by_sites() -> None:
    cloud, edge = traffic_between([STEP], PLACES)
    assert (edge.site, edge.sent_bytes, edge.received_bytes) == ("edge", 1000, 500)
    assert (cloud.site, cloud.sent_bytes, cloud.received_bytes) == ("cloud", 500, 1000)
    # 1,000 bytes from 2 s, when they were sent, to 4 s.
    assert (cloud.timed_bytes, cloud.timed_ms) == (1000, pytest.approx(2000.0))
    assert cloud.goodput_mbit == pytest.approx(0.004)
    assert edge.goodput_mbit == pytest.approx(0.008)
    # The edge waits from 3 s to 6.5 s, of which the cloud computes until 6 s.
    assert edge.exposed_ms == {"0": pytest.approx(3500.0)} and edge.on_way_ms == {"0": pytest.approx(500.0)}
    # Of stage 1 the leader waits longest; stage 2 waits for its own site only.
    assert cloud.exposed_ms == {"1": pytest.approx(3000.0)} and cloud.on_way_ms == {"1": pytest.approx(2000.0)}
    # Rank 1 alone exchanges messages with the edge: what the namespace of rank 3 sends again does not count.
    assert (edge.num_resent, cloud.num_resent) == (2, 3)


def test_the_sums_are_those_of_a_step_on_average_and_the_same_as_text() -> None:
    found = traffic_between([STEP, STEP, STEP], PLACES)
    assert found == traffic_between([STEP], PLACES)
    sums = StepSums(stages=(), sites=found)
    assert read_typed(StepSums, json.dumps(asdict(sums))) == sums


def test_one_site_has_no_traffic_between_sites() -> None:
    places = {rank: replace(place, site="") for rank, place in PLACES.items()}
    assert traffic_between([STEP], places) == ()


def test_what_had_come_before_it_was_looked_for_has_no_known_time() -> None:
    post, wait, _, *others = STEP[1].stretches
    early = replace(STEP[1], stretches=(post, replace(wait, start_s=4.0, end_s=4.0), *others))
    found = {one.site: one for one in traffic_between([[STEP[0], early]], PLACES)}
    assert found["cloud"].goodput_mbit is None and found["cloud"].received_bytes == 1000
    assert " at " not in str(found["cloud"]) and "goodput" not in dict(found["cloud"].values())
    assert "Mbit/s" in str(found["edge"])


def test_where_a_system_does_not_count_nothing_is_said() -> None:
    unknown = [replace(one, num_resent=None) for one in STEP]
    _, edge = traffic_between([unknown], PLACES)
    assert edge.num_resent is None and "sent again" not in str(edge)
    assert not [name for name, _ in edge.values() if "segments" in name]


def test_ranks_of_one_namespace_count_once() -> None:
    shares = [
        share(0, (Cause.SEND, THERE, 1.0, 1.1, 8), (Cause.SEND, BACK, 1.1, 1.2, 8), num_resent=0),
        share(1, (Cause.POST, THERE, 0.0, 0.1, 8), num_resent=5),
        share(2, (Cause.POST, BACK, 0.0, 0.1, 8), num_resent=6),
    ]
    cloud, _ = traffic_between([shares], PLACES)
    assert cloud.num_resent == 6
    apart = {**PLACES, 2: replace(PLACES[2], network="d")}
    assert traffic_between([shares], apart)[0].num_resent == 11


def test_counted_bytes_survive_the_file() -> None:
    owner = Owner(run="a", rank=0, world_size=1, stage=0, worker=0, site="edge", network="x")
    assert owner_line(owner)["site"] == "edge" and "site" not in owner_line(replace(owner, site="", network=""))
    step = step_times.RankStep(
        number=1, plan="p", start_s=0.0, end_s=9.0, stretches=STEP[0].stretches, num_resent=STEP[0].num_resent
    )
    read = read_step(json.loads(json.dumps(step_line(step))))
    assert read == step
    assert on_one_clock(read, rank=0, worker=0, offset_s=lambda _: 0.0).num_resent == 2
    # Without counted bytes a line is as long as it was.
    plain = replace(step, num_resent=None, stretches=tuple(replace(one, num_bytes=0) for one in step.stretches))
    assert all(len(entry) == 4 for entry in json.loads(json.dumps(step_line(plain)))["done"])
    assert "num_resent" not in step_line(plain)


def test_bytes_are_counted_where_somebody_wants_to_know() -> None:
    recorder = Recorder(CpuPlatform("of the test"))
    sent = [torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64)]

    def count() -> int:
        with recorder.listening() as noted, recorder.span(Cause.SEND, "x"):
            recorder.add_bytes(sent)
        return noted[0].num_bytes

    assert count() == 0
    recorder.counts_traffic = True
    assert count() == 24 + 32
    recorder.add_bytes(sent)  # nobody listens


def test_segments_that_were_sent_again_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(CpuPlatform("of the test"))
    counts = iter([7, 12, None])
    monkeypatch.setattr(step_times, "num_resent", lambda: next(counts))
    step = step_times.begin_step(1, recorder)
    step.finish(recorder)
    assert step.num_resent is None, "nobody counts in a run of one site"
    recorder.counts_resent = True
    step = step_times.begin_step(1, recorder)
    step.finish(recorder)
    assert step.num_resent == 5
    step = step_times.begin_step(1, recorder)
    assert step.resent_before is None


def test_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "snmp"
    file.write_text("Tcp: RtoMin OutSegs RetransSegs\nTcp: 200 9 4\nUdp: InDatagrams\nUdp: 1\n")
    monkeypatch.setattr(work, "_COUNTERS", file)
    assert work.num_resent() == 4
    for text in ("", "Tcp: a\n", "Tcp: RetransSegs\nTcp: x\n", "Tcp: OutSegs\nTcp: 5\n"):
        file.write_text(text)
        assert work.num_resent() is None
    file.unlink()
    assert work.num_resent() is None
    monkeypatch.setattr(work, "_NAMESPACE", file)
    assert work.name_network() == ""


def test_figures_have_names_for_writers() -> None:
    traffic = SiteTraffic(
        site="edge",
        sent_bytes=1,
        received_bytes=2,
        timed_bytes=1000,
        timed_ms=8.0,
        exposed_ms={"0": 3.0},
        on_way_ms={"0": 1.0},
        num_resent=0,
    )
    assert dict(traffic.values()) == {
        "edge sent (bytes)": 1,
        "edge received (bytes)": 2,
        "edge goodput (Mbit/s)": pytest.approx(1.0),
        "stage 0 exposed (ms)": 3.0,
        "stage 0 exposed, on the way (ms)": 1.0,
        "edge resent (segments)": 0,
    }
