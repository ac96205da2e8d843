"""U5: set-up of a training run on stages with different numbers of chunks, of which only the first one has data."""

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
            why="it is called once for each chunk and talks to all ranks: with different numbers of chunks that hangs; "
            "and it calls the script's provider, which opens data, on every rank",
            versions=">=0.19,<0.20",
            remove_when="the number of calls is the same on all ranks, and only ranks that read data call the provider",
            optional=True,
        ),
    )


def _build_iterators(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Callable[..., Any]) -> Any:
        if session.own.stage == 0:
            return original(provider)
        assert session.pipeline is not None
        for _ in range(len(session.pipeline.placement.vstages(0)) - session.pipeline.num_chunks):
            original(_no_data)
        return original(_no_data)

    return build_train_valid_test_data_iterators


def _no_data(num_samples: list[int]) -> tuple[None, None, None]:
    """Stand in for the script's provider: no training, validation or test set, here.

    Whether there are any, and so what the run does, the ranks hear from rank 0 all the same.
    """
    return None, None, None


# Megatron then calls it on all tensor-parallel ranks.
_no_data.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
