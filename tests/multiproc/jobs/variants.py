"""Runs that differ from those of core_job in one thing: in what is built, started, read, or asked on the way."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.distributed.distributed_c10d import _pg_map

import vtp_plugin
from tests.multiproc.cases.case_parts import VOCAB
from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.hooks.gathered_attention import GatheredAttention
from tests.multiproc.jobs.core_job import Trainer, applied, count_threads, cpu_only, model_parallel
from tests.ordering.recorder import Recorder
from tests.ordering.trace import END_OF_STEP, format_trace
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.api import current_session
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.patches.certified.certified_tensors import bare
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.platform.detect import detect


def train_with(case: Case, sizes: dict[int, int]) -> str:
    """Train one step with other context-parallel sizes in the configuration, by stage; give the refusal."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        trainer.config.context_parallel_size = sizes.get(stage, trainer.config.context_parallel_size)
        try:
            trainer.step(0)
        except ConfigError as error:
            return str(error)
    return ""


def train_late(case: Case) -> RankResult:
    """Run a case on this rank with the functions that this module took from Megatron before the plugin was applied.

    Its ``finalize_model_grads`` is the one that a tied embedding needs the plugin's replacement for. Another one is
    taken under a name of this module's own, and only here: with it ``apply()`` searches all that is loaded, and each
    job after this one would wait for that.
    """
    names = globals()
    names["choose_schedule"] = get_forward_backward_func
    before = finalize_model_grads, names["choose_schedule"]
    try:
        init_gloo()
        with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
            now = finalize_model_grads, names["choose_schedule"]
            trainer.config.finalize_model_grads_func = finalize_model_grads
            assert all(one is not other for one, other in zip(now, before, strict=True)), "nothing was rebound"
            result = trainer.run()
        assert (finalize_model_grads, names["choose_schedule"]) == before, "revert() left a replacement"
    finally:
        del names["choose_schedule"]
    return result


def searched_for_names() -> list[bool]:
    """Apply the plugin in a process of the tests; tell of each set of patches whether all that is loaded was read."""
    with applied(Case.of(sizes=(1, 2)), force=False):
        session = current_session()
        assert session is not None
        return [not patches.is_reached for patches in session.applied]


def start_and_listen(sizes: Sequence[int], **options: Any) -> str:
    """Apply the plugin, make the groups, and return what came out."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as stream:
        os.dup2(stream.fileno(), 2)
        try:
            init_gloo()
            vtp_plugin.apply(vtp_size_list=sizes, device="cpu", timeout_s=TIMEOUT_S, **options)
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(sizes))
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            parallel_state.destroy_model_parallel()
            vtp_plugin.revert()
        stream.seek(0)
        return stream.read().decode()


Weights = dict[str, tuple[torch.Tensor, int | None]]


def draw(
    case: Case, edge_seed: str | None, *, is_told: bool = True, num_steps: int = 0
) -> tuple[int, Weights, list[str]]:
    """Build the model, and train so many steps.

    Args:
        case: a U.
        edge_seed: of ``apply()``.
        is_told: the script builds in ``drawing_edge_weights()``.
        num_steps: to train.

    Returns:
        Stage of this rank, its start weights by chunk and name, each with the dimension in which it is cut, and the
        warnings that it has got.
    """
    init_gloo()
    said = _Said()
    logging.getLogger("vtp_plugin").addHandler(said)
    try:
        return (*_draw(case, edge_seed, is_told=is_told, num_steps=num_steps), said.lines)
    finally:
        logging.getLogger("vtp_plugin").removeHandler(said)


class _Said(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _draw(case: Case, edge_seed: str | None, *, is_told: bool, num_steps: int) -> tuple[int, Weights]:
    with applied(case, force=False, edge_seed=edge_seed), model_parallel(case):
        drawing: Any = vtp_plugin.drawing_edge_weights() if is_told else contextlib.nullcontext()
        with drawing:
            trainer = Trainer(case)
        with closing(trainer):
            weights = {
                f"{number} {name}": (
                    weight.detach().clone(),
                    weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None,
                )
                for number, chunk in enumerate(trainer.model)
                for name, weight in chunk.named_parameters()
            }
            for step in range(num_steps):
                trainer.step(step)
        return parallel_state.get_pipeline_model_parallel_rank(), weights


BATCH = ("tokens", "labels", "loss_mask", "position_ids")


def batch_of_the_edge() -> dict[str, list[list[float]] | None]:
    """Share a batch inside the edge as Megatron's own script does, whose flags do not know the chunk."""
    init_gloo()
    case = Case.of(sizes=(2, 1), layers=(1, 1, 1))
    with applied(case, force=False), model_parallel(case):
        if parallel_state.get_pipeline_model_parallel_rank() != 0:
            return {}
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        numbers = torch.arange(6).view(2, 3)
        whole = {key: numbers + 10 * i for i, key in enumerate(BATCH)}
        whole["loss_mask"] = whole["loss_mask"].float()
        share: Callable[..., dict[str, Any]] = utils.get_batch_on_this_tp_rank
        batch = share(
            {**whole, "attention_mask": None} if tp_rank == 0 else {},
            broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
            broadcast_group=parallel_state.get_tensor_model_parallel_group(),
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            cp_size=1,
            tp_rank=tp_rank,
            micro_batch_size=2,
            seq_length=3,
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=len(case.stages.sizes),
            is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
            is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
        )
        return {key: None if batch[key] is None else batch[key].tolist() for key in BATCH}


