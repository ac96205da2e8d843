"""Training steps of the model: spread over grids by Megatron's schedule, or all on one rank by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.mimo import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from mimo_model import (
    LANGUAGE,
    SEQ_LENGTH,
    VISION,
    draw_weights,
    for_training,
    groups_of,
    loss_sums,
    make_grid,
    make_model,
    share_of,
)
from mimo_sizes import Sizes

LR = {"sgd": 0.1, "adam": 0.01}
MOMENTUM = 0.9
EPSILON = 1e-3  # so large that rounding of gradients near zero does not decide where weights go
# Megatron keeps all of the optimizer only with use_distributed_optimizer, and stored in this form.
_STORED = {"distrib_optim_sharding_type": "dp_reshardable"}
Batch = dict[str, Any]
Report = tuple[float, float, float]
"""Sum of the losses of this rank's words, number of these words, norm of all gradients."""


class Spread:
    """The model with a grid for each module, on disjoint ranks.

    Args:
        sizes: of all modules, in the order of their ranks.
        attention: see ``make_model``.
        is_frozen: the encoder is not trained.
        clip: largest norm of the gradients; 0 does not clip.
        optimizer: ``sgd`` or ``adam``.
        dtype: of the weights; the optimizer keeps them in float32.
        options: of ``for_training``.

    Attributes:
        on_gradients: called with the model in every step, when its gradients are complete.
    """

    def __init__(
        self,
        sizes: dict[str, Sizes],
        attention: dict[str, type] | None = None,
        *,
        is_frozen: bool = False,
        clip: float = 1.0,
        optimizer: str = "sgd",
        dtype: torch.dtype = torch.float32,
        **options: bool,
    ) -> None:
        self.on_gradients: Callable[[MimoModel], None] = lambda _model: None
        self.sizes = sizes
        starts = accumulate((one.num_ranks for one in sizes.values()), initial=0)
        self.grids = {name: make_grid(sizes[name], start) for name, start in zip(sizes, starts, strict=False)}
        encoders = [name for name in sizes if name != LANGUAGE]
        self.own_name = next(name for name, grid in self.grids.items() if grid.is_current_rank_in_grid())
        self.groups = groups_of(self.grids[self.own_name])
        _prepare(self.groups.tp.rank())
        self.model = make_model(sizes, self.grids, attention, dtype=dtype)
        draw_weights(self.model)
        if is_frozen:
            self.model.modality_submodules.requires_grad_(False)
        for_training(self.model, **options)
        self.optimizer = get_mimo_optimizer(
            self.model,
            OptimizerConfig(
                optimizer=optimizer,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                sgd_momentum=MOMENTUM,
                adam_eps=EPSILON,
                lr=LR[optimizer],
                weight_decay=0.0,
                clip_grad=clip,
                use_distributed_optimizer=options.get("distributed_optimizer", False),
            ),
        )
        self.communicator = MultiModulePipelineCommunicator(
            self.grids,
            {**{name: [LANGUAGE] for name in encoders}, LANGUAGE: []},
            self.model.config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim=dict.fromkeys(encoders, 2),
        )
        if is_frozen:
            for bridge in self.communicator.bridge_comms:
                bridge.has_gradient = False  # the plugin's bridge sends none back then

    def step(self, batches: Sequence[Batch]) -> Report:
        """Train one step on these microbatches, each of the samples of all replicas."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.run(batches)
        self.on_gradients(self.model)
        _, norm, _ = self.optimizer.step()
        return (*found, float(norm))

    def run(self, batches: Sequence[Batch], *, forward_only: bool = False) -> tuple[float, float]:
        """Run the schedule; returns the sum of the losses of this rank's words, and their number."""
        dp = self.groups.dp
        shares = iter([share_of(batch, dp.rank(), dp.size()) for batch in batches])
        reports = forward_backward_pipelining_without_interleaving(
            forward_step_func=_forward_step,
            data_iterator=shares,
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=len(batches[0]["input_ids"]) // dp.size(),
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=MultiModuleProcessGroupCollection(
                module_pgs={self.own_name: self.groups},
                language_model_module_name=LANGUAGE if self.own_name == LANGUAGE else None,
            ),
        )
        total = sum((report["loss"] for report in reports), torch.zeros(2))
        # Tensor-parallel ranks have the same.
        return (0.0, 0.0) if self.groups.tp.rank() else (total[0].item(), total[1].item())

    def save(self, path: str) -> None:
        """Write a checkpoint of weights and optimizer into a folder."""
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, metadata=_STORED)
        dist_checkpointing.save({"model": model, "optimizer": optimizer}, path)

    def load(self, path: str) -> None:
        """Read what :meth:`save` wrote."""
        model = self.model.sharded_state_dict()
        wanted = {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, True, metadata=_STORED)}
        found: Any = dist_checkpointing.load(wanted, path)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None:
        """Destroy the groups; all ranks call this."""
        for name in ("finalize_model_grads_func", "grad_scale_func", "no_sync_func"):
            setattr(self.model.config, name, None)
        BridgeCommunicator.destroy_bridge_pgs()
        BridgeCommunicator.destroy_broadcast_pgs()
        for grid in self.grids.values():
            grid.destroy()
        parallel_state.destroy_global_memory_buffer()


