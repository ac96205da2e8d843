"""The random generator of the simulated device.

A real accelerator has a second generator: what Megatron draws "on the device" before the weights does not advance the
CPU's generator, so ``--use-cpu-initialization`` gives the same weights for every TP size. And what only some ranks of a
stage draw on the host, such as the seeds of a data loader, does not advance the device's, so that dropout leaves out
the same elements on all of them. The CPU platform keeps both properties with a second generator, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from vtp_plugin.util.undo import UndoStack


class DeviceGenerator:
    """The generator that ``torch.cuda``'s random functions act on while the CPU mapping is installed.

    Functions that take ``generator=`` draw from :attr:`current` directly. In-place initialisers and dropout take none:
    run them inside :meth:`as_default` to draw them from the device's stream as well.

    Attributes:
        is_default: inside :meth:`as_default`.
    """

    def __init__(self) -> None:
        self._other = torch.Generator(device="cpu")
        self.is_default = False

    @property
    def current(self) -> torch.Generator:
        """The generator with the device's state: a separate one, or inside :meth:`as_default` the CPU's default one."""
        return torch.default_generator if self.is_default else self._other

    def as_default(self) -> AbstractContextManager[None]:
        """Let random operations without a ``generator=`` argument draw from the device's stream.

        Meanwhile the device's state replaces that of the CPU's default generator, which comes back afterwards. Nesting
        does nothing, but in a :meth:`host_as_default`. Not safe if other threads draw random numbers.
        """
        return self._switched(is_default=True)

    def host_as_default(self) -> AbstractContextManager[None]:
        """Let random operations draw from the host's stream, as they do outside :meth:`as_default`."""
        return self._switched(is_default=False)

    @contextmanager
    def _switched(self, *, is_default: bool) -> Generator[None]:
        if is_default == self.is_default:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._other.get_state())
        self._other.set_state(state)
        self.is_default = not self.is_default

    # Names and arguments follow torch.cuda.random. There is one device, so the device argument is ignored.

    def get_rng_state(self, device: object = "cuda") -> torch.Tensor:
        """Return a copy of the device generator's state, a byte tensor on the CPU."""
        return self.current.get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the states of all devices: there is one."""
        return [self.current.get_state()]

    def set_rng_state(self, new_state: torch.Tensor, device: object = "cuda") -> None:
        """Set the device generator's state."""
        self.current.set_state(new_state)

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the states of all devices: there is one, which takes the first."""
        self.current.set_state(new_states[0])

    def manual_seed(self, seed: int) -> None:
        """Seed the device generator."""
        self.current.manual_seed(int(seed))

    def seed(self) -> None:
        """Seed the device generator from the system's entropy."""
        self.current.seed()

    def initial_seed(self) -> int:
        """Return the last seed of the device generator."""
        return self.current.initial_seed()


class DefaultGenerators:
    """Stands for ``torch.cuda.default_generators``: a sequence with the generator of the only device."""

    def __init__(self, device_generator: DeviceGenerator) -> None:
        self._device_generator = device_generator

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Generator:
        if index not in (0, -1):
            raise IndexError(f"device {index}: the CPU platform has one device")
        return self._device_generator.current


def map_computing(undo: UndoStack, device_generator: DeviceGenerator) -> None:
    """Let what modules compute, forward and backward, draw from the device's generator.

    A data loader draws outside of modules, so from the host's. A backward pass draws where it computes a forward again.
    Torch's checkpoints restore the state of the default generator then, so it must be the device's when they note it.

    Args:
        undo: Receives every replacement.
        device_generator: Random generator of the simulated device.
    """
    variable: Any = torch.autograd.Variable  # torch's types leave out its engine
    undo.set(torch.nn.Module, "__call__", _on_device(torch.nn.Module.__call__, device_generator))
    undo.set(variable, "_execution_engine", _Engine(variable._execution_engine, device_generator))
    undo.set(torch.utils.checkpoint, "checkpoint", _on_device(torch.utils.checkpoint.checkpoint, device_generator))


def _on_device(function: Callable[..., Any], device_generator: DeviceGenerator) -> Callable[..., Any]:
    @functools.wraps(function)
    def computing(*args: Any, **kwargs: Any) -> Any:
        if device_generator.is_default:
            return function(*args, **kwargs)
        with device_generator.as_default():
            return function(*args, **kwargs)

    return computing


class _Engine:
    """Stands for torch's engine, by which each backward pass of torch and Megatron runs."""

    def __init__(self, engine: Any, device_generator: DeviceGenerator) -> None:
        self.run_backward = _on_device(engine.run_backward, device_generator)
        self.queue_callback = engine.queue_callback
        self.is_checkpoint_valid = engine.is_checkpoint_valid
