"""A script on megatron-core alone whose edge has a key: what it draws, and what it is told when it does not."""

from __future__ import annotations

import contextlib
import logging
from contextlib import closing
from typing import Any

import torch
from megatron.core import parallel_state

import vtp_plugin
from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo

Weights = dict[str, tuple[torch.Tensor, int | None]]


def draw(
    case: Case, edge_seed: str | None, *, is_told: bool = True, num_steps: int = 0
) -> tuple[int, Weights, list[str]]:
    """Build the model, and train so many steps.

    Args:
        case: a U.
        edge_seed: of ``apply()``.
        is_told: the script builds in ``drawing_edge_weights()``.
        num_steps: to train.

    Returns:
        Stage of this rank, its start weights by chunk and name, each with the dimension in which it is cut, and the
        warnings that it has got.
    """
    init_gloo()
    said = _Said()
    logging.getLogger("vtp_plugin").addHandler(said)
    try:
        return (*_draw(case, edge_seed, is_told=is_told, num_steps=num_steps), said.lines)
    finally:
        logging.getLogger("vtp_plugin").removeHandler(said)


class _Said(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _draw(case: Case, edge_seed: str | None, *, is_told: bool, num_steps: int) -> tuple[int, Weights]:
    with applied(case, force=False, edge_seed=edge_seed), model_parallel(case):
        drawing: Any = vtp_plugin.drawing_edge_weights() if is_told else contextlib.nullcontext()
        with drawing:
            trainer = Trainer(case)
        with closing(trainer):
            weights = {
                f"{number} {name}": (
                    weight.detach().clone(),
                    weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None,
                )
                for number, chunk in enumerate(trainer.model)
                for name, weight in chunk.named_parameters()
            }
            for step in range(num_steps):
                trainer.step(step)
        return parallel_state.get_pipeline_model_parallel_rank(), weights
