"""What adapters (LoRA) start from: drawn for the whole matrix, and cut, so that it is the same for every list."""

from __future__ import annotations

import hashlib
import math

import torch


def first_factor(name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Draw a whole A, from a generator of its own, as PEFT 0.21 does (``LoraLayer.reset_lora_parameters``).

    Args:
        name: name of the factor in the whole model, with the layer's number.
        shape: rows and columns.
        seed: of the run.

    Returns:
        On the CPU, in fp32: uniform as of Kaiming with a = sqrt 5, so within 1 / sqrt of its columns.

    >>> bool(first_factor("layers.0.q_proj", (1, 4), seed=1).abs().max() < 0.5)
    True
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def whole_factor(name: str, shape: tuple[int, int], *, seed: int) -> torch.Tensor:
    """Give a whole factor: A as of :func:`first_factor`, B zero.

    Args:
        name: name of the factor in the whole model, with the layer's number; ``linear_in`` is A, others are B.
        shape: rows and columns.
        seed: of the run.

    >>> whole_factor("layers.0.q_proj.linear_out", (2, 1), seed=1).tolist()
    [[0.0], [0.0]]
    """
    return first_factor(name, shape, seed=seed) if name.endswith("linear_in") else torch.zeros(shape)


def fill(weight: torch.Tensor, whole: torch.Tensor, *, rank: int) -> None:
    """Write this rank's part of a whole factor into its parameter, which says by its shape where it is cut.

    Args:
        weight: the parameter; what has fewer rows or columns than the whole is cut there.
        whole: the whole factor.
        rank: tensor-parallel rank.

    >>> part = torch.empty(1, 2)
    >>> fill(part, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rank=1)
    >>> part.tolist()
    [[3.0, 4.0]]
    """
    for axis, length in enumerate(weight.shape):
        if length < whole.shape[axis]:
            whole = whole.narrow(axis, rank * length, length)
    with torch.no_grad():
        weight.copy_(whole)
