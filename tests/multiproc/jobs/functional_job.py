"""Training steps written by hand over the exchange functions, and what these return and refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication, schedules

from tests.multiproc.cases.case_parts import HIDDEN, MICRO_BATCH
from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.hosts import host_name
from tests.support.pool import init_gloo
from vtp_plugin import functional as p2p
from vtp_plugin.errors import ConfigError
from vtp_plugin.patches.hosts import load_host

Style = Literal["vtp", "reqs", "impl"]
Keyword = Literal["", "group", "next_rank", "prev_rank"]
REFERENCE = "mindspeed_mm.patchs.layerwise_disaggregated_training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One forward or backward of a hand-written step.

    Attributes:
        chunk: model chunk of the own stage.
        is_end: of the edge: of the model's last part.
    """

    chunk: int
    microbatch: int
    is_backward: bool
    is_end: bool


def train_by_hand(case: Case, style: Style, is_async: bool, keyword: Keyword = "") -> RankResult:
    """Run a case on this rank, with steps that call every exchange themselves."""
    init_gloo()
    with applied(case, force=False), model_parallel(case):
        if keyword:
            p2p.install(REFERENCE)
        with closing(ByHand(case, style, is_async, keyword)) as trainer:
            return trainer.run()


class ByHand(Trainer):
    """Walks a list of forwards and backwards; asynchronous receives are posted one before their compute.

    With a keyword it imports what it calls by the names of the Ascend implementation, and chooses replicas by that
    keyword, else by groups where there are several.
    """

    def __init__(self, case: Case, style: Style, is_async: bool, keyword: Keyword = "") -> None:
        super().__init__(case)
        self._style = style
        self._is_async = is_async
        self._keyword = keyword
        self._p2p: Any = p2p
        if keyword:
            self._p2p = importlib.import_module(f"{REFERENCE}.p2p_communication_patch")
        config: Any = self.config
        assert config.layerwise_disaggregated_training is bool(case.model.layers)
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._groups = p2p.pipeline_groups()
        parts = parallel_state.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        self._shape = (case.data.seq // parts, MICRO_BATCH, HIDDEN)
        if dist.get_rank() == 0 and hasattr(p2p_communication, "P2PCommunicator"):
            # On one rank alone: making Megatron's communicator is no exchange and no agreement.
            p2p_communication.P2PCommunicator(self._groups[0], self.config)

    def _pass(self, step: int, *, forward_only: bool) -> list[float]:
        num_microbatches = self.case.num_microbatches_at(self._stage, step)
        num_replicas = len(self._groups)
        works = [
            replace(work, microbatch=work.microbatch * num_replicas + replica)
            for work in _works(self.case, self._stage, num_microbatches // num_replicas)
            for replica in range(num_replicas)
            if not (forward_only and work.is_backward)
        ]
        iterators = [self._batches(chunk, step) for chunk in self.model]
        reports: list[dict[str, torch.Tensor]] = []
        kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        posted: dict[Work, Callable[[], torch.Tensor | None]] = {}
        sends: list[Any] = []
        num_tokens = torch.zeros([], dtype=torch.int)
        host, backward_step = load_host(host_name()), cast("Callable[..., Any]", schedules.backward_step)
        for i, work in enumerate(works):
            for ahead in works[i : i + 1 + self._is_async]:
                if ahead not in posted:
                    posted[ahead] = self._receive(ahead)
            received = posted[work]()
            if work.is_backward:
                activation, output = kept.pop((work.chunk, work.microbatch))
                arguments = host.backward_arguments(self.model[work.chunk], self.config)
                self._send(work, backward_step(activation, output, received, *arguments), sends)
                continue
            host.enter_chunk(work.chunk)
            output, tokens = host.forward_step(
                chunk=work.chunk,
                num_chunks=len(self.model),
                is_first_microbatch=False,
                forward_step_func=self._forward_step,
                data_iterator=iterators[work.chunk],
                model=self.model[work.chunk],
                num_microbatches=num_microbatches,
                input_tensor=received,
                forward_data_store=reports,
                config=self.config,
                collect_non_loss_data=False,
                current_microbatch=work.microbatch,
                is_last_stage=self._is_last(work),
            )
            num_tokens += tokens
            self._send(work, output, sends)
            if not forward_only:
                kept[work.chunk, work.microbatch] = received, output
                schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        for handle in sends:
            handle.wait()
        if not forward_only:
            finalize = self.config.finalize_model_grads_func
            assert finalize is not None
            finalize(self.model, num_tokens if self.case.numerics.per_token_loss else None)
        return [report["loss"].item() for report in reports]

    def _where(self, work: Work) -> dict[str, Any]:
        """Choose the replica, in odd microbatches by a list of one."""
        replica = work.microbatch % len(self._groups)
        if not self._keyword:
            return {"group": self._groups[replica] if len(self._groups) > 1 else None}
        if self._keyword == "group":
            chosen: Any = self._groups[replica]
        else:
            # Megatron knows one replica only. A rank that leads no stage gets a rank of its own pipeline group there.
            queries: Any = parallel_state if len(self._groups) == 1 else p2p
            ranks = getattr(queries, f"get_pipeline_model_parallel_{self._keyword}")()
            chosen = ranks[replica] if isinstance(ranks, list) else ranks
        return {self._keyword: [chosen] if work.microbatch % 2 else chosen}

    def _is_last(self, work: Work) -> bool:
        return work.is_end if self.case.model.layers else self._stage == len(self.case.stages.sizes) - 1

    def _needs_no_message(self, work: Work, *, upstream: bool) -> bool:
        return (self._stage == 0 and not work.is_end) if upstream else self._is_last(work)

    def _receive(self, work: Work) -> Callable[[], torch.Tensor | None]:
        """Receive what a compute needs; give a function that returns it when it is there."""
        reqs: dict[str, Any] | None
        if self._style == "vtp":
            if self._needs_no_message(work, upstream=not work.is_backward):
                return lambda: None
            receive = self._p2p.vtp_recv_backward if work.is_backward else self._p2p.vtp_recv_forward
            if not self._is_async:
                return lambda: receive(self._shape, self.config, **self._where(work))
            tensor, reqs = receive(self._shape, self.config, async_op=True, **self._where(work))
        elif self._style == "impl":
            if self._needs_no_message(work, upstream=not work.is_backward):
                return lambda: None
            from_prev, from_next, reqs = self._communicate(
                work, recv_prev=not work.is_backward, recv_next=work.is_backward, tensor_shape=self._shape
            )
            tensor = from_next if work.is_backward else from_prev
        else:
            receive = self._p2p.recv_backward_with_reqs if work.is_backward else self._p2p.recv_forward_with_reqs
            options = {"wait_on_reqs": not self._is_async, **self._where(work)}
            tensor, reqs = receive(self._shape, self.config, work.is_end, **options)

        def wait() -> torch.Tensor | None:
            for request in (reqs or {}).values():
                request.wait()
            return tensor

        return wait

    def _send(self, work: Work, tensor: torch.Tensor, sends: list[Any]) -> None:
        if self._style == "vtp":
            if not self._needs_no_message(work, upstream=work.is_backward):
                send = self._p2p.vtp_send_backward if work.is_backward else self._p2p.vtp_send_forward
                sends += send(tensor, **self._where(work)) or ()
        elif self._style == "impl":
            if not self._needs_no_message(work, upstream=work.is_backward):
                name = "tensor_send_prev" if work.is_backward else "tensor_send_next"
                _, _, reqs = self._communicate(work, **{name: tensor})
                sends += (reqs or {}).values()
        else:
            send = self._p2p.send_backward if work.is_backward else self._p2p.send_forward
            send(tensor, self.config, work.is_end, wait_on_reqs=not self._is_async, **self._where(work))

    def _communicate(self, work: Work, **operations: Any) -> Any:
        nothing = dict.fromkeys(("tensor_send_next", "tensor_send_prev", "tensor_shape")) | dict.fromkeys(
            ("recv_prev", "recv_next"), False
        )
        wait_on_reqs = not self._is_async
        return self._p2p._communicate_impl(
            **{**nothing, **operations}, config=self.config, wait_on_reqs=wait_on_reqs, **self._where(work)
        )


def _works(case: Case, stage: int, num_microbatches: int) -> Iterator[Work]:
    """Yield the order of the Ascend implementation for a U, with its K clipped, and of 1F1B for a plain pipeline."""
    num_stages, m = len(case.stages.sizes), num_microbatches

    def work(name: str, microbatch: int) -> Work:
        is_end = name in ("FE", "BS")
        return Work(chunk=int(is_end), microbatch=microbatch, is_backward=name[0] == "B", is_end=is_end)

    warmup = min(num_stages - stage, m)
    if not case.model.layers or stage > 0:
        yield from (work("F", i) for i in range(warmup))
        for i in range(m - warmup):
            pair = (work("F", warmup + i), work("B", i))
            yield from pair if case.model.layers else pair[::-1]
        yield from (work("B", i) for i in range(m - warmup, m))
        return
    ends = min((4 * num_stages + 1) // 6, m)
    yield from (work("FS", i) for i in range(warmup))
    for i in range(ends):
        yield from (work("FE", i), work("BS", i))
    for i in range(m - ends):
        if warmup + i < m:
            yield work("FS", warmup + i)
        yield from (work("FE", ends + i), work("BS", ends + i), work("BE", i))
    yield from (work("BE", i) for i in range(m - ends, m))


def returns(transport: str) -> list[str]:
    """Send one tensor round a U of the sizes 1 and 2, and its gradient back; tell what the functions return."""
    init_gloo()
    case = Case.of(sizes=(1, 2), layers=(1, 1, 1), transport=transport)
    with applied(case, force=False), model_parallel(case):
        config = ModelParallelConfig(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            batch_p2p_comm=False,
        )
        config.hidden_size = 2  # pyright: ignore[reportAttributeAccessIssue]
        shape = (4, 1, 2)
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        tensor = torch.arange(8.0).view(shape)
        notes: list[Any] = []
        if parallel_state.get_pipeline_model_parallel_rank() == 0:
            notes += _both_ends_of_the_edge(tensor, config, group)
        else:
            activation, reqs = p2p.vtp_recv_forward(shape, config, async_op=True, group=group)
            reqs["recv_prev"].wait()
            notes += [list(reqs), activation.requires_grad, activation.detach().equal(tensor)]
            notes.append(_count(p2p.vtp_send_forward(activation * 2, group=[group])))
            gradient = p2p.vtp_recv_backward(shape, config, group=[group])
            notes.append(gradient.detach().equal(tensor * 3))
            notes.append(p2p.send_backward(gradient, config))
            p2p.send_forward(activation, config)
        return [str(note) for note in notes]


def _both_ends_of_the_edge(tensor: torch.Tensor, config: ModelParallelConfig, group: Any) -> Iterator[Any]:
    shape = tensor.shape
    yield _count(p2p.vtp_send_forward(tensor))
    yield p2p.recv_forward_with_reqs(shape, config)
    activation, reqs = p2p.recv_forward_with_reqs(shape, config, True, group=[group], wait_on_reqs=False)
    assert activation is not None and reqs is not None
    yield list(reqs)
    reqs["recv_prev"].wait()
    yield activation.detach().equal(tensor * 2)
    yield p2p.recv_backward_with_reqs(shape, config, True)
    yield p2p.send_forward(tensor, config, True)
    yield p2p.send_backward(tensor, config)
    yield _count(p2p.vtp_send_backward(tensor * 3, group=group))
    gradient, reqs = p2p.recv_backward_with_reqs(shape, config)
    assert gradient is not None
    yield reqs, gradient.detach().equal(tensor * 3)
    activation, reqs = p2p.recv_forward_with_reqs(shape, config, is_end_stage=True)
    assert activation is not None
    yield reqs, activation.detach().equal(tensor)


def lists_of_groups() -> list[str]:
    """Let an edge of one replica send one tensor to both cloud replicas; each sends another multiple back each time."""
    init_gloo()
    case = Case.of(sizes=(1, 1), dp_list=(1, 2), layers=(1, 1, 1))
    with applied(case, force=False), model_parallel(case):
        config = ModelParallelConfig(
            pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16, batch_p2p_comm=False
        )
        config.hidden_size = 2  # pyright: ignore[reportAttributeAccessIssue]
        tensor = torch.arange(8.0, dtype=torch.bfloat16).view(4, 1, 2)
        if parallel_state.get_pipeline_model_parallel_rank() > 0:
            activation = p2p.vtp_recv_forward(tensor.shape, config)
            for number in range(_NUM_RECEIVES):
                p2p.send_forward(_sent_back(activation.detach(), dist.get_rank(), number), config)
            return [str(activation.detach().equal(tensor)), str(p2p.get_pipeline_model_parallel_next_rank())]
        groups = p2p.pipeline_groups()
        notes: list[Any] = [
            _count(p2p.vtp_send_forward(tensor, config, next_rank=[1, 2])),
            p2p.get_pipeline_model_parallel_next_rank(),
            p2p.get_pipeline_model_parallel_prev_rank(),
            _refusal(lambda: p2p.vtp_send_forward(tensor, config)),
            _refusal(lambda: p2p.vtp_recv_forward(tensor.shape, config, prev_rank=[1, 2], group=groups[::-1])),
            _refusal(lambda: p2p.vtp_recv_forward(tensor.shape, config, prev_rank=1, group=groups)),
            _refusal(lambda: p2p.vtp_recv_forward(tensor.shape, config, prev_rank=0)),
        ]
        return [str(note) for note in [*notes, *_means(tensor, config, groups)]]


_NUM_RECEIVES = 7


def _sent_back(tensor: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    """What a cloud rank sends: numbers whose sum bfloat16 cannot hold, as fp32 can."""
    return (tensor + 1) * (1 + 2.0**-7 * (1 + number)) * (256.0 if rank == 1 else 1.0)


def _means(tensor: torch.Tensor, config: ModelParallelConfig, groups: Any) -> Iterator[bool]:
    """Receive from both replicas at once, in every way; the last receives are of one replica."""
    shape = tensor.shape

    def is_mean(received: Any, number: int) -> bool:
        parts = [_sent_back(tensor, rank, number) for rank in (1, 2)]
        mean = ((parts[0].float() + parts[1].float()) / 2).to(torch.bfloat16)
        assert received.is_leaf and received.requires_grad
        return received.dtype == torch.bfloat16 and received.detach().equal(mean)

    yield is_mean(p2p.vtp_recv_forward(shape, config, group=groups), 0)
    received, reqs = p2p.vtp_recv_forward(shape, config, async_op=True, group=groups, prev_rank=[1, 2])
    reqs["recv_prev"].wait()
    yield is_mean(received, 1)
    received, none = p2p.recv_forward_with_reqs(shape, config, True, prev_rank=[1, 2])
    yield none is None and is_mean(received, 2)
    received, late = p2p.recv_forward_with_reqs(shape, config, True, group=groups, wait_on_reqs=False)
    options: dict[str, Any] = {"recv_prev": True, "tensor_shape": shape, "config": config, "group": groups}
    second, nothing, later = p2p._communicate_impl(**options, wait_on_reqs=False)
    assert nothing is None and list(late or ()) == list(later or ()) == ["recv_prev"]
    for reqs in (late, later, later):
        (reqs or {})["recv_prev"].wait()
    yield is_mean(received, 3) and is_mean(second, 4)
    received, _, none = p2p._communicate_impl(**options)
    yield none is None and is_mean(received, 5)
    for rank, group in enumerate(groups, start=1):
        received = p2p.vtp_recv_forward(shape, config, group=[group], prev_rank=rank)
        yield received.detach().equal(_sent_back(tensor, rank, 6))


def _count(works: list[Any] | None) -> int | None:
    return None if works is None else len(works)


def refusals() -> list[str]:
    """Ask for what there is not on a plain pipeline of two replicas; collect the messages."""
    init_gloo()
    case = Case.of(sizes=(1, 1), dp=2)
    lines = [_refusal(lambda: p2p.vtp_send_forward(torch.ones(1)), RuntimeError)]
    with applied(case, force=True), model_parallel(case):
        batched, config, untyped = (
            ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, batch_p2p_comm=is_batched)
            for is_batched in (True, False, False)
        )
        untyped.pipeline_dtype = None  # pyright: ignore[reportAttributeAccessIssue]
        batched.hidden_size = config.hidden_size = 2  # pyright: ignore[reportAttributeAccessIssue]
        own: Any = parallel_state.get_pipeline_model_parallel_group()
        replicas: Any = parallel_state.get_data_parallel_group()
        tensor, shape = torch.ones(4, 1, 2), (4, 1, 2)
        is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
        past_the_end = p2p.vtp_send_backward if is_first else p2p.vtp_send_forward
        before = p2p.vtp_recv_forward if is_first else p2p.vtp_recv_backward
        name = "prev_rank" if is_first else "next_rank"
        wrapped = {name: getattr(parallel_state, f"get_pipeline_model_parallel_{name}")()}
        for query in ("get_pipeline_model_parallel_next_rank", "get_pipeline_model_parallel_prev_rank"):
            assert getattr(p2p, query)() == getattr(parallel_state, query)() == (dist.get_rank() + 2) % 4
        to_neighbour = p2p.vtp_send_forward if is_first else p2p.vtp_send_backward
        from_neighbour = p2p.recv_backward_with_reqs if is_first else p2p.recv_forward_with_reqs
        recv: dict[str, Any] = {"recv_next" if is_first else "recv_prev": True}
        lines += [
            _refusal(lambda: past_the_end(tensor, config)),
            _refusal(lambda: before(shape, config, **wrapped)),
            _refusal(lambda: p2p.recv_forward_with_reqs(shape, config, True, group=[own, own])),
            _refusal(lambda: p2p.vtp_send_forward(tensor, config, group=replicas)),
            _refusal(lambda: p2p.recv_forward_with_reqs(shape, batched, True, wait_on_reqs=False)),
            _refusal(lambda: from_neighbour(shape, untyped), RuntimeError),
            _refusal(lambda: p2p._communicate_impl(**recv, config=config), RuntimeError),
            _refusal(lambda: to_neighbour(tensor, config, next_rank=dist.get_rank(), prev_rank=dist.get_rank())),
            _refusal(lambda: to_neighbour(tensor, config, next_rank=[], prev_rank=[])),
        ]
    return lines


def _refusal(call: Callable[[], Any], also: type[Exception] = ValueError) -> str:
    try:
        call()
    except ConfigError as error:
        assert isinstance(error, also), type(error)
        return str(error)
    raise AssertionError("this was not refused")
