"""``rendezvous``: keep the rendezvous of elastic torchrun, where it outlives every machine that trains."""

from __future__ import annotations

import argparse
import contextlib
import threading

from vtp_plugin.elastic.launchers import PICKLE
from vtp_plugin.errors import VtpError
from vtp_plugin.host.versions import find_torch
from vtp_plugin.util.own_command import own_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the address."""
    parser.epilog = f"It ends with Ctrl-C, and all runs that meet there with it. {PICKLE[0].upper()}{PICKLE[1:]}."
    parser.add_argument(
        "address", metavar="HOST:PORT", help="of this machine, as torchrun gets it by --rdzv-endpoint on all machines"
    )


def run(options: argparse.Namespace) -> None:
    """Listen until this process is told to end."""
    if options.unknown:
        raise VtpError(f"{options.unknown[0]} is unknown; see: {own_command()} rendezvous --help")
    if find_torch() is None:
        raise VtpError("torch is not installed here; a rendezvous is a store of torch; install it: pip install torch")
    from vtp_plugin.runtime.health.store_server import keep_open

    host, _, port = options.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise VtpError(f"{options.address!r} is not HOST:PORT; torchrun needs both; write for example 10.8.0.1:29400")
    store, address = keep_open(host.strip("[]"), int(port))
    print(f"the rendezvous listens on {address} port {port}, until this process ends; {PICKLE}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    del store  # it listened as long as somebody held it
