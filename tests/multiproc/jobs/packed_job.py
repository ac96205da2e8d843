"""Training on packed sequences as in Megatron: every stage reads its batch and shares it among its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams

from tests.multiproc.cases.case_parts import VOCAB
from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.hooks.gathered_attention import GatheredAttention
from tests.multiproc.jobs.core_job import Trainer, _bare, applied, model_parallel
from tests.support.pool import init_gloo


def train(case: Case, num_samples: int) -> tuple[RankResult, list[list[int]]]:
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
        batch = _share(next(iterator) if iterator else {}, self.case, _bare(chunk))
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
