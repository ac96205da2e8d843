"""Trains the small model of ``certify`` on this rank, by megatron.core alone, and keeps its numbers as sketches."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

# Functions are asked of their modules: a name that is taken before the plugin is applied would stay the original.
from megatron.core import dist_checkpointing, distributed, optimizer, parallel_state, pipeline_parallel, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from vtp_plugin.certify.compare import EPS, PartSketch, RankNumbers
from vtp_plugin.certify.layouts import NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS, CertifiedRun
from vtp_plugin.errors import PeerError
from vtp_plugin.patches.certified_tensors import TensorRecorder, draw, named_parts, seed_of
from vtp_plugin.runtime.health.monitor import is_lost_connection
from vtp_plugin.session import Session

_HIDDEN, _HEADS, _VOCAB, _SEQ, _MICRO_BATCH, _NUM_EXPERTS = 48, 12, 144, 24, 2, 4
_LR: Final = {"sgd": 0.1, "adam": 0.01}
_KILLED_AT: Final = 1  # so that one step has gone well
_LISTEN_S = 5.0  # for who has ended, after a connection broke
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
Apply = Callable[[CertifiedRun], AbstractContextManager[Session]]
"""Applies the plugin for a run inside a block."""
HAS_LAYOUTS = "pipeline_model_parallel_layout" in inspect.signature(TransformerConfig).parameters


def train(run: CertifiedRun, apply: Apply, folder: str = "") -> RankNumbers:
    """Train a run on this rank of the default process group, and undo all that it set up.

    Args:
        run: the run.
        apply: applies the plugin for a run, and takes it back.
        folder: of all ranks, for a run that is saved.

    Returns:
        What this rank saw.

    Raises:
        PeerError: another rank has failed.
    """
    if run.saved_by:
        first = replace(run, sizes=run.saved_by, saved_by=())
        with _started(first, apply) as session:
            trainer = _Trainer(first, session)
            trainer.step(0)
            dist_checkpointing.save(trainer.sharded(), folder)
            trainer.close()
    with _started(run, apply) as session:
        trainer = _Trainer(run, session, folder if run.saved_by else "")
        try:
            return trainer.run_steps(range(1 if run.saved_by else 0, NUM_STEPS))
        finally:
            trainer.close()


@contextmanager
def _started(run: CertifiedRun, apply: Apply) -> Iterator[Session]:
    with apply(run) as session:
        chunks = _num_chunks(run)
        try:
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=len(run.sizes),
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(7)
            yield session
        except Exception as error:
            monitor = session.ranks.monitor
            if monitor is None:
                raise
            monitor.post_failure(error)
            until_s = time.monotonic() + (_LISTEN_S if is_lost_connection(error) else 0)
            while monitor.failure is None and time.monotonic() < until_s:
                time.sleep(0.1)
            # What ended another rank says more than where this one has waited.
            raise error if monitor.failure is None else PeerError(monitor.failure) from error
        finally:
            parallel_state.destroy_model_parallel()


def _num_chunks(run: CertifiedRun) -> int:
    return 2 if run.u_layers else run.num_chunks


def _known(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Keep the keywords that this version of Megatron knows."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


class _Trainer:
    """Model, optimizer and data of this rank.

    Args:
        run: the run.
        session: the applied plugin.
        folder: of a checkpoint with the weights after the first step; empty begins with drawn ones.
    """

    def __init__(self, run: CertifiedRun, session: Session, folder: str = "") -> None:
        self.run = run
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.platform = session.choose_platform()
        self.config = self._make_config()
        self.chunks = [self._make_chunk(*ends) for ends in self._ends()]
        self.parts = named_parts(self.chunks, _NUM_EXPERTS)
        draw(self.parts)
        self._change_by_rounding()
        self.start = {name: part.parameter.detach().float().clone() for name, part in self.parts.items()}
        if folder:
            loaded: Any = dist_checkpointing.load(self.sharded(), folder)
            for i, chunk in enumerate(self.chunks):
                chunk.load_state_dict(loaded[f"model{i}"])
        self.model = [self._wrap(chunk, i) for i, chunk in enumerate(self.chunks)]
        self.optimizer = optimizer.get_megatron_optimizer(self._optimizer_config(), self.model)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        if run.is_distributed:
            self.config.no_sync_func = self.model[0].no_sync
            self.config.grad_sync_func = self.model[0].start_grad_sync

    def run_steps(self, steps: range) -> RankNumbers:
        """Train some steps, and return what this rank saw."""
        losses: list[float] = []
        norms: list[float] = []
        is_watched = steps[0] == 0 and parallel_state.get_data_parallel_rank() == 0
        recorder = TensorRecorder(self.chunks, 1 / self.run.dp_sizes[self.run.loss_stage]) if is_watched else None
        gradients: dict[str, PartSketch] = {}
        begin_s = 0.0
        for step in steps:
            if self.run.killed_rank == dist.get_rank() and step == _KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            begin_s = time.perf_counter()
            own, norm = self.step(step, gradients)
            losses += own
            norms.append(norm)
        self.platform.module().synchronize()
        step_s = time.perf_counter() - begin_s
        if self.run.is_distributed:
            self.model[0].disable_forward_pre_hook(param_sync=True)  # gathers the weights
        eps = EPS[self.run.training.dtype]
        changes = {name: part.parameter.detach().float() - self.start[name] for name, part in self.parts.items()}
        return RankNumbers(
            losses=tuple(losses),
            gradient_norms=tuple(norms),
            outputs={} if recorder is None else recorder.outputs,
            output_gradients={} if recorder is None else recorder.gradients,
            gradients=gradients,
            changes={
                name: self.parts[name].sketch(name, change, eps * float(self.start[name].norm()))
                for name, change in changes.items()
            },
            step_s=step_s,
        )

    def step(self, step: int, gradients: dict[str, PartSketch] | None = None) -> tuple[list[float], float]:
        """Train one step.

        Args:
            step: its number, from 0.
            gradients: gets those of the first step.

        Returns:
            The mean loss, in a list that is empty on ranks without one, and the gradient norm.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [self._batches(step) for _ in self.model]
        reports: Any = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if _num_chunks(self.run) > 1 else iterators[0],
            model=self.model if _num_chunks(self.run) > 1 else self.model[0],
            num_microbatches=NUM_MICROBATCHES // self.run.dp_sizes[self.stage],
            seq_length=_SEQ,
            micro_batch_size=_MICRO_BATCH,
            forward_only=False,
        )
        if gradients is not None and step == 0 and not self.run.is_distributed:
            for name, part in self.parts.items():
                gradients[name] = part.sketch(name, part.parameter.main_grad)
        _, norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
        losses = [float(report["loss"]) for report in reports]
        return [sum(losses) / len(losses)] if losses else [], float(norm)

    def sharded(self) -> dict[str, Any]:
        """Give the weights in the form in which Megatron saves and loads them."""
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.chunks)}

    def close(self) -> None:
        """Break the cycle that would keep the process groups alive: views of main weights hold Megatron's hooks."""
        for part in self.parts.values():
            if hasattr(part.parameter, "main_param"):
                del part.parameter.main_param
        for name in ("grad_scale", "finalize_model_grads", "no_sync", "grad_sync"):
            setattr(self.config, f"{name}_func", None)
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            if hasattr(module, "token_dispatcher"):
                vars(module.token_dispatcher).clear()
        del self.optimizer

    def _change_by_rounding(self) -> None:
        """Make each start weight larger or smaller by the distance of two numbers, for a reference that is changed."""
        for name, part in self.parts.items() if self.run.seed else ():
            generator = torch.Generator().manual_seed(seed_of(name) + self.run.seed)
            signs = torch.randint(0, 2, part.parameter.shape, generator=generator) * 2 - 1
            with torch.no_grad():
                part.parameter.mul_((1 + EPS[self.run.training.dtype] * signs).to(part.parameter.device))

    def _make_config(self) -> TransformerConfig:
        run, tp = self.run, parallel_state.get_tensor_model_parallel_world_size()
        experts: dict[str, Any] = {}
        if run.training.has_experts:
            experts = {
                "num_moe_experts": _NUM_EXPERTS,
                "moe_ffn_hidden_size": _HIDDEN,
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.01,
                "add_bias_linear": False,
                "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            }
        values: dict[str, Any] = {
            "num_layers": NUM_LAYERS,
            "hidden_size": _HIDDEN,
            "num_attention_heads": _HEADS,
            "ffn_hidden_size": 2 * _HIDDEN,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": len(run.sizes),
            "virtual_pipeline_model_parallel_size": _num_chunks(run) if _num_chunks(run) > 1 else None,
            "sequence_parallel": run.is_sequence_parallel and tp > 1,
            "pipeline_dtype": _DTYPES[run.training.dtype],
            "params_dtype": _DTYPES[run.training.dtype],
            "bf16": run.training.dtype == "bf16",
            "batch_p2p_comm": False,
            **experts,
        }
        if run.u_layers and HAS_LAYOUTS:
            layers = [["decoder"] * number for number in run.u_layers]
            layers[0].insert(0, "embedding")
            layers[-1].append("loss")
            values["pipeline_model_parallel_layout"] = [*layers, *([] for _ in run.sizes[1:])]
        return TransformerConfig(**values)

    def _ends(self) -> Iterator[tuple[int | None, bool, bool]]:
        """Yield for every chunk of this rank its number, and whether it begins and whether it ends the model."""
        is_edge = self.stage == 0
        for i in range(_num_chunks(self.run)):
            number = i if _num_chunks(self.run) > 1 else None
            if not self.run.u_layers:
                asked: dict[str, Any] = {"ignore_virtual": False, **_of_chunk(number)}
                is_first = parallel_state.is_pipeline_first_stage(**asked)
                yield number, is_first, parallel_state.is_pipeline_last_stage(**asked)
            elif i == 0 or is_edge:
                yield number, is_edge and i == 0, is_edge and i == 1

    def _make_chunk(self, number: int | None, is_first: bool, is_last: bool) -> GPTModel:
        of_chunk = _of_chunk(number)
        spec: Any = get_gpt_layer_local_spec()
        if self.run.training.has_experts:
            keywords = _known(get_gpt_decoder_block_spec, **of_chunk)
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, **keywords)
        chunk = GPTModel(
            self.config,
            spec,
            vocab_size=_VOCAB,
            max_sequence_length=_SEQ,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=True,
            **of_chunk,
        )
        return chunk if self.platform.name == "cpu" else chunk.cuda()

    def _wrap(self, chunk: Any, number: int) -> Any:
        overlaps = self.run.is_distributed
        ddp_config = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=overlaps,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps,
            bucket_size=20_000,
        )
        inner = chunk if self.run.training.dtype == "fp32" else Float16Module(self.config, chunk)
        return distributed.DistributedDataParallel(self.config, ddp_config, inner, disable_bucketing=number > 0)

    def _optimizer_config(self) -> optimizer.OptimizerConfig:
        training = self.run.training
        values: dict[str, Any] = {
            "optimizer": training.optimizer,
            "lr": _LR[training.optimizer],
            "sgd_momentum": 0.0,  # a run that loads weights alone has none, either
            "clip_grad": 1.0,
            "use_distributed_optimizer": self.run.is_distributed,
            "params_dtype": _DTYPES[training.dtype],
            "bf16": training.dtype == "bf16",
        }
        kind = optimizer.OptimizerConfig
        return kind(**values, **_known(kind, overlap_param_gather=self.run.is_distributed))

    def _batches(self, step: int) -> Iterator[torch.Tensor]:
        """Yield the text ``[B, S + 1]`` of every microbatch of this replica; any number of replicas share the same."""
        dp, replica = self.run.dp_sizes[self.stage], parallel_state.get_data_parallel_rank()
        for number in range(replica, NUM_MICROBATCHES, dp):
            generator = torch.Generator().manual_seed(1000 + NUM_MICROBATCHES * step + number)
            yield torch.randint(_VOCAB, (_MICRO_BATCH, _SEQ + 1), generator=generator).to(self.platform.device())

    def _forward(self, texts: Iterator[torch.Tensor], chunk: Any) -> Any:
        text = next(texts)
        positions = torch.arange(_SEQ, device=text.device).expand(_MICRO_BATCH, -1)

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return chunk(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous()), loss_function


def _of_chunk(number: int | None) -> dict[str, Any]:
    """Give the keyword that names a chunk; Megatron 0.12 has none and asks for the number that was set last."""
    if "vp_stage" in inspect.signature(parallel_state.is_pipeline_last_stage).parameters:
        return {"vp_stage": number}
    if number is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(number)
    return {}
