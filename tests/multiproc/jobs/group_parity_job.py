"""Job of test_group_parity: build process groups with and without the plugin on every rank of a fake world."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import vtp_plugin


def compare(worlds: dict[str, tuple[dict[str, Any], int]]) -> list[str]:
    """Return the differences between stock Megatron's groups and those with the plugin forced on; empty means none.

    Args:
        worlds: by name, the arguments of ``initialize_model_parallel`` and the number of ranks.
    """
    return [
        f"{name}, rank {rank}: {difference}"
        for name, (sizes, world_size) in worlds.items()
        for rank in sorted({0, 1 % world_size, world_size // 2, world_size - 1})
        for difference in _compare_rank(sizes, world_size, rank)
    ]


def _compare_rank(sizes: dict[str, Any], world_size: int, rank: int) -> list[str]:
    stock_calls, stock_globals = _build(sizes, world_size, rank, with_plugin=False)
    plugin_calls, plugin_globals = _build(sizes, world_size, rank, with_plugin=True)
    differences = [
        f"{name} is {plugin_globals.get(name)}, stock {stock_globals.get(name)}"
        for name in sorted({*stock_globals, *plugin_globals})
        if stock_globals.get(name) != plugin_globals.get(name)
    ]
    # Our channels come after all of Megatron's groups, so they shift the name of none.
    if plugin_calls[: len(stock_calls)] != stock_calls:
        differences.append("other new_group calls")
    return differences


def _build(
    sizes: dict[str, Any], world_size: int, rank: int, *, with_plugin: bool
) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Build one rank's groups; give all ``new_group`` calls and the ranks behind every global of parallel_state."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    before = _state()
    arguments = dict(sizes)
    if with_plugin:
        tp = arguments.pop("tensor_model_parallel_size")
        pp = arguments.get("pipeline_model_parallel_size", 1)
        vtp_plugin.apply(vtp_size_list=[tp] * pp, force=True)
    calls: list[tuple[Any, ...]] = []
    original = dist.new_group

    def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
        calls.append((tuple(ranks or ()), options.get("group_desc"), options.get("backend")))
        # A gloo group on a fake store would look for real peers.
        return original(ranks, **{**options, "backend": None})

    dist.new_group = new_group
    try:
        parallel_state.initialize_model_parallel(**arguments)
        if with_plugin:
            assert vtp_plugin.is_vtp_enabled()
        return calls, {name: _shown(value) for name, value in _state().items()}
    finally:
        dist.new_group = original
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()
        # Megatron does not reset all of it.
        vars(parallel_state).update(before)
        dist.destroy_process_group()


def _state() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _shown(value: Any) -> Any:
    if isinstance(value, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(value))
    if isinstance(value, list | tuple):
        return tuple(_shown(v) for v in value)
    return value if isinstance(value, int | str | None) else type(value).__name__
