"""The training job of the multi-process tests: Megatron's model, DDP, optimizer and schedules, no megatron.training."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core import dist_checkpointing, distributed, parallel_state, pipeline_parallel, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

import vtp_plugin
from tests.group_queries.recorder import refusing_unknown_callers
from tests.multiproc.cases import experts
from tests.multiproc.cases.attentions import ATTENTIONS, layer_spec
from tests.multiproc.cases.case_parts import FFN, HEADS, HIDDEN, MICRO_BATCH, VOCAB
from tests.multiproc.cases.core_cases import LR, Case, Part, RankResult
from tests.multiproc.hooks.gathered_attention import chunk_positions
from tests.support.hosts import counts_over_context
from tests.support.mended_wheel import mend_wheel
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.api import _Holder, current_session
from vtp_plugin.host.versions import find_host
from vtp_plugin.patches.activation import activate
from vtp_plugin.patches.certified.certified_tensors import NamedPart, bare, global_words, named_parts
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.step.adapter_start import fill

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEYS = ["tokens", "labels", "mask"]
_HAS_LAYOUTS = "pipeline_model_parallel_layout" in inspect.signature(TransformerConfig).parameters
_TELLS_OPTIMIZER = "overlap_param_gather" in inspect.signature(OptimizerConfig).parameters


@refusing_unknown_callers(always=True)
def train(case: Case) -> RankResult:
    """Run a case on this rank."""
    init_gloo()
    if case.execution.plugin == "reverted":
        with applied(case, force=True), model_parallel(case), closing(Trainer(case)) as trainer:
            trainer.step(0)
        with cpu_only(), model_parallel(case), closing(Trainer(case)) as trainer:
            return trainer.run()
    alone = {"stock": cpu_only, "mapped": mapped_only}.get(case.execution.plugin)
    with alone() if alone else applied(case, force=case.execution.plugin == "forced"), model_parallel(case):
        is_asked = case.execution.plugin == "forced" or (
            case.execution.plugin == "on" and (case.execution.schedule == "planned" or bool(case.model.layers))
        )
        assert vtp_plugin.is_vtp_enabled() == (is_asked or not case.stages.is_uniform)
        with experts.drops_by_shard(case), closing(Trainer(case)) as trainer:
            return trainer.run()


def count_threads() -> int:
    """Return the number of this process's threads: each living process group of gloo has three."""
    return len(os.listdir("/proc/self/task"))


@contextmanager
def applied(case: Case, *, force: bool, **options: Any) -> Iterator[None]:
    """Apply the plugin, with further options, and take it back."""
    vtp_plugin.apply(
        vtp_size_list=list(case.stages.sizes),
        vtp_cp_list=case.stages.cp_list or None,
        vtp_dp_list=case.stages.dp_list or None,
        vtp_ep_list=case.stages.ep_list or None,
        vtp_etp_list=case.stages.etp_list or None,
        dp_mode=case.stages.dp_mode,
        device="cpu",
        transport=case.execution.transport,
        sites=case.stages.sites or None,
        timeout_s=TIMEOUT_S,
        force=force,
        schedule=case.execution.schedule,
        in_flight=case.execution.in_flight or None,
        split_backward=case.execution.split_backward,
        layerwise_disaggregated=bool(case.model.layers),
        num_layer_list=None if _HAS_LAYOUTS else case.model.layers or None,
        **options,
    )
    try:
        yield
    except Exception as error:
        # As the hook of a process that ends so: the others need not wait for this rank.
        session = current_session()
        if session is not None and session.ranks.monitor is not None:
            session.ranks.monitor.post_failure(error)
        raise
    finally:
        vtp_plugin.revert()


@contextmanager
def cpu_only() -> Iterator[None]:
    """Map torch.cuda onto the CPU and leave Megatron alone."""
    platform = detect("cpu")
    platform.install()
    applied = mend_wheel()
    try:
        yield
    finally:
        applied.revert()
        platform.uninstall()


