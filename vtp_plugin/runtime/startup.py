"""Start-up checks that all ranks pass or fail together, over the store, before any process group exists.

A check that fails on one rank only leaves the others waiting inside a collective that never comes. So every rank posts
what it is about to do (its *statement*) or the error it found; rank 0 compares and posts one verdict; all read it, and
all go on or all leave with the same reason. Cost: one key per rank and one verdict, linear in the world size.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError, VtpError

EXIT_CODE = 1
_FAREWELL_S = 5.0
_POLL_S = 0.02
# Rank 0 judges early enough for its verdict to reach those that came before it.
_JUDGE_SHARE = 0.9
# Once an error is known, ranks that have not come are waited for no longer than this.
_GRACE_S = 5.0
_WAITED = "start-up: waited"


def open_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Join the launcher's rendezvous (``MASTER_ADDR``, ``MASTER_PORT``) before torch.distributed is initialised.

    Does not wait for the other ranks; :func:`agree` does, and can name those that are missing.
    ``init_process_group`` later shares the same server: torch opens it as multi-tenant.

    Raises:
        ConfigError: the launcher's variables are missing or wrong.
        PeerError: the server did not answer within ``timeout_s``.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"environment variable {name} is not set; start the script with torchrun")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit():
        raise ConfigError(f"environment variable MASTER_PORT is {port!r}, not a number; start the script with torchrun")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    begin_s = time.monotonic()
    reason = f"for the store that rank 0 or the launcher keeps at {host}:{port}: no answer"
    try:
        with _time_limit(rank, timeout_s, reason):
            # Not left to torch, whose attempts together take longer than the timeout that it is given.
            if not serves and not _poll(lambda: _is_reachable(host, int(port)), timeout_s, pause_s=0.2):
                raise TimeoutError("nobody listens there")
            store = dist.TCPStore(
                host,
                int(port),
                is_master=serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
    except (RuntimeError, TimeoutError) as error:
        if serves:
            raise ConfigError(
                f"rank 0 cannot serve at {host}:{port} ({_first_line(error)}); choose a free MASTER_PORT"
            ) from None
        raise PeerError(
            f"{_WAITED} {time.monotonic() - begin_s:.1f} s {reason} ({_first_line(error)}); look for a rank 0 that did "
            "not start or ended, or raise the timeout"
        ) from None
    # A launcher that restarts the ranks may keep its store.
    return dist.PrefixStore(f"vtp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def gather_node_sizes(
    store: dist.Store, environment: Mapping[str, str], *, divisor: int, timeout_s: float
) -> tuple[int, ...]:
    """Tell every rank how many tensor-parallel ranks each node of the launcher has.

    Args:
        store: the run's store.
        environment: of this process; torchrun sets ``GROUP_RANK``, ``GROUP_WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``.
        divisor: ranks of a node that share one tensor-parallel position: data- times context-parallel size.
        timeout_s: how long to wait for the other nodes.

    Returns:
        ``LOCAL_WORLD_SIZE / divisor`` of node 0, 1, ...

    Raises:
        ConfigError: a variable is missing, or a node's ranks do not divide.
        PeerError: a node did not answer.
    """
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in names:
        if not environment.get(name, "").isdigit():
            raise ConfigError(
                f"--vtp-size-list auto needs the launcher's {name}, which is not set; use torchrun or write the list"
            )
    node, num_nodes, num_local = (int(environment[name]) for name in names)
    nodes = dist.PrefixStore("nodes", store)
    nodes.set(str(node), str(0 if num_local % divisor else num_local // divisor))
    if num_local % divisor:
        raise ConfigError(
            f"--vtp-size-list auto: node {node} has {num_local} ranks, not a multiple of data- times context-parallel "
            f"size {divisor}; start another number of ranks there or write the list"
        )
    keys = [str(i) for i in range(num_nodes)]
    begin_s = time.monotonic()
    while not nodes.check(keys):
        waited_s = time.monotonic() - begin_s
        if waited_s > timeout_s:
            missing = [int(key) for key in keys if not nodes.check([key])]
            raise PeerError(
                f"{_WAITED} {waited_s:.1f} s for node {_ranks(missing)}: no answer; look for a node that did not start"
            )
        time.sleep(_POLL_S)
    sizes = tuple(int(nodes.get(key)) for key in keys)
    if 0 in sizes:
        raise ConfigError(f"--vtp-size-list auto: the ranks of node {sizes.index(0)} do not divide; see its message")
    return sizes


def open_round(store: dist.Store, rank: int) -> dist.Store:
    """Give the part of a store for the next exchange between all ranks; each counts its own, so all get the same part.

    Args:
        store: for exchanges of one kind.
        rank: own rank.
    """
    return dist.PrefixStore(str(store.add(f"rounds of {rank}", 1)), store)


class Agreement:
    """One collective check. All ranks of the world construct it with the same name and call :meth:`settle` once.

    The same name may be used again later on the same store: rounds are counted.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_partial: bool = False,
    ) -> None:
        """Bind the check to a store; nothing is sent yet."""
        self._store = dist.PrefixStore(f"agree/{name}", store)
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._is_partial = is_partial

    def settle(self, statement: Mapping[str, object], error: BaseException | None = None) -> None:
        """Post this rank's statement or error, and return only if every rank made the same statement.

        Args:
            statement: JSON values that must be equal on all ranks; the first that differs is named in the error.
            error: what this rank found wrong, if anything; then no rank goes on.

        Raises:
            ConfigError: a rank posted an error, or two statements differ. The text is the same on all ranks.
            PeerError: a rank did not answer within the timeout.
        """
        own = {"error": describe_error(error)} if error is not None else {"says": dict(statement)}
        begin_s = time.monotonic()
        try:
            with _time_limit(self._rank, self._timeout_s, f"for the store at {self._name}: no answer"):
                verdict = self._exchange(json.dumps(own), begin_s)
        except dist.DistError as broken:
            waited_s = time.monotonic() - begin_s
            raise PeerError(
                f"{_WAITED} {waited_s:.1f} s for rank 0 or the launcher, which keeps the store, at {self._name}: the "
                f"connection broke ({_first_line(broken)}); it ended"
            ) from None
        if verdict:
            kind = PeerError if verdict.startswith(_WAITED) else ConfigError
            raise kind(verdict) from error

    def _exchange(self, own: str, begin_s: float) -> str:
        """Post, judge on rank 0, and return the verdict; the empty string means agreement."""
        posts = open_round(self._store, self._rank)
        posts.set(str(self._rank), own)
        if self._rank != 0:
            verdict = self._read_verdict(posts, begin_s)
            posts.add("farewell", 1)
            return verdict
        verdict, num_present = self._judge(posts, begin_s)
        posts.set("verdict", verdict)
        if verdict:
            # Rank 0 may own the store's server: it leaves last, or the others never learn why.
            _poll(lambda: posts.add("farewell", 0) >= num_present - 1, min(_FAREWELL_S, 0.15 * self._timeout_s))
        return verdict

    def _judge(self, posts: dist.Store, begin_s: float) -> tuple[str, int]:
        """Compare all posts on rank 0; return the verdict and how many ranks came."""
        deadline_s = begin_s + _JUDGE_SHARE * self._timeout_s
        missing: list[int] = []
        errors: dict[int, str] = {}
        statements: dict[int, dict[str, Any]] = {}
        for rank in range(self._world_size):
            if not _poll(lambda key=str(rank): posts.check([key]), deadline_s - time.monotonic()):
                missing.append(rank)
                continue
            post = json.loads(posts.get(str(rank)))
            if "error" in post:
                errors[rank] = post["error"]
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            else:
                statements[rank] = post["says"]
        num_present = self._world_size - len(missing)
        if errors:
            return _summarise_errors(errors), num_present
        if missing:
            waited_s = time.monotonic() - begin_s
            return (
                f"{_WAITED} {waited_s:.1f} s for rank {_ranks(missing)} at {self._name}: no answer; it did not "
                "start, ended, or runs without vtp_plugin (every rank needs apply() or 'python -m vtp_plugin run')"
            ), num_present
        return first_difference(statements, is_partial=self._is_partial), num_present

    def _read_verdict(self, posts: dist.Store, begin_s: float) -> str:
        try:
            posts.wait(["verdict"], timedelta(seconds=self._timeout_s))
            return posts.get("verdict").decode()
        except dist.DistStoreError:
            waited_s = time.monotonic() - begin_s
            whom = "rank 0, which still waits for another rank," if posts.check(["0"]) else "rank 0"
            raise PeerError(
                f"{_WAITED} {waited_s:.1f} s for {whom} at {self._name}: no answer; it did not start, ended, or runs "
                "without vtp_plugin (every rank needs apply() or 'python -m vtp_plugin run')"
            ) from None


