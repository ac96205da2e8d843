"""What bridges need of the run around them: a platform, a clock, and a way to compare before they send."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vtp_plugin.platform import detect
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.life.monitor import Monitor
from vtp_plugin.runtime.life.startup import Agreement
from vtp_plugin.runtime.life.store import Topic, part_of
from vtp_plugin.runtime.wire.audit import Audit
from vtp_plugin.session.request import agree_on_request
from vtp_plugin.session.session import Session

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The run that bridges are made in.

    Attributes:
        get_session: returns the applied plugin; None where a script takes the classes without ``apply()``.
    """

    get_session: Callable[[], Session | None]

    @property
    def session(self) -> Session | None:
        """The applied plugin, if it is."""
        return self.get_session()

    def platform(self) -> Platform:
        """Return what says where tensors are and how to wait."""
        return detect("auto") if self.session is None else self.session.choose_platform()

    def watch(self) -> None:
        """Watch over the other ranks from now on; all ranks of the world call this at the same point.

        With a list of sizes they watch each other anyway, from Megatron's first groups on.

        Raises:
            ConfigError: a rank was asked for something else.
            PeerError: a rank did not come within the timeout.
        """
        session = self.session
        is_alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        if session is None or is_alone or session.ranks.store is not None or session.config.size_list is not None:
            return
        session.watch_failures()
        sizes = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        agree_on_request(session, _get_default_store(), lambda: None, **sizes)

    def monitor(self) -> Monitor | None:
        """Return what keeps the time, if the run has it."""
        return None if self.session is None else self.session.ranks.monitor

    def audit(self) -> Audit | None:
        """Return the record of what crosses, if it is asked for."""
        if self.session is None:
            return None
        self.session.open_audit(dist.get_rank())
        return self.session.audit

    def takes_wider(self) -> bool:
        """Tell whether the colocated bridge takes what Megatron's refuses, unless it is told otherwise."""
        return self.session is not None and self.session.config.bridges == "extended"

    def timeout_s(self) -> float:
        """Return how long to wait for another rank."""
        return _TIMEOUT_S if self.session is None else self.session.config.timeout_s

    def agreement(self, name: str, members: Sequence[int]) -> Callable[[Callable[[], Mapping[str, object]]], None]:
        """Return a function that compares statements over some ranks; every one of them calls it once.

        Args:
            name: of what is compared.
            members: the ranks.
        """
        store = None if self.session is None else self.session.ranks.store
        # Rounds are counted for each rank: bridges of other ranks must not come between.
        digest = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]
        agreement = Agreement(
            part_of(store or _get_default_store(), Topic.BRIDGES, digest),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=self.timeout_s,
            members=tuple(members),
            way_out="give both modules tensors of one type, hidden size and sequence length (comm_dtype, dim_mapping)",
        )
        return partial(agreement.settle, name, is_partial=True)
