"""All records, by the moment at which they apply.

Each function imports its modules late, because a patch imports the Megatron module that it belongs to: a run loads only
what it uses, and only when its records apply.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from vtp_plugin.errors import PatchError, refuse
from vtp_plugin.hosts import find_host
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patching import Record
from vtp_plugin.session import Session
from vtp_plugin.session.surroundings import Surroundings

PINS: Final = Path(__file__).with_name("pins.json")
"""Digests of the sources that the patches were written against (``vtp_plugin.patching.pins``)."""


def argument_records(session: Session, host: MegatronHost, activate: Callable[[], None]) -> tuple[Record, ...]:
    """Give the records that apply at once and change nothing by themselves.

    They read the command line, or replace what scripts import by name before there is a command line.
    """
    from vtp_plugin.patches.core import utils
    from vtp_plugin.patches.training import arguments

    return host.placed((*arguments.records(session, host, activate), *utils.records(session, host)))


def platform_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records without which Megatron's wheel does not run on this platform."""
    from vtp_plugin.patches.core.datasets import utils
    from vtp_plugin.patches.core.optimizer import distrib_optimizer
    from vtp_plugin.platform.cpu import CpuPlatform

    common = (*utils.records(), *distrib_optimizer.records(), *host.platform_records())
    platform = session.choose_platform()
    if not isinstance(platform, CpuPlatform):
        return host.placed(common)
    from vtp_plugin.patches.core.distributed import param_and_grad_buffer
    from vtp_plugin.patches.core.tensor_parallel import mappings, random
    from vtp_plugin.patches.core.transformer import torch_norm
    from vtp_plugin.patches.core.transformer.moe import moe_utils
    from vtp_plugin.patches.training import async_utils, initialize

    return host.placed(
        (
            *common,
            *random.records(platform),
            *torch_norm.records(),
            *moe_utils.records(),
            *mappings.records(),
            *param_and_grad_buffer.records(),
            *initialize.records(platform),
            *async_utils.records(),
            *host.cpu_records(),
        )
    )


def training_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records that, besides ``module_records``, make a list of sizes work; they apply once it is known."""
    from vtp_plugin.patches.core import parallel_state
    from vtp_plugin.patches.core.dist_checkpointing import validation
    from vtp_plugin.patches.core.dist_checkpointing.strategies import async_utils
    from vtp_plugin.patches.core.pipeline_parallel import schedules
    from vtp_plugin.patches.core.tokenizers.utils import build_tokenizer
    from vtp_plugin.patches.core.transformer.moe import moe_layer, moe_logging
    from vtp_plugin.patches.training import checkpointing, theoretical_memory_usage, training, vocab_utils

    adapting = (parallel_state, schedules, checkpointing, moe_layer, moe_logging)
    modules = (
        validation,
        build_tokenizer,
        theoretical_memory_usage,
        vocab_utils,
    )
    if host.mindspeed is not None:
        refuse(host.mindspeed.problems(is_planned=session.config.has_planned_schedule))
    records = (
        *host.group_records(),
        *(record for module in adapting for record in module.records(session, host)),
        *(record for module in modules for record in module.records(session)),
    )
    records += (*async_utils.records(), *training.length_records(session), *training.iterator_records(session))
    if session.config.has_several_sites or session.config.layerwise_disaggregated:
        records += training.site_records(session)
    if session.config.layerwise_disaggregated:
        records += u_shape_records(session, host)
    return host.placed(records)


def u_shape_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records that only a U-shaped pipeline needs."""
    from vtp_plugin.patches.core import parallel_state, timers
    from vtp_plugin.patches.core.datasets import blended_megatron_dataset_builder as datasets
    from vtp_plugin.patches.core.dist_checkpointing.strategies import fully_parallel
    from vtp_plugin.patches.core.pipeline_parallel import utils
    from vtp_plugin.patches.training import global_vars, training
    from vtp_plugin.patches.training.models import dist_utils
    from vtp_plugin.patches.training.utils import common_utils

    records = (*utils.records(session), *parallel_state.u_records(session, host), *datasets.records())
    records += (
        *fully_parallel.records(),
        *host.u_records(session),
        *dist_utils.records(session, host),
        *training.records(session, host),
    )
    return records + (*common_utils.records(session), *timers.records(session), *global_vars.records(session))


def module_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records that stages of unequal size need, in the run's own pipeline or in a module's.

    They apply once: with the bridges, or else with the list.
    """
    from vtp_plugin.patches.core import model_groups
    from vtp_plugin.patches.core.distributed import finalize_model_grads
    from vtp_plugin.patches.core.models.common.language_module import language_module
    from vtp_plugin.patches.core.transformer import multi_latent_attention

    records: tuple[Record, ...] = (*finalize_model_grads.records(session, host), *model_groups.records(session))
    records += language_module.records(session, host)
    return host.placed((host.exchange_record(session), *records, *multi_latent_attention.records(host)))


def bridge_records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records that, besides ``module_records``, put our bridges between modules in the place of Megatron's.

    Raises:
        PatchError: this Megatron has no bridges that we can stand in for.
    """
    if not host.can("bridges"):
        raise PatchError(
            f"--vtp-bridges: megatron-core {find_host()[1].version} has no such bridges between modules; use 0.19, or "
            "leave it out"
        )
    from vtp_plugin.patches.core import hyper_comm_grid
    from vtp_plugin.patches.core.models.mimo import optimizer
    from vtp_plugin.patches.core.models.mimo.comm import colocated_communicator
    from vtp_plugin.patches.core.models.mimo.model import base
    from vtp_plugin.patches.core.pipeline_parallel import bridge_communicator, multimodule_communicator

    surroundings = Surroundings(lambda: session)
    modules = (bridge_communicator, colocated_communicator, optimizer, multimodule_communicator, hyper_comm_grid)
    records = (record for module in modules for record in module.records(surroundings))
    return host.placed((*records, *base.records()))
