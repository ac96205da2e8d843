"""What a rank holds: parameters, gradients, the optimizer's state, activations and overhead.

Bytes on a device that are no tensors of the model: 8-bit copies of weights, buffers of communicators, workspaces.

An estimate: none of it was measured. Not counted are the driver's context, and holes between blocks. Sources:

* Transformer Engine 2.9, ``pytorch/module/base.py``: a weight's 8-bit copies, by rows and by columns, stay over the
  microbatches; its workspace is 32 MiB on Hopper, and that of grouped products four more.
* NCCL, ``src/init.cc`` and ``src/include/device.h``: a connection has buffers for three protocols. ``connect.cc`` makes
  a ring in each of many channels, here 24 as on nodes with NVSwitch (an assumption; there are fewer elsewhere);
  ``graph/paths.cc`` 2 channels to a peer of a pipeline.
* HCCL: twice ``HCCL_BUFFSIZE``, 200 MB by default, for a communicator; the plugin's channels ask for one message.
* torch, ``c10/cuda/CUDACachingAllocator.cpp``: small tensors come out of blocks of 2 MiB, those below 10 MiB out of
  blocks of 20 MiB, others are rounded up to 2 MiB; ``aten/src/ATen/cuda/CublasHandlePool.cpp``: 32 MiB on Hopper.

Bytes of weights, gradients and optimizer state on every rank.

Gradients lie in buffers, one for routed experts and one for all else, each a row of buckets. With the distributed
optimizer weights lie in such buffers, too: every parameter begins at a multiple of 64 elements, every bucket ends at
one of 128 and of the number of replicas, and each replica keeps optimizer state for its part of every bucket. Read in
megatron/core of 0.19: ``distributed/param_and_grad_buffer.py`` and ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, groupby
from typing import NamedTuple

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.layout.layer_lists import Chunk, Kept
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activation_rows import ROWS, WAITING, KeptRow, Microbatch, Recompute, Sizes, row_of
from vtp_plugin.plan.model.gpt_model import (
    DENSE_LAYER,
    EXPERT_LAYER,
    FINAL_NORM,
    LAYERS,
    OUTPUT,
    POSITION_EMBEDDING,
    PREDICTION,
    PREDICTION_NORM,
    WORD_EMBEDDING,
    GPTModel,
    ParameterRow,
)
from vtp_plugin.plan.model.lora import Lora, LoraTarget, Matrices, is_adapter, published_matrices

_MIB = 2**20
# Low latency: 8 lines of 16 bytes for 512 threads in 8 steps; with 128 bytes: 120 times 8 bytes for 640; simple: 4 MiB.
_NCCL_CONNECTION = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * _MIB
_RING_CHANNELS, _PEER_CHANNELS = 24, 2
_HCCL_COMMUNICATOR = 2 * 200 * _MIB
_WORKSPACE, _GROUPED_WORKSPACES = 32 * _MIB, 4
# What may be left of one block of each kind, and of the last one of weights, gradients and optimizer.
_ALLOCATOR = (2 + 20 + 3 * 2) * _MIB


def overhead_bytes(
    backend: str,
    sizes: Sizes | None,
    held: Sequence[Parameter],
    chunks: Sequence[Chunk],
    grid: StageGrid,
    experts: ExpertGrid | None,
) -> int:
    """Return the bytes that a rank holds besides weights, gradients, optimizer and activations.

    Args:
        backend: backend of the collectives: nccl, hccl, or gloo, which is for CPUs, where the overhead is 0.
        sizes: sizes of a microbatch; None if they are not known.
        held: parameters of the rank.
        chunks: chunks of the rank's stage.
        grid: sizes of the stage.
        experts: how the stage shares its experts; None without experts.

    Two ranks of one stage, with a tensor-parallel group and one of the world: 2 * 24 * 9.1875 MiB. On an NPU 2 * 400.

    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> two = [overhead_bytes(backend, None, [], [chunk], StageGrid(2), None) for backend in ("nccl", "hccl")]
    >>> [(size - _ALLOCATOR - _WORKSPACE) / 2**20 for size in two]
    [441.0, 800.0]
    """
    if backend == "gloo":
        return 0
    copies, num_workspaces, message = 0, 1, 0
    if sizes is not None:
        linear = sum(
            p.numel for p in held if p.name.endswith("weight") and (".linear_" in p.name or "eh_proj" in p.name)
        )
        copies = 2 * sizes.inputs(linear) if sizes.batch.eight_bits else 0
        num_workspaces += (1 + (_GROUPED_WORKSPACES if experts else 0)) * sizes.batch.is_engine
        message = sizes.numbers(sizes.positions * sizes.model.hidden)
    parts = [grid.tp, grid.cp, grid.dp * grid.cp, *([experts.tp, experts.ep, experts.dp] if experts else [])]
    is_cut = any(not chunk.is_whole for chunk in chunks)
    num_groups = sum(size > 1 for size in parts) + (is_cut or grid.size > 1) + any(p.is_shared for p in held)
    num_peers = any(not chunk.is_first for chunk in chunks) + any(not chunk.is_last for chunk in chunks)
    if backend == "hccl":
        buffers = num_groups * _HCCL_COMMUNICATOR + num_peers * 2 * message
    else:
        buffers = (num_groups * _RING_CHANNELS + num_peers * _PEER_CHANNELS) * _NCCL_CONNECTION
    return copies + buffers + num_workspaces * _WORKSPACE + _ALLOCATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of one rank.

    Attributes:
        name: name in ``named_parameters()``.
        numel: number of elements on this rank.
        is_expert: whether it belongs to a routed expert.
        is_shared: whether other stages have a copy, so that Megatron gives it a bucket of its own.
    """

    name: str
    numel: int
    is_expert: bool = False
    is_shared: bool = False


