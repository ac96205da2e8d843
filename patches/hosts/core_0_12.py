"""Megatron 0.12: functions and global groups, where later families have a communicator and collections of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import exchange, tensor_format
from vtp_plugin.patches.hosts.older import OlderHost
from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.runtime.channel import TensorFormat
from vtp_plugin.session import Session

_ENCODERS = (
    "encoder_tensor_model_parallel_size",
    "encoder_pipeline_model_parallel_size",
    "pipeline_model_parallel_split_rank",
)


class Host(OlderHost):
    """Megatron 0.12."""

    name = "0.12"
    moved = {
        **OlderHost.moved,
        "H5": "megatron.core.pipeline_parallel.p2p_communication:_communicate",
    }
    absent = {
        **OlderHost.absent,
        "H4c3": "the shares of the distributed optimizer are summed over the world",
        "U1": "all ask megatron.core.parallel_state:is_pipeline_last_stage, which U2 carries",
    }

    def platform_records(self) -> tuple[PatchRecord, ...]:
        return (
            PatchRecord(
                id="P7",
                target="megatron.core.fp8_utils:quantize_param_shard",
                build=wrap_with(_quantize),
                why="without Transformer Engine it fails in every step of the distributed optimizer, also where no "
                "parameter is FP8; with it, it returns at once then",
                remove_when="Megatron 0.12 is no longer supported",
            ),
        )

    def exchange_record(self, session: Session) -> PatchRecord:
        return PatchRecord(
            id="H5",
            target=self.moved["H5"],
            build=wrap_with(_communicate, session),
            why="all functions that exchange tensors between stages go through it",
            remove_when="Megatron 0.12 is no longer supported",
        )

    def is_whole_pipeline(self) -> bool:
        return True

    def forward_step(
        self, *, chunk: int, num_chunks: int, is_last_stage: bool, is_first_microbatch: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if num_chunks > 1:
            # The model and its loss function ask there which chunk runs.
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        return schedules.forward_step(is_first_microbatch=is_first_microbatch, **options)

    def default_groups(self) -> Any:
        return None

    def tensor_shape(self, *, groups: Any, config: Any, model: Any, **sizes: Any) -> tuple[int, ...]:
        get_shapes: Callable[..., Any] = schedules.get_tensor_shapes
        (shape,) = get_shapes(
            rank=parallel_state.get_pipeline_model_parallel_rank(),
            model_type=get_model_type(model),
            config=config,
            encoder_decoder_xattn=False,
            **sizes,
        )
        return shape

    def finalize_options(self, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
        return {}

    def without_ends(self) -> dict[str, Any]:
        return {}  # without embedding ranks, which H4 forgets, it leaves the ends alone

    def is_reshardable(self, state: Mapping[str, Any]) -> bool:
        # Each optimizer of a chain says how it cut its state; a checkpoint without optimizer says nothing.
        stored = state.get("optimizer") or {}
        forms = [part.get("param_state_sharding_type") for part in (stored, *stored.values()) if isinstance(part, dict)]
        return all(form in (None, "fully_sharded_model_space") for form in forms)

    def loaded_iteration(self, load_dir: str) -> int:
        from megatron.training.checkpointing import get_checkpoint_tracker_filename, read_metadata

        return read_metadata(get_checkpoint_tracker_filename(load_dir))[0]

    def token_group(self) -> dist.ProcessGroup:
        # A loss function of this family gives the number of tokens of all context-parallel ranks.
        return parallel_state.get_data_parallel_group()

    def problems_of_groups(self, options: Mapping[str, Any]) -> Iterable[str]:
        for name in _ENCODERS:
            if options.get(name):
                yield f"{name}={options[name]} is not supported with vtp_size_list; leave it out"


def _quantize(original: Callable[..., None], model_params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Run `quantize_param_shard` where there is an FP8 parameter."""
    if model_params:
        original(model_params, *args, **kwargs)


def _communicate(
    session: Session,
    original: Callable[..., Any],
    *,
    config: Any,
    **options: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]:
    """Replace `_communicate`: exchange with both neighbours over channels, where there are any."""
    communicator = session.running.communicator if session.is_running else None
    if communicator is None:
        return original(config=config, **options)

    def begin() -> TensorFormat:
        # H10 has begun the step, unless a script calls Megatron's schedules past get_forward_backward_func().
        return session.tensor_format or tensor_format(session, config)

    return exchange(session, communicator, config, begin, **options)
