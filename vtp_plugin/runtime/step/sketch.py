"""Sketches of tensors: a few numbers of each block of rows of a rank's part, which make up those of the whole."""

from __future__ import annotations

import math
import zlib
from typing import Final

import torch

from vtp_plugin.certify.compare import PartSketch

_NUM_VALUES: Final = 8
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW: Final = (1 << 48) - 1  # which a float64 holds exactly
_NUM_BLOCKS: Final = 24  # of a tensor at most; stages of 1, 2, 3, 4, 6, 8, 12 ranks have whole ones


def sketch(
    name: str,
    part: torch.Tensor,
    *,
    dim: int | None = None,
    index: int = 0,
    count: int = 1,
    noise: float = 0.0,
    is_exact: bool = False,
) -> PartSketch:
    """Multiply the blocks of a part of a tensor with random vectors of signs, which depend on name and whole shape.

    Args:
        name: of the tensor, the same on all ranks and in all runs.
        part: what this rank has of it, of any shape, type and device; it is not changed.
        dim: the dimension along which it is cut into equal parts; None where this rank has all of it.
        index: which part it is.
        count: number of parts.
        noise: norm of what the storage of the part rounds away.
        is_exact: multiply the bits of the numbers with random integers instead: a digest, by blocks.

    >>> whole = torch.arange(12.0).reshape(4, 3)
    >>> parts = [sketch("w", part, dim=0, index=i, count=2).values for i, part in enumerate(whole.chunk(2))]
    >>> parts[0] + parts[1] == sketch("w", whole).values
    True
    """
    is_cut = dim is not None and count > 1
    rows = part.detach().cpu()
    if is_exact:
        rows = rows.contiguous().view(_BITS[rows.element_size()]).to(torch.int64)
    rows = rows if is_exact else rows.to(torch.float64)
    rows = (rows.movedim(dim, 0) if dim is not None and rows.dim() else rows).reshape(rows.shape[dim or 0], -1)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    num_values = 1 if is_exact else _NUM_VALUES

    def draw(size: int) -> torch.Tensor:
        if is_exact:
            return torch.randint(-(2**62), 2**62, (1, size), generator=generator) | 1
        return torch.randint(0, 2, (num_values, size), generator=generator, dtype=torch.float64) * 2 - 1

    num_rows = len(rows) * (count if is_cut else 1)
    columns, before = draw(rows.shape[1]), draw(num_rows)
    if is_cut:
        before = before[:, index * len(rows) : (index + 1) * len(rows)]
    num_blocks = math.gcd(num_rows, _NUM_BLOCKS)
    num_own = num_blocks // count if is_cut and num_blocks % count == 0 else 1 if is_cut else num_blocks
    blocks = rows.reshape(num_own, -1, rows.shape[1])
    before = before.reshape(num_values, num_own, -1).transpose(0, 1)
    values = ((before @ blocks) * columns).sum(dim=2).flatten()
    values = values & _LOW if is_exact else values
    return PartSketch(
        values=tuple(map(float, values.tolist())),
        index=index,
        count=count,
        is_cut=is_cut,
        noise=math.sqrt(num_values) * noise,
        norm=float(rows.double().norm()),
    )
