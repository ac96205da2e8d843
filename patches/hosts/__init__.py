"""What differs between families of Megatron versions: one module for each, chosen before any patch is imported.

Everything else in ``patches`` is written once, against the newest family, and asks the host where families differ. The
module of 0.19 is ``core_0_19``; each says by ``HOST`` which of its classes answers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping

import torch

from vtp_plugin.errors import refuse
from vtp_plugin.host.mindspeed import loaded_adaptor
from vtp_plugin.host.versions import Package, find_megatron, host_named
from vtp_plugin.patches.hosts.megatron_host import MegatronHost
from vtp_plugin.patches.mindspeed import MindSpeed

__all__ = ["MegatronHost", "load_host", "problems_of_import"]


def problems_of_import(megatron: Package, *, has_cuda: bool, environment: Mapping[str, str]) -> Iterator[str]:
    """Say why a Megatron cannot be imported on this machine.

    Args:
        megatron: what an import would take.
        has_cuda: torch finds a GPU, or the platform cpu stands for one.
        environment: variables of this process.

    >>> from pathlib import Path
    >>> next(problems_of_import(Package("0.15.3", Path("core")), has_cuda=False, environment={})).partition(";")[0]
    'megatron-core 0.15.3 at core builds a CUDA library while it is imported, and torch sees no GPU to build it for'
    """
    if megatron.version.startswith("0.15.") and not has_cuda and not environment.get("TORCH_CUDA_ARCH_LIST"):
        yield (
            f"megatron-core {megatron.version} at {megatron.folder} builds a CUDA library while it is imported, and "
            "torch sees no GPU to build it for; start with python -m vtp_plugin run, set TORCH_CUDA_ARCH_LIST=9.0 (if "
            "the build fails, Megatron works without the library), or use Megatron 0.16"
        )


def load_host(name: str) -> MegatronHost:
    """Import the module of a family, such as ``"0.19"``, and return what it says, MindSpeed included.

    Raises:
        ConfigError: the Megatron that lies here cannot be imported on this machine.
    """
    megatron = find_megatron()
    if megatron is not None and "megatron.core" not in sys.modules:
        refuse(problems_of_import(megatron, has_cuda=torch.cuda.is_available(), environment=os.environ))
    module = importlib.import_module(f"{__name__}.core_{name.replace('.', '_')}")
    fits = megatron is not None and host_named(name).has(megatron.version)
    host = module.HOST(megatron.version if megatron is not None and fits else host_named(name).first)
    if loaded_adaptor():
        host.mindspeed = MindSpeed()
    return host
