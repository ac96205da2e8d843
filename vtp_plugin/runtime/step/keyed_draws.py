"""Random numbers that follow from a secret key: the weights of a model, and seeds for what is drawn while it trains.

A seed would not do. Torch's generator on the CPU (mt19937) takes 32 bits of it, that of a device (Philox) 64: whoever
sees what a model computes can try all of them. Here every tensor has a generator of its own, whose whole state, 19,968
bits, SHAKE-256 makes from the key. So a search has to try all keys, and what is known of one tensor tells nothing of
another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vtp_plugin.errors import ConfigError

# Where torch keeps the words of mt19937, each in 64 bits, and what they are after this seed.
_NUM_WORDS: Final = 624
_WORDS: Final = slice(24, 24 + 8 * _NUM_WORDS)
_SEED: Final = 5489
_FIRST_WORDS: Final = [5489, 1301868182]
_WEIGHTS, _SEEDS = b"vtp_plugin weights:", b"vtp_plugin seeds:"


def keyed_seed(key: bytes, label: bytes) -> int:
    """Return a seed of 64 bits.

    >>> keyed_seed(bytes(32), b"a") == keyed_seed(bytes(32), b"a") != keyed_seed(bytes(32), b"b")
    True
    """
    return int.from_bytes(hashlib.shake_256(_SEEDS + key + label).digest(8), "little")


def keyed_state(key: bytes, label: bytes) -> torch.Tensor:
    """Return the state of a generator of the CPU, as ``torch.Generator.get_state`` gives it.

    Raises:
        ConfigError: this torch keeps it in another form.

    >>> one, other = torch.Generator(), torch.Generator()
    >>> _ = one.set_state(keyed_state(bytes(32), b"a")), other.set_state(keyed_state(bytes(32), b"a"))
    >>> torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
    True
    """
    state = torch.Generator().manual_seed(_SEED).get_state()
    words = state[_WORDS].view(torch.int64) if len(state) >= _WORDS.stop else state[:0]
    if words[:2].tolist() != _FIRST_WORDS:
        raise ConfigError(
            f"torch {torch.__version__} keeps the state of its generator in another form than --vtp-edge-seed can "
            "write; take another torch, or give --vtp-edge-seed shared"
        )
    drawn = hashlib.shake_256(_WEIGHTS + key + label).digest(4 * _NUM_WORDS)
    words.copy_(torch.frombuffer(bytearray(drawn), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF)
    return state


class KeyedDraws(TorchDispatchMode):
    """Inside it, whatever torch draws at random on this thread follows from a key, on any device.

    Values are equal exactly where they would be equal without it: each tensor's generator is made from the key and from
    the state of the generator that torch would have used. So ranks that would draw the same whole weight still do, and
    ranks that would draw slices of their own still do. Torch's own generators move on as they would. All is drawn on
    the CPU, and copied to its device.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        device = _device_of(leaves, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        label = _state_of(leaves, device)
        on_host: Callable[[Any], Any] = lambda value: _on_host(value)  # noqa: E731
        host_args, host_kwargs = tree_map(on_host, args), tree_map(on_host, kwargs)
        result = func(*args, **kwargs)
        drawn = self._draw(label, func, host_args, host_kwargs)
        if not func._schema.is_mutable:
            return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, drawn)
        for value, new in zip(leaves, tree_leaves((host_args, host_kwargs)), strict=True):
            if isinstance(value, torch.Tensor):
                value.copy_(new)
        return result

    def _draw(self, label: bytes, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that draws from the CPU's default generator, whose state comes back afterwards."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(keyed_state(self._key, label))
        try:
            return func(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)


def _device_of(leaves: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    devices = [value.device for value in leaves if isinstance(value, torch.Tensor)]
    return devices[0] if devices else torch.device(kwargs.get("device") or "cpu")


def _state_of(leaves: Sequence[Any], device: torch.device) -> bytes:
    """Return the state of the generator that torch would draw from."""
    named = [value for value in leaves if isinstance(value, torch.Generator)]
    if named:
        state = named[0].get_state()
    elif device.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return bytes(state.tolist())


def _on_host(value: Any) -> Any:
    """Give an argument as the CPU takes it: a copy of a tensor; no generator, and no other device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, torch.Generator):
        return None
    return torch.device("cpu") if isinstance(value, torch.device) else value
