"""The command line, ``python -m vtp_plugin run | plan | draw | simulate | doctor``: one file for each command.

Commands parse, call and print; other packages plan what they show. Only ``run`` and ``doctor`` import torch and
Megatron.
"""

from __future__ import annotations

from vtp_plugin.cli.main import main

__all__ = ["main"]
