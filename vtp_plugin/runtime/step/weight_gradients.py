"""Split backwards: what the gradients of weights are computed from, kept until their turn comes.

A linear layer's forward runs as if its weight were frozen, so its backward gives the gradient of the input alone. What
the weight's own gradient needs is kept: the input, and the gradient of the output. Later the gradient is computed, and
given to autograd as that of the weight, so that whoever listens there (Megatron's DDP) is told as by a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vtp_plugin.errors import PlanError

Gather = Callable[[torch.Tensor], torch.Tensor]
Key = tuple[int, int]
"""Virtual stage and microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """One use of a weight, whose gradient is not computed yet.

    Attributes:
        weight: the parameter, ``[out, in]``.
        inputs: the layer's input on this rank, ``[..., in]``.
        gradient: the gradient of its output, ``[..., out]``.
        gather: makes the input whole, where ranks hold slices of it.
    """

    weight: torch.Tensor
    inputs: torch.Tensor
    gradient: torch.Tensor
    gather: Gather

    def product(self) -> torch.Tensor:
        """Return the gradient of the weight, by the same operations as Megatron's layer."""
        whole = self.gather(self.inputs)
        return self.gradient.reshape(-1, self.gradient.shape[-1]).t().matmul(whole.reshape(-1, whole.shape[-1]))


class WeightGradients:
    """What waits on this rank, by virtual stage and microbatch.

    Attributes:
        is_splitting: whether the compute that runs leaves the gradients of its weights for later.
    """

    def __init__(self) -> None:
        self.is_splitting = False
        self._waiting: dict[Key, list[_Waiting]] = {}
        self._current: list[_Waiting] | None = None
        self._whole: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of what waits; a tensor that several uses share counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for uses in self._waiting.values()
            for use in uses
            for tensor in (use.inputs, use.gradient)
        }
        return sum(storages.values())

    @contextmanager
    def forward(self, whole: Collection[torch.Tensor]) -> Iterator[None]:
        """Let the forward that runs meanwhile be one whose backward is split.

        Args:
            whole: weights whose gradients are not left for later: those that something else than linear layers uses,
                since autograd must sum both gradients of such a weight.
        """
        self._whole = {id(weight) for weight in whole}
        self.is_splitting = True
        try:
            yield
        finally:
            self.is_splitting = False

    @contextmanager
    def backward(self, vstage: int, microbatch: int, whole: Collection[torch.Tensor]) -> Iterator[None]:
        """Keep what the backward meanwhile leaves for later; a forward that it runs again is split, too."""
        self._current = self._waiting.setdefault((vstage, microbatch), [])
        try:
            with self.forward(whole):
                yield
        finally:
            self._current = None

    def is_left_for_later(self, weight: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Tell whether the layer that is about to run leaves the gradient of its weight for later.

        Not without a gradient of the input, since then nothing would run back through the layer; not in the first pass
        of a recompute, which keeps nothing; not where the weight is computed of others, such as a slice of one, since
        these would get a gradient for each.
        """
        return (
            self.is_splitting
            and torch.is_grad_enabled()
            and weight.requires_grad
            and weight.is_leaf
            and inputs.requires_grad
            and id(weight) not in self._whole
        )

    def watch(self, output: torch.Tensor, *, weight: torch.Tensor, inputs: torch.Tensor, gather: Gather) -> None:
        """Keep, once the gradient of a layer's output is there, what the gradient of its weight needs.

        Args:
            output: of the layer, whose graph goes to the input alone.
            weight: of the layer.
            inputs: of the layer, on this rank.
            gather: makes the input whole, where ranks hold slices of it.
        """
        kept = inputs.detach()

        def keep(gradient: torch.Tensor) -> None:
            if self._current is None:
                raise PlanError("a backward that is not split runs through a forward that is")
            self._current.append(_Waiting(weight=weight, inputs=kept, gradient=gradient, gather=gather))

        output.register_hook(keep)

    def compute(self, vstage: int, microbatch: int) -> None:
        """Compute what one split backward has left for later, weight after weight in the order of the backward.

        A weight that was used several times gets the sum, as from autograd. One pass of autograd takes them all, and
        frees each gradient before it comes to the next.

        Raises:
            PlanError: nothing is left: that backward has not run, or its rest is computed already.
        """
        if (vstage, microbatch) not in self._waiting:
            raise PlanError(f"{vstage}W{microbatch} comes before {vstage}I{microbatch}, or twice")
        uses: dict[int, list[_Waiting]] = {}
        for use in self._waiting.pop((vstage, microbatch)):
            uses.setdefault(id(use.weight), []).append(use)
        # What was made last, autograd computes first. They are empty, as are their gradients.
        outputs = [_Later.apply(own[0].weight, own) for own in reversed(uses.values())]
        if outputs:
            torch.autograd.backward(outputs, outputs)


class _Later(torch.autograd.Function):
    """Makes an empty tensor, whose backward computes the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, uses: list[_Waiting]) -> torch.Tensor:
        ctx.uses = uses
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        first, *rest = ctx.uses
        del ctx.uses
        gradient = first.product()
        for use in rest:
            gradient = gradient + use.product()
        return gradient, None
