"""Bytes that the forward pass of one microbatch keeps for its backward pass, on one rank: sums of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.memory.activation_rows import ROWS, WAITING, KeptRow
from vtp_plugin.plan.memory.layer_sizes import Recompute, Sizes


def kept_by_module(sizes: Sizes, chunks: Sequence[Chunk]) -> dict[str, int]:
    """Give what the chunks of a stage keep of one microbatch on one rank of such sizes, by module, the most first.

    >>> from vtp_plugin.plan.model.gpt_model import GPTModel
    >>> from vtp_plugin.plan.memory.layer_sizes import Microbatch
    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=64, heads=12, groups=12, kv_channels=4, ffn=192,
    ...     vocab=60, num_positions=12, is_gated=False, has_bias=True, has_qkv_bias=False, has_norm_bias=True,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Microbatch(length=12, size=2, itemsize_bytes=4, is_sharded=False, has_rope=False, is_fused=True)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> kept = kept_by_module(Sizes(model=model, batch=batch, tp=1), [chunk])
    >>> list(kept.items())[:2], sum(kept.values())
    ([('mlp', 36864), ('core_attention', 27792)], 113064)
    """
    return _by_module(ROWS, sizes, chunks)


def waiting_by_module(sizes: Sizes, chunks: Sequence[Chunk]) -> dict[str, int] | None:
    """Give the same of a microbatch that waits: from the gradient of its input to those of its weights.

    None where that is not known: of Transformer Engine's layers, and of experts computed together, which some versions
    of Megatron do not build of its linear layers.

    >>> from vtp_plugin.plan.model.gpt_model import GPTModel
    >>> from vtp_plugin.plan.memory.layer_sizes import Microbatch
    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=64, heads=12, groups=12, kv_channels=4, ffn=192,
    ...     vocab=60, num_positions=12, is_gated=False, has_bias=True, has_qkv_bias=False, has_norm_bias=True,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Microbatch(length=12, size=2, itemsize_bytes=4, is_sharded=False, has_rope=False, is_fused=True)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> waiting_by_module(Sizes(model=model, batch=batch, tp=1), [chunk])
    {'mlp': 49152, 'linear_qkv': 19968, 'linear_proj': 10752}
    """
    batch = sizes.batch
    if batch.is_engine or (batch.routing is not None and batch.routing.is_grouped):
        return None
    # Recomputed layers have run again by then.
    return _by_module(WAITING, replace(sizes, batch=replace(batch, recompute=Recompute())), chunks)


def _by_module(rows: Mapping[str, Sequence[KeptRow]], sizes: Sizes, chunks: Sequence[Chunk]) -> dict[str, int]:
    model, batch, kept = sizes.model, sizes.batch, Counter[str]()

    def add(place: str, sizes: Sizes, times: int = 1) -> None:
        for row in rows.get(place, ()):
            kept[row.module] += times * row.size_bytes(sizes)

    has_experts = model.experts.layers if model.experts and batch.routing else (False,) * model.num_layers
    for chunk in chunks:
        num_again, layers = batch.recompute.parted(chunk.layers)
        num_predicting = model.num_predicting if chunk.is_last else 0
        # Megatron's blocks are not for those of multi-token prediction.
        whole = [*layers, *[model.num_layers - 1] * (num_predicting if batch.recompute.method != "uniform" else 0)]
        for kind, number in Counter(has_experts[layer] for layer in whole).items():
            add("layer", replace(sizes, has_experts=kind), number)
        add("chunk", replace(sizes, num_again=num_again, num_layers=len(chunk.layers) + num_predicting))
        if chunk.is_first:
            add("first", sizes)
        if chunk.is_last:
            add("last", sizes)
            add("loss", sizes, 1 + num_predicting)
            add("prediction", sizes, num_predicting)
    return {module: size for module, size in kept.most_common() if size}