def agree(
    store: dist.Store,
    name: str,
    prepare: Callable[[], Mapping[str, object]],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    is_partial: bool = False,
) -> None:
    """Run ``prepare`` on every rank and go on only if it succeeded everywhere with equal results.

    ``SystemExit`` counts as a failure too: Megatron leaves some checks that way.
    """
    agreement = Agreement(store, name, rank=rank, world_size=world_size, timeout_s=timeout_s, is_partial=is_partial)
    try:
        statement = prepare()
    except (Exception, SystemExit) as error:
        agreement.settle({}, error)
        raise AssertionError("an error was posted, so settle() cannot return") from error
    agreement.settle(statement)


def first_difference(statements: Mapping[int, Mapping[str, object]], *, is_partial: bool = False) -> str:
    """Name the first value in which a rank differs from one before it; empty when all are equal.

    Args:
        statements: by rank, ascending.
        is_partial: a rank need not state every value that another one states.

    >>> first_difference({0: {"sizes": [1, 2]}, 1: {"sizes": [1, 2]}})
    ''
    >>> first_difference({0: {"sizes": [1, 2]}, 1: {"sizes": [1, 3]}})[:55]
    'ranks disagree: sizes is [1, 2] on rank 0 and [1, 3] on'
    >>> first_difference({0: {}, 1: {"sliced": True}, 2: {"sliced": False}}, is_partial=True)[:58]
    'ranks disagree: sliced is True on rank 1 and False on rank'
    """
    first_to_say: dict[str, int] = {} if is_partial else dict.fromkeys((k for s in statements.values() for k in s), 0)
    for rank, statement in statements.items():
        for key in statement if is_partial else first_to_say:
            other = first_to_say.setdefault(key, rank)
            theirs, own = statements[other].get(key), statement.get(key)
            if theirs != own:
                return (
                    f"ranks disagree: {key} is {theirs} on rank {other} and {own} on rank {rank}; "
                    "start every rank with the same command line and the same versions"
                )
    return ""


