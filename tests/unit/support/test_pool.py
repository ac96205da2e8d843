"""The pool of worker processes: order, reuse, and what a report says when a rank raises, dies or hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import ROOT
from tests.support.pace import pace
from tests.support.pool import HOST, TIMEOUT_S, Pool, PoolError, free_port

JOBS = "tests.support.pool_jobs"


@pytest.fixture(scope="module")
def own() -> Iterator[Pool]:
    """A pool for jobs that fail, so that they do not cost the session's pool its warm workers."""
    with Pool(max_workers=5) as workers:
        yield workers


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failure(pool: Pool, world_size: int, job: str, timeout_s: float = TIMEOUT_S, **kwargs: object) -> PoolError:
    with pytest.raises(PoolError) as caught:
        pool.run(world_size, f"{JOBS}:{job}", kwargs, timeout_s)
    return caught.value


def test_results_come_in_rank_order(own: Pool) -> None:
    results = own.run(4, f"{JOBS}:rank_and_pid", {"scale": 10})
    assert [rank for rank, _ in results] == [0, 10, 20, 30]
    assert [pid for _, pid in results] == list(own.pids)


def test_one_set_of_workers_serves_several_world_sizes(own: Pool) -> None:
    pids: list[int] = []
    for world_size in (2, 3, 5, 2):
        results = own.run(world_size, f"{JOBS}:sum_of_ranks")
        assert [total.item() for total, _ in results] == [sum(range(world_size))] * world_size
        served_by = [pid for _, pid in results]
        assert served_by[: len(pids)] == pids[:world_size]
        pids = max(pids, served_by, key=len)


def test_environment_is_the_launchers_and_does_not_leak(own: Pool) -> None:
    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "EXTRA"]
    results = own.run(3, f"{JOBS}:variables", {"names": names}, node_sizes=[1, 2], env={"EXTRA": "x"})
    assert results == [["0", "1", "0", "x"], ["0", "2", "1", "x"], ["1", "2", "1", "x"]]
    assert own.run(1, f"{JOBS}:variables", {"names": names}) == [["0", "1", "0", None]]


def test_init_from_environment_uses_the_parents_store(own: Pool) -> None:
    assert own.run(2, f"{JOBS}:world_from_env") == [(0, 2), (1, 2)]


def test_the_store_outlives_rank_0s_job(own: Pool) -> None:
    assert own.run(2, f"{JOBS}:read_store_late") == [[], ["by rank 0"]]


def test_every_traceback_reaches_the_report(own: Pool) -> None:
    error = failure(own, 3, "fail_on", ranks=[0, 2])
    assert [(f.rank, f.kind) for f in error.failures] == [(0, "raised"), (2, "raised")]
    for rank in (0, 2):
        assert f"ValueError: rank {rank} does not like it" in str(error)
    assert "pool_jobs.py" in str(error)


def test_a_rank_that_raises_is_told_from_those_that_wait_for_it(own: Pool) -> None:
    start_s = time.monotonic()
    error = failure(own, 3, "raise_while_others_wait")
    assert time.monotonic() - start_s < TIMEOUT_S / 2  # the others are not waited for
    assert error.failures[0].kind == "raised"
    assert "the real reason" in error.failures[0].text
    assert all(f.kind in {"hung", "raised"} for f in error.failures[1:])


def test_timeout_kills_and_the_next_job_works(own: Pool) -> None:
    own.run(3, f"{JOBS}:rank_and_pid")
    old = own.pids
    error = failure(own, 2, "wait_for_a_peer_that_never_comes", timeout_s=3.0 * pace())
    assert [(f.rank, f.kind) for f in error.failures] == [(1, "hung")]
    assert "wait_for_a_peer_that_never_comes" in error.failures[0].text  # the stack of the rank that hangs
    assert not any(is_alive(pid) for pid in old[:2])
    assert is_alive(old[2])
    results = own.run(2, f"{JOBS}:sum_of_ranks")
    assert [total.item() for total, _ in results] == [1.0, 1.0]
    assert not {pid for _, pid in results} & set(old[:2])


def test_a_worker_that_exits_is_reported_with_code_and_output(own: Pool) -> None:
    error = failure(own, 2, "exit_on", rank=1, code=7)
    assert [(f.rank, f.kind) for f in error.failures] == [(1, "died")]
    assert "exited with 7" in str(error)
    assert "last words" in str(error)
    assert len(own.run(2, f"{JOBS}:rank_and_pid")) == 2


@pytest.mark.parametrize(
    ("job", "text"),
    [("leave_script", "SystemExit: 3"), ("return_a_lambda", "lambda"), ("no_such_job", "AttributeError")],
)
def test_what_cannot_be_a_result_is_a_failure(own: Pool, job: str, text: str) -> None:
    error = failure(own, 1, job)
    assert error.failures[0].kind == "raised"
    assert text in str(error)


def test_too_large_a_world_is_refused(own: Pool) -> None:
    with pytest.raises(ValueError, match=r"world_size 6 .* 1\.\.5"):
        own.run(6, f"{JOBS}:rank_and_pid")


def test_close_ends_the_workers() -> None:
    with Pool(max_workers=1) as short_lived:
        [(_, pid)] = short_lived.run(1, f"{JOBS}:rank_and_pid")
        assert is_alive(pid)
    assert not is_alive(pid)


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "from tests.support.pool import Pool\n"
        "pool = Pool(max_workers=1)\n"
        f"pool.run(1, '{JOBS}:rank_and_pid')\n"
        "print(*pool.pids, flush=True)\n"
        f"pool.run(1, '{JOBS}:stay', {{'time_s': 60}})\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed pool leaves its folder behind
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not is_alive(pid)


def test_a_port_is_given_to_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between its choice and the moment when somebody binds it."""
    port = free_port()
    choices = iter([port, port, *range(20000, 32768)])
    monkeypatch.setattr("tests.support.pool.random.randrange", lambda *_: next(choices))
    assert free_port() != port
    with socket.create_server((HOST, port)):
        pass
