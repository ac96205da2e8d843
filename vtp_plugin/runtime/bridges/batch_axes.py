"""The order in which a module has the axes of the tensor that crosses a bridge."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
