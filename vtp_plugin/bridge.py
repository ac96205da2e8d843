"""Bridges between modules of different grids, with the names and the interface of Megatron's.

``StageCommGrid`` is the grid of a module whose pipeline stages differ in size.

A script that is written against this module gets the plugin's bridges; one that is written against Megatron's names
gets them by ``vtp_plugin.apply(bridges=True)``. Names are looked up when they are used, since Megatron is loaded then.
"""

from __future__ import annotations

import functools
from typing import Any

from vtp_plugin.api import current_session
from vtp_plugin.errors import PatchError
from vtp_plugin.hosts import capability, find_host

_NAMES = (
    "BridgeCommunicator",
    "BridgeDirection",
    "ColocatedBridgeCommunicator",
    "CommRole",
    "RankCommInfo",
    "SliceInfo",
    "StageCommGrid",
)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _, megatron = find_host()
    if not capability("bridges").has(megatron.version):
        raise PatchError(
            f"vtp_plugin.bridge: megatron-core {megatron.version} has no such bridges between modules; use 0.19"
        )
    return _find(name)


def __dir__() -> list[str]:
    return list(_NAMES)


# Two uses of the name must give one class.
@functools.cache
def _stage_comm_grid() -> type:
    from vtp_plugin.session.stage_comm_grid import StageCommGrid
    from vtp_plugin.session.surroundings import Surroundings

    names = {"__module__": __name__, "__doc__": StageCommGrid.__doc__, "surroundings": Surroundings(current_session)}
    return type("StageCommGrid", (StageCommGrid,), names)


def _find(name: str) -> Any:
    from vtp_plugin.patches.core.models.mimo.comm import colocated_communicator
    from vtp_plugin.patches.core.pipeline_parallel import bridge_communicator
    from vtp_plugin.session.surroundings import Surroundings

    if name == "StageCommGrid":
        return _stage_comm_grid()
    modules = {"BridgeCommunicator": bridge_communicator, "ColocatedBridgeCommunicator": colocated_communicator}
    if name in modules:
        return modules[name].current_class(Surroundings(current_session))
    if name in ("BridgeDirection", "SliceInfo"):
        return getattr(colocated_communicator.colocated_communicator, name)  # Megatron's module, which defines them
    return getattr(bridge_communicator, name)
