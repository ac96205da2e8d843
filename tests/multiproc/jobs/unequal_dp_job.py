"""What scripts on stages with different numbers of replicas may get wrong."""

from __future__ import annotations

from contextlib import closing

from tests.multiproc.cases.case_parts import MICRO_BATCH
from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.errors import ConfigError


def run_one_size_on_all_stages(case: Case) -> str:
    """Train a step with one microbatch size for all stages; give the refusal."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        trainer.micro_batch_size = MICRO_BATCH
        try:
            trainer.step(0)
        except ConfigError as error:
            return str(error)
    raise AssertionError("this was not refused")
