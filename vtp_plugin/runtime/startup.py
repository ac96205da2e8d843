"""Start-up checks that all ranks pass or fail together, over the store, before any process group exists.

A check that fails on one rank only leaves the others waiting inside a collective that never comes. So every rank posts
what it is about to do (its *statement*) or the error it found; rank 0 compares and posts one verdict; all read it, and
all go on or all leave with the same reason. Cost: one key per rank and one verdict, linear in the world size.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError, VtpError

_FAREWELL_S = 10.0


def open_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Join the launcher's rendezvous (``MASTER_ADDR``, ``MASTER_PORT``) before torch.distributed is initialised.

    ``init_process_group`` later shares the same server: torch opens it as multi-tenant.

    Raises:
        ConfigError: the launcher's variables are missing.
        PeerError: not all ranks came within ``timeout_s``.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"environment variable {name} is not set; start the script with torchrun")
    begin_s = time.monotonic()
    try:
        store, _, _ = next(
            dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
        )
    except (RuntimeError, TimeoutError) as error:
        waited_s = time.monotonic() - begin_s
        raise PeerError(
            f"start-up: waited {waited_s:.1f} s and not all {world_size} ranks came to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({_first_line(error)}); "
            "look for a rank that did not start, or raise --vtp-timeout-s"
        ) from None
    return dist.PrefixStore("vtp", store)


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
    try:
        nodes.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [int(key) for key in keys if not nodes.check([key])]
        raise PeerError(f"start-up: waited {timeout_s:.1f} s for node {_ranks(missing)}: no answer") from None
    sizes = tuple(int(nodes.get(key)) for key in keys)
    if 0 in sizes:
        raise ConfigError(f"--vtp-size-list auto: the ranks of node {sizes.index(0)} do not divide; see its message")
    return sizes


class Agreement:
    """One collective check. All ranks of the world construct it with the same name and call :meth:`settle` once."""

    def __init__(self, store: dist.Store, name: str, *, rank: int, world_size: int, timeout_s: float) -> None:
        """Bind the check to a store; nothing is sent yet."""
        self._store = dist.PrefixStore(f"agree/{name}", store)
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

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
        self._store.set(str(self._rank), json.dumps(own))
        if self._rank == 0:
            self._store.set("verdict", self._judge(begin_s))
        verdict = self._read("verdict", begin_s, "rank 0")
        self._store.add("farewell", 1)
        if self._rank == 0 and verdict:
            # Rank 0 may own the store's server: it leaves last, or the others never learn why.
            self._wait_for_farewells()
        if verdict:
            kind = PeerError if verdict.startswith("start-up: waited") else ConfigError
            raise kind(verdict) from error

    def _judge(self, begin_s: float) -> str:
        """Compare all ranks' posts on rank 0; the empty string means agreement."""
        missing, errors = [], {}
        statements: dict[int, dict[str, Any]] = {}
        for rank in range(self._world_size):
            left_s = max(0.01, self._timeout_s - (time.monotonic() - begin_s))
            try:
                self._store.wait([str(rank)], timedelta(seconds=left_s))
            except RuntimeError:
                missing.append(rank)
                continue
            post = json.loads(self._store.get(str(rank)))
            if "error" in post:
                errors[rank] = post["error"]
                # A failing rank does not have to be waited for together with those that failed to start.
            else:
                statements[rank] = post["says"]
        if errors:
            return _summarise_errors(errors)
        if missing:
            waited_s = time.monotonic() - begin_s
            return (
                f"start-up: waited {waited_s:.1f} s for rank {_ranks(missing)} at {self._name}: no answer; it did not "
                "start, ended, or runs without vtp_plugin (every rank needs apply() or 'python -m vtp_plugin run')"
            )
        return first_difference(statements)

    def _read(self, key: str, begin_s: float, whom: str) -> str:
        # Rank 0 may use the whole timeout for a third rank; its verdict then still has to travel.
        left_s = self._timeout_s * 1.25 + 2.0 - (time.monotonic() - begin_s)
        try:
            self._store.wait([key], timedelta(seconds=max(0.01, left_s)))
            return self._store.get(key).decode()
        except RuntimeError as error:
            waited_s = time.monotonic() - begin_s
            raise PeerError(
                f"start-up: waited {waited_s:.1f} s for {whom} at {self._name}: no answer ({_first_line(error)}); it did "
                "not start, ended, or runs without vtp_plugin"
            ) from None

    def _wait_for_farewells(self) -> None:
        deadline_s = time.monotonic() + min(_FAREWELL_S, self._timeout_s)
        while time.monotonic() < deadline_s:
            if self._store.add("farewell", 0) >= self._world_size:
                return
            time.sleep(0.02)


def agree(
    store: dist.Store,
    name: str,
    prepare: Callable[[], Mapping[str, object]],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> None:
    """Run ``prepare`` on every rank and go on only if it succeeded everywhere with equal results.

    ``SystemExit`` counts as a failure too: Megatron leaves some checks that way.
    """
    agreement = Agreement(store, name, rank=rank, world_size=world_size, timeout_s=timeout_s)
    try:
        statement = prepare()
    except (Exception, SystemExit) as error:
        agreement.settle({}, error)
        raise AssertionError("an error was posted, so settle() cannot return") from error
    agreement.settle(statement)


def first_difference(statements: Mapping[int, Mapping[str, object]]) -> str:
    """Name the first value in which a rank differs from rank 0; empty when all are equal.

    >>> first_difference({0: {"sizes": [1, 2]}, 1: {"sizes": [1, 2]}})
    ''
    >>> first_difference({0: {"sizes": [1, 2]}, 1: {"sizes": [1, 3]}})[:55]
    'ranks disagree: sizes is [1, 2] on rank 0 and [1, 3] on'
    """
    reference = statements[0]
    for rank, statement in statements.items():
        for key in [*reference, *(k for k in statement if k not in reference)]:
            if reference.get(key) != statement.get(key):
                return (
                    f"ranks disagree: {key} is {reference.get(key)} on rank 0 and {statement.get(key)} on rank {rank}; "
                    "start every rank with the same command line and the same versions"
                )
    return ""


def describe_error(error: BaseException) -> str:
    """Give an exception as one line: plugin errors as they are, others with their type."""
    text = _first_line(error)
    if isinstance(error, VtpError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
