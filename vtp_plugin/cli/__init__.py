"""Command line: ``python -m vtp_plugin run | plan | draw | simulate | doctor``. One file for each command.

Commands parse, call and print; what they show is planned elsewhere. Only ``run`` and ``doctor`` import torch and
Megatron.
"""

from __future__ import annotations

from vtp_plugin.cli.main import main

__all__ = ["main"]
