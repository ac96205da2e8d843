"""Hooks that make ranks slow: timed waits in the place of work, so that a few cores carry many ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import global_vars, training

from tests.multiproc.hooks.in_place import Facts, after, before
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.comm import transfers

FORWARD_S = 0.04
FORWARD_DELAY_S, PACK_DELAY_S = 0.03, 0.02
LINK_DELAY_S = 0.05
LATE_KINDS = (MessageKind.ACTIVATION, MessageKind.GRADIENT)
# Training steps before the planted delays: a U has measured its costs by then.
NUM_STEPS_BEFORE = 6


def _wait_in_forwards(facts: Facts, extra_s: Callable[[], float] = lambda: 0.0) -> None:
    """Let every chunk's forward wait."""
    before(TransformerBlock, "forward")(lambda *_args, **_kwargs: time.sleep(FORWARD_S + extra_s()))


def plant_delays(facts: Facts) -> None:
    """After some steps let rank 1 compute its forwards slower, and rank 0 pack slower what it sends."""
    rank, num_steps = int(os.environ["RANK"]), 0

    @before(training, "train_step")
    def count(*_args: Any, **_kwargs: Any) -> None:
        nonlocal num_steps
        num_steps += 1

    def extra_s(of_rank: int, delay_s: float) -> float:
        return delay_s if rank == of_rank and num_steps > NUM_STEPS_BEFORE else 0.0

    before(transfers.Transmission, "_outgoing")(lambda *_: time.sleep(extra_s(0, PACK_DELAY_S)))
    _wait_in_forwards(facts, lambda: extra_s(1, FORWARD_DELAY_S))


def slow_link(facts: Facts) -> None:
    """Let each tensor of a step take longer on its way: its messages leave a while after they were sent."""

    @before(transfers.Transfers, "post")
    def wait(_self: Any, messages: Any, kind: Any, **_options: Any) -> None:
        if kind in LATE_KINDS and any(operation is transfers.dist.isend for operation, *_ in messages):
            time.sleep(LINK_DELAY_S)


def _slow_rank(slow: int, facts: Facts) -> Callable[[], None]:
    """Let one rank compute slower than its peers all along, and give the last rank a stand-in for W&B's writer."""
    rank = int(os.environ["RANK"])
    logged: list[tuple[int, dict[str, Any]]] = []
    _wait_in_forwards(facts, lambda: FORWARD_S if rank == slow else 0.0)

    def note(values: dict[str, Any], iteration: int) -> None:
        logged.append((iteration, values))

    @after(global_vars, "_set_wandb_writer")
    def give(_none: None, args: Any) -> None:
        if rank == args.world_size - 1:
            global_vars._GLOBAL_WANDB_WRITER = MagicMock(log=note)

    def finish() -> None:
        facts["wandb"] = logged

    return finish


def slow_rank_1(facts: Facts) -> Callable[[], None]:
    return _slow_rank(1, facts)


def slow_rank_3(facts: Facts) -> Callable[[], None]:
    return _slow_rank(3, facts)
