"""Bridges between modules on the same ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CompiledPlan, compile_plan
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.endpoint import Shape, Widths, replicated, sharded
from vtp_plugin.plan.boundary.message_kind import TYPES, MessageKind, ShareHeader
from vtp_plugin.plan.boundary.strategies.in_place import plan_in_place, plans_of_gradient
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import NUM_PLANS
from vtp_plugin.runtime.comm.transfers import Audit, ChannelGroups, Transfers, Transmission
from vtp_plugin.runtime.comm.work import Recorder, TimedWaits, ranks_text
from vtp_plugin.runtime.health.monitor import Monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxes:
    """Which axes of a module's tensors are the plan's rows, batch and depth.

    Attributes:
        num_dims: number of dimensions: 2 for `[tokens, H]`, or 3.
        order: axis of the sequence, of the batch and of the hidden dimension, where there are three.
    """

    num_dims: int
    order: tuple[int, int, int] = (0, 1, 2)

    def to_plan(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor as `[rows, batch, depth]`.

        >>> BatchAxes(num_dims=3, order=(1, 0, 2)).to_plan(torch.zeros(2, 8, 4)).shape
        torch.Size([8, 2, 4])
        >>> BatchAxes(num_dims=2).to_plan(torch.zeros(6, 4)).shape
        torch.Size([4, 6, 1])
        """
        return tensor.t().unsqueeze(-1) if self.num_dims == 2 else tensor.permute(self.order)

    def from_plan(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor `[rows, batch, depth]` with the axes of the module, as dense memory.

        >>> BatchAxes(num_dims=3, order=(1, 2, 0)).from_plan(torch.zeros(8, 2, 4)).shape
        torch.Size([4, 8, 2])
        """
        turned = tensor.permute(self.memory_order)
        return (turned.squeeze(-1) if self.num_dims == 2 else turned).contiguous()

    @property
    def memory_order(self) -> tuple[int, int, int]:
        """Dimensions of a plan in the order in which a module's dense tensor has them, the slowest first.

        >>> BatchAxes(num_dims=3, order=(1, 2, 0)).memory_order, BatchAxes(num_dims=2).memory_order
        ((2, 0, 1), (1, 0, 2))
        """
        rows, batch, depth = (self.order.index(axis) for axis in range(3))
        return (1, 0, 2) if self.num_dims == 2 else (rows, batch, depth)


_PROBLEM = -1


class ColocatedBridge:
    """This rank's part of a bridge among the ranks of one group.

    In every call each rank first tells all others, by one small message, what it has: shapes may vary from call to
    call, and what does not fit is refused on all ranks.

    Args:
        spec: the direction from the one module to the other.
        group: process group of all ranks of the two modules.
        axes: order of the tensors' axes.
        platform: says on which device tensors are and how to wait.
        monitor: keeps the time.
        audit: records every message.
        has_fixed_shape: whether all calls are like the first one, so that ranks tell each other only then what they
            have.
    """

    def __init__(
        self,
        spec: BridgeSpec,
        group: dist.ProcessGroup,
        axes: BatchAxes,
        platform: Platform,
        monitor: Monitor | None,
        audit: Audit | None,
        *,
        has_fixed_shape: bool = False,
    ) -> None:
        self._spec, self._axes = spec, axes
        self._platform = platform
        self._device = platform.device()
        waits = TimedWaits(platform, monitor, Recorder(platform))
        # All ranks tell what they have, which opens the backend's communicator of the whole group.
        groups = ChannelGroups(messages=group, stage=None)
        self._transfers, statements = (Transfers(spec.name, groups, platform, waits, audit) for _ in range(2))
        self._rank = dist.get_rank()
        self._members = tuple(dist.get_process_group_ranks(group))
        # One row from each rank, for all.
        self._codec = spec.header_codec(self._rank)
        shape = len(self._members), self._codec.length
        said_plan = plan_in_place(sharded(shape, self._members, dim=0), replicated(shape, self._members))
        require_valid(said_plan)
        said = compile_plan(said_plan, self._rank)
        self._said = self._transmission(statements, said, torch.int64, MessageKind.BRIDGE_HEADER)
        self._has_fixed_shape = has_fixed_shape
        # What this rank said in the first call, and what followed; only with fixed shapes.
        self._first: tuple[list[int], tuple[Shape, Widths]] | None = None
        # Lengths of units differ more often than the shape that is planned for.
        plans_of = functools.lru_cache(NUM_PLANS)(functools.partial(_plans_of, spec))
        self._compiled = functools.lru_cache(NUM_PLANS)(functools.partial(_compile, plans_of, self._rank, axes))

    def communicate(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Move a tensor from the layout of one module to that of the other; gradients come back by the adjoint.

        Args:
            tensor: this rank's part.
            sizes: number of tokens of every sample, where samples differ.

        Raises:
            ConfigError: the ranks' parts do not fit together, or cannot be cut; raised on all ranks.
        """
        return _Across.apply(tensor, self, sizes)

    def forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> tuple[torch.Tensor, Shape, Widths]:
        """Return this rank's part for the other module; shape and widths are for :meth:`backward`."""
        planned = self._axes.to_plan(tensor) if tensor.dim() == self._axes.num_dims else tensor
        shape, widths = self._compare(planned, sizes)
        plan, _ = self._compiled(shape, widths)
        return self._axes.from_plan(self._move(plan, planned, MessageKind.ACTIVATION)), shape, widths

    def backward(self, grad: torch.Tensor, shape: Shape, widths: Widths) -> torch.Tensor:
        """Return the gradient of this rank's part: the sum over the ranks that used the tensor, in their order."""
        planned = self._axes.to_plan(grad)
        first, *others = self._compiled(shape, widths)[1]
        total = self._move(first, planned, MessageKind.GRADIENT)
        for plan in others:
            total = total + self._move(plan, planned, MessageKind.GRADIENT)
        return self._axes.from_plan(total)

    def _compare(self, planned: torch.Tensor, sizes: Sequence[int] | None) -> tuple[Shape, Widths]:
        """Tell all ranks what this one has; return the shape of the whole batch and the length of every unit."""
        spec = self._spec
        own, problem = self._statement(planned, sizes)
        if self._first is not None:
            if own != self._first[0]:
                now, before = map(self._codec.parse, (own, self._first[0]))
                raise ConfigError(
                    problem
                    or f"{spec.name}: a tensor of {now} (type, rows, columns, lengths) after one of {before}; leave "
                    "has_fixed_shape out"
                )
            return self._first[1]
        said = torch.tensor([own], dtype=torch.int64, device=self._device)
        all_said = self._said.exchange(said, spec.name)
        lines = dict(zip(self._members, all_said.tolist(), strict=True))
        if wrong := [rank for rank, line in lines.items() if line[0] == _PROBLEM]:
            raise ConfigError(problem or f"{spec.name}: the tensor of {ranks_text(wrong)} cannot cross; see there")
        said_by = {rank: self._codec.parse(line) for rank, line in lines.items()}
        units: dict[range, ShareHeader] = {}
        for rank, header in said_by.items():
            share = units.setdefault(spec.units_of(rank), header)
            if header[:3] != said_by[self._members[0]][:3] or header != share:
                shown = "; ".join(f"rank {one}: {said}" for one, said in said_by.items())
                raise ConfigError(
                    f"{spec.name}: the ranks' tensors do not fit together (type, rows, columns, lengths): {shown}; "
                    "give copies of one tensor to the ranks of a replica, and one hidden size to all"
                )
        widths = [width for share in sorted(units, key=lambda share: share.start) for width in units[share].widths]
        own_header = said_by[self._rank]
        found = (own_header.rows, spec.num_units, own_header.depth), tuple(widths)
        self._first = (own, found) if self._has_fixed_shape else None
        return found

    def _statement(self, planned: torch.Tensor, sizes: Sequence[int] | None) -> tuple[list[int], str]:
        """Return what this rank tells of its tensor, and what is wrong with it."""
        spec = self._spec
        try:
            if planned.dim() != 3 or str(planned.dtype) not in TYPES:
                raise ConfigError(
                    f"bridge {spec.name}: a tensor of {planned.dtype} {tuple(planned.shape)}, expected is floating "
                    f"point of {self._axes.num_dims} dimensions; see dim_mapping"
                )
            batch = spec.batch_of(planned.shape, self._rank, sizes)
            spec.shardings(spec.crossing(batch)[0])
        except ConfigError as error:
            return [_PROBLEM] * self._codec.length, str(error)
        return list(self._codec.encode(batch, str(planned.dtype), spec.name)), ""

    def _move(self, plan: CompiledPlan, tensor: torch.Tensor, kind: MessageKind) -> torch.Tensor:
        """Carry out a plan in one exchange; ranks outside its source send nothing."""
        transmission = self._transmission(self._transfers, plan, tensor.dtype, kind)
        return transmission.exchange(tensor, self._spec.name)

    def _transmission(
        self, transfers: Transfers, plan: CompiledPlan, dtype: torch.dtype, kind: MessageKind
    ) -> Transmission:
        return Transmission(
            transfers=transfers,
            whole=plan.whole,
            plan=plan,
            dtype=dtype,
            kind=kind,
            peer="the ranks of the bridge",
            is_batched=not self._platform.host_blocking_wait,
        )


def _plans_of(spec: BridgeSpec, shape: Shape) -> tuple[BoundaryPlan, tuple[BoundaryPlan, ...]]:
    """Return the plan of the tensor, and the plans of its gradient, whose results add up."""
    src, dst = spec.shardings(shape)
    plans = plan_in_place(src, dst), plans_of_gradient(src, dst, spec.dst_end.summands)
    for plan in (plans[0], *plans[1]):
        require_valid(plan)
    return plans


def _compile(
    plans_of: Callable[[Shape], tuple[BoundaryPlan, tuple[BoundaryPlan, ...]]],
    rank: int,
    axes: BatchAxes,
    shape: Shape,
    widths: Widths,
) -> tuple[CompiledPlan, tuple[CompiledPlan, ...]]:
    """Work out a rank's part of the plans of a shape."""

    def compiled(plan: BoundaryPlan) -> CompiledPlan:
        # What is one block on both ranks then travels without a copy.
        order = axes.memory_order if all(len(one.boxes) == 1 for one in plan.transfers) else None
        return compile_plan(plan, rank, widths=widths, memory_order=order)

    plan, of_gradient = plans_of(shape)
    return compiled(plan), tuple(map(compiled, of_gradient))


class _Across(torch.autograd.Function):
    """An exchange in the forward, and its adjoint in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, bridge: ColocatedBridge, sizes: Sequence[int] | None) -> torch.Tensor:
        result, ctx.shape, ctx.widths = bridge.forward(tensor.detach(), sizes)
        ctx.bridge = bridge
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.bridge.backward(grads[0], ctx.shape, ctx.widths), None, None
