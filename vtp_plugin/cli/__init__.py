"""The command line, ``python -m vtp_plugin run | plan | draw | simulate | checkpoint | doctor``: one file each.

Commands parse, call and print; other packages plan what they show. Only ``run`` and ``doctor`` import torch and
Megatron, and ``checkpoint diff`` imports torch.

Words:
    view: what a command shows, in words and as JSON.
    simulation: what ``simulate`` runs: a schedule with its costs (``_Simulation``).
"""

from __future__ import annotations

from vtp_plugin.cli.main import main

__all__ = ["main"]
