"""``run`` with ``--vtp-size-list auto --vtp-stages``: fit the list before the script starts, hand it on as flags."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import vtp_plugin
from vtp_plugin.checkpoint.save.saving import LOCK_VARIABLE
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.run_flags import add_run_flags
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import read_flags
from vtp_plugin.elastic.cards import RankCard, try_card
from vtp_plugin.elastic.coordinator import Coordinator
from vtp_plugin.elastic.failed_cards import forget_error, name_card, reported_error
from vtp_plugin.elastic.join import Membership, join_run
from vtp_plugin.elastic.orphans import end_orphans
from vtp_plugin.elastic.progress import RUN_FOLDER_VARIABLE, name_start
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.versions import capability, find_host
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.tune.fit.fit_layout import OF_A_FIT, without
from vtp_plugin.util import log

# Of the timeout, for a card to be tried; and with what goes before, so that rank 0 still waits for the result.
_PROBE_SHARE, _MAX_PROBE_S = 0.3, 60.0
_WITH_START_SHARE = 0.8


def fit_run(argv: Sequence[str]) -> tuple[list[str], Membership]:
    """Fit a list to the cards; end this process here if its rank is spare.

    Args:
        argv: the script and its flags, ``--vtp-stages`` among them.

    Returns:
        The run's arguments with the list that fits, and this process's membership, which needs to know of a good end.

    Raises:
        ConfigError: nothing fits, or flags contradict each other.
        PeerError: a rank did not come.
    """
    end_orphans()
    parser = Parser(add_help=False)
    add_run_flags(parser)
    parser.add_argument("--dataloader-type")
    args, _ = parser.parse_known_args(list(argv[1:]))
    config = read_flags(args, VtpConfig())
    # What is said before apply() is called has the form of the plugin's other lines.
    uninstall = log.install(config.log_level)
    try:
        redaction = _own_redaction(args, config)
        own = _own_card(args, config, redaction)
        _warn_of_cyclic(args)
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        coordinator = Coordinator(
            args=args,
            config=config,
            folder=Path(folder) if folder else None,
            forgives=bool(args.vtp_forgive),
            on_loss=args.vtp_on_loss or "",
            environment=os.environ,
            redaction=redaction,
        )
        seat = join_run(own, coordinator, environment=os.environ, timeout_s=config.timeout_s)
        if folder:
            forget_error(Path(folder), name_card(own))
    finally:
        uninstall()
    if seat.rank is None:
        sys.exit(seat.wait_outside(own))
    name_start(argv, os.environ[LOCK_VARIABLE], os.environ)
    # A flag that the fitted list gives, too, is not given twice.
    given = [word for word in seat.argv if word.startswith("--") and word != "--vtp-force"]
    return [argv[0], *without(argv[1:], (*OF_A_FIT, *given)), *seat.argv, *_state_flags(argv)], seat


def _own_redaction(args: argparse.Namespace, config: VtpConfig) -> Redaction:
    """Say what the others may learn, by this rank's own flags: nobody has compared them yet."""
    is_one_site = not config.has_several_sites and not args.vtp_site
    return Redaction(is_one_site=is_one_site, is_opted_in=config.share_errors, site=args.vtp_site)


def _own_card(args: argparse.Namespace, config: VtpConfig, redaction: Redaction) -> RankCard:
    local = os.environ.get("LOCAL_RANK", "")
    if not local.isdigit():
        raise ConfigError("--vtp-size-list auto needs the launcher's LOCAL_RANK, which is not set; use torchrun")
    host = socket.gethostname()
    node = args.vtp_node or host
    limit_s = min(_MAX_PROBE_S, _PROBE_SHARE * config.timeout_s)
    kind, why = try_card(config.device, node, int(local), limit_s, _WITH_START_SHARE * config.timeout_s - limit_s)
    own = RankCard(
        # A name that the user gives is for all; a host's own name stays at its site.
        node=args.vtp_node or redaction.name(host),
        local_rank=int(local),
        site=args.vtp_site or "",
        kind=kind,
        why=why,
        versions=f"vtp_plugin {vtp_plugin.__version__}, torch {torch.__version__}, Megatron {find_host()[1].version}",
    )
    # What a device has reported lies in the folder of its site, which rank 0 may not see.
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    error = reported_error(Path(folder), name_card(own)) if folder else ""
    return replace(own, reported=f"erring: {error}" if error else "")


def _warn_of_cyclic(args: argparse.Namespace) -> None:
    if args.dataloader_type == "cyclic" and os.environ.get("RANK") == "0":
        log.warning(
            "--dataloader-type cyclic: which samples come next depends on the number of replicas; where that changes "
            "with the devices, some come twice and some never: --dataloader-type single keeps the order"
        )


def _state_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """Leave random states alone where this Megatron ends, with status 0, if a list has no place for them."""
    return () if capability("layouts").has(find_host()[1].version) or "--no-load-rng" in argv else ("--no-load-rng",)
