"""What `megatron sft --external_plugins $(vtp path swift)` imports on every rank: it applies the plugin.

ms-swift imports it while it reads its arguments, before there are process groups. Its parser knows no flags of the
plugin, so they come in the variable VTP_FLAGS. It lies in a folder of its own, which ms-swift puts on `sys.path`.
"""

import multiprocessing
import os
import shlex

from vtp_plugin.api import apply_flags, report_failures
from vtp_plugin.errors import ConfigError

# A process that reads data imports it, too, and is no rank.
if multiprocessing.parent_process() is None:
    _rest = apply_flags(shlex.split(os.environ.get("VTP_FLAGS", "")))
    if _rest:
        report_failures()
        raise ConfigError(
            f"VTP_FLAGS has {' '.join(_rest)}; it takes flags of the plugin only; give others to megatron"
        )
