"""A family of Megatron's versions: what it can do, and torch's stand-in for it."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from vtp_plugin.host.patching import AnyRecord
from vtp_plugin.host.rules.rule import CALL_RULES, RING_RULES, OptionContext, OptionRule, ULayers
from vtp_plugin.host.rules.table.rows import refusals
from vtp_plugin.host.versions import capability
from vtp_plugin.patches.mindspeed import MindSpeed


class SeenDistributed:
    """``torch.distributed`` with another size of the world; every group has its true size."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def get_world_size(self, group: Any = None) -> int:
        """Return the size of a group; of the world, the one to be seen."""
        return self._world_size if group is None else torch.distributed.get_world_size(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)


class SeenTorch:
    """``torch`` with another ``torch.distributed``.

    >>> seen = SeenTorch(SeenDistributed(6))
    >>> seen.distributed.get_world_size(), seen.float32, seen.distributed.is_available()
    (6, torch.float32, True)
    """

    def __init__(self, distributed: object) -> None:
        self.distributed: Any = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class RouterMetric(NamedTuple):
    """Numbers that routers have noted for the log.

    Attributes:
        values: one for each layer of the model, summed over this rank's microbatches.
        sum_group: its ranks have parts of them, to be added up; None if this rank has all.
        mean_group: its ranks have different ones, to be averaged; None if there are none.
        is_averaged: those of the replicas are averaged, too.
        is_whole: they count the tokens of all replicas.
    """

    values: torch.Tensor
    sum_group: dist.ProcessGroup | None
    mean_group: dist.ProcessGroup | None
    is_averaged: bool
    is_whole: bool


