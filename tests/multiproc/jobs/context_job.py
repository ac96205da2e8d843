"""A training step whose configuration was made for another stage's context-parallel size."""

from __future__ import annotations

from contextlib import closing

from megatron.core import parallel_state

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.errors import ConfigError


def train_with(case: Case, sizes: dict[int, int]) -> str:
    """Train one step with other context-parallel sizes in the configuration, by stage; give the refusal."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        trainer.config.context_parallel_size = sizes.get(stage, trainer.config.context_parallel_size)
        try:
            trainer.step(0)
        except ConfigError as error:
            return str(error)
    return ""
