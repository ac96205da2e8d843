"""Ranges of stored pieces against a brute-force oracle: numbered elements that go through real arrays."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from vtp_plugin.checkpoint.format.infer_map import check_map, check_wanted
from vtp_plugin.checkpoint.format.plan_copies import Copy, Stored, count_below, require_cover
from vtp_plugin.checkpoint.format.shard_map import (
    Block,
    Bucket,
    BucketEntry,
    ShardSpec,
    StoredRange,
    Strided,
    block_at,
    boxes_between,
    dump_map,
    load_map,
    row_major,
)
from vtp_plugin.errors import ConfigError, PlanError

SETTINGS = settings(max_examples=150, deadline=None)
Array = np.ndarray


def part_of(name: str, shape: tuple[int, ...], axis: int, spans: Sequence[tuple[int, int]]) -> ShardSpec:
    """Give a rank some spans of an axis, one behind another in its memory along that axis."""
    lengths = [stop - start for start, stop in spans]
    strides = row_major((*shape[:axis], sum(lengths), *shape[axis + 1 :]))
    begins = [sum(lengths[:index]) for index in range(len(spans))]
    blocks = tuple(
        block_at(tuple(span if dim == axis else (0, n) for dim, n in enumerate(shape)), begin * strides[axis], strides)
        for span, begin in zip(spans, begins, strict=True)
    )
    return ShardSpec(name=name, shape=shape, blocks=blocks)


@st.composite
def layouts(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> list[ShardSpec]:
    """Draw how the ranks of one layout share a parameter."""
    axis = draw(st.integers(0, len(shape) - 1))
    length = shape[axis]
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    bounds = [0, *cuts, length]
    if length % 2 == 0 and draw(st.booleans()):  # a gated layer: rows of either half
        half = length // 2
        bounds = sorted({0, half, *(cut for cut in cuts if cut < half)})
        return [part_of(name, shape, axis, [(a, b), (a + half, b + half)]) for a, b in itertools.pairwise(bounds)]
    return [part_of(name, shape, axis, [span]) for span in itertools.pairwise(bounds)]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[Bucket], list[StoredRange]]:
    """Draw parameters, and buckets of a few ranks that hold them, cut into pieces; some parts are held twice."""
    shapes = {
        f"w{index}": tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        for index in range(draw(st.integers(1, 3)))
    }
    held: dict[int, list[ShardSpec]] = {}
    for name, shape in shapes.items():
        for rank, cut in enumerate(draw(layouts(name, shape))):
            held.setdefault(rank, []).append(cut)
            if draw(st.booleans()):
                held.setdefault(rank + 1, []).append(replace(cut, is_copy=True))
    buckets, pieces = [], []
    for rank, cuts in held.items():
        key, end, parts, edges = f"bucket{rank}", 0, [], {0}
        for cut in draw(st.permutations(cuts)):
            end += draw(st.integers(0, 2))  # a gap
            parts.append(BucketEntry(cut, end))
            edges |= {end, end + cut.numel}
            end += cut.numel
        edges |= {0, end, *draw(st.lists(st.integers(0, end), max_size=2))}  # the shares of data-parallel ranks
        buckets.append(Bucket(key, end, tuple(parts)))
        pieces += [StoredRange(key, a, b - a) for a, b in itertools.pairwise(sorted(edges))]
    return shapes, buckets, pieces


def strided(array: Array, place: Strided, shape: tuple[int, ...]) -> Array:
    size = array.itemsize
    return as_strided(array[place.offset :], shape, [stride * size for stride in place.strides])


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Number all elements of all parameters, from 1 on."""
    firsts = itertools.accumulate((math.prod(shape) for shape in shapes.values()), initial=1)
    return {
        name: np.arange(first, first + math.prod(shape)).reshape(shape)
        for (name, shape), first in zip(shapes.items(), firsts, strict=False)
    }


def local_of(cut: ShardSpec, whole: Array) -> Array:
    """Cut a rank's part out of a whole parameter, element by element."""
    flat = np.zeros(cut.numel, dtype=np.int64)
    for block in cut.blocks:
        for index in itertools.product(*(range(start, stop) for start, stop in block.box)):
            steps = (i - start for i, (start, _) in zip(index, block.box, strict=True))
            at = block.strided.offset + sum(step * n for step, n in zip(steps, block.strided.strides, strict=True))
            flat[at] = whole[index]
    return flat


def stored_arrays(
    buckets: Sequence[Bucket], pieces: Sequence[StoredRange], wholes: dict[str, Array]
) -> dict[StoredRange, Array]:
    contents: dict[str, Array] = {}
    for bucket in buckets:
        contents[bucket.key] = np.zeros(bucket.numel, dtype=np.int64)
        for part in bucket.parts:
            # What only a copy stores must not be taken.
            flat = (
                -local_of(part.shard, wholes[part.shard.name])
                if part.shard.is_copy
                else local_of(part.shard, wholes[part.shard.name])
            )
            contents[bucket.key][part.offset : part.offset + part.shard.numel] = flat
    return {piece: contents[piece.key][piece.offset : piece.offset + piece.numel].copy() for piece in pieces}


