"""U5: set-up of a training run on stages with different numbers of chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.patches.training.models.dist_utils import keep_full_chunks
from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="U5",
            target="megatron.training.training:get_model",
            build=functools.partial(keep_full_chunks, session),
            why="as U4, for scripts with a model provider",
            versions=">=0.19,<0.20",
            remove_when="with U1",
            optional=True,
        ),
        PatchRecord(
            id="U5b",
            target="megatron.training.training:build_train_valid_test_data_iterators",
            build=functools.partial(_build_iterators, session),
            why="it is called once for each chunk and talks to all ranks: with different numbers of chunks that hangs",
            versions=">=0.19,<0.20",
            remove_when="the number of calls is the same on all ranks",
            optional=True,
        ),
    )


def _build_iterators(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(*args: Any, **kwargs: Any) -> Any:
        if session.own.stage != 0:
            assert session.pipeline is not None
            for _ in range(len(session.pipeline.placement.vstages(0)) - session.pipeline.num_chunks):
                original(*args, **kwargs)
        return original(*args, **kwargs)

    return build_train_valid_test_data_iterators
