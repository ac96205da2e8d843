"""Bridges between modules of different grids, with the names and the interface of Megatron's.

``StageCommGrid`` is the grid of a module whose pipeline stages differ in size.

A script that is written against this module gets the plugin's bridges; one that is written against Megatron's names
gets them by ``vtp_plugin.apply(bridges=True)``. Names are looked up when they are used, since Megatron is loaded then.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vtp_plugin.api import current_session
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions import capability, find_host

if TYPE_CHECKING:
    from vtp_plugin.session import Session

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


def _session() -> Session:
    """Return the applied plugin; where a script takes the bridges without ``apply()``, one that patches nothing."""
    from vtp_plugin.platform.detect import detect
    from vtp_plugin.session import Session

    # With its platform, it maps nothing of torch.
    return current_session() or Session(VtpConfig(), platform=detect("auto"))


# Two uses of the name must give one class.
@functools.cache
def _stage_comm_grid() -> type:
    from vtp_plugin.patches.core.parallel_state import known
    from vtp_plugin.session.stage_comm_grid import StageCommGrid

    asked = {"get_session": staticmethod(_session), "know_group": staticmethod(known)}
    names = {"__module__": __name__, "__doc__": StageCommGrid.__doc__, **asked}
    return type("StageCommGrid", (StageCommGrid,), names)


def _find(name: str) -> Any:
    from vtp_plugin.patches.core.models.mimo.comm import colocated_communicator
    from vtp_plugin.patches.core.pipeline_parallel import bridge_communicator

    if name == "StageCommGrid":
        return _stage_comm_grid()
    modules = {"BridgeCommunicator": bridge_communicator, "ColocatedBridgeCommunicator": colocated_communicator}
    if name in modules:
        return modules[name].current_class(_session)
    if name in ("BridgeDirection", "SliceInfo"):
        return getattr(colocated_communicator.colocated_communicator, name)  # Megatron's module, which defines them
    return getattr(bridge_communicator, name)