@contextmanager
def mapped_only() -> Iterator[None]:
    """Apply what lets Megatron run on CPUs, sequence parallelism and experts included, and nothing else."""
    vtp_plugin.apply(device="cpu")
    try:
        assert _Holder.session is not None
        activate(_Holder.session, load_host(find_host()[0].name))
        yield
    finally:
        vtp_plugin.revert()


@contextmanager
def model_parallel(case: Case) -> Iterator[None]:
    """Have Megatron make its groups, as a user would; only stock Megatron needs to be told a tensor-parallel size."""
    sizes = (
        {"tensor_model_parallel_size": case.stages.sizes[0]}
        if case.execution.plugin in ("stock", "mapped", "reverted")
        else {}
    )
    parallel_state.initialize_model_parallel(
        **sizes,
        pipeline_model_parallel_size=len(case.stages.sizes),
        virtual_pipeline_model_parallel_size=case.model.num_virtual if case.model.num_virtual > 1 else None,
        context_parallel_size=case.stages.cp,
        expert_model_parallel_size=case.stages.ep,
        expert_tensor_parallel_size=case.stages.etp,
        order=case.stages.order,
        **({"get_embedding_ranks": lambda ranks: _embedding_ranks(case, ranks)} if case.model.layout else {}),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    # The rule of megatron.training: weights depend on the pipeline rank, not on the tensor-parallel one.
    torch.manual_seed(7 + 100 * parallel_state.get_pipeline_model_parallel_rank())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron 0.12 forgets the group but not its ranks, and the next run of this worker would ask for the group.
        parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
        # It holds the losses of as many predictions as the first model of this process had.
        MTPLossLoggingHelper.tracker.clear()


def _forget_saves() -> None:
    """Let this process count its saves anew.

    Older Megatrons compare the counts of all ranks, and these workers may have saved in different runs before.
    """
    base: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.base")
    if base is not None:
        base.async_calls = type(base.async_calls)()
    # The process that holds the queue of Megatron's writers can have ended: seen once in a whole run, cause unknown.
    writers: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if (queue := getattr(writers, "_results_queue", None)) is not None:
        try:
            queue.qsize()
        except (EOFError, OSError):
            writers._results_queue = None


class Trainer:
    """Model, optimizer and data of this rank."""

    micro_batch_size = MICRO_BATCH

    def __init__(self, case: Case) -> None:
        self.case = case
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.micro_batch_size *= case.micro_batch_at(self.stage) // MICRO_BATCH
        self.config = _config(case)
        chunks = self._prepared(_chunks(case, self.config))
        if case.model.experts or case.model.is_drawn:
            for chunk in chunks:  # in a U two of them hold the word embedding
                draw(named_parts([chunk], experts.NUM_EXPERTS))
        if case.checks.load:
            _load(chunks, case.checks.load)
        if case.checks.save:
            _forget_saves()
            dist_checkpointing.save(_sharded(chunks), case.checks.save)
        self.model = _wrap(case, self.config, chunks)
        self.optimizer = get_megatron_optimizer(_optimizer_config(case), self.model)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        if case.execution.overlap_grad_reduce:
            _set_functions(self.config, "no_sync_func", [chunk.no_sync for chunk in self.model])
            if case.execution.align_grad_reduce:
                _set_functions(self.config, "grad_sync_func", [chunk.start_grad_sync for chunk in self.model])
        if case.execution.overlap_param_gather and len(self.model) > 1:
            _set_functions(self.config, "param_sync_func", [chunk.start_param_sync for chunk in self.model])
        self.num_read = 0

    def _prepared(self, chunks: list[GPTModel]) -> list[GPTModel]:
        """Give what is trained, before it is wrapped: the model as it is."""
        return chunks

    def close(self) -> None:
        """Break the cycle that would keep the process groups, with their threads, alive in a worker for ever.

        The distributed optimizer's main parameters are views of the model's, kept by these. Such a view keeps the
        gradient accumulators, they keep the hooks of Megatron's DDP, and the way back leads through autograd's own
        references, which Python's garbage collector does not see.
        """
        for chunk in self.model:
            for parameter in chunk.parameters():
                if hasattr(parameter, "main_param"):
                    del parameter.main_param
        for name in ("grad_scale", "finalize_model_grads", "no_sync", "grad_sync", "param_sync"):
            setattr(self.config, f"{name}_func", None)
        del self.optimizer
        experts.forget(self.model)

    def run(self) -> RankResult:
        """Train all steps."""
        case = self.case
        result = RankResult(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
        )
        self._keep_tied(result)
        for step in range(case.data.num_steps):
            for _ in range(case.checks.num_evaluations):
                result.evaluations.append(self.evaluate(step))
            losses, successful, grad_norm, num_zeros = self.step(step)
            result.losses.append(losses)
            result.successful.append(bool(successful))
            result.grad_norms.append(-1.0 if grad_norm is None else float(grad_norm))
            # Megatron 0.12 counts always.
            result.num_zeros.append(float(num_zeros) if case.numerics.count_zeros else -1.0)
            self._keep_tied(result)
            session = _Holder.session
            if session is not None and session.is_running and session.running.communicator is not None:
                opened = session.running.opened
                result.allocations.append(sum(channel.transfers.memory.num_allocations for channel in opened))
        if case.checks.wants_weights:
            with self._gathered_weights():
                result.weights = _weights(self.model)
        result.read = self.num_read
        return result

    def step(self, step: int) -> tuple[list[float], Any, Any, Any]:
        """Train one step: losses by microbatch, then what the optimizer returns."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._planted_inf(step):
            losses = self._pass(step, forward_only=False)
        return losses, *self.optimizer.step()

    def evaluate(self, step: int) -> list[float]:
        """Pass the step's data forward only, as megatron.training does between two steps."""
        for chunk in self.model:
            chunk.eval()
        with self._gathered_weights(), torch.no_grad():
            losses = self._pass(step, forward_only=True)
        for chunk in self.model:
            chunk.train()
        return losses

    def _pass(self, step: int, *, forward_only: bool) -> list[float]:
        iterators = [self._batches(chunk, step) for chunk in self.model]
        reports = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators if self.case.model.num_virtual > 1 else iterators[0],
            model=self.model if self.case.model.num_virtual > 1 else self.model[0],
            num_microbatches=self.case.num_microbatches_at(self.stage, step),
            seq_length=self.case.data.seq,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only and self.case.checks.collects,
        )
        return [report["loss"].item() for report in reports]

    def _batches(self, chunk: Any, step: int) -> Iterator[dict[str, torch.Tensor]] | None:
        """Give data to the ranks that read it in Megatron: tensor-parallel rank 0 of some chunks."""
        if parallel_state.get_tensor_model_parallel_rank() != 0 or not _reads(chunk):
            return None
        return map(self._count, _batches(self.case, step, parallel_state.get_data_parallel_rank()))

    def _count(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.num_read += 1
        return batch

    def _forward_step(self, iterator: Iterator[dict[str, torch.Tensor]] | None, chunk: Any) -> Any:
        tokens = labels = mask = positions = None
        if _reads(chunk):
            batch = tensor_parallel.broadcast_data(KEYS, next(iterator) if iterator else None, torch.int64)
            cp_rank = parallel_state.get_context_parallel_rank()
            num_cp = parallel_state.get_context_parallel_world_size()
            own = chunk_positions(batch["tokens"].shape[1], cp_rank, num_cp)
            tokens, labels, mask = (batch[key][:, own].contiguous() for key in KEYS)
            positions = own.expand_as(tokens)
        extra = {"loss_mask": mask} if self.case.model.mtp else {}
        if self.case.data.padded:
            assert mask is not None
            extra["padding_mask"] = mask == 0
        output = chunk(tokens, positions, None, labels=labels, **extra)

        def loss_function(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
            assert mask is not None
            total, num_tokens = (losses.float() * mask).sum(), mask.sum().int()
            # Over all context-parallel ranks: what is reported, and the number that the older form divides by.
            whole = torch.stack([total.detach(), num_tokens.float()])
            if parallel_state.get_context_parallel_world_size() > 1:
                torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            if self.case.execution.sums_loss:
                torch.distributed.all_reduce(whole.clone(), group=parallel_state.get_data_parallel_group())
            if non_loss_data:
                return {"loss": whole[0] / whole[1]}
            # Megatron divides the loss in place, so what is reported must be a copy.
            if self.case.numerics.loss_tuple == 3:
                counted = whole[1].int() if counts_over_context() else num_tokens
                return total, counted, {"loss": whole[0].clone()}
            return total / whole[1], {"loss": whole[0] / whole[1]}

        return output, loss_function

    @contextmanager
    def _planted_inf(self, step: int) -> Iterator[None]:
        """Spoil one element of one gradient of one rank, after or before the replicas' gradients are summed."""
        case = self.case
        here = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            step,
        )
        if here != case.checks.inf_at:
            yield
            return
        parameter = next(
            parameter
            for name, parameter in self.model[0].named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
            and (not case.model.experts or "local_experts" in name)
        )
        spoil = torch.zeros_like(parameter)
        spoil.view(-1)[0] = torch.inf
        if case.checks.inf_cp_rank is None:
            yield
            if case.checks.inf_dp_rank in (None, parallel_state.get_data_parallel_rank()):
                parameter.main_grad += spoil
        elif parallel_state.get_context_parallel_rank() == case.checks.inf_cp_rank:
            hook = parameter.register_hook(lambda gradient: gradient + spoil)
            yield
            hook.remove()
        else:
            yield

    @contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """Gather the weights that overlapping would gather in the next forward pass, as megatron.training does."""
        if not self.case.execution.overlap_param_gather:
            yield
            return
        for chunk in self.model:
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        for chunk in self.model:
            chunk.enable_forward_pre_hook()

    def _keep_tied(self, result: RankResult) -> None:
        if not self.case.checks.wants_tied:
            return
        ends = [chunk for chunk in self.model if _holds_embedding(chunk)]
        with self._gathered_weights():
            result.tied += [bare(chunk).shared_embedding_or_output_weight().detach().clone() for chunk in ends]


def _config(case: Case) -> TransformerConfig:
    recompute: dict[str, Any] = {}
    if case.execution.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    attention = ATTENTIONS[case.model.attention]
    config = attention.config_class(
        num_layers=case.num_layers,
        hidden_size=case.model.hidden,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        add_bias_linear=case.model.has_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=len(case.stages.sizes),
        virtual_pipeline_model_parallel_size=case.model.num_virtual if case.model.num_virtual > 1 else None,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        # Megatron refuses it on a stage of one rank.
        sequence_parallel=case.execution.sequence_parallel
        and parallel_state.get_tensor_model_parallel_world_size() > 1,
        pipeline_dtype=DTYPES[case.numerics.dtype],
        params_dtype=DTYPES[case.numerics.dtype],
        bf16=case.numerics.dtype == "bf16",
        fp16=case.numerics.dtype == "fp16",
        batch_p2p_comm=case.execution.batch_p2p,
        overlap_p2p_comm=case.execution.overlap_p2p,
        variable_seq_lengths=case.data.varying_lengths,
        deallocate_pipeline_outputs=case.execution.deallocate,
        microbatch_group_size_per_vp_stage=case.execution.vpp_group_size,
        calculate_per_token_loss=case.numerics.per_token_loss,
        **({"pipeline_model_parallel_layout": _u_layout(case)} if case.model.layers and _HAS_LAYOUTS else {}),
        **({"pipeline_model_parallel_layout": case.model.layout} if case.model.layout else {}),
        # So much that it matters.
        **({"mtp_num_layers": case.model.mtp, "mtp_loss_scaling_factor": 0.5} if case.model.mtp else {}),
        **recompute,
        **{
            "kv_channels": HIDDEN // HEADS,
            "moe_token_dispatcher_type": "alltoall",  # the default is refused with variable lengths, experts or not
            **attention.config,
            **experts.config_of(case),
        },
    )
    vars(config).update(attention.attributes)
    return config


def _optimizer_config(case: Case) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=case.numerics.optimizer,
        lr=LR[case.numerics.optimizer],
        clip_grad=case.numerics.clip,
        use_distributed_optimizer=case.execution.distributed_optimizer,
        # In 0.12 only the model's wrapper is told.
        **({"overlap_param_gather": True} if case.execution.overlap_param_gather and _TELLS_OPTIMIZER else {}),
        params_dtype=DTYPES[case.numerics.dtype],
        bf16=case.numerics.dtype == "bf16",
        fp16=case.numerics.dtype == "fp16",
        loss_scale=case.numerics.loss_scale,
        initial_loss_scale=1024.0,
        hysteresis=1,
        log_num_zeros_in_grad=case.numerics.count_zeros,
    )


