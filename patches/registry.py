"""All records: which modules declare them, by the moment at which they apply, and what a run gets of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vtp_plugin.config import VtpConfig
from vtp_plugin.host.patching import Declared, Record, declared
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.session import Session

PINS: Final = Path(__file__).with_name("pins.json")
"""Digests of the sources that the patches were written against (``vtp_plugin.host.patching.pins``)."""

MODULES: Final[Mapping[Moment, tuple[str, ...]]] = {
    Moment.COMMAND_LINE: ("training.command_line", "training.arguments", "training.stored_arguments", "core.utils"),
    Moment.PLATFORM: ("core.datasets.utils", "core.optimizer.distrib_optimizer", "training.models.dist_utils"),
    Moment.CPU: (
        "core.tensor_parallel.random",
        "core.transformer.torch_norm",
        "core.transformer.moe.moe_utils",
        "core.tensor_parallel.mappings",
        "core.distributed.param_and_grad_buffer",
        "training.initialize",
        "training.async_utils",
    ),
    Moment.STAGES: (
        "core.distributed.finalize_model_grads",
        "core.parallel_state",
        "core.models.common.language_module.language_module",
        "core.transformer.multi_latent_attention",
        "core.transformer.dot_product_attention",
        "core.optimizer.optimizer",
    ),
    Moment.LIST: (
        "core.parallel_state",
        "core.timers",
        "core.datasets.gpt_dataset",
        "core.pipeline_parallel.schedules",
        "training.checkpointing",
        "training.atomic_checkpoint",
        "core.dist_checkpointing.strategies.filesystem_async",
        "core.dist_checkpointing.strategies.torch",
        "core.dist_checkpointing.strategies.common",
        "core.transformer.moe.moe_layer",
        "core.transformer.moe.router",
        "core.transformer.moe.moe_utils",
        "core.dist_checkpointing.serialization",
        "core.dist_checkpointing.strategies.fully_parallel",
        "core.dist_checkpointing.validation",
        "core.optimizer.optimizer",
        "core.optimizer.distrib_optimizer",
        "core.optimizer.moved_state",
        "core.tokenizers.utils.build_tokenizer",
        "training.theoretical_memory_usage",
        "training.vocab_utils",
        "core.dist_checkpointing.strategies.async_utils",
        "training.async_utils",
        "training.training",
        "training.arguments",
    ),
    Moment.SPLIT: ("core.tensor_parallel.layers",),
    Moment.LORA: ("lora_layers", "training.adapter_checkpoints"),
    Moment.BRIDGES: (
        "core.pipeline_parallel.bridge_communicator",
        "core.models.mimo.comm.colocated_communicator",
        "core.models.mimo.optimizer",
        "core.pipeline_parallel.multimodule_communicator",
        "core.hyper_comm_grid",
        "core.models.mimo.model.base",
    ),
    Moment.U_SHAPE: (
        "core.pipeline_parallel.utils",
        "core.parallel_state",
        "core.datasets.blended_megatron_dataset_builder",
        "core.dist_checkpointing.strategies.fully_parallel",
        "training.models.dist_utils",
        "training.training",
        "training.builders_world",
        "training.utils.common_utils",
        "core.timers",
        "training.global_vars",
    ),
    Moment.SITES: ("site_objects",),
    Moment.MM_RINGS: ("mindspeed.two_rings",),
    Moment.SWIFT: (
        "swift.swift_arguments",
        "swift.lora_start",
        "swift.hf_export",
        "swift.checkpoints",
        "swift.both_ends",
    ),
}
"""The modules that declare records for a moment. They are imported then: a patch imports the Megatron module that it
belongs to, and a run loads only what it uses."""


def declared_at(moment: Moment, host: MegatronHost) -> tuple[Declared, ...]:
    """List what is declared for a moment: by the modules of this family, then by those that all families share."""
    shared = (f"{__package__}.{name}" for name in MODULES[moment])
    modules = map(importlib.import_module, (*host.modules, *shared))
    return tuple(record for module in modules for record in declared(module) if record.when == moment)


def records_at(
    session: Session, host: MegatronHost, *moments: Moment, activate: Callable[[], None] = lambda: None
) -> tuple[Record, ...]:
    """Give the records of some moments as this version needs them, bound to this run.

    Args:
        session: the applied plugin.
        host: the family of the Megatron that runs.
        moments: which ones.
        activate: applies the patches that need the list; called once the list is known.
    """
    given: dict[str, Any] = {
        "session": session,
        "host": host,
        "platform": session.platform,
        "writes": session.writes,
        "activate": activate,
        "python": sys.version_info[:2],
    }
    return tuple(record.bound(given) for moment in moments for record in host.placed(declared_at(moment, host)))


def platform_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records without which Megatron's wheel does not run on this platform."""
    is_cpu = isinstance(session.choose_platform(), CpuPlatform)
    return records_at(session, host, Moment.PLATFORM, *((Moment.CPU,) if is_cpu else ()))


def list_moments(config: VtpConfig) -> tuple[Moment, ...]:
    """Return the moments that come with a list of sizes, besides ``Moment.STAGES``."""
    u_shape = (Moment.U_SHAPE,) if config.layerwise_disaggregated else ()
    split = (Moment.SPLIT,) if config.split_backward else ()
    lora = (Moment.LORA,) if config.lora is not None else ()
    return (Moment.LIST, *u_shape, *split, *lora, *((Moment.SITES,) if config.has_several_sites else ()))
