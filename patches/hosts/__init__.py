"""What differs between families of Megatron versions: one module for each, chosen before any patch is imported.

Everything else in ``patches`` is written once, against the newest family, and asks the host where families differ.
"""

from __future__ import annotations

import importlib

from vtp_plugin.adaptor import loaded_adaptor
from vtp_plugin.patches.hosts.base import MegatronHost
from vtp_plugin.patches.mindspeed import MindSpeed

__all__ = ["MegatronHost", "load_host"]


def load_host(name: str) -> MegatronHost:
    """Import the module of a family, such as ``"0.19"``, and return what it says, MindSpeed included."""
    module = importlib.import_module(f"{__name__}.core_{name.replace('.', '_')}")
    host = module.Host()
    if loaded_adaptor():
        host.mindspeed = MindSpeed()
    return host
