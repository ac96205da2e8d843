"""The example script as a user of MindSpeed starts it: the adaptor's import comes first."""

from __future__ import annotations

import atexit
import os
import runpy
import sys

import mindspeed.megatron_adaptor as adaptor
from megatron.core.datasets import gpt_dataset

from tests.support.hosts import example_script

# As in the runs that it is compared with (tests.multiproc.jobs.script_job): an index of more takes longer than steps.
gpt_dataset.MockGPTLowLevelDataset.size = 100

# The form: how the plugin gets here. "run": by python -m vtp_plugin run, and nothing of it stands here.
form = os.environ["FAKE_FORM"]
if form != "run":
    import vtp_plugin

    vtp_plugin.apply(**({"vtp_size_list": "1,2", "device": "cpu"} if form == "repatch" else {}))
if form == "repatch":
    adaptor.repatch({})


def report() -> None:
    """Say which wrappers of the fake ran, and which records of the plugin are in force."""
    calls = sys.modules["mindspeed.calls"].NAMES
    states = [status.id for status in sys.modules["vtp_plugin"].status() if not status.applied and not status.skipped]
    sys.stdout.write(f"calls {sorted(set(calls))} lost {states}\n")


atexit.register(report)
runpy.run_path(example_script(), run_name="__main__")