def _chunks(case: Case, config: TransformerConfig) -> list[GPTModel]:
    return [
        GPTModel(
            config,
            _layers(case, config, vp_stage),
            vocab_size=VOCAB,
            max_sequence_length=case.data.seq,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=case.model.tied,
            **(
                {"mtp_block_spec": _mtp_spec(config, _layers(case, config, vp_stage), vp_stage)}
                if case.model.mtp
                else {}
            ),
            **ATTENTIONS[case.model.attention].model,
            **_of_chunk(vp_stage),
        )
        for vp_stage, is_first, is_last in _ends(case)
    ]


def _mtp_spec(config: TransformerConfig, spec: Any, vp_stage: int | None) -> Any:
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **_of_chunk(vp_stage))


def _embedding_ranks(case: Case, ranks: list[int]) -> list[int]:
    """Say which ranks of a pipeline hold the word embedding, as NVIDIA's scripts do."""
    if case.model.embedding_stages:
        return [ranks[stage] for stage in case.model.embedding_stages]
    with_prediction = [i % len(ranks) for i, part in enumerate(case.model.layout.split("|")) if "m" in part]
    return sorted({ranks[0], *([ranks[-1]] if case.model.tied else []), *(ranks[stage] for stage in with_prediction)})


def _layers(case: Case, config: TransformerConfig, vp_stage: int | None) -> Any:
    if case.model.experts:
        return experts.block_spec(config, vp_stage, is_gathered=case.model.gathered_attention)
    return layer_spec(case.model.attention, is_gathered=case.model.gathered_attention)


