"""The random generator of the simulated device.

A real accelerator has a second generator: what Megatron draws "on the device" before the weights does not advance the
CPU's generator, so ``--use-cpu-initialization`` gives the same weights for every TP size. The CPU platform keeps that
property with a second generator, too.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


class DeviceGenerator:
    """The generator that ``torch.cuda``'s random functions act on while the CPU mapping is installed.

    Functions that take ``generator=`` draw from :attr:`current` directly. In-place initialisers and dropout take none:
    run them inside :meth:`as_default` to draw them from the device's stream as well.
    """

    def __init__(self) -> None:
        self._own = torch.Generator(device="cpu")
        self._is_default = False

    @property
    def current(self) -> torch.Generator:
        """The generator with the device's state: a separate one, or inside :meth:`as_default` the CPU's default one."""
        return torch.default_generator if self._is_default else self._own

    @contextmanager
    def as_default(self) -> Generator[None]:
        """Let random operations without a ``generator=`` argument draw from the device's stream.

        Meanwhile the device's state replaces that of the CPU's default generator, which is restored afterwards. Nesting
        does nothing. Not safe if other threads draw random numbers.
        """
        if self._is_default:
            yield
            return
        cpu_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._own.get_state())
        self._is_default = True
        try:
            yield
        finally:
            self._is_default = False
            self._own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(cpu_state)

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
