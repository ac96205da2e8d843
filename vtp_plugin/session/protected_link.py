"""The way between the sites of a run: checked and settled before the first group is made."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.link.guard import NCCL_BY_SOCKETS, check_device, check_way, spans_machines
from vtp_plugin.util import log


@contextmanager
def protected_link(
    config: VtpConfig, device: str, environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Refuse what goes past an encrypted link between sites, and let NCCL go by sockets; afterwards it may choose.

    Nothing is done with one site, on one machine, or where ``--vtp-link-is-protected`` says that something else
    encrypts.

    Args:
        config: the plugin's options.
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: variables of this process.

    Raises:
        ConfigError: the way is public, or the backend goes past it.
    """
    added: list[str] = []
    if config.has_several_sites and not config.link_is_protected:
        problems, warnings = check_way(environment)
        refuse(problems)
        if (problem := check_device(device, environment)) is not None:
            raise ConfigError(problem)
        for warning in warnings:
            if environment.get("LOCAL_RANK", "0") == "0":
                log.warning(warning)
        if device == "cuda" and spans_machines(environment):
            added = [name for name in NCCL_BY_SOCKETS if name not in environment]
            environment.update({name: NCCL_BY_SOCKETS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            environment.pop(name, None)
