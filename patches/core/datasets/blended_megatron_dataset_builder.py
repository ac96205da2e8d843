"""`datasets-on-edge`: the edge of a U-shaped pipeline builds the datasets without the cloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment

_CLASS = "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"


@replaces(f"{_CLASS}.build", id="datasets-on-edge", when=Moment.U_SHAPE)
def _build(original: Callable[[Any], list[Any]], builder: Any) -> list[Any]:
    """Run `BlendedMegatronDatasetBuilder.build` on rank 0, then on the other ranks of its stage.

    Why: rank 0 writes the index, then all ranks of the world meet, once for each path of the data; the cloud does not
    know the paths.

    Remove when: the builder takes a process group.
    """
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    datasets = original(builder) if dist.get_rank() == 0 else []
    # The other ranks read what rank 0 has written. The stage is the edge: no other stage has data.
    dist.barrier(group=stage)
    return datasets if dist.get_rank() == 0 else original(builder)


@replaces(f"{_CLASS}._build_megatron_dataset_splits", id="datasets-on-edge/splits", when=Moment.U_SHAPE)
def _build_splits(
    original: Callable[..., list[Any]],
    builder: Any,
    prefix: str | None,
    split: Sequence[Any],
    sizes: Sequence[Any],
    synchronize_ranks: bool = False,
) -> list[Any]:
    """Run `_build_megatron_dataset_splits` without its barriers of the world.

    Why: it waits for the world; `datasets-on-edge` needs it to work on the calling rank alone.

    Remove when: with `datasets-on-edge`.
    """
    return original(builder, prefix, split, sizes, False)


@replaces(f"{_CLASS}.build_generic_dataset", id="datasets-on-edge/generic", when=Moment.U_SHAPE)
def _build_generic(
    original: Callable[..., Any], cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
) -> Any:
    """Run `build_generic_dataset` without its barrier of the world.

    Why: it waits for the world; `datasets-on-edge` needs it to work on the calling rank alone.

    Remove when: with `datasets-on-edge`.
    """
    return original(cls, is_built_on_rank, False, *args)


@replaces(f"{_CLASS}._build_megatron_datasets_parallel", id="datasets-on-edge/parallel", when=Moment.U_SHAPE)
def _build_parallel(
    original: Callable[..., list[list[Any]]],
    builder: Any,
    prefixes: Sequence[str],
    split: Sequence[Any],
    sizes_per_dataset: Sequence[Sequence[Any]],
) -> list[list[Any]]:
    """Replace `_build_megatron_datasets_parallel`: the same threads, but no rank waits for another between them.

    Why: it waits for the world; `datasets-on-edge` needs it to work on the calling rank alone.

    Remove when: with `datasets-on-edge`.

    Returns:
        For each split its datasets, in the order of the prefixes.
    """
    build_splits = builder._build_megatron_dataset_splits
    with ThreadPoolExecutor(max_workers=builder.config.num_dataset_builder_threads) as executor:
        by_prefix = list(executor.map(lambda p, sizes: build_splits(p, split, sizes), prefixes, sizes_per_dataset))
    return [list(datasets) for datasets in zip(*by_prefix, strict=True)]
