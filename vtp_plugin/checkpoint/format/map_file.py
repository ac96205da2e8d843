"""The map file: where each parameter lies in the buckets that the distributed optimizer has stored.

It lies beside ``metadata.json`` and is written with the checkpoint. It holds names and shapes of the parameters once,
then every bucket with its shards: which parameter, where, whether another rank holds the same, and its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.shard_map import Block, Bucket, BucketEntry, ShardSpec, Strided, row_major
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import box_shape
from vtp_plugin.util.untrusted_files import MAX_INDEX_BYTES, count, read_json

MAP: Final = "vtp_optimizer_map.json"
"""The name of the file."""
_VERSION = 1
_WAY_OUT = "copy it again, or load only the weights with --no-load-optim"


def dump_map(buckets: Iterable[Bucket]) -> str:
    """Write a map, one line for a bucket.

    >>> block = Block(((0, 2), (0, 3)), Strided(0, (3, 1)))
    >>> print(dump_map([Bucket("0", 8, (BucketEntry(ShardSpec(name="w", shape=(4, 3), blocks=(block,)), 2),))]))
    {"version":1,"parameters":[["w",[4,3]]],"buckets":[
    ["0",8,[[0,2,0,[[[[0,2],[0,3]]]]]]]
    ]}
    """
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    rows: list[Any] = []
    for bucket in buckets:
        parts = [
            (
                numbers.setdefault((shard.name, shard.shape), len(numbers)),
                part.offset,
                int(shard.is_copy),
                [_packed(block) for block in shard.blocks],
            )
            for part in bucket.parts
            for shard in (part.shard,)
        ]
        rows.append((bucket.key, bucket.numel, parts))
    lines = ",\n".join(map(_json, rows))
    return f'{{"version":{_VERSION},"parameters":{_json(list(numbers))},"buckets":[\n{lines}\n]}}'


def load_map(file: Path) -> tuple[Bucket, ...] | None:
    """Read a map; None if there is none.

    Raises:
        ConfigError: it is damaged, or a newer version of the plugin wrote it.
    """
    try:
        read = read_json(file, MAX_INDEX_BYTES)
        if read["version"] == _VERSION:
            parameters = [(str(name), _counts(shape)) for name, shape in read["parameters"]]
            return tuple(_bucket(row, parameters) for row in read["buckets"])
        version = int(read["version"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); it says where the optimizer lies; {_WAY_OUT}"
        ) from None
    except (ValueError, TypeError, LookupError):
        raise ConfigError(f"{file} is damaged; it says where the optimizer lies; {_WAY_OUT}") from None
    raise ConfigError(
        f"{file} is a map of version {version}, and this vtp_plugin reads version {_VERSION}; use the one that wrote "
        "it, or load only the weights with --no-load-optim"
    )


def _bucket(row: Any, parameters: list[tuple[str, tuple[int, ...]]]) -> Bucket:
    key, numel, parts = row
    return Bucket(str(key), count(numel), tuple(_placed(part, parameters) for part in parts))


def _placed(row: Any, parameters: list[tuple[str, tuple[int, ...]]]) -> BucketEntry:
    number, offset, is_copy, blocks = row
    name, shape = parameters[count(number)]
    shard = ShardSpec(name=name, shape=shape, blocks=tuple(map(_unpacked, blocks)), is_copy=bool(is_copy))
    return BucketEntry(shard, count(offset))


def _packed(block: Block) -> list[Any]:
    """Write a block, without its layout where that is a whole tensor without gaps."""
    if block.strided == Strided(0, row_major(block.shape)):
        return [block.box]
    return [block.box, block.strided.offset, block.strided.strides]


def _unpacked(row: Any) -> Block:
    box = tuple((count(start), count(stop)) for start, stop in row[0])
    strided = Strided(0, row_major(box_shape(box))) if len(row) == 1 else Strided(count(row[1]), _counts(row[2]))
    return Block(box, strided)


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(count, values))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