def _ends(case: Case) -> Iterator[tuple[int | None, bool, bool]]:
    """Yield, for every chunk of this rank, its number and whether it begins and whether it ends the model."""
    is_edge = parallel_state.get_pipeline_model_parallel_rank() == 0
    for i in range(case.model.num_virtual):
        vp_stage = i if case.model.num_virtual > 1 else None
        if case.model.layers and (i == 0 or is_edge):
            yield vp_stage, is_edge and i == 0, is_edge and i == 1
        elif not case.model.layers:
            yield (
                vp_stage,
                parallel_state.is_pipeline_first_stage(ignore_virtual=False, **_of_chunk(vp_stage)),
                parallel_state.is_pipeline_last_stage(ignore_virtual=False, **_of_chunk(vp_stage)),
            )


def _of_chunk(vp_stage: int | None) -> dict[str, Any]:
    """Give the keyword that names a chunk; Megatron 0.12 has none and asks for the number that was set last."""
    if "vp_stage" in inspect.signature(parallel_state.is_pipeline_last_stage).parameters:
        return {"vp_stage": vp_stage}
    if vp_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    return {}


def _u_layout(case: Case) -> list[list[str]]:
    """Say which layers each stage's first chunk holds, then each one's second."""
    parts = [["decoder"] * num_layers for num_layers in case.model.layers]
    parts[0].insert(0, "embedding")
    parts[-1] += ["mtp"] * case.model.mtp + ["loss"]
    return [*parts, *([] for _ in case.stages.sizes[1:])]


