"""A model with a wrong mark on one weight, as a script of its own might build it."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.errors import ConfigError


class Spoiled(Trainer):
    """Sets the mark of all weights whose names end so."""

    end: str
    is_marked: bool

    def _prepared(self, chunks: list[GPTModel]) -> list[GPTModel]:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith(self.end):
                    marked: Any = parameter
                    marked.tensor_model_parallel = self.is_marked
        return chunks


def build(case: Case, end: str, is_marked: bool) -> str:
    """Build model and optimizer, and return the line of the refusal; empty if there was none."""
    init_gloo()
    kind = type("Kind", (Spoiled,), {"end": end, "is_marked": is_marked})
    with applied(case, force=case.execution.plugin == "forced"), model_parallel(case):
        try:
            kind(case).close()
        except ConfigError as error:
            return str(error)
    return ""
