"""Jobs whose communication is recorded from before the first group is made."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.ordering.recorder import Recorder
from tests.ordering.trace import END_OF_STEP, format_trace
from tests.support.pool import init_gloo
from vtp_plugin.platform import detect
from vtp_plugin.platform.cpu import CpuPlatform


def record(case: Case, *, gathers_by_messages: bool) -> tuple[str, list[list[float]]]:
    """Train on this rank; give its trace as text, and the losses by step and microbatch.

    Args:
        case: what to train.
        gathers_by_messages: complete slices as on gloo; else as on the devices that the checked models are of.
    """
    init_gloo()
    with pytest.MonkeyPatch.context() as patch, Recorder(detect("cpu")) as recorder:
        patch.setattr(CpuPlatform, "gathers_by_messages", gathers_by_messages)
        return _record(case, recorder)


def _record(case: Case, recorder: Recorder) -> tuple[str, list[list[float]]]:
    with applied(case, force=True), model_parallel(case):
        with closing(RecordedTrainer(case, recorder)) as trainer:
            losses = [trainer.step(step)[0] for step in range(case.data.num_steps)]
        return format_trace(recorder.trace()), losses


class RecordedTrainer(Trainer):
    """Marks the compute of every microbatch, such as ``"forward 1.3"`` for the fourth of chunk 1, and ends of steps."""

    def __init__(self, case: Case, recorder: Recorder) -> None:
        super().__init__(case)
        self._recorder = recorder
        self._num_forward: dict[int, int] = {}

    def step(self, step: int) -> tuple[list[float], Any, Any, Any]:
        self._num_forward = dict.fromkeys(range(self.case.model.num_virtual), 0)
        result = super().step(step)
        self._recorder.note(END_OF_STEP)
        return result

    def _forward_step(self, iterator: Any, chunk: Any) -> Any:
        index = self.model.index(chunk)
        name = f"{index}.{self._num_forward[index]}"
        self._num_forward[index] += 1
        recorder = self._recorder
        recorder.note(f"forward {name}")
        output, loss_function = super()._forward_step(iterator, chunk)
        output.register_hook(lambda _: recorder.note(f"backward {name}"))
        return output, loss_function


class _SumOfBoth(torch.autograd.Function):
    """All-reduces in its backward pass only, as Megatron's tensor-parallel regions do."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        dist.all_reduce(gradient)
        return gradient


def record_every_operation() -> tuple[str, str]:
    """Use every operation that Megatron uses, on two ranks, and check the results; give two traces as text.

    The second one is of a send that nobody waits for.
    """
    rank = init_gloo()
    other = 1 - rank
    platform = detect("cpu")
    with Recorder(platform) as recorder:
        messages, collectives = dist.new_group([0, 1], group_desc="messages"), dist.new_group([0, 1])
        tensor, received = torch.full((4,), float(rank)), torch.empty(4)
        sum_work = dist.all_reduce(tensor[:2], group=collectives, async_op=True)
        send, receive = dist.isend(tensor[2:], other, messages), dist.irecv(received[:2], other, messages)
        assert send is not None and receive is not None and sum_work is not None
        recorder.note("compute")
        receive.wait()
        send.wait()
        sum_work.wait()
        both = [dist.P2POp(dist.isend, tensor, other, messages), dist.P2POp(dist.irecv, received, other, messages)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert tensor.tolist() == [1.0, 1.0, rank, rank]
        assert received.tolist() == [1.0, 1.0, other, other]
        if rank == 0:
            dist.send(tensor, other, messages)
        else:
            dist.recv(received, other, messages)
        _check_collectives(rank)
        leaf = torch.ones(2, requires_grad=True)
        (_SumOfBoth.apply(leaf) * (rank + 1)).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]
    with Recorder(platform) as careless:
        with pytest.raises(RuntimeError, match="active already"):
            Recorder(platform).__enter__()
        if rank == 0:
            dist.isend(tensor, other, messages)
        else:
            dist.recv(received, other, messages)
        dist.barrier()
    dist.barrier()
    return format_trace(recorder.trace()), format_trace(careless.trace())


def _check_collectives(rank: int) -> None:
    mine, pair = torch.full((2,), float(rank)), torch.tensor([0.0, 0.0, 1.0, 1.0])
    dist.broadcast(root := mine.clone(), src=1)
    assert root.tolist() == [1.0, 1.0]
    dist.all_gather_into_tensor(whole := torch.empty(4), mine)
    assert torch.equal(whole, pair)
    dist.all_gather(parts := [torch.empty(2), torch.empty(2)], mine)
    assert torch.equal(torch.cat(parts), pair)
    dist.reduce_scatter_tensor(part := torch.empty(2), pair)
    assert part.tolist() == [2.0 * rank] * 2
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    dist.scatter(part, parts if rank == 0 else None, src=0)
    assert torch.equal(part, mine)
    dist.reduce(mine.clone(), dst=0, op=dist.ReduceOp.MAX)
    dist.all_to_all_single(whole, pair)
    dist.barrier()
