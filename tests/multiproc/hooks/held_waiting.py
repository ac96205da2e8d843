"""What a rank with split backwards keeps, counted on the storages themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vtp_plugin.api import _Holder
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.step.weight_gradients import WeightGradients


def note_waiting(facts: dict[str, Any]) -> None:
    """Note after every compute which activations are kept, which microbatches wait, and the bytes of these.

    A microbatch is named by its virtual stage alone, and there is a list of each.
    """
    facts["kept"] = []

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, action: Any) -> None:
            original(self, action)
            assert _Holder.session is not None
            waiting = _Holder.session.running.require_schedule_runner().weight_gradients
            kept = (sorted(vstage for vstage, _ in held) for held in (self._kept, waiting._waiting))
            facts["kept"].append((*kept, waiting.num_bytes))

        return run

    for name in ("_forward", "_backward", "_weights"):
        setattr(Executor, name, noting(getattr(Executor, name)))


def keep_one_more(facts: dict[str, Any]) -> None:
    """Let every microbatch that waits keep the input of one layer in two copies."""
    original = WeightGradients.backward

    @contextmanager
    def backward(
        self: WeightGradients, vstage: int, microbatch: int, whole: Collection[torch.Tensor]
    ) -> Iterator[None]:
        with original(self, vstage, microbatch, whole):
            yield
        uses = self._waiting[vstage, microbatch]
        inputs, gradient = uses[0].tensors
        uses.append(replace(uses[0], tensors=(inputs.clone(), gradient), versions=(0, uses[0].versions[1])))

    WeightGradients.backward = backward
