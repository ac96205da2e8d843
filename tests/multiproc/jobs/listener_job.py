"""Training steps in which somebody listens to the linear layers, each step in another way."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrize import register_parametrization

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, applied, cpu_only, mapped_only, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.api import _Holder
from vtp_plugin.runtime.step.weight_gradients import WeightGradients
from vtp_plugin.util import log


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one step gave on this rank, and what its listener saw.

    Attributes:
        result: losses, norm, and all weights after it.
        seen: by listener and by when it heard (in forwards or in backwards), in this order.
        left: how often the gradient of each weight was left for later, by name.
        said: warnings.
    """

    result: Any
    seen: dict[str, list[Any]]
    left: dict[str, int]
    said: list[str]


@dataclass(slots=True, kw_only=True)
class Ear:
    """Listens to one model until its stack closes."""

    model: Any
    stack: ExitStack = field(default_factory=ExitStack)
    seen: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    @property
    def layers(self) -> list[tuple[str, Any]]:
        """The linear layers that can split, by name."""
        kinds = (ColumnParallelLinear, RowParallelLinear)
        found = [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, kinds)]
        return [(name, layer) for name, layer in found if "output_layer" not in name]

    def hear(self, name: str, *tensors: Any, place: str = "") -> None:
        """Note something; what is heard in forwards apart from backwards, whose order among each other may differ."""
        place = place or ("forward" if torch._C._current_graph_task_id() == -1 else "backward")
        self.seen.setdefault(place, []).append((name, *map(digest, tensors)))

    def hook(self, handle: Any) -> None:
        self.stack.callback(handle.remove)

    def at_outputs(self, listen: Callable[[str, torch.Tensor], Any]) -> None:
        """Call something with each output of a linear layer, in the forward."""

        for name, layer in self.layers:

            def hook(_layer: Any, _inputs: Any, output: Any, name: str = name) -> None:
                if output[0].requires_grad:  # not in the first pass of a recompute
                    listen(name, output[0])

            self.hook(layer.register_forward_hook(hook))

    def at_inputs(self, listen: Callable[[str, torch.Tensor], Any]) -> None:
        for name, layer in self.layers:

            def hook(_layer: Any, given: Any, name: str = name) -> None:
                if given[0].requires_grad:
                    listen(name, given[0])

            self.hook(layer.register_forward_pre_hook(hook))


def digest(value: Any) -> Any:
    """Make what is compared of what a listener saw."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.double().sum().item(), value.double().square().sum().item()
    return tuple(map(digest, value)) if isinstance(value, tuple) else value


def halved(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient * 0.5


def outputs(ear: Ear) -> None:
    """The finding's own case, with a second hook that sees what the first one made of it."""

    def listen(name: str, output: torch.Tensor) -> None:
        output.register_hook(halved)
        output.register_hook(lambda gradient: ear.hear(name, gradient))

    ear.at_outputs(listen)


def outputs_in_place(ear: Ear) -> None:
    ear.at_outputs(lambda _, output: output.register_hook(lambda gradient: gradient.mul_(0.5)))


def inputs(ear: Ear) -> None:
    def listen(name: str, given: torch.Tensor) -> None:
        given.register_hook(halved)
        given.register_hook(lambda gradient: ear.hear(name, gradient))

    ear.at_inputs(listen)


def retained(ear: Ear) -> None:
    """Gradients that stay on inputs and outputs; read after the step."""
    held: list[tuple[str, torch.Tensor]] = []

    def listen(name: str, tensor: torch.Tensor) -> None:
        tensor.retain_grad()
        held.append((name, tensor))

    ear.at_inputs(listen)
    ear.at_outputs(listen)
    ear.stack.callback(lambda: [ear.hear(name, tensor.grad) for name, tensor in held])


