"""Split backwards: what the gradients of weights are computed from, kept until their turn comes.

A linear layer's backward gives the gradient of the input alone. What the weight's own gradient needs is kept: the
input, and the gradient of the output, as the operation's backward sees them, after all hooks of users. Later the
gradient is computed, and given to autograd as that of the weight, so that whoever listens there (Megatron's DDP) is
told as by a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vtp_plugin.errors import ConfigError, PlanError

Key = tuple[int, int]
"""Virtual stage and microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """One use of a weight, whose gradient is not computed yet.

    Attributes:
        weight: the parameter, ``[out, in]``.
        tensors: what its gradient is computed from.
        product: computes it.
        versions: how often each tensor was changed in place before.
    """

    weight: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    product: Callable[..., torch.Tensor]
    versions: tuple[int, ...]

    def gradient(self) -> torch.Tensor:
        """Compute the gradient of the weight.

        Raises:
            ConfigError: something that it is computed from was changed in place meanwhile.
        """
        if self.versions != _versions(self.tensors):
            raise ConfigError(
                f"the input of a linear layer with a weight of {list(self.weight.shape)}, or its output's gradient, "
                "was changed in place after its backward; with --vtp-split-backward the gradient of the weight needs "
                "both; change a copy, or leave --vtp-split-backward out"
            )
        return self.product(*self.tensors)


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Count changes; 0 for a part of a larger tensor, which counts those of its other parts, too."""
    return tuple(tensor._version if tensor.untyped_storage().nbytes() == tensor.nbytes else 0 for tensor in tensors)


class WeightGradients:
    """What waits on this rank, by virtual stage and microbatch.

    Attributes:
        is_splitting: whether the compute that runs leaves the gradients of its weights for later.
        always_whole: weights that no backward leaves for later; None until the first step finds them.
    """

    def __init__(self) -> None:
        self.is_splitting = False
        self.always_whole: Collection[torch.Tensor] | None = None
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
            for tensor in use.tensors
        }
        return sum(storages.values())

    @contextmanager
    def forward(self, whole: Collection[torch.Tensor]) -> Iterator[None]:
        """Let the forward that runs meanwhile be one whose backward is split.

        Args:
            whole: weights whose gradients are not left for later: those that something else than linear layers uses,
                since autograd must sum both gradients of such a weight.
        """
        self._whole = {id(weight) for weights in (whole, self.always_whole or ()) for weight in weights}
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

    @property
    def is_keeping(self) -> bool:
        """Whether a split backward runs, so that gradients of weights may wait."""
        return self._current is not None

    def keep(self, weight: torch.Tensor, product: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        """Keep what the gradient of a weight is computed from, or give it at once where the backward is whole.

        Args:
            weight: the parameter, ``[out, in]``.
            product: computes its gradient of the tensors.
            tensors: as the backward of the layer sees them.
        """
        use = _Waiting(weight=weight, tensors=tensors, product=product, versions=_versions(tensors))
        if self._current is None:
            _give([use])
        else:
            self._current.append(use)

    def take(self, entry: torch.Tensor, weight: torch.Tensor) -> None:
        """Keep for a weight the gradient that a backward is about to give to what stands for it in the graph.

        A split backward gives none. But one that a user runs inside a forward is whole, and so is one whose gradients
        a hook of the layer's node wants to see.

        Args:
            entry: a leaf of the graph.
            weight: the parameter for which it stands.
        """

        def take(entry: torch.Tensor) -> None:
            gradient, entry.grad = entry.grad, None
            if gradient is not None:
                self.keep(weight, torch.Tensor.detach, gradient)

        entry.register_post_accumulate_grad_hook(take)

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
        _give(*uses.values())


def _give(*uses: list[_Waiting]) -> None:
    """Let autograd take the gradients of weights, one after the other; each list has the uses of one weight."""
    # What was made last, autograd computes first. They are empty, as are their gradients.
    with torch.enable_grad():  # a hook of a backward runs without
        outputs = [_Later.apply(own[0].weight, own) for own in reversed(uses)]
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
        gradient = first.gradient()
        for use in rest:
            gradient = gradient + use.gradient()
        return gradient, None
