"""What Megatron hands out and asks on the ranks of a U-shaped pipeline, beside training itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, utils
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, _bare, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.errors import ConfigError

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def batch_of_the_edge() -> dict[str, list[list[float]] | None]:
    """Share a batch inside the edge as Megatron's own script does, whose flags do not know the chunk."""
    init_gloo()
    case = Case.of(sizes=(2, 1), layers=(1, 1, 1))
    with applied(case, force=False), model_parallel(case):
        if parallel_state.get_pipeline_model_parallel_rank() != 0:
            return {}
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        numbers = torch.arange(6).view(2, 3)
        whole = {key: numbers + 10 * i for i, key in enumerate(KEYS)}
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
        return {key: None if batch[key] is None else batch[key].tolist() for key in KEYS}


class Observed(Trainer):
    """Notes every forward: chunk, the microbatch that its layers were told, batches that were read before."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.forwards: list[tuple[int, int, int]] = []

    def _forward_step(self, iterator: Any, chunk: Any) -> Any:
        layers = _bare(chunk).decoder.layers
        assert len({layer.current_microbatch for layer in layers}) == 1
        self.forwards.append((self.model.index(chunk), layers[0].current_microbatch, self.num_read))
        return super()._forward_step(iterator, chunk)


def forwards(case: Case) -> list[tuple[int, int, int]]:
    """Train one step; see :class:`Observed`."""
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Observed(case)) as trainer:
        trainer.step(0)
        return trainer.forwards


def start(case: Case) -> tuple[tuple[str, ...], list[tuple[str, tuple[int, ...]]]]:
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