def chunk_parameters(model: GPTModel, chunk: Chunk, grid: StageGrid, experts: ExpertGrid) -> tuple[Parameter, ...]:
    """List the parameters of a chunk on each rank of its stage.

    Args:
        model: the whole model.
        chunk: which layers of it.
        grid: sizes of the stage.
        experts: how the stage shares its experts.

    Raises:
        ConfigError: a size does not divide what it cuts.

    >>> model = GPTModel(num_layers=2, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=12, vocab=10,
    ...     num_positions=0, is_gated=True, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=False)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=False, is_whole=False)
    >>> [(p.name.split(".")[-2], p.numel) for p in chunk_parameters(model, chunk, StageGrid(2), ExpertGrid(2, 1, 1))]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('word_embeddings', 40), ('input_layernorm', 8), ('linear_proj', 32), ('linear_qkv', 96), ('pre_mlp_layernorm', 8),
     ('linear_fc1', 96), ('linear_fc2', 48)]
    """
    return tuple(_chunk(_Rank(model, grid.tp, experts), chunk))


def adapter_parameters(
    model: GPTModel, chunk: Chunk, tp: int, experts: ExpertGrid, lora: Lora
) -> tuple[Parameter, ...]:
    """List the factors of the adapters of a chunk on each rank of its stage, in the order of ``named_parameters()``.

    The factor that faces a cut side of its matrix is cut with it; the other one is whole on every rank.

    Args:
        model: the whole model.
        chunk: which layers of it.
        tp: tensor-parallel size of the stage.
        experts: how the stage shares its experts.
        lora: the adapters.

    >>> model = GPTModel(num_layers=2, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=12, vocab=10,
    ...     num_positions=0, is_gated=True, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=False)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=False, is_whole=False)
    >>> lora = Lora(rank=2, alpha=2, targets=("v_proj", "down_proj"))
    >>> [(p.name.split(".", 3)[-1], p.numel) for p in adapter_parameters(model, chunk, 2, ExpertGrid(2, 1, 1), lora)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('self_attention.linear_qkv.adapter.adapter_v.linear_in.weight', 16),
     ('self_attention.linear_qkv.adapter.adapter_v.linear_out.weight', 8),
     ('mlp.linear_fc2.adapter.linear_in.weight', 12), ('mlp.linear_fc2.adapter.linear_out.weight', 16)]
    """
    numbers, rank = lora.layer_numbers(model.num_layers), _Rank(model, tp, experts)
    return tuple(
        replace(parameter, name=f"{LAYERS}.{layer}.{parameter.name}")
        for layer in chunk.layers
        if layer in numbers
        for parameter in rank.factors(lora, has_experts=bool(model.experts and model.experts.layers[layer]))
    )