class MegatronHost(ABC):
    """What one family of Megatron versions does in its own way; the patches ask here.

    Attributes:
        name: name of the family, see ``vtp_plugin.host.versions``.
        version: that records and rules are chosen for.
        needs_device_first: `initialize_megatron` looks for CUDA before it reads the command line.
        sums_whole_experts: a local linear layer of an expert that nobody cuts sums over the ranks of its stage.
        stores_states_by_replica: whether random states are stored for every replica on a stage with an EP above 1, in a
            grid of another form than elsewhere.
        stores_padding: what is stored by bucket includes what makes its length a multiple of the replicas.
        for_any_list: how to save the distributed optimizer so that any list loads it.
        mindspeed: what has patched this Megatron before us; None without MindSpeed.
    """

    name: ClassVar[str]
    needs_device_first: ClassVar[bool] = False
    sums_whole_experts: ClassVar[bool] = False
    stores_states_by_replica: ClassVar[bool] = False
    stores_padding: ClassVar[bool] = False
    for_any_list: ClassVar[str] = "with --dist-ckpt-optim-fully-reshardable"
    mindspeed: MindSpeed | None = None

    def __init__(self, version: str) -> None:
        self.version = version

    def can(self, name: str) -> bool:
        """Tell whether this version has a capability, by its name in ``vtp_plugin.host.versions.known_versions``."""
        return capability(name).has(self.version)

    @property
    def declared_flags(self) -> frozenset[str]:
        """Flags that MindSpeed declares."""
        return frozenset() if self.mindspeed is None else self.mindspeed.flags

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that this family is written in; what they declare is for it alone."""
        return tuple(base.__module__ for base in type(self).__mro__ if issubclass(base, MegatronHost))

    def placed(self, records: Iterable[AnyRecord]) -> tuple[AnyRecord, ...]:
        """Give the records that this version needs, with their targets in it."""
        here = [record for each in records if (record := each.at(self.version)) is not None]
        if self.can("named_aliases"):
            return tuple(here)
        # The search finds those of any family by identity.
        return tuple(replace(record, aliases=()) if record.aliases else record for record in here)

    def refusals(
        self, rules: tuple[OptionRule, ...], options: object, context: OptionContext | None = None
    ) -> tuple[str, ...]:
        """Say what of some rows this version does not do, one line for each.

        Args:
            rules: rows of ``vtp_plugin.host.rules.rule``.
            options: what has their attributes.
            context: the stages; None before there are any.
        """
        here = replace(context or OptionContext(tp_sizes=()), version=self.version, forced=True)
        return refusals(rules, options, here)

    def refusals_of_call(self, options: Mapping[str, Any], num_rings: int) -> tuple[str, ...]:
        """Say what of a call of `initialize_model_parallel` does not work beside a list of sizes, and so many rings."""
        context = OptionContext(tp_sizes=(), num_rings=num_rings)
        return self.refusals((*CALL_RULES, *RING_RULES), argparse.Namespace(**options), context)

    def router_metrics(self, *args: Any, **kwargs: Any) -> Iterator[RouterMetric]:
        """Yield what routers have noted for the log, by the arguments of what `router-loss-log` replaces."""
        tracker, names = args[0], args[1] if len(args) > 1 else kwargs["metric_names"]
        for name in names:
            entry = tracker.metrics.get(name)
            if entry is not None:
                yield RouterMetric(
                    entry.values, entry.reduce_group, entry.avg_group, entry.needs_dp_avg, not entry.needs_dp_avg
                )

    @abstractmethod
    def is_whole_pipeline(self, *args: Any, **kwargs: Any) -> bool:
        """Tell by the arguments of `get_forward_backward_func` whether it is asked for the run's own pipeline."""

    @abstractmethod
    def enter_chunk(self, chunk: int) -> None:
        """Say that what follows is about this model chunk, where Megatron keeps that in a global."""

    @abstractmethod
    def asks_for_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> bool:
        """Tell whether a call of `is_pipeline_last_stage` asks about this model chunk, or about any.

        Args:
            chunk: number of the model chunk on this rank.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """

    @abstractmethod
    def layers_of_layout(self, text: str) -> tuple[int, ...]:
        """Read the layers of a U-shaped pipeline from ``--pipeline-model-parallel-layout``, part by part.

        Raises:
            ConfigError: it is no layout of a U, or this family has no such option.
        """

    @abstractmethod
    def written_layers(
        self, args: argparse.Namespace, layers: Sequence[int], num_rings: int = 1
    ) -> AbstractContextManager[None]:
        """Let `validate_args` see two chunks on every stage of a U-shaped pipeline, one more than it has rings.

        Args:
            args: Megatron's; where they can hold the layers, they do from then on.
            layers: number of layers of the edge's first part, of every cloud stage, of the edge's last part.
            num_rings: number of times that a microbatch passes the cloud; the layers are those of the last ring.
        """

    @abstractmethod
    def u_layers(self, layers: Sequence[int] | None, config: Any, num_rings: int = 1) -> ULayers:
        """Put together what a model says of the layers of a U-shaped pipeline, for ``LAYER_RULES``.

        Args:
            layers: number of layers of the edge's first part, of every cloud stage, of the edge's last part; None if
                the plugin was not told.
            config: Megatron's configuration of the model.
            num_rings: number of times that a microbatch passes the cloud; the layers are those of the last ring.
        """

    @abstractmethod
    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        """Let `get_batch_on_this_tp_rank` see a pipeline of one stage on the edge.

        Args:
            options: keywords of the call; may be changed.
        """

    @abstractmethod
    def forward_step(
        self, *, chunk: int, num_chunks: int, is_last_stage: bool, is_first_microbatch: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run Megatron's forward of one chunk.

        Args:
            chunk: number of the model chunk on this rank.
            num_chunks: how many there are.
            is_last_stage: the chunk computes the loss.
            is_first_microbatch: argument of Megatron's function.
            options: its other arguments, which are the same in all families.

        Returns:
            Output (or loss), and the number of tokens in the loss.
        """

    @abstractmethod
    def backward_arguments(self, model: Any, config: Any) -> tuple[Any, ...]:
        """Give what Megatron's `backward_step` takes after activation, output and gradient."""

    @abstractmethod
    def default_groups(self) -> Any:
        """Return the process groups of a step that names none; None where Megatron passes none on."""

    @abstractmethod
    def tensor_shape(self, *, groups: Any, config: Any, model: Any, **sizes: Any) -> tuple[int, ...]:
        """Give the shape `[S, B, H]` of what this rank receives, for ``seq_length`` and the other sizes."""

    @abstractmethod
    def finalize_options(self, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
        """Give the keywords of `config.finalize_model_grads_func` besides model and token count."""

    @abstractmethod
    def without_ends(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give keywords of `finalize_model_grads` with which it leaves the tied embedding alone.

        The arguments are those of the call after model and token count.
        """

    def mtp_stages(self, config: Any, num_stages: int) -> Sequence[int]:
        """Return the stages that hold the layers of multi-token prediction: the last one, if the model has such."""
        return [num_stages - 1] if getattr(config, "mtp_num_layers", None) else []

    def note_of_prediction(self, tp_size: int) -> str:
        """Say what multi-token prediction computes otherwise on a stage of this size; empty if it does not.

        Args:
            tp_size: tensor-parallel size of the stage that predicts.
        """
        return ""

    @abstractmethod
    def token_group(self) -> dist.ProcessGroup:
        """Return the group over which this family sums the number of tokens in the loss."""

    def seen_world(
        self, options: dict[str, Any], world_size: int, put_torch: Callable[[object], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Let `initialize_model_parallel` see a world of this size.

        Args:
            options: keyword arguments of the call; may be changed.
            world_size: that it counts its groups with.
            put_torch: assigns to the name ``torch`` in Megatron's ``parallel_state``, inside a ``with`` block.
        """
        return put_torch(SeenTorch(SeenDistributed(world_size)))

    @abstractmethod
    def is_reshardable(self, state: Mapping[str, Any]) -> bool:
        """Tell whether other sizes can load the distributed optimizer's part of a checkpoint."""

    def lost_form(self, state: Mapping[str, Any]) -> str | None:
        """Name the form of a stored distributed optimizer that this Megatron reads no more; None if it reads it.

        Args:
            state: what all ranks share of the checkpoint.
        """
        del state
        return None

    @abstractmethod
    def is_by_bucket(self, state: Mapping[str, Any]) -> bool:
        """Tell whether a checkpoint holds the distributed optimizer bucket by bucket.

        Args:
            state: what all ranks share of the checkpoint.
        """

    @abstractmethod
    def take_for_reshardable(self, state: Mapping[str, Any]) -> None:
        """Let Megatron take an optimizer that is stored by bucket for one that any sizes can load."""

    def problems_of_saving(self, args: argparse.Namespace, *, device: str) -> Iterable[str]:
        """Say why Megatron could not save a checkpoint as its options ask.

        Args:
            args: Megatron's.
            device: name of the platform.
        """
        if args.async_save and getattr(args, "async_strategy", "mcore") != "mcore":
            yield (
                f"--async-save with --async-strategy {args.async_strategy}; what nvidia-resiliency-ext writes was not "
                "tried with runs that are killed; give --async-strategy mcore"
            )
        is_called_anew = args.async_save and args.use_persistent_ckpt_worker and not self.can("worker_without_cuda")
        if device == "cpu" and is_called_anew:
            yield (
                f"--async-save with --use-persistent-ckpt-worker on CPUs; the worker of Megatron {self.name} "
                "(PersistentAsyncCaller.async_loop) is a process that calls CUDA, ends without it, and the run would "
                "wait for it; leave --async-save out"
            )
