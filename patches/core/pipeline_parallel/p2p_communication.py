"""H5: Megatron's pipeline communicator over our channels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.options.table.check import check_config
from vtp_plugin.patching import PatchRecord
from vtp_plugin.runtime.channel import TensorFormat
from vtp_plugin.runtime.communicator import PipelineCommunicator
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H5",
            target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
            build=functools.partial(communicator_class, session),
            why="both schedules build it by this name; all nine public methods go through the one that a subclass "
            "overrides, so timers, list handling and return types stay Megatron's",
            remove_when="every entry point of Megatron takes a communicator",
            aliases=(
                "megatron.core.pipeline_parallel.schedules:P2PCommunicator",
                "megatron.core.pipeline_parallel.multimodule_communicator:P2PCommunicator",
                "megatron.training.training:P2PCommunicator",
            ),
        ),
    )


def tensor_format(session: Session, config: Any, check: Callable[[], None] = lambda: None) -> TensorFormat:
    """Read from Megatron's configuration how tensors cross; the first time all ranks compare it.

    Args:
        session: the applied plugin.
        config: of the model.
        check: a further check; it raises ConfigError.

    Raises:
        ConfigError: it was made for another stage, asks for what does not work, or differs from another rank's.
        PatchError: its ``finalize_model_grads_func`` was taken from Megatron before the plugin was applied.
    """

    def read() -> TensorFormat:
        # Inside the comparison: if one rank refuses here, the others learn why and do not wait for it.
        check()
        return _read_format(session, config)

    return session.agree_on_format(read)


def _read_format(session: Session, config: Any) -> TensorFormat:
    session.refuse_originals("config.finalize_model_grads_func", config.finalize_model_grads_func)
    session.planned.check_model_config(config.tensor_model_parallel_size, config.context_parallel_size)
    refuse(check_config(config, session.planned.option_context))
    if config.use_ring_exchange_p2p:
        raise ConfigError("use_ring_exchange_p2p is not supported with vtp_size_list; leave it out")
    has_variable_shapes = config.variable_seq_lengths or config.mtp_standalone
    if has_variable_shapes and session.planned.replicas.is_split:
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
        is_batched=config.batch_p2p_comm,
    )


def communicator_class(session: Session, original: type) -> type:
    """Make the subclass that carries pipeline traffic over the session's channels."""

    class P2PCommunicator(original):
        """Megatron's communicator over the plugin's channels; without channels it is Megatron's unchanged."""

        def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
            super().__init__(pp_group, config)
            self._vtp = session.running.communicator if session.is_running else None
            self._vtp_format: TensorFormat | None = None

        def _communicate(self, **exchange: Any) -> Any:
            """Exchange with both neighbours; all public methods of Megatron's class end here."""
            return super()._communicate(**exchange) if self._vtp is None else self._exchange(self._vtp, **exchange)

        def _exchange(
            self,
            communicator: PipelineCommunicator,
            *,
            tensor_send_next: torch.Tensor | None,
            tensor_send_prev: torch.Tensor | None,
            recv_prev: bool,
            recv_next: bool,
            tensor_shape: Sequence[int] | None,
            wait_on_reqs: bool = True,
        ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]:
            """Exchange over channels; arguments and result as of Megatron's `_communicate`."""
            if not session.planned.replicas.is_equal:
                raise ConfigError(
                    "Megatron's schedules do not fit stages of different data-parallel sizes; run each step with the "
                    "function that get_forward_backward_func() returns"
                )
            if (recv_prev or recv_next) and (self.config.pipeline_dtype is None or tensor_shape is None):
                raise ConfigError("receiving needs config.pipeline_dtype and a tensor_shape; set both")
            if not wait_on_reqs and self.config.batch_p2p_comm:
                raise ConfigError("batch_p2p_comm cannot receive without waiting; wait, or set overlap_p2p_comm")
            if self._vtp_format is None:
                # All ranks compare the format. A script may call the constructor on some ranks only.
                self._vtp_format = tensor_format(session, self.config)
                communicator.start_step()
            done = communicator.exchange(
                self._vtp_format,
                send_next=tensor_send_next,
                send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                shape=tensor_shape,
                wait=wait_on_reqs,
            )
            return done.from_prev, done.from_next, None if wait_on_reqs else dict(done.works)

    # Messages show Megatron's name; the module says whose class it is.
    P2PCommunicator.__qualname__ = original.__qualname__
    P2PCommunicator.__module__ = __name__
    return P2PCommunicator
