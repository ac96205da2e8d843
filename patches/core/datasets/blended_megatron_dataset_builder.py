"""U9: the edge of a U-shaped pipeline builds the datasets without the cloud."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.patching import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="U9",
            target="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
            build=_build,
            why="it lets rank 0 write the index first and meets all ranks of the world after it, as often as the paths "
            "of the data say; the cloud does not know them",
            versions=">=0.19,<0.20",
            remove_when="the builder takes a process group",
        ),
    )


def _build(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def build(self: Any) -> list[Any]:
        _meet_nobody(self)
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        datasets = original(self) if dist.get_rank() == 0 else []
        # The other ranks of the edge find what rank 0 has written.
        dist.barrier(group=stage)
        return datasets if dist.get_rank() == 0 else original(self)

    return build


def _meet_nobody(builder: Any) -> None:
    """Hide the builder's methods that wait for the world behind some that build on the calling rank alone."""
    build_splits, build_generic = builder._build_megatron_dataset_splits, builder.build_generic_dataset

    def splits(prefix: str | None, split: Sequence[Any], sizes: Sequence[Any], is_meeting: bool = False) -> list[Any]:
        return build_splits(prefix, split, sizes, False)

    def generic(kind: Any, is_built_here: Callable[[], bool], is_meeting: bool, *args: Any) -> Any:
        return build_generic(kind, is_built_here, False, *args)

    def parallel(prefixes: Sequence[str], split: Sequence[Any], sizes: Sequence[Sequence[Any]]) -> list[list[Any]]:
        with ThreadPoolExecutor(max_workers=builder.config.num_dataset_builder_threads) as executor:
            by_prefix = list(executor.map(lambda prefix, wanted: splits(prefix, split, wanted), prefixes, sizes))
        return [list(datasets) for datasets in zip(*by_prefix, strict=True)]

    builder._build_megatron_dataset_splits = splits
    builder.build_generic_dataset = generic
    builder._build_megatron_datasets_parallel = parallel
