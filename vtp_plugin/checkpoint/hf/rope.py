"""The scaling of rotary positions in Llama 3: its frequencies, and the factor that given frequencies stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

LOW: Final = 1.0
"""``low_freq_factor``, which Megatron has in its code."""
HIGH: Final = 4.0
"""``high_freq_factor``, likewise."""
ORIGINAL: Final = 8192
"""``original_max_position_embeddings``, likewise."""
# Far above what rounding to 32 bits does, far below what a factor does.
_TOLERANCE: Final = 1e-4


def frequencies(size: int, base: float, factor: float) -> list[float]:
    """Return the frequencies of rotary positions, slow ones stretched as in Llama 3.

    Follows https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py.

    Args:
        size: size of the part of a head that is rotated.
        base: base of the rotary positions.
        factor: factor by which positions are stretched; 1 leaves them as they are.

    >>> [round(each, 9) for each in frequencies(8, 500000.0, 32.0)]
    [1.0, 0.037606031, 0.000429557, 1.662e-06]
    """
    plain = [base ** (-2 * i / size) for i in range(size // 2)]
    return [each * (share + (1 - share) / factor) for each, share in zip(plain, _kept(plain), strict=True)]


def factor_of(found: Sequence[float], base: float) -> float | None:
    """Return the factor that frequencies were stretched by; None if they do not tell, or are others.

    Args:
        found: all frequencies.
        base: base of the rotary positions.

    >>> round(factor_of(frequencies(64, 500000.0, 8.0), 500000.0), 4), factor_of([1.0, 0.5, 0.1, 1e-6], 500000.0)
    (8.0, None)
    >>> factor_of(frequencies(4, 10.0, 8.0), 10.0)  # none of them is slow enough
    """
    size = 2 * len(found)
    plain = frequencies(size, base, 1.0)
    (*_, share), last = _kept(plain), found[-1] / plain[-1]
    if share == 1 or last <= share:
        return None
    factor = (1 - share) / (last - share)
    expected = frequencies(size, base, factor)
    is_so = all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(found, expected, strict=True))
    return factor if is_so else None


def problem_of_factor(found: Sequence[float], base: float, factor: float) -> Iterator[str]:
    """Say where a model's positions are stretched by another factor than the flag says.

    Args:
        found: frequencies of the model.
        base: base of its rotary positions.
        factor: factor that the flag gives.

    Yields:
        A line ``value; rule; way out``.

    >>> [*problem_of_factor(frequencies(64, 5e5, 8.0), 5e5, 8.0)]
    []
    >>> [line.partition(";")[0] for line in problem_of_factor(frequencies(64, 5e5, 8.0), 5e5, 32.0)]
    ['--rope-scaling-factor is 32, and the model was built with 8']
    """
    built = factor_of(found, base)
    if built is not None and not math.isclose(built, factor, rel_tol=_TOLERANCE):
        yield (
            f"--rope-scaling-factor is {factor:g}, and the model was built with {built:.6g}; the script does not hand "
            "the flag on, and the model would train with other positions than the flag says; give GPTModel "
            "rope_scaling_factor=args.rope_scaling_factor"
        )


def _kept(plain: Sequence[float]) -> list[float]:
    """Return the share of each frequency that stays: 1 for fast ones, 0 for slow ones, a ramp between them."""
    turns = (ORIGINAL * each / (2 * math.pi) for each in plain)
    return [min(max((each - LOW) / (HIGH - LOW), 0.0), 1.0) for each in turns]
