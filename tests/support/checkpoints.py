"""Small checkpoints as torch_dist writes them, in any layout and form, made in one process without Megatron."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vtp_plugin.checkpoint.format.contents import Contents, Part
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK
from vtp_plugin.checkpoint.format.shard_map import (
    MAP,
    Bucket,
    BucketEntry,
    ShardSpec,
    Strided,
    block_at,
    dump_map,
    row_major,
)
from vtp_plugin.checkpoint.load.stored_optimizer import Elements, typed
from vtp_plugin.cli import main
from vtp_plugin.util.index_boxes import box_shape

STATES = ("param", "exp_avg", "exp_avg_sq")
# What Megatron 0.12 says of a group of parameters.
OLDER_GROUP = (
    *("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr", "lr", "weight_decay"),
    *("betas", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "step"),
)
QKV = "decoder.layers.self_attention.linear_qkv.weight"
EXPERTS = "decoder.layers.mlp.experts.linear_fc1.weight"
NORM = "decoder.layers.input_layernorm.weight"
OTHER_NORM = "decoder.layers.pre_mlp_layernorm.weight"
# Layers come first; norms are whole on every rank.
FC1, FC2 = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight"
# Parameters in the order of Megatron's model.
STOCK_SHAPES = {
    "embedding.word_embeddings.weight": (32, 4),
    NORM: (3, 4),
    QKV: (3, 48, 4),
    OTHER_NORM: (3, 4),
    FC1: (3, 32, 4),
    FC2: (3, 32, 4),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (32, 4),
}
SHAPES = {QKV: (2, 12, 4), EXPERTS: (2, 4, 8, 4), NORM: (2, 4), OTHER_NORM: (2, 4), "embedding.weight": (8, 4)}


@dataclass
class Model:
    """What a checkpoint holds.

    Attributes:
        weights: by name.
        states: of the optimizer, by state and name.
        step: that it has made.
    """

    weights: dict[str, torch.Tensor]
    states: dict[tuple[str, str], torch.Tensor]
    step: float = 3.0


def make_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> Model:
    """Make a model whose values all differ; masters are the weights before rounding."""
    generator = torch.Generator().manual_seed(seed)
    states = {
        (state, name): torch.randn(shape, generator=generator) for state in STATES for name, shape in shapes.items()
    }
    return Model({name: states["param", name].to(dtype, copy=True) for name in shapes}, states)


def cuts_of(name: str, shape: tuple[int, ...], ranks: int, axis: int) -> Iterator[tuple[int, ShardSpec]]:
    """Yield the parts of all ranks: layer by layer, along an axis behind the layers, or whole on the first rank."""
    layers = shape[0] if name.startswith("decoder.layers") else 1
    inner = shape[1:] if layers > 1 else shape
    for layer, rank in itertools.product(range(layers), range(ranks)):
        is_whole = len(inner) == 1
        length = inner[0 if is_whole else axis] // ranks
        box = tuple(
            (rank * length, (rank + 1) * length) if dim == axis and not is_whole else (0, n)
            for dim, n in enumerate(inner)
        )
        strides = row_major(tuple(b - a for a, b in box))
        if layers > 1:
            box, strides = ((layer, layer + 1), *box), (1, *strides)
        yield (
            rank,
            ShardSpec(name=name, shape=shape, blocks=(block_at(box, 0, strides),), is_copy=is_whole and rank > 0),
        )


@dataclass
class Writer:
    """Writes one checkpoint, piece by piece.

    Attributes:
        folder: to write to.
    """

    folder: Path
    entries: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def _append(self, index: MetadataIndex, value: Any, rank: int) -> None:
        file = self.folder / f"__{rank}_0.distcp"
        with file.open("ab") as stream:
            start = stream.tell()
            torch.save(value, stream)
            self.places[index] = _StorageInfo(file.name, start, stream.tell() - start)

    def tensor(self, key: str, shape: Sequence[int], offset: Sequence[int], value: torch.Tensor, rank: int) -> None:
        """Write a part of a tensor."""
        entry = self.entries.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), value.shape))
        self._append(MetadataIndex(key, torch.Size(offset)), value.contiguous().clone(), rank)

    def object(self, key: str, value: Any, rank: int = 0) -> None:
        """Write an object."""
        self.entries[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [value], rank)

    def finish(
        self, common: Mapping[str, Any], *, is_older: bool = False, flattened: Mapping[str, Any] | None = None
    ) -> Path:
        """Write what all ranks share, and the index."""
        if is_older:
            torch.save(common, self.folder / "common.pt")
        else:
            self.object("common_state/shard_0_1", common)
        (self.folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        index: Any = Metadata(self.entries, storage_data=self.places)
        index.mcore_data = flattened or {}
        (self.folder / ".metadata").write_bytes(pickle.dumps(index))
        return self.folder


def _common(model: Model, form: str, **optimizer: Any) -> dict[str, Any]:
    args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, device=torch.float32)
    return {
        "args": args,
        "iteration": int(model.step),
        "optimizer": {"param_state_sharding_type": form, **optimizer},
        "content_metadata": {"distrib_optim_sharding_type": form},
    }


def _groups(step: float) -> dict[str, Any]:
    return {"param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "step": step}]}


def _write_parts(writer: Writer, key: str, whole: torch.Tensor, name: str, ranks: int, axis: int) -> None:
    for rank, cut in cuts_of(name, tuple(whole.shape), ranks, axis):
        if not cut.is_copy:
            box = cut.blocks[0].box
            part = whole[tuple(slice(a, b) for a, b in box)]
            writer.tensor(key, whole.shape, [a for a, _ in box], part, rank)


def by_name(
    folder: Path, model: Model, ranks: int = 2, axis: int = 0, *, form: str = "fully_reshardable", **options: Any
) -> Path:
    """Write the optimizer by parameter."""
    writer = Writer(folder)
    for name, weight in model.weights.items():
        _write_parts(writer, name, weight, name, ranks, axis)
    for (state, name), value in model.states.items():
        _write_parts(writer, f"optimizer.state.{state}.{name}", value, name, ranks, axis)
    return writer.finish(_common(model, form, optimizer=_groups(model.step)), **options)


def by_block(folder: Path, model: Model, ranks: int = 2, axis: int = 0, **options: Any) -> Path:
    """Write the optimizer by parameter as Megatron 0.12 does: each rank's block flat, shared by two replicas."""
    writer = Writer(folder)
    flattened: dict[str, Any] = {}
    for name, weight in model.weights.items():
        _write_parts(writer, name, weight, name, ranks, axis)
    for (state, name), value in model.states.items():
        key = f"optimizer.state.{'fp32_param' if state == 'param' else state}.{name}"
        flattened[key] = {"nd_reformulated_orig_global_shape": value.shape}
        for rank, cut in cuts_of(name, tuple(value.shape), ranks, axis):
            box = cut.blocks[0].box
            if not cut.is_copy:
                flat = value[tuple(slice(a, b) for a, b in box)].flatten()
                grid = [n // (b - a) for (a, b), n in zip(box, value.shape, strict=True)]
                at = [a // (b - a) for a, b in box]
                for start, stop in itertools.pairwise((0, flat.numel() // 2 - 1, flat.numel())):
                    part = flat[start:stop].reshape(*(1 for _ in at), -1)
                    writer.tensor(key, [*grid, flat.numel()], [*at, start], part, rank)
    common = _common(model, "fully_sharded_model_space", optimizer=_groups(model.step))
    return writer.finish(common, flattened=flattened, **options)


def by_bucket(folder: Path, model: Model, ranks: int = 2, axis: int = 0, *, dp: int = 2, **options: Any) -> Path:
    """Write the optimizer by bucket, one for each rank, shared by some data-parallel ranks, and its map."""
    writer = Writer(folder)
    for name, weight in model.weights.items():
        _write_parts(writer, name, weight, name, ranks, axis)
    held: dict[int, list[ShardSpec]] = {rank: [] for rank in range(ranks)}
    for name, weight in model.weights.items():
        for rank, cut in cuts_of(name, tuple(weight.shape), ranks, axis):
            held[rank].append(cut)
    buckets = [_write_bucket(writer, model, rank, cuts[::-1], dp) for rank, cuts in held.items()]
    (folder / MAP).write_text(dump_map(buckets))
    return _finish_buckets(writer, model, held, **options)


def as_stock(folder: Path, model: Model, ranks: int = 2, *, order: Sequence[str] = (), **options: Any) -> Path:
    """Write the optimizer by bucket as stock Megatron does: layer by layer, every part aligned, and no map.

    Args:
        folder: to write to.
        model: of the shapes ``STOCK_SHAPES``.
        ranks: tensor-parallel ranks.
        order: of the parameters, if another than Megatron's.
        options: of the writer.
    """
    writer = Writer(folder)
    for name, weight in model.weights.items():
        _write_parts(writer, name, weight, name, ranks, 0)
    held = _held_by_stock(model, ranks, order)
    for rank, cuts in held.items():
        _write_bucket(writer, model, rank, cuts[::-1], 2, alignment=64)
    return _finish_buckets(writer, model, held, **options)


def _held_by_stock(model: Model, ranks: int, order: Sequence[str]) -> dict[int, list[ShardSpec]]:
    """Give what each rank of a model of one stage holds, in the order of the model."""
    names = [*(order or STOCK_SHAPES)]
    held: dict[int, list[tuple[int, ShardSpec]]] = {rank: [] for rank in range(ranks)}
    for name in names:
        for rank, cut in cuts_of(name, tuple(model.weights[name].shape), ranks, 0):
            depth = cut.blocks[0].box[0][0] if name.startswith("decoder.layers") else len(names)
            held[rank].append((-1 if name.startswith("embedding") else depth, cut))
    return {rank: [cut for _, cut in sorted(cuts, key=lambda pair: pair[0])] for rank, cuts in held.items()}


def by_rank(
    folder: Path, model: Model, ranks: int = 2, *, order: Sequence[str] = (), bucket_size: int | None = None
) -> Path:
    """Write the optimizer as Megatron 0.12 does without a fully parallel save: an object for each rank, no map.

    Args:
        folder: to write to.
        model: of the shapes ``STOCK_SHAPES``.
        ranks: tensor-parallel ranks.
        order: of the parameters, if another than Megatron's.
        bucket_size: at which a bucket is large enough; None for one bucket.
    """
    writer = Writer(folder)
    for name, weight in model.weights.items():
        _write_parts(writer, name, weight, name, ranks, 0)
    for rank, cuts in _held_by_stock(model, ranks, order).items():
        buckets: list[list[torch.Tensor]] = [[] for _ in STATES]
        for cut in cuts[::-1]:
            _lay_behind(buckets, model, cut, bucket_size)
        state: dict[str, Any] = {name: torch.cat(parts) for name, parts in zip(STATES, buckets, strict=True)}
        state["numel_unpadded"] = state["param"].numel()
        dtypes = next(iter(model.weights.values())).dtype, torch.float32
        group = f"optimizer.distributed.dp_group_idx_{rank}"
        writer.object(f"{group}.param_state/shard_0_1", {"buckets_coalesced": True, 0: {dtypes: state}}, rank)
        writer.object(f"{group}.optimizer/shard_0_1", _groups(model.step), rank)
    common = _common(model, "dp_zero_gather_scatter")
    del common["content_metadata"]
    if bucket_size is not None:
        common["args"].overlap_grad_reduce, common["args"].ddp_bucket_size = True, bucket_size
    return writer.finish(common, is_older=True)


def _lay_behind(buckets: list[list[torch.Tensor]], model: Model, cut: ShardSpec, bucket_size: int | None) -> None:
    """Append a parameter at the next multiple of 64 of its bucket; where that is large enough, a new one begins."""
    for parts, state in zip(buckets, STATES, strict=True):
        # What lies in the bucket is what came since an empty tensor.
        held = list(itertools.takewhile(lambda part: part.numel() > 0, parts[::-1]))
        end = sum(part.numel() for part in held)
        if end % 64:
            parts.append(torch.full((-end % 64,), torch.nan))
        (block,) = cut.blocks
        parts.append(model.states[state, cut.name][tuple(slice(a, b) for a, b in block.box)].flatten())
        if bucket_size is not None and end + -end % 64 + cut.numel >= bucket_size:
            parts.append(torch.empty(0))


def _finish_buckets(writer: Writer, model: Model, ranks: Iterable[int], **options: Any) -> Path:
    for rank in ranks:
        writer.object(f"optimizer.distributed.dp_group_idx_{rank}.optimizer/shard_0_1", _groups(model.step), rank)
        writer.object(f"optimizer.distributed.dp_group_idx_{rank}.per_bucket_numel/shard_0_1", [{}], rank)
    return writer.finish(_common(model, "dp_reshardable"), **options)


def _write_bucket(
    writer: Writer, model: Model, rank: int, cuts: Sequence[ShardSpec], dp: int, *, alignment: int = 1
) -> Bucket:
    dtype = next(iter(model.weights.values())).dtype
    key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_({dtype}, torch.float32).bucket_idx_0"
    parts, end = [], 0
    for number, cut in enumerate(cuts):
        end = -(-end // alignment) * alignment if alignment > 1 else end + 3 * (number == 1)  # a gap
        parts.append(BucketEntry(cut, end))
        end += cut.numel
    edges = {0, end, *(end * share // dp for share in range(dp))}
    edges |= {edge for part in parts for edge in (part.offset, part.offset + part.shard.numel)}
    for state in STATES:
        flat = torch.full((end,), torch.nan)
        for part in parts:
            whole = model.states[state, part.shard.name]
            (block,) = part.shard.blocks
            flat[part.offset : part.offset + part.shard.numel] = whole[
                tuple(slice(a, b) for a, b in block.box)
            ].flatten()
        for start, stop in itertools.pairwise(sorted(edges)):
            writer.tensor(f"{key}.{state}", (end,), (start,), flat[start:stop], rank)
    return Bucket(key, end, tuple(parts))


def run_action(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str]]:
    """Run an action of the tools; return exit code and lines, of the error stream if it was refused."""
    code: Any = 0
    try:
        main(["checkpoint", *map(str, words)])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, (printed.err if code == 2 else printed.out).splitlines()


def as_older(source: Path, folder: Path) -> Path:
    """Write a checkpoint of Megatron 0.16 or later, in the form ``fully_reshardable``, as Megatron 0.12 writes it.

    Each rank's part of a state is a flat block, and what all ranks share says less: no form, and of groups of
    parameters only what that Megatron knows of. Random states are left out.
    """
    contents, elements, writer = Contents(source), Elements(source), Writer(folder)
    flattened: dict[str, Any] = {}
    for key, tensor in contents.index.tensors.items():
        for box, extent in tensor.extents:
            shape, at = box_shape(box), [start for start, _ in box]
            part = Part(box, extent, Strided(0, row_major(shape)))
            value = typed(elements.read(part, box), tensor.dtype).view(shape)
            if not key.startswith("optimizer.state."):
                writer.tensor(key, tensor.shape, at, value, 0)
                continue
            older = key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
            flattened[older] = {"nd_reformulated_orig_global_shape": tensor.shape}
            grid = [whole // own for whole, own in zip(tensor.shape, shape, strict=True)]
            corner = [start // own for start, own in zip(at, shape, strict=True)]
            writer.tensor(older, [*grid, value.numel()], [*corner, 0], value.reshape(*(1 for _ in at), -1), 0)
    objects: dict[str, Any] = {}
    for key, place in contents.index.objects.items():
        data = (source / place.file).read_bytes()[place.offset :][: place.length]
        (objects[key],) = torch.load(io.BytesIO(data), weights_only=False)
        if not key.startswith(("common_state/", "rng_state/", "rerun_state_machine_state/")):
            writer.object(key, objects[key])
    common = objects["common_state/shard_0_1"]
    del common["content_metadata"]
    stored = common["optimizer"]
    stored["param_state_sharding_type"], stored["param_state"] = BY_BLOCK, {0: {"step": torch.tensor(2.0)}}
    groups = stored["optimizer"]["param_groups"]
    stored["optimizer"]["param_groups"] = [{key: group[key] for key in OLDER_GROUP if key in group} for group in groups]
    return writer.finish(common, is_older=True, flattened=flattened)


class Writing:
    """A file in which something happens while torch writes; torch makes another error of what is raised there."""

    def __init__(self, file: Any, happen: Callable[[], None]) -> None:
        self._file, self._happen = file, happen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._happen()
        return count


def happens_in_writes(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], None]) -> None:
    """Let something happen in every write of an import's elements."""
    from vtp_plugin.checkpoint.tools.writer import PieceWriter

    original = PieceWriter._write_piece
    monkeypatch.setattr(
        PieceWriter, "_write_piece", lambda self, piece, file: original(self, piece, cast(Any, Writing(file, happen)))
    )
