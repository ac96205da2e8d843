"""In place of the door: applies the plugin without one of the things that it does, which WITHOUT names."""

import os
import runpy
from typing import Any

import torch.distributed as dist

from tests.swift.runs import DOOR
from vtp_plugin.patches import activation
from vtp_plugin.patches.swift import hf_export
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

WITHOUT = os.environ["WITHOUT"]
records_at = activation.records_at


def _rest(*args: Any, **options: Any) -> Any:
    return tuple(record for record in records_at(*args, **options) if record.id != WITHOUT)


activation.records_at = _rest
if WITHOUT == "greatest":
    hf_export._reduce = lambda _own, *args, **options: dist.all_reduce(*args, **options)
if WITHOUT == "padding":
    PipelineLayout.vocab_multiple = lambda *_args: 1
runpy.run_path(str(DOOR))
