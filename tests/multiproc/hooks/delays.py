"""Hooks that make ranks slow: timed waits in the place of work, so that a few cores carry many ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import global_vars, training

from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.comm import transfers

FORWARD_S = 0.04
FORWARD_DELAY_S, PACK_DELAY_S = 0.03, 0.02
LINK_DELAY_S = 0.05
LATE_KINDS = (MessageKind.ACTIVATION, MessageKind.GRADIENT)
# Training steps before the planted delays: a U has measured its costs by then.
NUM_STEPS_BEFORE = 6


def wait_in_forwards(facts: dict[str, Any], extra_s: Callable[[], float] = lambda: 0.0) -> None:
    """Let every chunk's forward wait."""
    original = TransformerBlock.forward

    def forward(self: TransformerBlock, *args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_S + extra_s())
        return original(self, *args, **kwargs)

    TransformerBlock.forward = forward


def plant_delays(facts: dict[str, Any]) -> None:
    """After some steps let rank 1 compute its forwards slower, and rank 0 pack slower what it sends."""
    rank, num_steps = int(os.environ["RANK"]), 0
    train_step, packed = training.train_step, transfers._packed

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return train_step(*args, **kwargs)

    def extra_s(of_rank: int, delay_s: float) -> float:
        return delay_s if rank == of_rank and num_steps > NUM_STEPS_BEFORE else 0.0

    def slow_packed(pieces: Any) -> torch.Tensor:
        time.sleep(extra_s(0, PACK_DELAY_S))
        return packed(pieces)

    training.train_step, transfers._packed = counting, slow_packed
    wait_in_forwards(facts, lambda: extra_s(1, FORWARD_DELAY_S))


def slow_link(facts: dict[str, Any]) -> None:
    """Let each tensor of a step take longer on its way: its messages leave a while after they were sent."""
    post = transfers.Transfers._post

    def late_post(self: Any, messages: Any, transmission: Any) -> Any:
        if transmission.kind in LATE_KINDS and any(operation is transfers.dist.isend for operation, *_ in messages):
            time.sleep(LINK_DELAY_S)
        return post(self, messages, transmission)

    transfers.Transfers._post = late_post


def slow_rank(slow: int, facts: dict[str, Any]) -> Callable[[], None]:
    """Let one rank compute slower than its peers all along, and give the last rank a stand-in for W&B's writer."""
    rank = int(os.environ["RANK"])
    logged: list[tuple[int, dict[str, Any]]] = []
    wait_in_forwards(facts, lambda: FORWARD_S if rank == slow else 0.0)

    def note(values: dict[str, Any], iteration: int) -> None:
        logged.append((iteration, values))

    set_writer = global_vars._set_wandb_writer

    def give(args: Any) -> None:
        set_writer(args)
        if rank == args.world_size - 1:
            global_vars._GLOBAL_WANDB_WRITER = MagicMock(log=note)

    global_vars._set_wandb_writer = give

    def finish() -> None:
        facts["wandb"] = logged

    return finish
