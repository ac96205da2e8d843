"""The script of ``certify`` with an attention that takes latent heads, which Megatron's own needs a GPU for."""

from __future__ import annotations

import runpy

from tests.multiproc.hooks.held import LatentAttention
from tests.multiproc.hooks.script_hooks import _replace_attention
from vtp_plugin.cli.certify import _own_script

if __name__ == "__main__":
    _replace_attention(LatentAttention)
    runpy.run_path(_own_script(), run_name="__main__")
