"""The name by which a user calls the plugin's commands."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Final

MODULE: Final = "python -m vtp_plugin"
"""The name that works in every environment with the plugin; a launcher knows no other."""
_SCRIPT: Final = "vtp"


def own_command() -> str:
    """Return ``vtp`` where it is on the path and belongs to this environment, else ``python -m vtp_plugin``."""
    found = shutil.which(_SCRIPT)
    own = Path(sysconfig.get_path("scripts")).resolve()
    return _SCRIPT if found is not None and Path(found).parent.resolve() == own else MODULE