def describe_error(error: BaseException) -> str:
    """Give an exception as one line: plugin errors as they are, others with their type, or else where they were raised.

    >>> describe_error(ConfigError("no stages")), describe_error(KeyError("x")), describe_error(SystemExit())
    ('no stages', "KeyError: 'x'", 'SystemExit')
    """
    text = _first_line(error)
    if isinstance(error, VtpError):
        return text
    name = type(error).__name__
    if text:
        return f"{name}: {text}"
    # Many of Megatron's checks are bare asserts: only the source line tells which one it was.
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else name


def report(rank: int, text: str) -> None:
    """Write one line to the process's standard error.

    Not by way of ``sys.stderr``, which torch's exception hook replaces while it formats a traceback.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"[vtp rank {rank}] error: {text}\n".encode())


@contextlib.contextmanager
def _time_limit(rank: int, timeout_s: float, what: str) -> Iterator[None]:
    """End the process when the block takes clearly longer than its own timeout.

    Calls on a store have no limit when its server is stopped rather than gone.
    """
    limit_s = 1.1 * timeout_s + 1.0

    def leave() -> None:
        report(rank, f"{_WAITED} {limit_s:.1f} s {what}; the process that keeps the store is stopped")
        os._exit(EXIT_CODE)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _poll(is_true: Callable[[], bool], limit_s: float, *, pause_s: float = _POLL_S) -> bool:
    """Ask until the answer is yes or the time is up; asks at least once."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True


def _summarise_errors(errors: Mapping[int, str]) -> str:
    """Group equal texts, so that one mistake on 4,000 ranks is one line."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and len(errors) > 1:
        return next(iter(ranks_of))
    return "; ".join(f"rank {_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""
