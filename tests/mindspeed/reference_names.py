"""A pytest plugin: the Ascend implementation's own tests find the plugin's functions under the names that they import.

``VTP_MINDSPEED_MM`` names the tree of MindSpeed-MM. Its package is not on the path, so its names are stand-ins.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from vtp_plugin import functional

for name in ("mindspeed", "mindspeed.megatron_adaptor", "tests", "tests.ut"):
    sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
path = Path(os.environ["VTP_MINDSPEED_MM"]) / "tests" / "ut" / "utils.py"
spec = importlib.util.spec_from_file_location("tests.ut.utils", path)
assert spec is not None and spec.loader is not None
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
functional.install("mindspeed_mm.patchs.layerwise_disaggregated_training")
