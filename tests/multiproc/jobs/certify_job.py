"""Runs of ``certify`` in the tests' workers, also with a fault that a test plants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from tests.support.pool import init_gloo
from vtp_plugin.certify.compare import RankNumbers
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.cli.certify_workers import applied
from vtp_plugin.patches import certified_run


def train(run: CertifiedRun, fault: str = "") -> RankNumbers:
    """Run on this rank; with a fault, planted in the model before the first step."""
    init_gloo()
    if not fault:
        return certified_run.train(run, applied)
    plant, original = FAULTS[fault], certified_run._Trainer.run_steps

    def run_steps(self: Any, steps: range) -> RankNumbers:
        with plant(self):
            return original(self, steps)

    certified_run._Trainer.run_steps = run_steps
    try:
        return certified_run.train(run, applied)
    finally:
        certified_run._Trainer.run_steps = original


Fault = Callable[[Any], Any]
FAULTS: dict[str, Fault] = {}


def _fault(function: Callable[[Any], Iterator[None]]) -> Fault:
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


def _module(trainer: Any, ending: str, layer: int) -> Any:
    """Give a module of a layer, by its number in the model; None on ranks without it."""
    layers = [one for chunk in trainer.chunks for one in chunk.decoder.layers if one.layer_number == layer]
    return next((module for one in layers for name, module in one.named_modules() if name.endswith(ending)), None)


@contextmanager
def _gradient(trainer: Any, name: str, change: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Change the gradient of a weight after all sums."""
    step = trainer.config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        if name in trainer.parts:
            change(trainer.parts[name].parameter.main_grad)

    trainer.config.finalize_model_grads_func = finalize
    yield


def _tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


@_fault
def sum_left_out(trainer: Any) -> Iterator[None]:
    """A row-parallel layer does not sum over its ranks."""
    module = _module(trainer, "linear_fc2", 3)
    if module is not None:
        module.explicit_expert_comm = True  # as in experts, whose dispatcher sums
    yield


@_fault
def gradient_by_tp(trainer: Any) -> Iterator[None]:
    """The gradient of a norm is summed over ranks that have all of it."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    with _gradient(trainer, "decoder.layers.4.input_layernorm.weight", lambda gradient: gradient.mul_(size)):
        yield


@_fault
def gradient_of_stage(trainer: Any) -> Iterator[None]:
    """A stage divides its gradients by another number of replicas."""
    step = trainer.config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        for part in trainer.parts.values() if trainer.stage == 0 else ():
            part.parameter.main_grad.mul_(0.5)

    trainer.config.finalize_model_grads_func = finalize
    yield


@_fault
def rows_swapped(trainer: Any) -> Iterator[None]:
    """The rows of a layer's queries, keys and values lie in another order."""
    module = _module(trainer, "linear_qkv", 3)
    if module is not None:
        with torch.no_grad():
            module.weight.copy_(module.weight.roll(4, 0))
    yield


@_fault
def one_nan(trainer: Any) -> Iterator[None]:
    """One gradient of one rank is no number."""

    def spoil(gradient: torch.Tensor) -> None:
        if _tp_rank() == 1:
            gradient.view(-1)[3] = torch.nan

    with _gradient(trainer, "decoder.layers.3.mlp.linear_fc1.weight", spoil):
        yield


@_fault
def one_rank_alone(trainer: Any) -> Iterator[None]:
    """One rank's part of a gradient is too large."""

    def enlarge(gradient: torch.Tensor) -> None:
        if _tp_rank() == 1:
            gradient.mul_(3.0)

    with _gradient(trainer, "decoder.layers.3.mlp.linear_fc2.weight", enlarge):
        yield


@_fault
def tied_copy_drifts(trainer: Any) -> Iterator[None]:
    """The sum of the two ends of a tied embedding is left out at its end."""
    with _gradient(trainer, "output_layer.weight", lambda gradient: gradient.mul_(0.25)):
        yield


@_fault
def output_halved(trainer: Any) -> Iterator[None]:
    """A layer gives out half of what it should."""
    module = _module(trainer, "linear_proj", 4)
    if module is not None:
        forward = module.forward
        module.forward = lambda *args, **kwargs: (lambda out, bias: (0.5 * out, bias))(*forward(*args, **kwargs))
    yield


@_fault
def gradient_shares(trainer: Any) -> Iterator[None]:
    """The sum of a norm's gradient under sequence parallelism is left out: each rank keeps its share."""
    name = "decoder.layers.4.input_layernorm.weight"
    step = trainer.config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        part = trainer.parts.get(name)
        share = None if part is None else part.parameter.main_grad.clone()
        step(*args, **kwargs)
        if part is not None and share is not None:
            part.parameter.main_grad.copy_(share)

    trainer.config.finalize_model_grads_func = finalize
    yield


@_fault
def one_rate(trainer: Any) -> Iterator[None]:
    """One stage learns at another rate."""
    if trainer.stage == 1:
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 2
    yield