class Alone:
    """The model on one rank, trained without any of Megatron's schedules, sums and optimizers.

    Args:
        attention: see ``make_model``.
        is_frozen: the encoder is not trained.
        clip: largest norm of the gradients; 0 does not clip.
        optimizer: ``sgd`` or ``adam``.
        encoders: names of the encoders.
        dtype: of the weights; the optimizer keeps them in float32.

    Attributes:
        on_gradients: called with the model in every step, when its gradients are complete.
    """

    def __init__(
        self,
        attention: dict[str, type] | None = None,
        *,
        encoders: Sequence[str] = (VISION,),
        is_frozen: bool = False,
        clip: float = 1.0,
        optimizer: str = "sgd",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.on_gradients: Callable[[MimoModel], None] = lambda _model: None
        # Groups of one rank; all ranks of the world make them.
        self.grids = {name: make_grid(Sizes(), 0) for name in (*encoders, LANGUAGE)}
        self.clip = clip
        self.is_here = self.grids[LANGUAGE].is_current_rank_in_grid()
        if not self.is_here:
            return
        _prepare(0)
        self.model = make_model(dict.fromkeys(self.grids, Sizes()), self.grids, attention, is_alone=True, dtype=dtype)
        draw_weights(self.model)
        if is_frozen:
            self.model.modality_submodules.requires_grad_(False)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.weights = [one.detach().float() for one in self.parameters]  # of float32 they are the parameters
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.weights, lr=LR[optimizer], momentum=MOMENTUM)
            if optimizer == "sgd"
            else torch.optim.Adam(self.weights, lr=LR[optimizer], eps=EPSILON, betas=(0.9, 0.999))
        )

    def step(self, batches: Sequence[Batch]) -> Report:
        """Train one step."""
        self.model.zero_grad()
        loss, num_tokens = self.run(batches)
        for parameter, weight in zip(self.parameters, self.weights, strict=True):
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            weight.grad = found.float() / num_tokens
            parameter.grad = weight.grad.to(parameter.dtype)
        self.on_gradients(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.clip or float("inf"))
        self.optimizer.step()
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(weight)
        return loss, num_tokens, norm.item()

    def run(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Compute the gradients of the sum of all losses."""
        sums = torch.zeros(2)
        for batch in batches:
            losses, mask = self.model(**share_of(batch, 0, 1))
            total, _, report = loss_sums(losses, mask)
            total.backward()
            sums += report["loss"]
        return sums[0].item(), sums[1].item()

    def close(self) -> None:
        """Destroy the groups; all ranks call this."""
        for grid in self.grids.values():
            grid.destroy()
        if self.is_here:
            parallel_state.destroy_global_memory_buffer()


def _prepare(tp_rank: int) -> None:
    """Make what Megatron's layers expect where it has not made its own groups."""
    parallel_state._set_global_memory_buffer()
    tensor_parallel.model_parallel_cuda_manual_seed(7, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)


def _forward_step(shares: Any, model: Any) -> Any:
    share = next(shares)
    output, mask = model(**share)
    return output, partial(loss_sums, mask=mask)


def use_gloo() -> None:
    """Let the groups of Megatron's bridge, which asks for NCCL by name, have the backend of the world."""

    def broadcast(cls: Any, ranks: list[list[int]]) -> Any:
        return cls._broadcast_pg_cache.setdefault(str(ranks), dist.new_subgroups_by_enumeration(ranks)[0])

    def bridge(cls: Any, ranks: list[int]) -> Any:
        return cls._bridge_pg_cache.setdefault(str(ranks), dist.new_group(sorted(ranks)))

    BridgeCommunicator._get_or_create_broadcast_pg = classmethod(broadcast)
    BridgeCommunicator._get_or_create_bridge_pg = classmethod(bridge)
