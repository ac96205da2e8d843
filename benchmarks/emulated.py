"""Slow cards on this machine: Megatron trains as ever, and what a card computes also takes a timed wait.

The waits are by far the longest part of each computation, so a few cores carry many ranks. ``benchmarks/reality.py``
starts ranks on cards of several kinds; ``profile`` meets the same cards, and learns of the waits only by its clock.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.wan.link import ADDRESSES, INTERFACE, Site, WanLink
from vtp_plugin.cli import main as vtp

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 240.0
# Of a layer's wait: what the head and the loss take.
_HEAD_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank runs.

    Attributes:
        wait_s: of its card: what a layer's forward pass takes for one sample and no tensor parallelism; the backward
            pass takes twice as long.
        node: name of its node.
        site: site of its node; empty where all is on one site.
        kind: kind of its card, as the cluster's file names it.
    """

    wait_s: float
    node: str = ""
    site: Site | None = None
    kind: str = ""


def slow_down(wait_s: float) -> None:
    """Let this process be a slow card."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            time.sleep(seconds)
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(2 * ctx.seconds)
            return gradient, None

    def seconds(num_samples: int, share: float) -> float:
        return share * wait_s * num_samples / parallel_state.get_tensor_model_parallel_world_size()

    layer, loss = TransformerLayer.forward, GPTModel.compute_language_model_loss

    def slow_layer(self: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        output, *others = layer(self, *args, **kwargs)
        return Waiting.apply(output, seconds(output.shape[1], 1.0)), *others

    def slow_loss(self: GPTModel, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return Waiting.apply(loss(self, labels, logits), seconds(labels.shape[0], _HEAD_SHARE))

    TransformerLayer.forward, GPTModel.compute_language_model_loss = slow_layer, slow_loss


Mark = tuple[float, float]
"""When a step began, and how long collectives had taken until then, in seconds."""


def run_ranks(seats: Sequence[Seat], words: Sequence[str], link: WanLink | None, log: Path) -> list[Mark]:
    """Run a command on several ranks.

    Args:
        seats: the emulated cards of all ranks.
        words: arguments of the command; ``{rank's field}`` is filled in from its card.
        link: between two sites.
        log: what the ranks print.

    Returns:
        The marks of rank 0's training steps; none if the command does not train.

    Raises:
        RuntimeError: a rank failed or did not end in time.
    """
    # Once, in the process that forks the ranks.
    importlib.import_module("megatron.training.training")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(rank, seats, words, link, log, port, writer)) for rank in range(len(seats))
    ]
    with ExitStack() as stack:
        stack.callback(lambda: [one.kill() for one in ranks if one.is_alive()])
        for one in ranks:
            one.start()
        writer.close()
        until = time.monotonic() + LIMIT_S
        left = list(ranks)
        while left and all(one.exitcode in (None, 0) for one in ranks) and time.monotonic() < until:
            wait([one.sentinel for one in left], timeout=1.0)
            left = [one for one in left if one.exitcode is None]
        if left or any(one.exitcode for one in ranks):
            raise RuntimeError(f"ranks ended with {[one.exitcode for one in ranks]}; see {log}")
        return list(reader.recv())


def _rank(
    rank: int,
    seats: Sequence[Seat],
    words: Sequence[str],
    link: WanLink | None,
    log: Path,
    port: int,
    writer: Connection,
) -> None:
    seat = seats[rank]
    if link is not None and seat.site is not None:
        link.enter(seat.site)
    address = "127.0.0.1" if link is None else ADDRESSES[seats[0].site or "edge"]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(seats)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **({} if link is None else {"GLOO_SOCKET_IFNAME": INTERFACE}),
    }
    out = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    if seat.wait_s:
        slow_down(seat.wait_s)
    marks: list[Mark] = []
    _note_steps(marks)
    own = [word.format(node=seat.node, site=seat.site or "", kind=seat.kind) for word in words]
    code: object = 0
    try:
        vtp(own)
    except SystemExit as leave:
        code = leave.code
    if rank == 0:
        writer.send(marks)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if code else 0)


def _note_steps(marks: list[Mark]) -> None:
    import torch.distributed as dist
    from megatron.training import training

    step = training.train_step
    talking_s = 0.0

    def noting(*args: Any, **kwargs: Any) -> Any:
        marks.append((time.perf_counter(), talking_s))
        return step(*args, **kwargs)

    def timed(act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal talking_s
        begin_s = time.perf_counter()
        result = act(*args, **kwargs)
        talking_s += time.perf_counter() - begin_s
        return result

    class Handle:
        """Of a collective that goes on while its rank computes; what is waited for counts."""

        def __init__(self, work: dist.Work) -> None:
            self._work = work

        def wait(self) -> object:
            return timed(self._work.wait)

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            work = timed(collective, *args, **kwargs)
            return None if work is None else Handle(work)

        return act

    training.train_step = noting
    # A batch is broadcast to the ranks of a stage, too.
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, counted(getattr(dist, name)))