def _wrap(case: Case, config: TransformerConfig, chunks: list[GPTModel]) -> list[Any]:
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.execution.distributed_optimizer,
        overlap_grad_reduce=case.execution.overlap_grad_reduce,
        overlap_param_gather=case.execution.overlap_param_gather,
        bucket_size=case.execution.bucket_size,
    )
    return [
        distributed.DistributedDataParallel(
            config,
            ddp_config,
            chunk if case.numerics.dtype == "fp32" else Float16Module(config, chunk),
            disable_bucketing=i > 0,
        )
        for i, chunk in enumerate(chunks)
    ]


def _set_functions(config: TransformerConfig, name: str, functions: list[Any]) -> None:
    setattr(config, name, functions if len(functions) > 1 else functions[0])


def _sharded(chunks: list[GPTModel]) -> dict[str, Any]:
    sharded = {}
    # Megatron 0.16 does not fill it in for multi-token prediction.
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for i, chunk in enumerate(chunks):
        if len(chunks) > 1:
            _of_chunk(i)  # Megatron 0.12 numbers layers by the chunk that was set last
        sharded[f"model{i}"] = chunk.sharded_state_dict(metadata=metadata)
    return sharded


def _load(chunks: list[GPTModel], path: str) -> None:
    loaded = dist_checkpointing.load(_sharded(chunks), path)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])


