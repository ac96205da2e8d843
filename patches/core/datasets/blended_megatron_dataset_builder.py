"""U9: the edge of a U-shaped pipeline builds the datasets without the cloud."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.patching import PatchRecord

_CLASS = "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    helpers = (
        ("U9b", "_build_megatron_dataset_splits", _build_splits),
        ("U9c", "build_generic_dataset", _build_generic),
        ("U9d", "_build_megatron_datasets_parallel", _build_parallel),
    )
    return (
        PatchRecord(
            id="U9",
            target=f"{_CLASS}.build",
            build=_build,
            why="it lets rank 0 write the index first and meets all ranks of the world after it, as often as the paths "
            "of the data say; the cloud does not know them",
            versions=">=0.19,<0.20",
            remove_when="the builder takes a process group",
        ),
        *(
            PatchRecord(
                id=record_id,
                target=f"{_CLASS}.{name}",
                build=build,
                why="it waits for the world; as U9 calls it, it works on the calling rank alone",
                versions=">=0.19,<0.20",
                remove_when="with U9",
            )
            for record_id, name, build in helpers
        ),
    )


def _build(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def build(self: Any) -> list[Any]:
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        datasets = original(self) if dist.get_rank() == 0 else []
        # The other ranks of the edge find what rank 0 has written.
        dist.barrier(group=stage)
        return datasets if dist.get_rank() == 0 else original(self)

    return build


def _build_splits(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def _build_megatron_dataset_splits(
        self: Any, prefix: str | None, split: Sequence[Any], sizes: Sequence[Any], synchronize_ranks: bool = False
    ) -> list[Any]:
        return original(self, prefix, split, sizes, False)

    return _build_megatron_dataset_splits


def _build_generic(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        return original(cls, is_built_on_rank, False, *args)

    return build_generic_dataset


def _build_parallel(original: Callable[..., list[list[Any]]]) -> Callable[..., list[list[Any]]]:
    @functools.wraps(original)
    def _build_megatron_datasets_parallel(
        self: Any, prefixes: Sequence[str], split: Sequence[Any], sizes_per_dataset: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        build_splits = self._build_megatron_dataset_splits
        with ThreadPoolExecutor(max_workers=self.config.num_dataset_builder_threads) as executor:
            by_prefix = list(executor.map(lambda p, sizes: build_splits(p, split, sizes), prefixes, sizes_per_dataset))
        return [list(datasets) for datasets in zip(*by_prefix, strict=True)]

    return _build_megatron_datasets_parallel