def modules(ear: Ear) -> None:
    """Full backward hooks that change what they get, on every module, beside pre-hooks."""

    def hook(name: str) -> Callable[..., Any]:
        def listen(_module: Any, of_inputs: Any, of_outputs: Any) -> Any:
            ear.hear(name, of_inputs, of_outputs)
            return tuple(map(halved, of_inputs))

        return listen

    def pre_hook(name: str) -> Callable[..., Any]:
        def listen(_module: Any, of_outputs: Any) -> Any:
            ear.hear(f"{name} before", of_outputs)
            return tuple(map(halved, of_outputs))

        return listen

    for name, layer in ear.layers:
        ear.hook(layer.register_full_backward_hook(hook(name)))
        ear.hook(layer.register_full_backward_pre_hook(pre_hook(name)))


def modules_the_old_way(ear: Ear) -> None:
    """Hooks of the nodes, which see the gradients of weights, too."""

    def hook(name: str) -> Callable[..., Any]:
        return lambda _module, of_inputs, of_outputs: ear.hear(name, of_inputs, of_outputs)

    for name, layer in ear.layers:
        if isinstance(layer, ColumnParallelLinear):
            layer._is_full_backward_hook = None  # torch remembers the kind of hooks that were removed
            ear.hook(layer.register_backward_hook(hook(name)))
            ear.stack.callback(setattr, layer, "_is_full_backward_hook", None)


def nodes(ear: Ear) -> None:
    """Hooks before and behind the nodes of the layers, which change all gradients."""

    def listen(name: str, output: torch.Tensor) -> None:
        node: Any = output.grad_fn
        for _ in range(2):  # what a row layer returns is summed over its ranks
            if "Linear" not in node.name() and "_Split" not in node.name():
                node = node.next_functions[0][0]

        def before(of_outputs: Any) -> Any:
            ear.hear(f"{name} before", of_outputs)
            return tuple(map(halved, of_outputs))

        def behind(of_inputs: Any, of_outputs: Any) -> Any:
            ear.hear(name, of_inputs, of_outputs)
            return tuple(map(halved, of_inputs))

        node.register_prehook(before)
        node.register_hook(behind)

    ear.at_outputs(listen)