def _reads(chunk: Any) -> bool:
    model = bare(chunk)
    return model.pre_process or model.post_process or getattr(model, "mtp_process", False)


def _holds_embedding(chunk: Any) -> bool:
    model = bare(chunk)
    is_output = model.post_process and model.share_embeddings_and_output_weights
    return model.pre_process or is_output or getattr(model, "mtp_process", False)


def _batches(case: Case, step: int, dp_rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the microbatches of a replica of this rank's stage, in the order of Megatron's sampler."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    dp, num_parts = case.stages.dp_sizes[stage], case.micro_batch_at(stage) // MICRO_BATCH
    for microbatch in range(case.num_microbatches_at(stage, step)):
        first = step * case.batch_of(step) // MICRO_BATCH + (microbatch * dp + dp_rank) * num_parts
        parts = [_samples(case, first + i) for i in range(num_parts)]
        yield {key: torch.cat([part[key] for part in parts]) for key in KEYS}


def _samples(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Give the samples of one microbatch of the smallest size, by its number in the whole run."""
    generator = torch.Generator().manual_seed(1000 + index)
    length = case.data.seq - case.data.length_step * (index % 3) if case.data.varying_lengths else case.data.seq
    num_samples = MICRO_BATCH - (case.data.partial_batches and index % 3 == 2)
    text = torch.randint(0, VOCAB, (num_samples, length + 1), generator=generator)
    mask = torch.ones(num_samples, length, dtype=torch.int64)
    if case.data.masked:
        mask = (torch.rand(mask.shape, generator=generator) < (index % 4 + 1) / 5).long()
        mask[0, 0] = 1
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "mask": mask}


def draw(parts: Mapping[str, NamedPart]) -> None:
    """Set all matrices to what depends on their names and whole shapes only, so that any stages start alike."""
    for name, part in parts.items():
        if part.parameter.dim() < 2:
            continue
        shape = list(part.parameter.shape)
        if part.dim is not None:
            shape[part.dim] *= part.count
        # The two ends of a tied embedding are alike.
        seed = zlib.crc32(name.replace("output_layer", "embedding.word_embeddings").encode())
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shape, generator=generator) * (0.5 if "router" in name else 0.1)
        fill(part.parameter, whole, rank=part.index)


def _weights(model: list[Any]) -> dict[str, Part]:
    """Give a copy of every parameter, and of what balances experts, by a name with the layer's number in the model."""
    parts = {name: part for name, (_, part) in _named_parts(model).items()}
    for chunk in map(bare, model):
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                words = global_words(chunk, name)
                index = parallel_state.get_tensor_model_parallel_rank()
                count = parallel_state.get_tensor_model_parallel_world_size()
                parts[".".join(words)] = Part(dim=None, index=index, count=count, tensor=buffer)
    return {name: replace(part, tensor=part.tensor.float().clone()) for name, part in parts.items()}


def _named_parts(model: list[Any]) -> dict[str, tuple[Any, Part]]:
    """Give parameters, and what part of the whole they are, by a name that holds the layer's number in the model."""
    return {
        name: (
            part.parameter,
            Part(dim=part.dim, index=part.index, count=part.count, tensor=part.parameter.detach()),
        )
        for name, part in named_parts(model, experts.NUM_EXPERTS).items()
    }
