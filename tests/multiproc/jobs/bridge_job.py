"""Jobs that move known tensors over bridges between grids, without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator as StockBridge

import vtp_plugin
from tests.expected import bridge_values
from tests.expected.bridge_values import Sizes
from tests.multiproc.jobs.core_job import cpu_only
from tests.ordering.recorder import Recorder
from tests.ordering.trace import format_trace
from tests.support.pool import init_gloo
from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.bridges import separate as bridge_groups

SHIFT = 1000.0


@dataclass(frozen=True, kw_only=True)
class BridgeCase:
    """One bridge, and what crosses it.

    Attributes:
        src, dst: the grids.
        num_dims: of the tensors.
        axes: of sequence, batch and hidden dimension in a tensor of three dimensions.
        widths: units of the batch, microbatch by microbatch; one number stands for units of that length.
        pp: stages of both modules; the bridge joins the last and the first.
        rows: length of the sequence.
        dtype: of the tensors.
        is_fixed: no headers cross.
        num_evaluated: of the microbatches, so many are only forwarded, and without gradients.
        is_combined: sends and receives of both directions at once, as in the middle of a pipeline's step.
    """

    src: Sizes
    dst: Sizes
    num_dims: int = 3
    axes: str = "sbh"
    widths: tuple[int | tuple[int, ...], ...] = (1, 2)
    pp: tuple[int, int] = (1, 1)
    rows: int = 8
    dtype: str = "float32"
    is_fixed: bool = False
    is_combined: bool = False
    num_evaluated: int = 0

    @property
    def world_size(self) -> int:
        return self.src.num_ranks * self.pp[0] + self.dst.num_ranks * self.pp[1]

    @property
    def num_units(self) -> int:
        return math.lcm(self.src.num_shares(self.num_dims), self.dst.num_shares(self.num_dims))

    def units(self, microbatch: int) -> list[np.ndarray]:
        """Draw a batch, the same on every rank; small whole numbers, of which sums are exact in any type."""
        given = self.widths[microbatch]
        widths = (given,) * self.num_units if isinstance(given, int) else given
        random = np.random.default_rng(microbatch)
        shapes = [(self.rows, width, 5) if self.num_dims == 3 else (width, 6) for width in widths]
        return [random.integers(-9, 9, shape).astype(np.float64) for shape in shapes]

    def grids(self) -> list[HyperCommGrid]:
        return [
            HyperCommGrid([sizes.tp, sizes.cp, pp, sizes.dp], ["tp", "cp", "pp", "dp"], offset)
            for sizes, pp, offset in (
                (self.src, self.pp[0], 0),
                (self.dst, self.pp[1], self.src.num_ranks * self.pp[0]),
            )
        ]


def cross(cases: Sequence[BridgeCase], audit: str | None = None) -> list[str]:
    """Carry out all cases, one after another; return what went wrong on this rank."""
    init_gloo()
    with _applied(audit):
        return [f"{one}: {problem}" for one in cases for problem in _cross(one)]


def count(case: BridgeCase, *, is_stock: bool, as_device: bool) -> tuple[list[str], list[tuple[str, list[int]]], str]:
    """Carry out a case with Megatron's bridge, or with ours.

    Args:
        case: what crosses.
        is_stock: with Megatron's.
        as_device: as the plugin uses devices, also where gloo could do better.

    Returns:
        What went wrong on this rank, its groups with their ranks, and a trace of all that it issued.
    """
    rank = init_gloo()
    with pytest.MonkeyPatch.context() as patch, Recorder(detect("cpu")) as recorder:
        if as_device:
            patch.setattr(CpuPlatform, "gathers_by_messages", False)
            patch.setattr(CpuPlatform, "orders_by_peer", False)
            patch.setattr(bridge_groups, "coalesces", lambda _platform: True)
        if is_stock:
            _let_stock_use_gloo(patch)
        known = set(dist.distributed_c10d._world.pg_names.values())
        groups: list[tuple[str, list[int]]] = []
        with cpu_only() if is_stock else _applied():
            problems = _cross(case, lambda: groups.extend(_groups_beside(known)))
    return [f"rank {rank}: {one}" for one in problems], groups, format_trace(recorder.trace())


@contextmanager
def _applied(audit: str | None = None) -> Iterator[None]:
    vtp_plugin.apply(device="cpu", bridges=True, audit=audit)
    try:
        yield
    finally:
        vtp_plugin.revert()


def attributes(pairs: Sequence[tuple[Sizes, Sizes]]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Make Megatron's bridge and ours between the same grids; return what both have, by name."""
    init_gloo()
    found: list[list[dict[str, str]]] = []
    for is_stock in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_stock:
                _let_stock_use_gloo(patch)
            with cpu_only() if is_stock else _applied():
                found.append([_attributes(BridgeCase(src=src, dst=dst)) for src, dst in pairs])
    return list(zip(*found, strict=True))