class Observed(Trainer):
    """Notes every forward: chunk, the microbatch that its layers were told, batches that were read before."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.forwards: list[tuple[int, int, int]] = []

    def _forward_step(self, iterator: Any, chunk: Any) -> Any:
        layers = bare(chunk).decoder.layers
        assert len({layer.current_microbatch for layer in layers}) == 1
        self.forwards.append((self.model.index(chunk), layers[0].current_microbatch, self.num_read))
        return super()._forward_step(iterator, chunk)


def forwards(case: Case) -> list[tuple[int, int, int]]:
    """Train one step; see :class:`Observed`."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Observed(case)) as trainer:
        trainer.step(0)
        return trainer.forwards


def start_a_u(case: Case) -> tuple[tuple[str, ...], list[tuple[str, tuple[int, ...]]]]:
    """Give the names in torch.distributed that mean something else then, and all calls that make a group."""
    init_gloo()
    before = dict(vars(torch.distributed))
    calls: list[tuple[str, tuple[int, ...]]] = []

    def new_group(ranks: list[int] | None = None, *args: Any, **options: Any) -> Any:
        calls.append((options.get("group_desc") or "", tuple(ranks or ())))
        return before["new_group"](ranks, *args, **options)

    with applied(case, force=False), pytest.MonkeyPatch.context() as patch:
        changed = tuple(name for name, value in vars(torch.distributed).items() if before.get(name) is not value)
        patch.setattr(torch.distributed, "new_group", new_group)
        with model_parallel(case):
            return changed, calls


def norms(case: Case) -> list[list[float]]:
    """Give the two-norm and the largest of all gradients of a step, of those of stage 0 and of those of the others."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        for chunk in trainer.model:
            chunk.zero_grad_buffer()
        trainer._pass(0, forward_only=False)
        optimizer = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0]
        optimizer.prepare_grads()
        # Families before 0.19 have another name, and take no maximum of nothing.
        is_newest = hasattr(optimizer, "get_grads_for_grad_norm")
        none = [] if is_newest else [torch.zeros(1)]
        get_gradients = optimizer.get_grads_for_grad_norm if is_newest else optimizer.get_main_grads_for_grad_norm
        gradients, group = get_gradients(), optimizer.get_grad_stats_parallel_group()
        is_edge = parallel_state.get_pipeline_model_parallel_rank() == 0
        return [
            [float(get_grad_norm_fp32(some, kind, group)) for kind in (2, torch.inf)]
            for some in (gradients, gradients if is_edge else none, none if is_edge else gradients)
        ]


def refused_steps(case: Case, options: dict[str, Any]) -> dict[str, str]:
    """Try a step with one option of the model's configuration at a time, of those that it has; give the refusals."""
    init_gloo()
    lines = {}
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        for name, value in options.items():
            if not hasattr(trainer.config, name):
                continue
            before = getattr(trainer.config, name)
            setattr(trainer.config, name, value)
            with pytest.raises(ConfigError) as refusal:
                trainer._pass(0, forward_only=False)
            setattr(trainer.config, name, before)
            lines[name] = str(refusal.value)
    return lines


_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_OTHERS: tuple[dict[str, Any], ...] = (
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 5},
    {"order": "tp-cp-ep-pp-dp"},
)


class Left(NamedTuple):
    """What this process holds: process groups, open file descriptors, threads."""

    num_groups: int
    num_descriptors: int
    num_threads: int


def left() -> Left:
    """Count what this process holds."""
    gc.collect()
    return Left(len(_pg_map), len(os.listdir("/proc/self/fd")), count_threads())


def train_in_turn(parts: Sequence[Sequence[Case]]) -> tuple[list[list[RankResult]], list[list[Left]]]:
    """Train cases one after another, each with a start of its own; the cases of a part share one ``apply()``.

    Returns:
        The results of every part, and what was held before its first case and after each.
    """
    init_gloo()
    results: list[list[RankResult]] = []
    counts: list[list[Left]] = []
    for part in parts:
        with (
            cpu_only()
            if part[0].execution.plugin == "stock"
            else applied(part[0], force=part[0].execution.plugin == "forced")
        ):
            results.append([])
            counts.append([left()])
            for case in part:
                with model_parallel(case), closing(Trainer(case)) as trainer:
                    results[-1].append(trainer.run())
                counts[-1].append(left())
                del trainer
    return results, counts