@SETTINGS
@given(data=st.data())
def test_copies_fill_what_any_layout_wants(data: st.DataObject) -> None:
    shapes, buckets, pieces = data.draw(checkpoints())
    assert not list(check_map("map", buckets, pieces))
    wholes = numbered(shapes)
    arrays = stored_arrays(buckets, pieces, wholes)
    stored = Stored(buckets, pieces)
    for name, shape in shapes.items():
        for cut in data.draw(layouts(name, shape)):
            assert not list(check_wanted("x", stored, [cut]))
            start, stop = sorted(data.draw(st.tuples(st.integers(0, cut.numel), st.integers(0, cut.numel))))
            got = np.zeros(stop - start, dtype=np.int64)
            seen: Counter[int] = Counter()
            for copy in stored.fill(cut, start, stop):
                values = strided(arrays[copy.piece], copy.source, copy.shape)
                strided(got, copy.target, copy.shape)[...] = values
                seen.update(values.ravel().tolist())
            np.testing.assert_array_equal(got, local_of(cut, wholes[name])[start:stop])
            assert set(seen.values()) <= {1}


@SETTINGS
@given(checkpoint=checkpoints())
def test_a_map_is_read_as_it_was_written(
    checkpoint: tuple[object, list[Bucket], list[StoredRange]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, buckets, _ = checkpoint
    file = tmp_path_factory.getbasetemp() / "map.json"
    file.write_text(dump_map(buckets))
    assert load_map(file) == tuple(buckets)


@SETTINGS
@given(data=st.data())
def test_a_map_that_does_not_fit_is_found(data: st.DataObject) -> None:
    """A bucket of another length, a part at another place, another cut, a part that is held twice."""
    _, buckets, pieces = data.draw(checkpoints())
    index = data.draw(st.integers(0, len(buckets) - 1))
    bucket = buckets[index]
    number = data.draw(st.integers(0, len(bucket.parts) - 1))
    part = bucket.parts[number]
    wrong_part = data.draw(
        st.sampled_from(
            [
                BucketEntry(part.shard, bucket.numel),
                BucketEntry(replace(part.shard, is_copy=not part.shard.is_copy), part.offset),
                BucketEntry(replace(part.shard, shape=tuple(n + 1 for n in part.shard.shape)), part.offset),
            ]
        )
    )
    parts = (*bucket.parts[:number], wrong_part, *bucket.parts[number + 1 :])
    wrong = data.draw(st.sampled_from([replace(bucket, numel=bucket.numel + 1), replace(bucket, parts=parts)]))
    (line,) = check_map("map", [*buckets[:index], wrong, *buckets[index + 1 :]], pieces)
    assert line.startswith("map: ")
    assert list(check_map("map", buckets[:index] + buckets[index + 1 :], pieces))


@SETTINGS
@given(data=st.data())
def test_counts_and_boxes_of_a_range(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    outer = tuple(n + data.draw(st.integers(0, 2)) for n in shape)
    place = Strided(data.draw(st.integers(0, 9)), row_major(outer))
    indices = list(itertools.product(*map(range, shape)))
    where = [place.offset + sum(i * n for i, n in zip(index, place.strides, strict=True)) for index in indices]
    limit = data.draw(st.integers(0, max(where) + 3))
    assert count_below(place, shape, limit) == sum(at < limit for at in where)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(indices))] * 2)))
    boxes = list(boxes_between(shape, first, last))
    inside = [index for box in boxes for index in itertools.product(*(range(a, b) for a, b in box))]
    assert inside == indices[first:last]
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def _example() -> tuple[ShardSpec, tuple[Copy, ...]]:
    whole = part_of("w", (4, 3), 0, [(0, 4)])
    buckets = [Bucket("0", 12, (BucketEntry(whole, 0),))]
    wanted = part_of("w", (4, 3), 1, [(1, 3)])
    return wanted, Stored(buckets, [StoredRange("0", 0, 5), StoredRange("0", 5, 7)]).fill(wanted, 0, 8)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda copies: copies[1:], "give ", id="missing"),
        pytest.param(lambda copies: (*copies, copies[0]), "twice", id="twice"),
        pytest.param(
            lambda copies: (replace(copies[0], target=copies[0].target.moved(1)), *copies[1:]), "belong", id="elsewhere"
        ),
        pytest.param(
            lambda copies: (replace(copies[0], source=copies[0].source.moved(9)), *copies[1:]), "leaves", id="outside"
        ),
    ],
)
def test_the_proof_finds_wrong_copies(spoil: object, words: str) -> None:
    wanted, copies = _example()
    require_cover(wanted, 0, 8, copies)
    with pytest.raises(PlanError, match=words):
        require_cover(wanted, 0, 8, spoil(copies))  # type: ignore[operator]


def test_what_is_transposed_is_refused() -> None:
    block = Block(((0, 2), (0, 3)), Strided(0, (1, 2)))
    with pytest.raises(PlanError, match="of w"):
        ShardSpec(name="w", shape=(2, 3), blocks=(block,)).require_orderly()


def test_another_model_is_refused() -> None:
    wanted, _ = _example()
    stored = Stored([Bucket("0", 12, (BucketEntry(part_of("w", (4, 3), 0, [(0, 4)]), 0),))], [StoredRange("0", 0, 12)])
    (line,) = check_wanted("x", stored, [replace(wanted, shape=(5, 3))])
    assert line.startswith("x: the optimizer's w has the shape (4, 3), and this run's has (5, 3); another model")
    (line,) = check_wanted("x", stored, [replace(wanted, name="v")])
    assert "the optimizer's v is not stored" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("{", "is damaged", id="no-json"),
        pytest.param('{"version": 1, "buckets": []}', "is damaged", id="key"),
        pytest.param(
            '{"version": 1, "parameters": [], "buckets": [["0", 3, [[0, 0, 0, []]]]]}', "is damaged", id="index"
        ),
        pytest.param('{"version": 2}', "is a map of version 2, and this vtp_plugin reads version 1", id="newer"),
    ],
)
def test_a_broken_map_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    assert load_map(file) is None
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_map(file)
