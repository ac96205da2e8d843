"""`p2p-communication`: what Megatron exchanges between stages goes over our channels.

The host says by which of its functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.rules.checks.batch import most_tokens
from vtp_plugin.host.rules.table.rows import check_config
from vtp_plugin.plan.layout.layer_lists import FirstRing
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.session.session import warn_of_options


def tensor_format(session: Session, pipeline: Pipeline, config: Any) -> TensorFormat:
    """Read from Megatron's configuration how tensors cross in a pipeline; the first time its ranks compare it.

    Raises:
        ConfigError, PatchError: as :func:`tensor_formats`.
    """
    return tensor_formats(session, pipeline, [config])[0]


def tensor_formats(
    session: Session, pipeline: Pipeline, configs: Sequence[Any], check: Callable[[], None] = lambda: None
) -> tuple[TensorFormat, ...]:
    """Read from the configurations of a U's rings how tensors cross in each; the first time all ranks compare them.

    Args:
        session: the applied plugin.
        pipeline: pipeline in which the tensors cross.
        configs: configuration of the model in every ring; a single one in other pipelines.
        check: a further check; it raises ConfigError.

    Raises:
        ConfigError: it was made for another stage, asks for what does not work, or differs from another rank's.
        PatchError: its ``finalize_model_grads_func`` was taken from Megatron before the plugin was applied.
    """

    def read() -> tuple[TensorFormat, ...]:
        # Inside the comparison: if one rank refuses here, the others learn why and do not wait for it.
        check()
        first, *others = (read_format(session, pipeline, config) for config in configs)
        return (_of_first_ring(first, session.planned.first_ring) if others else first, *others)

    were_known = pipeline.form is not None
    formats = pipeline.agree_on_formats(read)
    # Of a script without a command line the model says which options are in use.
    if pipeline.form is not None and not were_known and session.is_planned and not session.has_arguments:
        warn_of_options(session.planned, configs[0], rank=dist.get_rank())
    return formats


def _of_first_ring(form: TensorFormat, ring: FirstRing | None) -> TensorFormat:
    """Say how tensors cross in the first of two rings, where its chunks have the language model's configuration."""
    if ring is None:
        return form
    return dataclasses.replace(form, width=ring.width, has_variable_shapes=True, requires_grad=ring.is_trained)


def read_format(session: Session, pipeline: Pipeline, config: Any) -> TensorFormat:
    """Read from a configuration how tensors cross, without a comparison; errors as of :func:`tensor_formats`."""
    session.refuse_originals("config.finalize_model_grads_func", config.finalize_model_grads_func)
    plan = pipeline.plan
    if plan.ends.are_bridged and config.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} in a module with "
            f"stages of tp {plan.sizes}: its channels lead from stage to stage, not from the last one to the "
            "first; leave it out"
        )
    plan.check_model_config(pipeline.stage, config)
    refuse(check_config(config, plan.context))
    if config.use_ring_exchange_p2p:
        raise ConfigError("config.use_ring_exchange_p2p; the plugin's channels have no ring exchange; leave it out")
    # Families before 0.19 have no stage that holds multi-token prediction alone.
    # In a U the edge holds it, which Megatron takes for a stage before the last one; there it ends with the loss.
    is_standalone = getattr(config, "mtp_standalone", False) and not plan.context.is_u_shaped
    has_variable_shapes = config.variable_seq_lengths or is_standalone
    if has_variable_shapes and plan.replicas.is_split and not plan.ends.are_bridged:
        raise ConfigError(
            "variable_seq_lengths does not work with --vtp-dp-mode split: one microbatch joins samples of several "
            "replicas, which must be equally long; use multiplex"
        )
    return TensorFormat(
        dtype=config.pipeline_dtype,
        src_sharded=config.sequence_parallel,
        dst_sharded=config.sequence_parallel,
        has_variable_shapes=has_variable_shapes,
        width=config.hidden_size,
        most_tokens=_most_tokens() if session.has_arguments else None,
        is_batched=config.batch_p2p_comm,
    )


def _most_tokens() -> int | None:
    """Say how many tokens a microbatch may have."""
    from megatron.training import get_args

    return most_tokens(get_args())


def exchange(
    pipeline: Pipeline,
    config: Any,
    begin: Callable[[], TensorFormat],
    *,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Sequence[int] | None,
    wait_on_reqs: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]:
    """Exchange with both neighbours over channels; arguments and result as of Megatron's `_communicate`.

    Args:
        pipeline: pipeline of this rank, with open channels.
        config: Megatron's configuration of the model.
        begin: returns how the tensors of this step cross, and begins the step unless that is done.
        tensor_send_next: activation for the next stage.
        tensor_send_prev: gradient for the previous stage.
        recv_prev: take an activation from the previous stage.
        recv_next: take a gradient from the next stage.
        tensor_shape: `[S, B, H]` of what is received.
        wait_on_reqs: return when it is there.

    Raises:
        ConfigError: Megatron's schedules do not fit the stages, or what is received is not known.
    """
    communicator, plan = pipeline.communicator, pipeline.plan
    assert communicator is not None
    if not plan.ends.are_bridged and not plan.replicas.is_equal:
        raise ConfigError(
            "Megatron's schedules do not fit stages of different data-parallel sizes; run each step with the function "
            "that get_forward_backward_func() returns"
        )
    if (recv_prev or recv_next) and (config.pipeline_dtype is None or tensor_shape is None):
        raise ConfigError("receiving needs config.pipeline_dtype and a tensor_shape; set both")
    if not wait_on_reqs and config.batch_p2p_comm:
        raise ConfigError("batch_p2p_comm cannot receive without waiting; wait, or set overlap_p2p_comm")
    done = communicator.exchange(
        begin(),
        send_next=tensor_send_next,
        send_prev=tensor_send_prev,
        recv_prev=recv_prev,
        recv_next=recv_next,
        shape=tensor_shape,
        wait=wait_on_reqs,
    )
    return done.from_prev, done.from_next, None if wait_on_reqs else dict(done.works)


def communicate(session: Session, original: Callable[..., Any], communicator: Any, **options: Any) -> Any:
    """Exchange with both neighbours over channels, as :func:`exchange`; without channels as Megatron does.

    Args:
        session: the applied plugin.
        original: Megatron's method.
        communicator: Megatron's communicator.
        options: arguments of the method.
    """
    pipeline = session.pipelines.of(communicator.pp_group)
    if pipeline is None or pipeline.communicator is None:
        return original(communicator, **options)
    return exchange(
        pipeline, communicator.config, functools.partial(_begin, session, communicator, pipeline), **options
    )


def _begin(session: Session, communicator: Any, pipeline: Pipeline) -> TensorFormat:
    if getattr(communicator, "vtp_format", None) is None:
        # All ranks compare the format. A script may call the constructor on some ranks only.
        communicator.vtp_format = tensor_format(session, pipeline, communicator.config)
        pipeline.start_step()
    return communicator.vtp_format