def refusals(
    case: Case, calls: Sequence[Mapping[str, Any]], *, has_started: bool
) -> tuple[list[str], RankResult, list[Left]]:
    """Start with wrong arguments, maybe after a right start, and then train a case.

    Returns:
        What each wrong start said, the result, and what was held before the wrong starts and after them.
    """
    init_gloo()
    said: list[str] = []
    with applied(case, force=False):
        if has_started:
            with model_parallel(case):
                pass
        held = [left()]
        for options in calls:
            try:
                parallel_state.initialize_model_parallel(**options)
                said.append("nothing")
            except VtpError as error:
                said.append(str(error))
        held.append(left())
        with model_parallel(case), closing(Trainer(case)) as trainer:
            try:
                parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(case.stages.sizes))
            except VtpError as error:
                said.append(str(error))
            return said, trainer.run(), held


def start_again(facts: dict[str, Any]) -> None:
    """Have a script start model parallelism once more, before it builds the model; note what wrong starts say."""
    training: Any = sys.modules["megatron.training.training"]
    original = training.initialize_megatron
    facts["said"] = []

    def initialize_megatron(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        args = training.get_args()
        sizes = {name: getattr(args, name) for name in _SIZES}
        for wrong in _OTHERS:
            parallel_state.destroy_model_parallel()
            try:
                parallel_state.initialize_model_parallel(**{**sizes, **wrong})
                facts["said"].append("nothing")
            except VtpError as error:
                facts["said"].append(str(error))
        parallel_state.initialize_model_parallel(**sizes)
        return result

    training.initialize_megatron = initialize_megatron


def train_packed(case: Case, num_samples: int) -> tuple[RankResult, list[list[int]]]:
    """Run a case whose microbatches are one row of samples; give also the lengths that this rank's attention saw."""
    init_gloo()
    with (
        applied(case, force=case.execution.plugin == "forced"),
        model_parallel(case),
        closing(PackedTrainer(case, num_samples)) as trainer,
    ):
        return trainer.run(), trainer.seen


def attend() -> list[torch.Tensor]:
    """Attend over a row of three samples, and over each of them alone by torch's own function."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.rand(3, 9, 2, 4, generator=generator)  # query, key and value of [T, heads, channels]
    ends = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    together = GatheredAttention(SimpleNamespace(kv_channels=4))(*parts, None, packed_seq_params=packed)
    by_head = parts.transpose(1, 2)
    alone = [
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        for query, key, value in (by_head[:, :, begin:end] for begin, end in pairwise(ends.tolist()))
    ]
    return [together.view(9, 2, 4).transpose(0, 1), torch.cat(alone, dim=1)]


class PackedTrainer(Trainer):
    """Every stage shares the rows of its first rank."""

    micro_batch_size = 1

    def __init__(self, case: Case, num_samples: int) -> None:
        super().__init__(case)
        self.seen: list[list[int]] = []
        self._num_samples = num_samples

    def _batches(self, chunk: Any, step: int) -> Iterator[dict[str, torch.Tensor]] | None:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None
        return map(self._count, _rows(self.case, step, self._num_samples))

    def _forward_step(self, iterator: Iterator[dict[str, torch.Tensor]] | None, chunk: Any) -> Any:
        batch = _share(next(iterator) if iterator else {}, self.case, bare(chunk))
        lengths, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
        self.seen.append(lengths.tolist())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)

        def loss_function(losses: torch.Tensor) -> Any:
            mask = batch["loss_mask"]
            loss = (losses.float() * mask).sum() / mask.sum()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function


def _share(row: dict[str, torch.Tensor], case: Case, model: Any) -> dict[str, Any]:
    """Give all ranks of a stage the row that its first one has read.

    By Megatron's own function, which gives the lengths to the stages in the middle, too; before 0.18 it knows none.
    """
    source, group = (
        parallel_state.get_tensor_model_parallel_src_rank(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    if not hasattr(utils, "get_batch_on_this_tp_rank"):
        rows = [row]
        dist.broadcast_object_list(rows, src=source, group=group)
        return rows[0]
    share: Callable[..., dict[str, torch.Tensor]] = utils.get_batch_on_this_tp_rank
    return share(
        row,
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=source,
        broadcast_group=group,
        cp_size=1,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=1,
        seq_length=case.data.seq,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=len(case.stages.sizes),
        is_pipeline_first_stage=model.pre_process,
        is_pipeline_last_stage=model.post_process,
    )


def _rows(case: Case, step: int, num_samples: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield rows of ``[1, S]`` that are cut elsewhere in every microbatch."""
    for microbatch in range(case.data.num_microbatches):
        generator = torch.Generator().manual_seed(100 * step + microbatch)
        text = torch.randint(0, VOCAB, (1, case.data.seq + 1), generator=generator)
        cuts = (torch.randperm(case.data.seq - 1, generator=generator)[: num_samples - 1] + 1).sort().values.tolist()
        ends = torch.tensor([0, *cuts, case.data.seq], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(length)) for length in ends.diff()])
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, case.data.seq),
            "position_ids": positions[None],
            "cu_seqlens": ends[None],
            "max_seqlen": ends.diff().max()[None],
        }


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
