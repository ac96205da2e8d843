"""A core attention for what Megatron's local one refuses and the others need a GPU for.

That is context parallelism and packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn


class GatheredAttention(nn.Module):
    """Causal attention of the own rows over all rows, which are gathered from the context-parallel ranks.

    Rows are in Megatron's load-balanced order: a rank has a chunk from the front and its counterpart from the back.
    """

    is_causal = True

    def __init__(
        self, config: Any, *_args: Any, pg_collection: Any = None, softmax_scale: float | None = None, **_options: Any
    ) -> None:
        super().__init__()
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._group = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **_options: Any,
    ) -> Any:
        """Attend; ``[S / cp, B, heads, channels]`` in, ``[S / cp, B, heads * channels]`` out.

        Packed samples have no ``B``, and no row attends to another sample.
        """
        if packed_seq_params is not None:
            samples = samples_of(packed_seq_params.cu_seqlens_q)
            hidden = (samples[:, None] != samples[None, :]) | torch.ones(len(samples), len(samples)).triu(1).bool()
            return self._mix(query[:, None], key[:, None], value[:, None], hidden)
        group: Any = self._group or parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(part.contiguous(), group=group) for part in (key, value))
        positions = [chunk_positions(len(key), rank, group.size()) for rank in range(group.size())]
        own, every = positions[group.rank()], torch.cat(positions)
        return self._mix(query, key, value, (every[None, :] > own[:, None]) & self.is_causal)

    def _mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        # Heads of a group share their keys and values.
        key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
        scores = torch.einsum("sbnh,tbnh->bnst", query, key) * self._scale
        scores = scores.masked_fill(hidden, float("-inf"))
        mixed = torch.einsum("bnst,tbnh->sbnh", scores.softmax(dim=-1), value)
        return mixed.flatten(start_dim=2)


def chunk_positions(length: int, cp_rank: int, cp: int) -> torch.Tensor:
    """Give the places in the sequence of a context-parallel rank's rows, in the order of its memory.

    >>> chunk_positions(8, 0, 2).tolist()
    [0, 1, 6, 7]
    """
    if cp == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


def samples_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Give the sample of every row from the cumulative lengths.

    >>> samples_of(torch.tensor([0, 2, 5])).tolist()
    [0, 0, 1, 1, 1]
    """
    return torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
