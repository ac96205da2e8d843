"""A bridge between two modules on the same ranks: one exchange among them, and its adjoint for gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.boundary.bridge import BridgeSpec, unit_widths
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.in_place import plan_in_place
from vtp_plugin.boundary.memory import Widths, local_shape, local_slices
from vtp_plugin.boundary.plan import BoundaryPlan, Transfer
from vtp_plugin.boundary.side import Shape
from vtp_plugin.boundary.spread import Holding, Spread
from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.batch_axes import BatchAxes
from vtp_plugin.runtime.channel import DTYPES
from vtp_plugin.runtime.work import TimedWaits, ranks_text

_PROBLEM = -1


class ColocatedBridge:
    """This rank's part of a bridge among the ranks of one group.

    Every call says first, in one small all-gather, what each rank has: shapes may vary from call to call, and what does
    not fit is refused on all ranks.

    Args:
        spec: the way from one module to the other.
        group: of all their ranks.
        axes: of the tensors.
        device: of the tensors.
        waits: times the exchanges.
    """

    def __init__(
        self, spec: BridgeSpec, group: dist.ProcessGroup, axes: BatchAxes, device: torch.device, waits: TimedWaits
    ) -> None:
        self._spec, self._group, self._axes = spec, group, axes
        self._device = device
        self._waits = waits
        self._rank = dist.get_rank()
        self._members = dist.get_process_group_ranks(group)
        self._plans: dict[Shape, tuple[BoundaryPlan, tuple[BoundaryPlan, ...]]] = {}

    def communicate(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Bring a tensor from the layout of one module to that of the other; gradients come back by the adjoint.

        Args:
            tensor: this rank's part.
            sizes: tokens of every sample, where they differ.

        Raises:
            ConfigError: the ranks' parts do not fit together, or cannot be cut; on all ranks.
        """
        return _Across.apply(tensor, self, sizes)

    def forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> tuple[torch.Tensor, Shape, Widths]:
        """Return this rank's part for the other module; shape and widths are for :meth:`backward`."""
        planned = self._axes.to_plan(tensor) if tensor.dim() == self._axes.num_dims else tensor
        shape, widths = self._compare(planned, sizes)
        plan, _ = self._plans_of(shape)
        return self._axes.from_plan(self._move(plan, planned, widths)), shape, widths

    def backward(self, grad: torch.Tensor, shape: Shape, widths: Widths) -> torch.Tensor:
        """Return the gradient of this rank's part: those of ranks that read one tensor add up, in their order."""
        planned = self._axes.to_plan(grad)
        first, *others = self._plans_of(shape)[1]
        total = self._move(first, planned, widths)
        for plan in others:
            total = total + self._move(plan, planned, widths)
        return self._axes.from_plan(total)

    def _plans_of(self, shape: Shape) -> tuple[BoundaryPlan, tuple[BoundaryPlan, ...]]:
        if shape not in self._plans:
            src, dst = self._spec.spreads(shape)
            summands = self._spec.dst_end.summands
            # One plan for each rank of a sum: what they have is moved alike.
            spreads = [_only(dst, ranks) for ranks in zip(*summands, strict=True)] if summands else [dst]
            plans = plan_in_place(src, dst), tuple(plan_in_place(one, src) for one in spreads)
            for plan in (plans[0], *plans[1]):
                require_valid(plan)
            self._plans[shape] = plans
        return self._plans[shape]

    def _compare(self, planned: torch.Tensor, sizes: Sequence[int] | None) -> tuple[Shape, Widths]:
        """Tell all ranks what this one has; return the shape of the whole batch and the length of every unit."""
        spec, problem = self._spec, ""
        per_share = spec.num_units // spec.src.num_replicas
        own = [_PROBLEM] * (3 + per_share)
        try:
            if planned.dim() != 3 or planned.dtype not in DTYPES:
                raise ConfigError(
                    f"bridge {spec.name}: a tensor of {planned.dtype} {tuple(planned.shape)}, expected is floating "
                    f"point of {self._axes.num_dims} dimensions; see dim_mapping"
                )
            parts = spec.src.num_parts(is_sharded=spec.src_end.is_sliced(num_dims=spec.num_dims))
            widths = unit_widths(planned.shape[1], per_share, sizes)
            own = [DTYPES.index(planned.dtype), planned.shape[0] * parts, planned.shape[2], *widths]
            spec.spreads((own[1], spec.num_units, own[2]))
        except ConfigError as error:
            problem = str(error)
            own = [_PROBLEM] * (3 + per_share)
        said = torch.tensor(own, dtype=torch.int64, device=self._device)
        everything = said.new_empty(len(self._members) * len(own))
        with self._waits.timed(spec.name, "the ranks of the bridge", "all-gather among the ranks of the bridge"):
            dist.all_gather_into_tensor(everything, said, self._group)
        lines = dict(zip(self._members, everything.view(-1, len(own)).tolist(), strict=True))
        if wrong := [rank for rank, line in lines.items() if line[0] == _PROBLEM]:
            raise ConfigError(problem or f"{spec.name}: the tensor of {ranks_text(wrong)} cannot cross; see there")
        units: dict[range, list[int]] = {}
        for rank, line in lines.items():
            share = units.setdefault(spec.units_of(rank), line)
            if line[:3] != lines[self._members[0]][:3] or line != share:
                shown = "; ".join(f"rank {one}: {DTYPES[said[0]]} {said[1:]}" for one, said in lines.items())
                raise ConfigError(
                    f"{spec.name}: the ranks' tensors do not fit together (type, rows, columns, lengths): {shown}; "
                    "give copies of one tensor to the ranks of a replica, and one hidden size to all"
                )
        widths = [width for share in sorted(units, key=lambda share: share.start) for width in units[share][3:]]
        _, rows, depth, *_ = lines[self._rank]
        return (rows, spec.num_units, depth), tuple(widths)

    def _move(self, plan: BoundaryPlan, tensor: torch.Tensor, widths: Widths) -> torch.Tensor:
        """Carry out a plan in one exchange; ranks that are no source send nothing."""

        def slices_in(spread: Spread, transfers: Mapping[int, Transfer]) -> dict[int, list[tuple[slice, ...]]]:
            boxes = spread.boxes_of(self._rank) if transfers else ()
            memory = Holding(rank=self._rank, boxes=boxes)
            return {peer: [local_slices(box, memory, widths) for box in one.boxes] for peer, one in transfers.items()}

        own = Holding(rank=self._rank, boxes=plan.dst.boxes_of(self._rank))
        result = tensor.new_empty(local_shape(own, widths))
        sent = slices_in(plan.src, {one.dst: one for one in plan.sends_of(self._rank)})
        received = slices_in(plan.dst, {one.src: one for one in plan.receives_of(self._rank)})
        pieces = [[tensor[where].reshape(-1) for where in sent.get(rank, ())] for rank in self._members]
        outgoing = [torch.cat(some) if some else tensor.new_empty(0) for some in pieces]
        lengths = [[result[where].numel() for where in received.get(rank, ())] for rank in self._members]
        arrived = result.new_empty(sum(map(sum, lengths)))
        size_bytes = result.element_size()
        with self._waits.timed(self._spec.name, "the ranks of the bridge", "exchange among the ranks of the bridge"):
            dist.all_to_all_single(
                arrived.view(torch.uint8),
                torch.cat(outgoing).view(torch.uint8),
                [sum(some) * size_bytes for some in lengths],
                [len(one) * size_bytes for one in outgoing],
                self._group,
            )
        targets = [where for rank in self._members for where in received.get(rank, ())]
        for where, piece in zip(targets, arrived.split([number for some in lengths for number in some]), strict=True):
            result[where] = piece.view(result[where].shape)
        return result


def _only(spread: Spread, ranks: Sequence[int]) -> Spread:
    """Return what some ranks hold, which is the whole tensor."""
    return Spread(shape=spread.shape, holdings=tuple(one for one in spread.holdings if one.rank in ranks))


class _Across(torch.autograd.Function):
    """An exchange and its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, bridge: ColocatedBridge, sizes: Sequence[int] | None) -> torch.Tensor:
        result, ctx.shape, ctx.widths = bridge.forward(tensor.detach(), sizes)
        ctx.bridge = bridge
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.bridge.backward(grads[0], ctx.shape, ctx.widths), None, None
