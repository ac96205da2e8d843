"""What all ranks of a run do outside its process groups: what they state at the start, and the start itself."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.errors import ConfigError, PeerError, PlanError
from vtp_plugin.host.versions import find_host
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.runtime.health.meeting_store import KEEPER_VARIABLE, open_store
from vtp_plugin.runtime.health.monitor import Monitor
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.runtime.health.startup import Agreement
from vtp_plugin.runtime.health.startup_waiting import time_limit
from vtp_plugin.runtime.health.store import ClockOffset, Topic, connect_again, estimate_offset, name_run, part_of
from vtp_plugin.runtime.step.step_times import Posted, Report, share_reports
from vtp_plugin.util.text import __version__


def state_request(config: VtpConfig) -> dict[str, object]:
    """Return the options that this rank was started with, before any layout is known."""
    return {"vtp_plugin version": __version__, **_stated(config, at_start=True)}


def state_run(config: VtpConfig, layout: PipelineLayout, platform_name: str) -> dict[str, object]:
    """Return what this rank is about to run: all options that ranks share, and the sizes of the layout."""
    sizes = {
        "vtp_size_list": layout.tp_sizes,
        "vtp_cp_list": layout.cp_sizes,
        "vtp_dp_list": layout.dp_sizes,
        "vtp_ep_list": layout.ep_sizes,
        "vtp_etp_list": layout.etp_sizes,
    }
    return {
        "vtp_plugin version": __version__,
        "megatron-core version": find_host()[1].version,
        **_stated(config),
        **{name: ",".join(map(str, of_stages)) for name, of_stages in sizes.items()},
        "world size": layout.world_size,
        "rank order": layout.order.value,
        "platform": platform_name,
    }


def _stated(config: VtpConfig, *, at_start: bool = False) -> dict[str, object]:
    """Return the options that all ranks share, or those that are compared at the start, as their fields declare."""
    shared = [(flag.compared, getattr(config, str(flag.field))) for flag in flags_of_fields()]
    return {
        compared.name: compared.state(value)
        for compared, value in shared
        if compared is not None and compared.name is not None and (compared.at_start or not at_start)
    }


def digest_of(statement: Mapping[str, object]) -> str:
    """Return a short digest of a statement: two logs that show the same one come from ranks with equal requests.

    >>> digest_of({"vtp_size_list": "1,2"})
    '936e500c'
    """
    return hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest()[:8]


Agree = Callable[[Callable[[], Mapping[str, object]]], None]
"""Runs a function on some ranks, and returns only if it states the same on all of them."""

_WAY_OUT_OF_MODULES = "give both modules tensors of one type, hidden size and sequence length (comm_dtype, dim_mapping)"


class AllRanks:
    """What this rank does together with all others, over a store.

    Args:
        timeout_s: returns how long to wait for another rank; called each time, since a check may change it.
        finish: called before this rank leaves, if no rank has failed.
        hint: see :class:`~vtp_plugin.runtime.health.monitor.Monitor`.

    Attributes:
        monitor: keeps the time; None before the ranks have agreed, and after the end.
        redaction: what this rank may tell the others; the least possible while the number of sites is not known, see
            :meth:`set_redaction`.
    """

    def __init__(
        self, timeout_s: Callable[[], float], finish: Callable[[], None], hint: Callable[[], str] = str
    ) -> None:
        self.monitor: Monitor | None = None
        self.redaction = Redaction()
        self._timeout_s = timeout_s
        self._finish, self._hint = finish, hint
        self._agreement: Agreement | None = None

    @property
    def store(self) -> dist.Store | None:
        """Store that reaches all ranks; None before :meth:`join`."""
        return None if self._agreement is None else self._agreement.store

    @property
    def timeout_s(self) -> float:
        """Limit of a wait for another rank, in seconds."""
        return self._timeout_s()

    def set_redaction(self, redaction: Redaction) -> None:
        """Note what this rank may tell the others from now on."""
        self.redaction = redaction

    def meet(self, environment: Mapping[str, str], prepare: Callable[[], Mapping[str, object]]) -> None:
        """Wait for all ranks that the launcher started, if it says where they meet, and compare their requests.

        Args:
            environment: variables of this process.
            prepare: returns the request of this rank.

        Raises:
            ConfigError: a rank has another request.
            PeerError: a rank did not come within the timeout.
        """
        rank, world_size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        is_launched = rank.isdigit() and world_size.isdigit() and "MASTER_ADDR" in environment
        if dist.is_initialized() or not is_launched or int(world_size) < 2:
            return
        self.join(open_store(int(rank), int(world_size), self._timeout_s()), int(rank), int(world_size))
        self.agree("start", prepare)

    def join(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Use a store for all that follows.

        Args:
            store: reaches all ranks.
            rank: this rank.
            world_size: number of ranks.

        Raises:
            ConfigError: the rank has joined another world before, whose ranks still watch it.
        """
        known = self._agreement
        if known is not None and (known.rank, known.world_size) != (rank, world_size):
            raise ConfigError(
                f"this process is rank {rank} of {world_size} now and was rank {known.rank} of {known.world_size} when "
                "the plugin started; one apply() is for one world; call vtp_plugin.revert() and apply() again"
            )
        self._agreement = Agreement(
            store, rank=rank, world_size=world_size, timeout_s=self._timeout_s, redaction=lambda: self.redaction
        )

    def agree(
        self,
        name: str,
        prepare: Callable[[], Mapping[str, object]],
        *,
        is_partial: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Go on only if a check succeeds with equal results on all ranks; from the first one on, watch the others.

        Arguments and errors are those of :meth:`~vtp_plugin.runtime.health.startup.Agreement.settle`.
        """
        agreement = self._joined()
        monitor_store = None
        if self.monitor is None:
            with time_limit(agreement.rank, self.timeout_s, "for another connection to the store: no answer"):
                monitor_store = connect_again(agreement.store)
        with self.passing():
            agreement.settle(name, prepare, is_partial=is_partial, timeout_s=timeout_s)
        if monitor_store is not None:
            self.monitor = Monitor(
                monitor_store,
                rank=agreement.rank,
                world_size=agreement.world_size,
                timeout_s=self._timeout_s(),
                keeper=_store_keeper(os.environ),
                describe=lambda error: self.redaction.describe(error),
                hint=self._hint,
            )
            self.monitor.start()
            atexit.register(self.stop)

    def together(self, what: str) -> AbstractContextManager[object]:
        """Watch the progress of all ranks while a block runs, such as a save; see ``Together``."""
        return contextlib.nullcontext() if self.monitor is None else self.monitor.together.during(what)

    def passing(self) -> AbstractContextManager[None]:
        """Return the context of one joint operation of all ranks, see ``EarlyExits``."""
        return contextlib.nullcontext() if self.monitor is None else self.monitor.early_exits.passing()

    def agreement(self, name: str, members: Sequence[int] | None = None) -> Agree:
        """Return a function that compares statements over some ranks, each of which calls it at the same point.

        A rank need not state every value that another rank states.

        Args:
            name: name of what is compared, for errors.
            members: global ranks of modules, which need not have met before; None for all ranks of the run.
        """
        if members is None:
            return functools.partial(self.agree, name, is_partial=True)
        # Rounds are counted for each rank: bridges of other ranks must not come between.
        digest = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]
        among = Agreement(
            part_of(self.store or _get_default_store(), Topic.BRIDGES, digest),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=self._timeout_s,
            members=tuple(members),
            redaction=lambda: self.redaction if self._agreement is not None else Redaction(is_one_site=True),
            way_out=_WAY_OUT_OF_MODULES,
        )
        return functools.partial(among.settle, name, is_partial=True)

    def share_reports(self, own: Posted, combine: Callable[[Sequence[Posted]], str], *, kind: Any = Report) -> str:
        """Combine all ranks' reports into one text, see :func:`~vtp_plugin.runtime.step.step_times.share_reports`."""
        agreement = self._joined()
        return share_reports(
            agreement.store,
            own,
            combine,
            rank=agreement.rank,
            world_size=agreement.world_size,
            timeout_s=self._timeout_s(),
            kind=kind,
        )

    def computing(self, name_compute: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Watch collectives inside computes; see :meth:`~vtp_plugin.runtime.health.position.Position.computing`."""
        return contextlib.nullcontext() if self.monitor is None else self.monitor.position.computing(name_compute)

    def compare_clocks(self) -> ClockOffset:
        """Measure how far this rank's clock is behind that of rank 0; a collective call."""
        agreement = self._joined()
        return estimate_offset(
            agreement.store, rank=agreement.rank, world_size=agreement.world_size, timeout_s=self._timeout_s()
        )

    def name_run(self) -> str:
        """Return a random name of this run, the same on all ranks."""
        return name_run(self._joined().store)

    def _joined(self) -> Agreement:
        if self._agreement is None:
            raise PlanError("the ranks are asked for before they met")
        return self._agreement

    def stop(self) -> None:
        """End the watch over the other ranks; they are told that this rank is done."""
        atexit.unregister(self.stop)
        monitor, self.monitor = self.monitor, None
        if monitor is None:
            return
        monitor.stop()
        if not monitor.is_failing and monitor.failure is None:
            # The last pass may have been an evaluation, whose sends nobody has waited for: sends that are under way
            # when the process ends are lost.
            with contextlib.suppress(PeerError):
                self._finish()


def _store_keeper(environment: Mapping[str, str]) -> str:
    """Name the process that keeps the run's store, whose end ends the store.

    >>> _store_keeper({}), _store_keeper({"MASTER_ADDR": "a"}), _store_keeper({KEEPER_VARIABLE: "rank 2"})
    ('the launcher or rank 0', 'rank 0', 'rank 2')
    """
    if keeper := environment.get(KEEPER_VARIABLE):
        return keeper
    if "MASTER_ADDR" not in environment:
        return "the launcher or rank 0"
    return "the launcher" if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