def saved(ear: Ear) -> None:
    """What is kept for backwards: which tensors, how often; and what is given back is another tensor."""
    weights = {id(parameter) for parameter in ear.model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        ear.hear(type(tensor).__name__, id(tensor) in weights, tensor)
        return tensor.detach().clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        ear.hear("unpacked", tensor)
        return tensor * 0.5 if tensor.is_floating_point() else tensor

    ear.stack.enter_context(saved_tensors_hooks(pack, unpack))


def saved_on_cpu(ear: Ear) -> None:
    ear.stack.enter_context(save_on_cpu())


def asked(ear: Ear) -> None:
    """Gradients of inputs that a user wants in the forward, by a backward of his own."""

    def listen(name: str, output: torch.Tensor) -> None:
        given = held[name]
        (gradient,) = torch.autograd.grad(output.square().sum(), given, retain_graph=True)
        ear.hear(name, gradient)

    held: dict[str, torch.Tensor] = {}
    ear.at_inputs(held.__setitem__)
    ear.at_outputs(listen)


def several(ear: Ear) -> None:
    """One hook for the outputs of a microbatch's layers, however many these are."""
    held: list[torch.Tensor] = []

    def listen(name: str, output: torch.Tensor) -> None:
        held.append(output)
        if len(held) == len(ear.layers):
            register_multi_grad_hook(held, lambda gradients: ear.hear("all", tuple(gradients)))
            held.clear()

    ear.at_outputs(listen)


def biases(ear: Ear) -> None:
    for name, layer in ear.layers:
        if layer.bias is not None:
            ear.hook(layer.bias.register_hook(halved))
            ear.hook(layer.bias.register_hook(lambda gradient, name=name: ear.hear(name, gradient)))


def accumulators(ear: Ear) -> None:
    """As Megatron's DDP listens: behind the sum of a weight's gradients, in the order of each weight."""
    for name, layer in ear.layers:
        (accumulator, _), *_ = layer.weight.expand_as(layer.weight).grad_fn.next_functions
        ear.hook(accumulator.register_hook(lambda *_, name=name: ear.hear(name, place=name)))
        ear.stack.callback(lambda accumulator: None, accumulator)


def weights(ear: Ear) -> None:
    """On the weights of some layers only."""
    for name, layer in ear.layers:
        if "linear_fc1" in name:
            ear.hook(layer.weight.register_hook(halved))
            ear.hook(layer.weight.register_hook(lambda gradient, name=name: ear.hear(name, gradient)))
            ear.hook(layer.register_full_backward_hook(lambda *_, name=name: ear.hear(name)))


def weights_of_one_rank(ear: Ear) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        weights(ear)


def behind_sums(ear: Ear) -> None:
    """Behind the sum of some weights' gradients."""
    for name, layer in ear.layers:
        if "linear_fc2" in name:

            def hear(weight: Any, name: str = name) -> None:
                ear.hear(name, weight.grad)

            ear.hook(layer.weight.register_post_accumulate_grad_hook(hear))


def several_weights(ear: Ear) -> None:
    """One hook for all parameters of a layer."""
    for name, layer in ear.layers:
        if "linear_qkv" in name:
            for mode in ("all", "any"):

                def hear(gradients: Any, name: str = f"{mode} {name}") -> None:
                    ear.hear(name, gradients if isinstance(gradients, torch.Tensor) else tuple(gradients))

                ear.hook(register_multi_grad_hook([*layer.parameters()], hear, mode=mode))


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(ear: Ear) -> None:
    """For good: it comes last."""
    for name, layer in ear.layers:
        if "linear_fc1" in name:
            register_parametrization(layer, "weight", _Doubled(), unsafe=True)


def nobody(ear: Ear) -> None:
    """The control."""


SPLIT = {
    one.__name__: one
    for one in (
        *(nobody, outputs, outputs_in_place, inputs, retained, modules, modules_the_old_way, nodes),
        *(saved_on_cpu, asked, several, biases, accumulators, saved),
    )
}
"""Layers that are listened to like this leave the gradients of weights for later all the same."""

WHOLE = {
    "weights": "linear_fc1",
    "weights_of_one_rank": "linear_fc1",
    "behind_sums": "linear_fc2",
    "several_weights": "linear_qkv",
    "parametrized": "linear_fc1",
}
"""Of these only the layers that have this in their name do not."""


def listen(case: Case, names: list[str]) -> dict[str, Heard]:
    """Train a step of a case with each listener in turn."""
    init_gloo()
    alone = {"stock": cpu_only, "mapped": mapped_only}.get(case.execution.plugin)
    with (
        alone() if alone else applied(case, force=False),
        model_parallel(case),
        contextlib.closing(Trainer(case)) as trainer,
    ):
        (model,) = trainer.model
        return {name: _one(trainer, Ear(model=model), globals()[name]) for name in names}


def _one(trainer: Trainer, ear: Ear, listener: Callable[[Ear], None]) -> Heard:
    if trainer.case.execution.schedule == "planned":
        assert _Holder.session is not None
        runner = _Holder.session.running.require_schedule_runner()
        runner.weight_gradients.always_whole = None  # as in the first step
        runner._num_left = 0  # the order stays
    said: list[str] = []
    with _counting(ear.model, said) as left, ear.stack:
        listener(ear)
        losses, _, grad_norm, _ = trainer.step(0)
    parameters = ear.model.named_parameters()
    after = {name.replace("parametrizations.weight.original", "weight"): digest(one) for name, one in parameters}
    return Heard(result=(losses, float(grad_norm), after), seen=ear.seen, left=dict(left), said=said)


@contextlib.contextmanager
def _counting(model: Any, said: list[str]) -> Iterator[Counter[str]]:
    """Count the gradients of weights that are left for later, and note warnings."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left, keep = Counter[str](), WeightGradients.keep

    def counting(self: WeightGradients, weight: torch.Tensor, *args: Any) -> None:
        left[names[id(weight)]] += self.is_keeping
        keep(self, weight, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "keep", counting)
        patch.setattr(log, "warning", said.append)
        yield left
