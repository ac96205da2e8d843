"""Bridges between modules of different grids, with the names and the interface of Megatron's.

A script that is written against this module gets the plugin's bridges; one that is written against Megatron's names
gets them by ``vtp_plugin.apply(bridges=True)``. Names are looked up when they are used, since Megatron is loaded then.
"""

from __future__ import annotations

from typing import Any

from vtp_plugin.api import current_session
from vtp_plugin.errors import PatchError
from vtp_plugin.hosts import find_host

_NAMES = ("BridgeCommunicator", "ColocatedBridgeCommunicator", "CommRole", "RankCommInfo")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family, megatron = find_host()
    if family.name != "0.19":
        raise PatchError(
            f"vtp_plugin.bridge: megatron-core {megatron.version} has no such bridges between modules; use 0.19"
        )
    return _find(name)


def __dir__() -> list[str]:
    return list(_NAMES)


def _find(name: str) -> Any:
    from vtp_plugin.patches.core.models.mimo.comm import colocated_communicator
    from vtp_plugin.patches.core.pipeline_parallel import bridge_communicator
    from vtp_plugin.session.surroundings import Surroundings

    modules = {"BridgeCommunicator": bridge_communicator, "ColocatedBridgeCommunicator": colocated_communicator}
    if name in modules:
        return modules[name].current_class(Surroundings(current_session))
    return getattr(bridge_communicator, name)