def _attributes(one: BridgeCase) -> dict[str, str]:
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    grids = one.grids()
    bridge: Any = BridgeCommunicator(*grids, {"s": 0, "b": 1, "h": 2}, torch.float32, "vision", "language")
    # Megatron sets this one too.
    found = {name: _shown(value) for name, value in (*vars(bridge).items(), ("bridge_pg", bridge.bridge_pg))}
    for grid, is_src in zip(grids, (True, False), strict=True):
        found[f"leaders, {is_src}"] = _shown(bridge.get_leader_rank(grid, is_src))
        found[f"ranks, {is_src}"] = _shown(bridge.get_boundary_pp_stage_ranks(grid, is_src))
        found[f"here, {is_src}"] = _shown(bridge.is_current_rank_in_grid(grid))
    pieces = bridge._split_tensor_at_batch_dim(torch.arange(48.0).view(3, 8, 2), 2)
    found["split"] = _shown([piece.tolist() for piece in pieces])
    found["per peer"] = _shown([piece.tolist() for piece in bridge._as_per_peer_tensors(pieces, 2)])
    bridge.destroy_bridge_pgs()
    bridge.destroy_broadcast_pgs()
    for grid in grids:
        grid.destroy()
    return found


def _shown(value: object) -> str:
    if isinstance(value, dist.ProcessGroup):
        return f"group of {dist.get_process_group_ranks(value)}"
    return "grid" if isinstance(value, HyperCommGrid) else repr(value)


_Grids = Sequence[tuple[Sequence[int], Sequence[str], int]]
"""Shape, names of the dimensions and first rank of two grids."""


def refusals(names: Sequence[_Grids]) -> list[tuple[str, str]]:
    """Make Megatron's colocated bridge and ours between grids that it refuses; return both errors."""
    init_gloo()
    found: list[list[str]] = []
    for is_stock in (True, False):
        with cpu_only() if is_stock else _applied():
            from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator

            found.append([_raised(lambda pair=pair: ColocatedBridgeCommunicator(*_grids_of(pair))) for pair in names])
    return list(zip(*found, strict=True))


def _grids_of(pair: _Grids) -> list[HyperCommGrid]:
    return [HyperCommGrid(list(shape), list(dims), offset) for shape, dims, offset in pair]


def _raised(run: Callable[[], object]) -> str:
    try:
        run()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _let_stock_use_gloo(patch: pytest.MonkeyPatch) -> None:
    for name, opened in (
        ("broadcast", lambda ranks: dist.new_subgroups_by_enumeration(ranks)[0]),
        ("bridge", lambda ranks: dist.new_group(sorted(ranks))),
    ):
        patch.setattr(StockBridge, f"_get_or_create_{name}_pg", _kept(name, opened))


def _kept(name: str, opened: Callable[[Any], Any]) -> classmethod[Any, Any, Any]:
    """Open groups on the world's backend; Megatron's bridge names NCCL."""

    def get(cls: Any, ranks: Any) -> Any:
        cache = getattr(cls, f"_{name}_pg_cache")
        if str(ranks) not in cache:
            cache[str(ranks)] = opened(ranks)
        return cache[str(ranks)]

    return classmethod(get)


def _groups_beside(known: Collection[str]) -> list[tuple[str, list[int]]]:
    names = dist.distributed_c10d._world.pg_names
    return [(name, dist.get_process_group_ranks(group)) for group, name in names.items() if name not in known]


