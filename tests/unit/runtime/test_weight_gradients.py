"""Gradients of weights that are computed later: the same ones, once each, and told to whoever listens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.runtime.step.weight_gradients import WeightGradients

S, B, IN, OUT = 3, 2, 5, 4


class Split(torch.autograd.Function):
    """As Megatron's linear layer with the patch."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, _entry: torch.Tensor, layer: Any, entry: Any) -> torch.Tensor:
        ctx.save_for_backward(inputs, layer.weight)
        ctx.layer, ctx.entry = layer, entry
        return inputs @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        if not ctx.layer.later.is_keeping:
            ctx.layer.later.take(*ctx.entry, ctx.layer.weight)
            return gradient @ weight, product(inputs, gradient), None, None
        ctx.layer.later.keep(ctx.layer.weight, product, inputs, gradient)
        return gradient @ weight, None, None, None


def product(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t() @ inputs.reshape(-1, inputs.shape[-1])


class Linear(torch.nn.Module):
    """A layer whose weight's gradient is left for later, where it can be."""

    def __init__(self, later: WeightGradients | None, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.later, self.weight = later, weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.later is None or not self.later.is_left_for_later(self.weight, inputs):
            return inputs @ self.weight.t()
        entry = self.weight.detach().requires_grad_()
        return Split.apply(inputs, entry, self, (entry,))


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def splitting(later: WeightGradients | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if later is None else later.forward(())


def samples(number: int = 0, rows: int = S) -> torch.Tensor:
    return torch.randn((rows, B, IN), generator=torch.Generator().manual_seed(number)).requires_grad_()


def both(model: type[torch.nn.Module], weights: int, inputs: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Gradients of a model with whole backwards, then with split ones."""
    for later in (None, WeightGradients()):
        own = parameters(*[(IN, IN)] * weights)
        with splitting(later):
            loss = model(later, *own)(inputs).square().sum()
        with contextlib.nullcontext() if later is None else later.backward(0, 0, ()):
            loss.backward()
        if later is not None:
            assert all(weight.grad is None for weight in own)
            later.compute(0, 0)
            assert later.num_bytes == 0
        yield [weight.grad for weight in own if weight.grad is not None]


class Two(torch.nn.Module):
    def __init__(self, later: WeightGradients | None, first: torch.nn.Parameter, second: torch.nn.Parameter) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(Linear(later, first), torch.nn.GELU(), Linear(later, second))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Shared(Two):
    """One weight, twice."""

    def __init__(self, later: WeightGradients | None, weight: torch.nn.Parameter) -> None:
        super().__init__(later, weight, weight)


class Recomputed(Two):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, inputs, use_reentrant=True)


@pytest.mark.parametrize(("model", "weights"), [(Two, 2), (Shared, 1), (Recomputed, 2)])
@pytest.mark.parametrize("rows", [S, 0])
def test_they_are_those_of_a_whole_backward(model: type[torch.nn.Module], weights: int, rows: int) -> None:
    """To the last bit; also of an expert that gets no tokens."""
    whole, split = both(model, weights, samples(rows=rows))
    assert len(whole) == len(split) == weights
    assert all(torch.equal(one, other) for one, other in zip(whole, split, strict=True))


def test_who_listens_is_told_once_for_each_microbatch() -> None:
    """By a hook on the accumulation of the gradient, as Megatron's DDP does."""
    (weight,) = parameters((IN, IN))
    told: list[int] = []
    node: Any = weight.expand_as(weight).grad_fn
    (accumulation, _), *_ = node.next_functions
    later = WeightGradients()
    accumulation.register_hook(lambda *_: told.append(later.num_bytes))
    model = Shared(later, weight)
    losses = []
    for number in range(2):
        with later.forward(()):
            losses.append(model(samples(number)).sum())
    for number, loss in enumerate(losses):
        with later.backward(0, number, ()):
            loss.backward()
    assert told == []
    for number in range(2):
        later.compute(0, number)
    assert len(told) == 2 and told[0] > 0 == told[1]


def test_one_gradient_is_there_at_a_time() -> None:
    """In the order of the backward; all of a chunk at once would take as much memory as its weights."""
    later, own = WeightGradients(), parameters((IN, IN), (IN, IN))
    told: list[tuple[int, int]] = []

    def take(weight: torch.Tensor) -> None:
        told.append((next(n for n, one in enumerate(own) if one is weight), sum(one.grad is not None for one in own)))
        weight.grad = None

    for weight in own:
        weight.register_post_accumulate_grad_hook(take)
    with later.forward(()):
        loss = Two(later, *own)(samples()).sum()
    with later.backward(0, 0, ()):
        loss.backward()
    later.compute(0, 0)
    assert told == [(1, 1), (0, 1)]


def test_some_stay_whole() -> None:
    """An input that needs no gradient; a weight that is frozen, sliced or used elsewhere; outside a split forward."""
    later = WeightGradients()
    (weight,), inputs = parameters((IN, IN)), samples()
    assert not later.is_left_for_later(weight, inputs)
    with later.forward(()):
        assert later.is_left_for_later(weight, inputs)
        assert not later.is_left_for_later(weight, inputs.detach())
        assert not later.is_left_for_later(weight.detach(), inputs)
        assert not later.is_left_for_later(weight[:OUT], inputs)
        with torch.no_grad():
            assert not later.is_left_for_later(weight, inputs)
    with later.forward([weight]):
        assert not later.is_left_for_later(weight, inputs)
        assert later.is_left_for_later(torch.nn.Parameter(weight.detach()), inputs)


def test_a_first_layer_without_a_gradient_of_its_input_is_whole() -> None:
    """As behind a frozen embedding."""
    later, (first, second) = WeightGradients(), parameters((IN, IN), (IN, IN))
    with later.forward(()):
        loss = Two(later, first, second)(samples().detach()).sum()
    with later.backward(0, 0, ()):
        loss.backward()
    assert first.grad is not None and second.grad is None
    later.compute(0, 0)
    assert second.grad is not None


def test_what_waits_is_counted() -> None:
    """Inputs and gradients of outputs; a tensor that two layers share counts once."""
    later, (first, second) = WeightGradients(), parameters((OUT, IN), (OUT, IN))
    inputs = samples()
    with later.forward(()):
        loss = torch.stack([Linear(later, weight)(inputs) for weight in (first, second)]).square().sum()
    with later.backward(0, 0, ()):
        loss.backward()
    gradients = 2 * S * B * OUT
    assert later.num_bytes == 4 * (S * B * IN + gradients)


def test_a_whole_backward_through_a_split_forward_gives_the_gradient_at_once() -> None:
    """As a user's own backward inside a forward; gradients of inputs alone leave the weight as it is."""
    later, (weight,), inputs = WeightGradients(), parameters((IN, IN)), samples()
    with later.forward(()):
        loss = Linear(later, weight)(inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert weight.grad is None
        loss.backward()
    whole = Linear(None, other := torch.nn.Parameter(weight.detach()))(again := samples())
    whole.square().sum().backward()
    assert torch.equal(gradient, again.grad) and torch.equal(inputs.grad, again.grad)
    assert torch.equal(weight.grad, other.grad)


@pytest.mark.parametrize("part", ["inputs", "gradient"])
def test_what_is_kept_must_not_be_changed_in_place(part: str) -> None:
    later, (weight,), inputs = WeightGradients(), parameters((IN, IN)), samples()
    kept = []
    with later.forward(()):
        output = Linear(later, weight)(inputs)
    output.register_hook(kept.append)
    with later.backward(0, 0, ()):
        output.square().sum().backward()
    changed = inputs.detach() if part == "inputs" else kept[0]
    changed.mul_(2)
    with pytest.raises(ConfigError, match=r"with a weight of \[5, 5\], .* changed in place after its backward; .*copy"):
        later.compute(0, 0)


def test_other_parts_of_a_larger_tensor_may_be() -> None:
    later, (weight,), inputs = WeightGradients(), parameters((IN, IN)), samples()
    whole = inputs.detach().repeat(2, 1, 1)
    with later.forward(()):
        loss = Linear(later, weight)(whole[:S].requires_grad_()).square().sum()
    with later.backward(0, 0, ()):
        loss.backward()
    whole[S:] = 0
    later.compute(0, 0)


def test_layers_that_always_stay_whole() -> None:
    later, (weight, other) = WeightGradients(), parameters((IN, IN), (IN, IN))
    later.always_whole = [weight]
    with later.forward([other]):
        assert not later.is_left_for_later(weight, samples()) and not later.is_left_for_later(other, samples())


def test_what_is_not_left_cannot_be_computed() -> None:
    """The proof of an order refuses it, too."""
    later, (weight,) = WeightGradients(), parameters((IN, IN))
    with later.forward(()):
        loss = Linear(later, weight)(samples()).sum()
    with pytest.raises(PlanError, match="0W0 comes before 0I0, or twice"):
        later.compute(0, 0)
    with later.backward(0, 0, ()):
        loss.backward()
    later.compute(0, 0)
    with pytest.raises(PlanError, match="0W0 comes before 0I0, or twice"):
        later.compute(0, 0)