def _chunk(rank: _Rank, chunk: Chunk) -> Iterator[Parameter]:
    model = rank.model
    predicts = chunk.is_last and model.num_predicting > 0
    # Every other place of the word embedding is a copy that is kept equal to it.
    is_copied = not chunk.is_whole and (model.is_tied or model.num_predicting > 0)
    if chunk.is_first or predicts:
        yield from rank.held((WORD_EMBEDDING,), is_shared=is_copied)
        yield from rank.held((POSITION_EMBEDDING,))
    for layer in chunk.layers:
        yield from rank.layer(f"{LAYERS}.{layer}.", layer)
    if chunk.is_last:
        yield from rank.held(FINAL_NORM)
    for number in range(model.num_predicting if predicts else 0):
        yield from rank.prediction(f"mtp.layers.{number}.")
    if chunk.is_last and not (chunk.is_first and model.is_tied):
        yield from rank.held((OUTPUT,), is_shared=is_copied and model.is_tied and not predicts)


class _Rank:
    """Says what one rank holds of the parameters of a model.

    Args:
        model: the model.
        tp: tensor-parallel size of the rank's stage.
        experts: how the stage shares its experts.
    """

    def __init__(self, model: GPTModel, tp: int, experts: ExpertGrid) -> None:
        self.model = model
        self._tp, self._experts = tp, experts
        self._layers: dict[bool, tuple[tuple[str, int, bool], ...]] = {}

    def layer(self, prefix: str, layer: int) -> Iterator[Parameter]:
        """Yield the parameters of a layer; all with experts are alike, and all without."""
        experts = self.model.experts
        has_experts = experts is not None and experts.layers[layer]
        if has_experts not in self._layers:
            self._layers[has_experts] = tuple(self._sizes(EXPERT_LAYER if has_experts else DENSE_LAYER, prefix))
        for name, numel, is_routed in self._layers[has_experts]:
            yield Parameter(name=prefix + name, numel=numel, is_expert=is_routed)

    def prediction(self, prefix: str) -> Iterator[Parameter]:
        """Yield the parameters of a layer of multi-token prediction."""
        yield from self.held(PREDICTION, prefix)
        yield from self.layer(f"{prefix}mtp_model_layer.", self.model.num_layers - 1)
        yield from self.held(PREDICTION_NORM, prefix)

    def held(self, rows: Iterable[ParameterRow], prefix: str = "", *, is_shared: bool = False) -> Iterator[Parameter]:
        """Yield the parameters of some rows."""
        for name, numel, _ in self._sizes(rows, prefix):
            yield Parameter(name=prefix + name, numel=numel, is_shared=is_shared)

    def _sizes(self, rows: Iterable[ParameterRow], prefix: str) -> Iterator[tuple[str, int, bool]]:
        """Yield name and elements of every row, and whether it is of a routed expert; these one after another."""
        own = (row for row in rows if row.needs(self.model))
        for is_routed, group in groupby(own, lambda row: row.is_routed):
            numbers = range(self._num_experts() if is_routed else 1)
            alike = [(row.name, self._numel(row, prefix)) for row in group]
            for number in numbers:
                yield from ((name.format(expert=number), numel, is_routed) for name, numel in alike)

    def factors(self, lora: Lora, *, has_experts: bool) -> Iterator[Parameter]:
        """Yield the factors of a layer, from the rows of the matrices that they are beside."""
        matrices = self.model.matrices(has_experts=has_experts)
        pairs = published_matrices(matrices)
        for is_routed, group in groupby(EXPERT_LAYER if has_experts else DENSE_LAYER, lambda row: row.is_routed):
            alike = [factor for row in group for factor in self._factors_of(row, lora, matrices, pairs)]
            for number in range(self._num_experts() if is_routed else 1):
                for name, numel in alike:
                    yield Parameter(name=name.format(expert=number), numel=numel, is_expert=is_routed)

    def _factors_of(
        self, row: ParameterRow, lora: Lora, matrices: Matrices, pairs: Sequence[LoraTarget]
    ) -> Iterator[tuple[str, int]]:
        """Yield name and size of the factors beside a weight, which may hold several published matrices."""
        held = [target for target in pairs if f"{target.module}.weight" == row.name]
        size = self._experts.tp if row.is_routed else self._tp
        rows = row.rows(self.model) if held else ()
        for target, lengths in zip(held, [(each,) for each in rows] if len(held) > 1 else [rows], strict=False):
            if target.published not in lora.targets:
                continue
            (columns,) = row.rest(self.model)
            if row.cut == "rows":
                lengths = tuple(_cut(row.name, length, size) for length in lengths)
            else:
                columns = _cut(row.name, columns, size)
            for name, width in zip(("linear_in", *target.seconds(matrices)), (columns, *lengths), strict=True):
                yield f"{target.place}.{name}.weight", lora.rank * width

    def _num_experts(self) -> int:
        assert self.model.experts is not None
        return _cut("--num-experts", self.model.experts.number, self._experts.ep)

    def _numel(self, row: ParameterRow, prefix: str) -> int:
        size = self._experts.tp if row.is_routed else self._tp
        what = row.cut_name or prefix + row.module
        lengths, width = row.rows(self.model), math.prod(row.rest(self.model))
        if row.cut == "rows":
            whole = (sum(lengths),) if row.is_by_group else lengths
            lengths = tuple(_cut(what, length, size) for length in whole)
        return sum(lengths) * (_cut(what, width, size) if row.cut == "columns" else width)


