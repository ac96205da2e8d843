"""The requests of all ranks, compared before anything is derived from them; then it is known who may read what."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.session.startup_statement import state_request

if TYPE_CHECKING:
    from vtp_plugin.session.session import Session


def meet(session: Session, prepare: Callable[[], None]) -> None:
    """Wait for all ranks that the launcher started, if it says where they meet, and compare their requests.

    Args:
        session: session of this rank.
        prepare: called first; if it raises, all ranks leave.

    Raises:
        ConfigError: a rank has another request, or could not prepare.
        PeerError: a rank did not come within the timeout.
    """
    is_unsure = may_name_sites(sys.argv)
    _note_sites(session, is_one_site=not is_unsure and not session.config.has_several_sites)

    def state() -> dict[str, object]:
        prepare()
        return {**state_request(session.config), "--vtp-sites on the command line": is_unsure}

    session.ranks.meet(os.environ, state)
    if session.ranks.store is not None and not is_unsure:
        _settle_redaction(session)


def may_name_sites(argv: Sequence[str]) -> bool:
    """Tell whether a command line may name sites, where its flags have not been read.

    >>> may_name_sites(["script.py", "--vtp-sites=edge,cloud"]), may_name_sites(["script.py", "--vtp-size-list", "1,2"])
    (True, False)
    """
    return any(word.startswith(("--vtp-sit", "--yaml")) for word in argv)


def _settle_redaction(session: Session) -> None:
    config = session.config
    session.ranks.set_redaction(Redaction(is_one_site=not config.has_several_sites, is_opted_in=config.share_errors))


def _note_sites(session: Session, *, is_one_site: bool) -> None:
    """Note whether there is one site by this rank's own request, before all requests are known to be equal."""
    session.ranks.set_redaction(replace(session.ranks.redaction, names_one_site=is_one_site))


def agree_on_request(
    session: Session,
    store: dist.Store,
    read: Callable[[], None],
    *,
    rank: int,
    world_size: int,
    timeout_s: float | None = None,
) -> None:
    """Compare the requests of all ranks, and note what this rank may tell the others from then on.

    Args:
        session: session of this rank.
        store: reaches all ranks.
        read: adds the rest of this rank's request to the session's ``config``.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: limit of the check, in seconds; default is the configured one.

    Raises:
        ConfigError: a rank has another request, or a wrong one.
        PeerError: a rank did not come within the timeout.
    """

    def prepare() -> dict[str, object]:
        read()
        _note_sites(session, is_one_site=not session.config.has_several_sites)
        return state_request(session.config)

    _note_sites(session, is_one_site=not may_name_sites(sys.argv) and not session.config.has_several_sites)
    session.ranks.join(store, rank, world_size)
    session.ranks.agree("start", prepare, timeout_s=timeout_s)
    _settle_redaction(session)


def watch_for_modules(session: Session) -> None:
    """Watch the other ranks from a module's first groups on; all ranks of the world call this at the same point.

    With a list of sizes they watch each other anyway, from Megatron's first groups on. A script that takes bridges
    without ``apply()`` watches nobody.

    Raises:
        ConfigError: a rank has another request.
        PeerError: a rank did not come within the timeout.
    """
    is_alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
    is_watched = session.ranks.store is not None or session.config.size_list is not None
    if is_alone or is_watched or not session.applied:
        return
    session.watch_failures()
    sizes = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    agree_on_request(session, _get_default_store(), lambda: None, **sizes)


def learn_site(session: Session, rank: int) -> None:
    """Note the site of this rank, which its messages to others name; called once the layout is known."""
    if session.is_planned and session.config.sites:
        site = session.config.sites[session.planned.layout.stage_of(rank)]
        session.ranks.set_redaction(replace(session.ranks.redaction, site=site))