def _cross(one: BridgeCase, when_open: Callable[[], None] = lambda: None) -> list[str]:
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    src_grid, dst_grid = one.grids()
    mapping = {name: one.axes.index(name) for name in "sbh"}
    options: dict[str, Any] = {}
    for end, sizes in (("src", one.src), ("dest", one.dst)):
        if sizes.sequence != "whole" or sizes.is_sharded:
            options |= {f"{end}_sequence": sizes.sequence, f"{end}_sharded": sizes.is_sharded}
    if one.is_fixed:
        share = np.concatenate(one.units(0)[: one.num_units // one.src.dp], axis=1 if one.num_dims == 3 else 0)
        options["fixed_shape"] = tuple(_turned(share, one).shape)
    bridge: Any = BridgeCommunicator(
        src_grid, dst_grid, mapping, getattr(torch, one.dtype), "vision", "language", one.num_dims, **options
    )
    when_open()
    problems = _exchange(bridge, one)
    wait_for_sends(bridge)
    bridge.destroy_bridge_pgs()
    bridge.destroy_broadcast_pgs()
    for grid in (src_grid, dst_grid):
        grid.destroy()
    return problems


def wait_for_sends(bridge: Any) -> None:
    """Wait as a bridge does when it ends, so that a trace has the waits."""
    if getattr(bridge, "vtp_bridge", None) is not None:
        bridge.vtp_bridge._opens.wait()


def _exchange(bridge: Any, one: BridgeCase) -> list[str]:
    rank = dist.get_rank()
    is_src = rank < one.src.num_ranks * one.pp[0]
    own, first = (one.src, 0) if is_src else (one.dst, 0)
    # Ranks of the stage at the bridge, as the oracle numbers them.
    place = _places(bridge, is_src).get(rank)
    problems: list[str] = []
    waiting: list[int] = []

    def wrong(what: str, microbatch: int, got: torch.Tensor, wanted: np.ndarray) -> None:
        tensor = torch.from_numpy(np.ascontiguousarray(wanted)).to(got.dtype)
        if got.shape != tensor.shape or not torch.equal(got.detach(), tensor):
            problems.append(f"rank {rank}: {what} {microbatch} is {tuple(got.shape)} {got.flatten()[:6]}")

    for microbatch in range(len(one.widths)):
        units = one.units(microbatch)
        random = np.random.default_rng(SEED + microbatch)
        grads = bridge_values.cotangents(
            units, one.dst, 0, lambda shape, random=random: random.integers(-9, 9, shape).astype(np.float64)
        )
        if place is None:
            assert (bridge.send_forward if is_src else bridge.recv_forward)(*([None] if is_src else [])) is None
            continue
        part = _turned(bridge_values.cut(units, own, first)[place], one)
        if microbatch < one.num_evaluated:
            with torch.no_grad():
                if is_src:
                    bridge.send_forward(torch.from_numpy(np.ascontiguousarray(part)).to(getattr(torch, one.dtype)))
                else:
                    wrong("activation", microbatch, bridge.recv_forward(), part)
            continue
        if is_src:
            tensor = torch.from_numpy(np.ascontiguousarray(part)).to(getattr(torch, one.dtype))
            _annotate(tensor, units, one, place)
            wanted = _turned(
                bridge_values.cut(bridge_values.gradient(units, one.dst, 0, grads), one.src, 0)[place], one
            )
            if one.is_combined and waiting:
                got = bridge.send_forward_recv_backward(tensor)
                wrong("gradient", microbatch - 1, got, waiting.pop())
            else:
                bridge.send_forward(tensor)
            waiting.append(wanted)
            if not one.is_combined or microbatch == len(one.widths) - 1:
                wrong("gradient", microbatch, bridge.recv_backward(), waiting.pop())
        else:
            grad = torch.from_numpy(np.ascontiguousarray(_turned(grads[place], one))).to(getattr(torch, one.dtype))
            if one.is_combined and waiting:
                got = bridge.send_backward_recv_forward(waiting.pop())
            else:
                got = bridge.recv_forward()
            wrong("activation", microbatch, got, part)
            if not (got.is_leaf and got.requires_grad and got.is_contiguous()):
                problems.append(f"rank {rank}: the activation is no fresh leaf")
            waiting.append(grad)
            if not one.is_combined or microbatch == len(one.widths) - 1:
                bridge.send_backward(waiting.pop())
    return problems


SEED = 100


def _places(bridge: Any, is_src: bool) -> dict[int, int]:
    """Number the ranks at the bridge, of this rank's module, replica after replica."""
    lists = bridge.get_boundary_pp_stage_ranks(bridge.src_grid if is_src else bridge.dest_grid, is_src=is_src)
    # Megatron lists tensor-parallel ranks of one context-parallel rank after another's, or the other way round.
    return {rank: index for index, rank in enumerate(rank for ranks in lists for rank in sorted(ranks))}


def _turned(tensor: np.ndarray, one: BridgeCase) -> np.ndarray:
    """Give `[S, B, H]` the axes of the case."""
    return tensor if one.num_dims == 2 else tensor.transpose(["sbh".index(name) for name in one.axes])


def _annotate(tensor: torch.Tensor, units: list[np.ndarray], one: BridgeCase, place: int) -> None:
    """Say how many tokens each sample has, as MimoModel does where they differ."""
    if one.num_dims == 3:
        return
    (_, d, c, t) = one.src.coordinates(0)[place]
    per_share = len(units) // one.src.num_shares(2)
    index = one.src.share(d, c, t, 2)
    sizes = [len(unit) for unit in units[index * per_share : (index + 1) * per_share]]
    if len(set(sizes)) > 1:
        tensor._mimo_bridge_split_sizes = sizes  # type: ignore[attr-defined]


def move_in_place(
    pairs: Sequence[tuple[Sizes, Sizes, int]], audit: str | None = None, *, num_calls: int = 1
) -> list[str]:
    """Move a tensor between two layouts of the same ranks, and its gradient back; return what went wrong.

    Args:
        pairs: the layouts, and the dimensions of the tensor.
        audit: file that records every message.
        num_calls: of the communicator, each with other values of one shape.
    """
    vtp_plugin.apply(device="cpu", bridges="extended", audit=audit)
    init_gloo()
    try:
        return [problem for pair in pairs for problem in _move_in_place(*pair, num_calls=num_calls)]
    finally:
        vtp_plugin.revert()


def _move_in_place(src: Sizes, dst: Sizes, num_dims: int, *, num_calls: int) -> list[str]:
    from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator

    grids = [HyperCommGrid([one.tp, one.cp, one.dp], ["tp", "cp", "dp"]) for one in (src, dst)]
    options: dict[str, Any] = {}
    for end, sizes in (("src", src), ("dest", dst)):
        if sizes.sequence != "whole" or sizes.is_sharded:
            options |= {f"{end}_sequence": sizes.sequence, f"{end}_sharded": sizes.is_sharded}
    mapping = {"b": 0, "h": 1} if num_dims == 2 else {"s": 0, "b": 1, "h": 2}
    options["has_fixed_shape"] = num_calls > 1
    bridge: Any = ColocatedBridgeCommunicator(*grids, "vision", "language", mapping, **options)
    case = BridgeCase(src=src, dst=dst, num_dims=num_dims, widths=(2,) * num_calls)
    problems = [
        problem for call in range(num_calls) for problem in _move_once(bridge, src, dst, num_dims, case.units(call))
    ]
    bridge.destroy()
    for grid in grids:
        grid.destroy()
    return problems


def _move_once(bridge: Any, src: Sizes, dst: Sizes, num_dims: int, units: list[np.ndarray]) -> list[str]:
    rank = dist.get_rank()
    random = np.random.default_rng(SEED)
    grads = bridge_values.cotangents(units, dst, 0, lambda shape: random.integers(-9, 9, shape).astype(np.float64))
    wanted = (
        bridge_values.cut(units, dst, 0)[rank],
        bridge_values.cut(bridge_values.gradient(units, dst, 0, grads), src, 0)[rank],
    )
    tensor = torch.from_numpy(np.ascontiguousarray(bridge_values.cut(units, src, 0)[rank])).requires_grad_()
    result = bridge.communicate(tensor)
    result.backward(torch.from_numpy(np.ascontiguousarray(grads[rank])))
    got = result.detach().numpy(), tensor.grad.numpy()  # type: ignore[union-attr]
    return [
        f"{src} -> {dst}, {num_dims}, rank {rank}: {what} is {ours.shape} {ours.ravel()[:6]}, not {true.shape}"
        for what, ours, true in zip(("tensor", "gradient"), got, wanted, strict=True)
        if not np.array_equal(ours, true)
    ]


def misuse(names: Sequence[str]) -> dict[str, str]:
    """Do what is wrong, each in four ranks, and return this rank's error for each."""
    init_gloo()
    vtp_plugin.apply(device="cpu", bridges=True)
    try:
        return {name: _error_of(_MISUSES[name]) for name in names}
    finally:
        from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

        BridgeCommunicator.destroy_bridge_pgs()
        BridgeCommunicator.destroy_broadcast_pgs()
        vtp_plugin.revert()


def _error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except ConfigError as error:
        return str(error)
    return "nothing"


def _first_message(shape: Sequence[int] = (8, 2, 4), dtype: torch.dtype = torch.float32, dp: int = 1) -> None:
    """Send a tensor of this shape from ranks 0 and 1, which are tensor-parallel, or replicas with dp 2."""
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    src = HyperCommGrid([2 // dp, 1, 1, dp], ["tp", "cp", "pp", "dp"])
    dst = HyperCommGrid([1, 1, 1, 2], ["tp", "cp", "pp", "dp"], 2)
    bridge: Any = BridgeCommunicator(src, dst, {"s": 0, "b": 1, "h": 2}, torch.float32)
    if dist.get_rank() < 2:
        bridge.send_forward(torch.zeros(*shape, dtype=dtype))
    else:
        bridge.recv_forward()


def _of_rank(first: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    return first if dist.get_rank() == 0 else others


def _overlap() -> None:
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    names = ["tp", "cp", "pp", "dp"]
    BridgeCommunicator(HyperCommGrid([2, 1, 1, 1], names), HyperCommGrid([2, 1, 1, 1], names, 1))


def _in_place(*shapes: Sequence[int], dp: int = 2, **options: Any) -> None:
    from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator

    grids = [HyperCommGrid(sizes, ["tp", "cp", "dp"]) for sizes in ([4 // dp, 1, dp], [2, 2, 1])]
    bridge: Any = ColocatedBridgeCommunicator(*grids, dim_mapping={"b": 0, "h": 1}, **options)
    for shape in shapes:
        bridge.communicate(torch.zeros(*shape))


def _gradient_of_another_shape() -> None:
    """The first gradient has another shape than its activation; nobody has to receive it."""
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    names = ["tp", "cp", "pp", "dp"]
    grids = [HyperCommGrid([2, 1, 1, 1], names, offset) for offset in (0, 2)]
    bridge: Any = BridgeCommunicator(*grids, {"s": 0, "b": 1, "h": 2}, torch.float32)
    if dist.get_rank() < 2:
        bridge.send_forward(torch.zeros(8, 2, 4))
    else:
        bridge.recv_forward()
        bridge.send_backward(torch.zeros(8, 2, 3))


_MISUSES: dict[str, Callable[[], object]] = {
    "type": lambda: _first_message(dtype=torch.bfloat16),
    "hidden size": lambda: _first_message(_of_rank((8, 2, 4), (8, 2, 6)), dp=2),
    "sequence": lambda: _first_message(_of_rank((8, 2, 4), (6, 2, 4))),
    "batch": lambda: _first_message((8, 3, 4)),
    "dimensions": lambda: _first_message((8, 4)),
    "overlap": _overlap,
    "in place, copies": lambda: _in_place(_of_rank((4, 3), (6, 3)), extended=True, dest_sharded=True, dp=1),
    "in place, batch": lambda: _in_place((3, 3), extended=True, dest_sequence="plain", dp=1),
    "in place, fixed": lambda: _in_place((4, 3), (4, 3), (6, 3), extended=True, has_fixed_shape=True),
    "in place, default": lambda: _in_place((4, 3), src_sharded=True),
    "gradient": _gradient_of_another_shape,
}
