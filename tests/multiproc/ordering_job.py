"""Training runs whose communication is recorded from before the first group is made."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from tests.multiproc.cases import Case
from tests.multiproc.train_job import Trainer, applied, model_parallel
from tests.pool import init_gloo
from vtp_plugin.ordering import END_OF_STEP, format_trace
from vtp_plugin.platform import detect
from vtp_plugin.runtime.recorder import Recorder


def record(case: Case) -> tuple[str, list[list[float]]]:
    """Train on this rank; give its trace as text, and the losses by step and microbatch."""
    init_gloo(timeout_s=60.0)
    with Recorder(detect("cpu")) as recorder:
        with applied(case, force=True), model_parallel(case):
            trainer = RecordedTrainer(case, recorder)
            losses = [trainer.step(step)[0] for step in range(case.num_steps)]
        return format_trace(recorder.trace()), losses


class RecordedTrainer(Trainer):
    """Marks the compute of every microbatch and the end of every step.

    The marks count the model chunk's microbatches: ``"forward 1.3"`` is microbatch 3 of chunk 1.
    """

    def __init__(self, case: Case, recorder: Recorder) -> None:
        super().__init__(case)
        self._recorder = recorder
        self._num_forward = [0] * case.vpp

    def step(self, step: int) -> tuple[list[float], Any, Any, Any]:
        self._num_forward = [0] * self.case.vpp
        result = super().step(step)
        self._recorder.note(END_OF_STEP)
        return result

    def _forward_step(self, iterator: Any, chunk: Any) -> Any:
        index = self.model.index(chunk)
        name = f"{index}.{self._num_forward[index]}"
        self._num_forward[index] += 1
        self._recorder.note(f"forward {name}")
        output, loss_function = super()._forward_step(iterator, chunk)
        output.register_hook(lambda _: self._recorder.note(f"backward {name}"))
        return output, loss_function


def stages() -> int:
    """Stage of this rank."""
    return parallel_state.get_pipeline_model_parallel_rank()