def _cut(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(f"{what} {size}; a stage cuts it into {parts} parts, which must divide it; use a multiple")
    return size // parts


def kept_by_module(sizes: Sizes, chunks: Sequence[Chunk]) -> dict[str, int]:
    """Give what the chunks of a stage keep of one microbatch on one rank of such sizes, by module, the most first.

    >>> from vtp_plugin.plan.model.gpt_model import GPTModel
    >>> from vtp_plugin.plan.memory.activation_rows import Microbatch
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

    None where that is not known: with adapters, of Transformer Engine's layers, and of experts computed together, which
    some versions of Megatron do not build of its linear layers.

    >>> from vtp_plugin.plan.model.gpt_model import GPTModel
    >>> from vtp_plugin.plan.memory.activation_rows import Microbatch
    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=64, heads=12, groups=12, kv_channels=4, ffn=192,
    ...     vocab=60, num_positions=12, is_gated=False, has_bias=True, has_qkv_bias=False, has_norm_bias=True,
    ...     has_query_norm=False, is_tied=True)
    >>> batch = Microbatch(length=12, size=2, itemsize_bytes=4, is_sharded=False, has_rope=False, is_fused=True)
    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> waiting_by_module(Sizes(model=model, batch=batch, tp=1), [chunk])
    {'mlp': 49152, 'linear_qkv': 19968, 'linear_proj': 10752}
    """
    batch = sizes.batch
    if sizes.lora or batch.is_engine or (batch.routing is not None and batch.routing.is_grouped):
        return None
    # Recomputed layers have run again by then.
    return _by_module(WAITING, replace(sizes, batch=replace(batch, recompute=Recompute())), chunks)


def _by_module(rows: Mapping[str, Sequence[KeptRow]], sizes: Sizes, chunks: Sequence[Chunk]) -> dict[str, int]:
    model, batch, kept = sizes.model, sizes.batch, Counter[str]()

    def add(place: str, sizes: Sizes, times: int = 1) -> None:
        # Rows stand in the order in which the modules run.
        start = sizes.starts_at.partition(".")[0]
        for row in dropwhile(lambda row: start not in ("", row.module), rows.get(place, ())):
            kept[row.module] += times * row.size_bytes(sizes)

    adapted = sizes.lora.layer_numbers(model.num_layers) if sizes.lora else ()
    has_experts = model.experts.layers if model.experts and batch.routing else (False,) * model.num_layers
    for chunk in chunks:
        first = _first_trained(sizes, chunk)
        num_again, layers = batch.recompute.parted([layer for layer in chunk.layers if layer >= first])
        num_predicting = model.num_predicting if chunk.is_last else 0
        # Megatron's blocks are not for those of multi-token prediction.
        whole = [*layers, *[model.num_layers - 1] * (num_predicting if batch.recompute.method != "uniform" else 0)]
        for (is_routed, has_adapters, is_first), number in Counter(
            (has_experts[layer], layer in adapted, layer == first) for layer in whole
        ).items():
            here = replace(sizes, has_experts=is_routed, has_adapters=has_adapters)
            start = next((row_of(pair) for pair in here.pairs), "") if is_first else ""
            add("layer", replace(here, starts_at=start), number)
        add("chunk", replace(sizes, num_again=num_again, num_layers=len(chunk.layers) + num_predicting))
        if chunk.is_first:
            add("first", sizes)
        if chunk.is_last:
            add("last", sizes)
            add("loss", sizes, 1 + num_predicting)
            add("prediction", sizes, num_predicting)
    return {module: size for module, size in kept.most_common() if size}


def _first_trained(sizes: Sizes, chunk: Chunk) -> int:
    """Give the layer before which nothing has a gradient: that of the first adapters, on the stage of the samples.

    -1 where all have one: the input of another stage does, as Megatron receives it, and that of recomputed layers.
    """
    if sizes.lora is None or not chunk.is_first or sizes.batch.recompute.method:
        return -1
    return min(sizes.lora.layer_numbers(sizes.model.num_layers), default=sizes.model.num_layers)


_START, _END = 64, 128
_MASTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is kept while it is trained.

    Attributes:
        weight_itemsize_bytes: bytes of one element of the weights; below 4 the optimizer keeps a copy of 4 bytes.
        gradient_itemsize_bytes: bytes of one element of the gradient buffers.
        num_moments: numbers of 4 bytes that the optimizer keeps for each weight: 2 for Adam.
        is_distributed: whether replicas share the optimizer state.
        bucket_size: elements from which on a bucket of the first stage's first chunk is closed; None for one bucket.
        backend: backend of the collectives, see :func:`~vtp_plugin.plan.memory.footprint.overhead_bytes`.
        lora: the adapters; the model is frozen then, and has neither gradients nor optimizer state. None without any.
    """

    weight_itemsize_bytes: int
    gradient_itemsize_bytes: int
    num_moments: int
    is_distributed: bool
    bucket_size: int | None
    backend: str = "gloo"
    lora: Lora | None = None


class ChunkBytes(NamedTuple):
    """What a chunk keeps of one microbatch on a rank.

    Attributes:
        activation_bytes: bytes between its forward and its backward.
        waiting_bytes: bytes between the gradient of its input and those of its weights, where backwards are split; None
            if not known.
    """

    activation_bytes: int
    waiting_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank holds.

    Attributes:
        num_parameters: number of elements of its weights.
        weight_bytes: bytes of its weights, with the gaps of their buffers.
        gradient_bytes: bytes of its gradient buffers.
        optimizer_bytes: bytes of moments and of weights in full precision, without the counters of steps.
        overhead_bytes: bytes on a device that are no tensor of the model, such as buffers of collectives.
        kept_bytes: bytes kept for one microbatch by all chunks, by module.
        chunks: bytes kept for one microbatch by each chunk; empty if not known.
    """

    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    overhead_bytes: int
    kept_bytes: Mapping[str, int]
    chunks: tuple[ChunkBytes, ...]

    @property
    def steady_bytes(self) -> int:
        """Bytes that it holds all the time."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.overhead_bytes

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of the activations of one microbatch in all chunks; None if not known."""
        return sum(chunk.activation_bytes for chunk in self.chunks) if self.chunks else None

    @property
    def waiting_bytes(self) -> int | None:
        """Bytes of one microbatch that waits in all chunks; None if not known."""
        known = [chunk.waiting_bytes for chunk in self.chunks if chunk.waiting_bytes is not None]
        return sum(known) if known else None

    def kept_parts(self, kept: Kept) -> tuple[int, int]:
        """Give the bytes of so many activations, and of so many microbatches that wait, as far as they are known."""
        pairs = [*zip(self.chunks, kept, strict=True)] if self.chunks else []
        return (
            sum(chunk.activation_bytes * number for chunk, (number, _) in pairs),
            sum((chunk.waiting_bytes or 0) * number for chunk, (_, number) in pairs),
        )

    def held_bytes(self, kept: Kept) -> int:
        """Give all that it holds with so many activations and waiting microbatches of each chunk, where known."""
        return self.steady_bytes + sum(self.kept_parts(kept))

    def fullest(self, peaks: Sequence[Kept]) -> Kept:
        """Give the moment at which it holds the most."""
        return max(peaks, key=self.held_bytes)


def footprints(
    model: GPTModel,
    training: Training,
    layout: PipelineLayout,
    chunks: Sequence[Sequence[Chunk]],
    batch: Microbatch | None = None,
    samples: Sequence[int] = (),
) -> tuple[Footprint, ...]:
    """Give what every rank holds, rank 0 first.

    Args:
        model: the whole model.
        training: how it is kept.
        layout: the ranks of every stage.
        chunks: chunks of every stage.
        batch: a microbatch; None where activations are not known.
        samples: number of samples of a microbatch on every stage, where stages run microbatches of their own sizes.

    Raises:
        ConfigError: a stage cannot cut the model.
    """
    held = [
        [
            (
                *chunk_parameters(model, chunk, grid, layout.experts[stage]),
                *(
                    adapter_parameters(model, chunk, grid.tp, layout.experts[stage], training.lora)
                    if training.lora
                    else ()
                ),
            )
            for chunk in chunks[stage]
        ]
        for stage, grid in enumerate(layout.stages)
    ]
    known: dict[_Place, Footprint] = {}
    for rank in range(layout.world_size):
        place = _place(layout, rank)
        if place not in known:
            grid, experts, own = layout.stages[place.stage], layout.experts[place.stage], chunks[place.stage]
            here = replace(batch, size=samples[place.stage]) if batch and samples else batch
            sizes = here and Sizes(model=model, batch=here, tp=grid.tp, cp=grid.cp, etp=experts.tp, lora=training.lora)
            flat = [parameter for parameters in held[place.stage] for parameter in parameters]
            overhead = overhead_bytes(training.backend, sizes, flat, own, grid, experts if model.experts else None)
            known[place] = _footprint(training, held[place.stage], place, overhead, sizes, own)
    return tuple(known[_place(layout, rank)] for rank in range(layout.world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a rank's footprint depends on: its stage, and which of how many replicas it is.

    ``apart`` counts the copies of a routed expert where they have groups of their own, else it is None.
    """

    stage: int
    dense: tuple[int, int]
    apart: tuple[int, int] | None


def _place(layout: PipelineLayout, rank: int) -> _Place:
    coord, expert = layout.coord(rank), layout.expert_coord(rank)
    grid, experts = layout.stages[coord.stage], layout.experts[coord.stage]
    return _Place(
        stage=coord.stage,
        dense=(coord.dp_rank * grid.cp + coord.cp_rank, grid.dp * grid.cp),
        apart=(expert.dp_rank, experts.dp) if layout.has_expert_groups else None,
    )


def _footprint(
    training: Training,
    held: Sequence[Sequence[Parameter]],
    place: _Place,
    overhead: int,
    sizes: Sizes | None,
    chunks: Sequence[Chunk],
) -> Footprint:
    num_parameters = num_frozen = num_buffered = num_owned = 0
    for number, parameters in enumerate(held):
        bucket_size = training.bucket_size if place.stage == number == 0 else None
        num_parameters += sum(parameter.numel for parameter in parameters)
        if training.lora is not None:
            num_frozen += sum(parameter.numel for parameter in parameters if not is_adapter(parameter.name))
            parameters = [parameter for parameter in parameters if is_adapter(parameter.name)]
        for buffer, (replica, num_replicas) in _buffers(parameters, place):
            if not training.is_distributed:
                numel = owned = sum(parameter.numel for parameter in buffer)
            else:
                numel, owned = _shared_buffer(buffer, bucket_size, replica, num_replicas)
            num_buffered += numel
            num_owned += owned
    masters = _MASTER_BYTES if training.weight_itemsize_bytes < _MASTER_BYTES else 0
    return Footprint(
        num_parameters=num_parameters,
        weight_bytes=(num_frozen + num_buffered) * training.weight_itemsize_bytes,
        gradient_bytes=num_buffered * training.gradient_itemsize_bytes,
        optimizer_bytes=num_owned * (_MASTER_BYTES * training.num_moments + masters),
        overhead_bytes=overhead,
        kept_bytes=kept_by_module(sizes, chunks) if sizes else {},
        chunks=tuple(_chunk_bytes(sizes, chunk) for chunk in chunks) if sizes else (),
    )


def _chunk_bytes(sizes: Sizes, chunk: Chunk) -> ChunkBytes:
    waiting = waiting_by_module(sizes, [chunk])
    return ChunkBytes(sum(kept_by_module(sizes, [chunk]).values()), None if waiting is None else sum(waiting.values()))


def _buffers(parameters: Sequence[Parameter], place: _Place) -> Iterator[tuple[Sequence[Parameter], tuple[int, int]]]:
    """Give the parameters of every buffer, and which of how many replicas this rank is for them."""
    if place.apart is None:
        yield parameters, place.dense
        return
    yield [parameter for parameter in parameters if not parameter.is_expert], place.dense
    yield [parameter for parameter in parameters if parameter.is_expert], place.apart


def _shared_buffer(
    parameters: Sequence[Parameter], bucket_size: int | None, replica: int, num_replicas: int
) -> tuple[int, int]:
    """Give the elements of a buffer of the distributed optimizer, and those whose state a replica keeps.

    >>> parameters = [Parameter(name="b", numel=100), Parameter(name="a", numel=10)]
    >>> [_shared_buffer(parameters, None, replica, 2) for replica in (0, 1)]
    [(256, 74), (256, 36)]
    """
    end, owned = 0, 0
    for bucket in _buckets(parameters, bucket_size):
        start, places, place = end, [], end
        for parameter in bucket:
            place = _up(place, _START)
            places.append((place, place + parameter.numel))
            place += parameter.numel
        end = _up(place, math.lcm(num_replicas, _END))
        share = (end - start) // num_replicas
        low, high = start + replica * share, start + (replica + 1) * share
        owned += sum(max(0, min(last, high) - max(first, low)) for first, last in places)
    return end, owned


def _buckets(parameters: Sequence[Parameter], bucket_size: int | None) -> Iterator[list[Parameter]]:
    """Cut the parameters of a buffer, the last one first, into buckets; a shared parameter has one of its own."""
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        if parameter.is_shared and bucket:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled = _up(filled, _START) + parameter.numel
        if parameter.is_shared or (bucket_size is not None and filled >= bucket_size):
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
