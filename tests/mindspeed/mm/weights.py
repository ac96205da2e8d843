"""One set of weights for every layout: each tensor is drawn whole, by its name, and every rank takes its part."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch

_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_EMBEDDING, _HEAD = "text_decoder.embedding.word_embeddings.weight", "text_decoder.output_layer.weight"


def fill(model: Any, rank: int, size: int, starts: dict[str, int]) -> None:
    """Give a model its weights.

    Args:
        model: the model, or one stage of it.
        rank: place of this process among the tensor-parallel ranks.
        size: how many there are.
        starts: number of the first layer that this stage holds, by the name of the module that holds the layers.
    """
    with torch.no_grad():
        for name, local_name, parameter in _named(model, starts):
            # A tied head is the embedding, wherever it lies.
            drawn = _EMBEDDING if name == _HEAD and model.share_embeddings_and_output_weights else name
            parameter.copy_(_part(_whole(drawn, parameter, size), local_name, parameter, rank, size))


def _named(model: Any, starts: dict[str, int]) -> Iterator[tuple[str, str, Any]]:
    for name, parameter in model.named_parameters():
        start = next((first for module, first in starts.items() if name.startswith(module)), 0)
        yield _LAYER.sub(lambda match, start=start: str(int(match.group()) + start), name), name, parameter


def _whole(name: str, parameter: Any, size: int) -> torch.Tensor:
    shape = list(parameter.shape)
    if _is_cut(parameter):
        shape[parameter.partition_dim] *= size
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    return 0.1 * values


def _part(whole: torch.Tensor, name: str, parameter: Any, rank: int, size: int) -> torch.Tensor:
    if not _is_cut(parameter):
        return whole
    dim = parameter.partition_dim
    # The first layer of a gated MLP holds two matrices, and each rank has a part of both.
    is_gated = "linear_fc1" in name and "projector" not in name
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(2 if is_gated else 1, dim)], dim)


def _is_cut(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
