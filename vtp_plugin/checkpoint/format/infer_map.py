"""The map of a model that nobody has described: inferred, and checked.

Infers the map of a checkpoint that has none: where Megatron has put each parameter, from what is stored.

Megatron takes the parameters of a rank in the reverse order of its model, and puts each behind the one before, at the
next multiple of 64 elements. The stored pieces say how many buckets there are, how long they are, and where parameters
may begin and end. So the parameters of the whole model, in its order, fill the buckets of all stages in the order of
depth, each bucket from its end. How layers are shared out among stages, and which size of bucket Megatron aimed at,
need not be known. Megatron 0.12 stores the buckets of a buffer joined, so only the sum of their lengths is known: there
parameters are laid out as Megatron does it, until they fill that length. An inferred position is proved by the master
weights (``vtp_plugin/checkpoint/load/stored_optimizer.py``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import StoredTensor
from vtp_plugin.checkpoint.format.plan_copies import Stored
from vtp_plugin.checkpoint.format.shard_map import (
    Bucket,
    BucketEntry,
    ModelParameter,
    ShardSpec,
    StoredRange,
    expert_ranks,
    parameters_of,
)
from vtp_plugin.errors import PlanError
from vtp_plugin.plan.model.gpt_model import OUTPUT, WORD_EMBEDDING
from vtp_plugin.util.index_boxes import Box, overlaps, volume

_WRONG_MAP = "the map does not belong to this checkpoint; load only the weights with --no-load-optim"
_OTHER_MODEL = "another model, or another padded vocabulary, was saved; start with its options"
_NOT_TRAINED = (
    "it was not trained then; start with the options of that run, or load only the weights with --no-load-optim"
)


def check_map(
    file: str,
    buckets: Sequence[Bucket],
    pieces: Iterable[StoredRange],
    *,
    is_joined: bool = False,
    is_part: bool = False,
) -> Iterator[str]:
    """Say where a map contradicts the stored pieces, or itself.

    Args:
        file: name of the file that holds the map.
        buckets: the buckets of the map.
        pieces: the stored pieces of all buckets.
        is_joined: whether a piece holds several parameters.
        is_part: whether elements may be missing, which another site keeps.

    Yields:
        Lines ``value; rule; way out``.

    >>> list(check_map("map.json", [Bucket("0", 6, ())], [StoredRange("0", 0, 4), StoredRange("0", 4, 1)]))
    ... # doctest: +ELLIPSIS
    ['map.json: 0 has 6 elements, and 5 are stored; the map does not belong to this checkpoint; ...']
    """
    stored: defaultdict[str, list[StoredRange]] = defaultdict(list)
    for piece in pieces:
        stored[piece.key].append(piece)
    for bucket in buckets:
        if (problem := _problem_of_bucket(bucket, stored.pop(bucket.key, []), is_joined)) is not None:
            yield f"{file}: {problem}; {_WRONG_MAP}"
            return
    if stored:
        yield f"{file}: {next(iter(stored))} is stored and not in it; {_WRONG_MAP}"
    elif (problem := _problem_of_shards(buckets, is_part=is_part)) is not None:
        yield f"{file}: {problem}; {_WRONG_MAP}"


def _problem_of_bucket(bucket: Bucket, pieces: list[StoredRange], is_joined: bool) -> str | None:
    """Name the first position where pieces leave a gap, overlap, or do not begin and end with a parameter."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset != end:
            return f"{bucket.key} is stored with a gap or twice at element {min(end, piece.offset)}"
        end += piece.numel
    if end != bucket.numel:
        return f"{bucket.key} has {bucket.numel} elements, and {end} are stored"
    ends = {0, *(piece.offset + piece.numel for piece in pieces)}
    behind = 0
    for part in bucket.parts:
        first, last = part.offset, part.offset + part.shard.numel
        if first < behind or (last > end if is_joined else not {first, last} <= ends):
            return f"{part.shard.name} would lie at {first}:{last} of {bucket.key}, where no stored parameter lies"
        behind = last
    return None


def _problem_of_shards(buckets: Iterable[Bucket], *, is_part: bool) -> str | None:
    """Name the first parameter that the ranks together do not hold exactly once."""
    boxes: defaultdict[tuple[str, tuple[int, ...]], list[Box]] = defaultdict(list)
    for shard in (part.shard for bucket in buckets for part in bucket.parts):
        try:
            shard.require_orderly()
        except (PlanError, ValueError):
            return f"{shard.name} is cut in no order"
        # What only copies hold nobody holds.
        boxes[shard.name, shard.shape] += [] if shard.is_copy else [block.box for block in shard.blocks]
    if len(boxes) != len({name for name, _ in boxes}):
        return "one parameter has two shapes"
    for (name, shape), held in boxes.items():
        is_all = is_part or sum(map(volume, held)) == math.prod(shape)
        if not is_all or next(overlaps(held), None) is not None:
            return f"the ranks do not hold {name} {shape} once"
    return None


def check_wanted(where: str, stored: Stored, shards: Iterable[ShardSpec]) -> Iterator[str]:
    """Name the first parameter of a run that the checkpoint does not store with the same shape.

    Args:
        where: the checkpoint, for the text.
        stored: what it holds.
        shards: the parts of parameters that a rank reads.

    Yields:
        The first line ``value; rule; way out``.
    """
    for shard in shards:
        found = stored.shape_of(shard.name)
        if found == shard.shape:
            continue
        if found is None:
            yield f"{where}: the optimizer's {shard.name} is not stored, and this run trains it; {_NOT_TRAINED}"
        else:
            shown = f"has the shape {found}, and this run's has {shard.shape}"
            yield f"{where}: the optimizer's {shard.name} {shown}; {_OTHER_MODEL}"
        return


_BUCKET: Final = re.compile(
    r"(?:chained_([01])\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)"
)
_NEEDED: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_ALIGNMENT: Final = 64
"""Elements; every parameter begins at a multiple of so many in its bucket (``pad_param_start``)."""
_BUCKET_ALIGNMENT: Final = 128
"""Elements; every bucket begins at a multiple of so many, and of the number of ranks that share it."""


def infer_map(
    weights: Mapping[str, StoredTensor],
    pieces: Iterable[StoredRange],
    arguments: Mapping[str, Any],
    *,
    is_joined: bool = False,
) -> list[Bucket]:
    """Infer the map of a checkpoint.

    Args:
        weights: the stored weights, by name.
        pieces: the stored pieces of all buckets.
        arguments: arguments of the run that wrote the checkpoint.
        is_joined: whether all buckets of a buffer are stored as one, without the gaps between them.

    Raises:
        PlanError: a parameter does not fit; the text names the first one.
    """
    if len(set(arguments.get("vtp_size_list") or ())) > 1:
        raise PlanError("stages were of unequal sizes")
    if missing := [name for name in _NEEDED if not arguments.get(name)]:
        raise PlanError(f"its arguments do not say {missing[0]}")
    is_tied = OUTPUT.key not in weights and arguments["pipeline_model_parallel_size"] > 1
    groups = _groups(pieces, _BucketRule(arguments, is_tied) if is_joined else None)
    parameters = parameters_of(weights, arguments)
    tp, pp = arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]
    num_chunks = arguments.get("virtual_pipeline_model_parallel_size") or 1
    has_own_experts = any(is_expert for is_expert, _ in groups)
    dense = [parameter for parameter in parameters if parameter.expert is None or not has_own_experts]
    for rank in range(tp):
        own = [(parameter.dtype, parameter.shards[rank]) for parameter in dense]
        if is_tied:
            # The last stage has the embedding once more.
            own += [
                (parameter.dtype, replace(parameter.shards[rank], is_copy=True))
                for parameter in dense
                if parameter.shards[rank].name == WORD_EMBEDDING.key
            ]
        _fill_stages(own, _stages(groups, False, [rank + tp * stage for stage in range(pp)], num_chunks))
    if has_own_experts:
        _fill_expert_stages([each for each in parameters if each.expert is not None], groups, arguments, num_chunks)
    return [bucket.finish() for buffers in groups.values() for buffer in buffers for bucket in buffer.buckets]


def _fill_expert_stages(
    experts: Sequence[ModelParameter], groups: _Groups, arguments: Mapping[str, Any], num_chunks: int
) -> None:
    """Fill the experts' own buckets, for each expert-parallel rank."""
    ep, etp = arguments.get("expert_model_parallel_size") or 1, expert_ranks(arguments)
    share = len({parameter.expert for parameter in experts}) // ep
    for part in range(ep):
        held = range(part * share, (part + 1) * share)
        for rank in range(etp):
            own = [(parameter.dtype, parameter.shards[rank]) for parameter in experts if parameter.expert in held]
            stages = range(arguments["pipeline_model_parallel_size"])
            _fill_stages(own, _stages(groups, True, [rank + etp * (part + ep * stage) for stage in stages], num_chunks))


@dataclass
class _Bucket:
    """A bucket that is filled with parameters from its end.

    Attributes:
        key: key of the bucket in the checkpoint.
        edges: offsets at which its stored pieces begin and end.
        limit: offset at which the next parameter must end at the latest; negative while the bucket is empty.
    """

    key: str
    edges: set[int] = field(default_factory=lambda: {0})
    parts: list[BucketEntry] = field(default_factory=list)
    limit: int = -1

    @property
    def is_full(self) -> bool:
        """Whether it is filled up to its beginning."""
        return self.limit == 0

    def prepend(self, shard: ShardSpec) -> None:
        """Put a parameter before those that are in the bucket.

        Raises:
            PlanError: no stored piece begins and ends there.
        """
        limit = max(self.edges) if self.limit < 0 else self.limit
        start = (limit - shard.numel) // _ALIGNMENT * _ALIGNMENT
        if not {start, start + shard.numel} <= self.edges:
            raise _misfit(
                shard, f"at {start}:{start + shard.numel} of {self.key}, where no stored piece begins and ends"
            )
        self.limit = start
        self.parts.append(BucketEntry(shard, start))

    def finish(self) -> Bucket:
        """Return it with what it holds."""
        return Bucket(self.key, max(self.edges), tuple(self.parts[::-1]))


class _BucketRule:
    """How Megatron 0.12 divides the parameters of a buffer into buckets.

    Args:
        arguments: arguments of the run.
        is_tied: whether two stages have the embedding.

    Attributes:
        size: number of elements from which on a bucket is closed; None if there is no limit.
        gap: largest number of elements between two parameters.

    Raises:
        PlanError: the rule for these arguments is not known.
    """

    def __init__(self, arguments: Mapping[str, Any], is_tied: bool) -> None:
        if arguments.get("ddp_num_buckets"):
            raise PlanError("--ddp-num-buckets counts the parameters of a rank")
        num_ranks = (arguments.get("data_parallel_size") or 1) * (arguments.get("context_parallel_size") or 1)
        self._num_ranks, self.gap = num_ranks, math.lcm(num_ranks, _BUCKET_ALIGNMENT)
        self._alone = WORD_EMBEDDING.key if is_tied else None
        self.size: int | None = None
        if arguments.get("overlap_grad_reduce") and not arguments.get("overlap_param_gather_with_optimizer_step"):
            self.size = arguments.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * num_ranks)

    def lay_out(self, shards: Sequence[ShardSpec], *, is_first: bool) -> tuple[list[int], int]:
        """Give the offsets of parameters in a buffer whose buckets are stored without the gaps between them.

        Args:
            shards: the parameters in the order of the buffer, which is the reverse order of the model.
            is_first: whether it is the first chunk of the first stage, the only one in several buckets for their size.

        Returns:
            Offset of each parameter, and the length of the buffer.
        """
        starts: list[int] = []
        bucket = end = 0  # where the bucket begins, and how long it is
        for shard in shards:
            start = _padded(end, _ALIGNMENT)
            if shard.name == self._alone and end:
                # The one before ends where this begins.
                is_shared = start % self._num_ranks == 0
                bucket += start if is_shared else _padded(start, self.gap)
                start = 0
            starts.append(bucket + start)
            end = start + shard.numel
            if shard.name == self._alone or (is_first and self.size is not None and end >= self.size):
                bucket, end = bucket + end, 0
        return starts, bucket + end


def _padded(count: int, divisor: int) -> int:
    return -(-count // divisor) * divisor


@dataclass
class _JoinedBucket:
    """All buckets of a buffer, stored as one.

    Attributes:
        key: key of the joined bucket in the checkpoint.
        numel: number of its elements.
        rule: how Megatron divides it into buckets.
        is_first: whether it belongs to the first chunk of the first stage.
        shards: its parameters, in the order of the model.
        total: number of elements of all these parameters.
        is_full: whether the parameters, laid out by the rule, fill the joined bucket.
    """

    key: str
    numel: int
    rule: _BucketRule
    is_first: bool = False
    shards: list[ShardSpec] = field(default_factory=list)
    total: int = 0
    is_full: bool = False

    def prepend(self, shard: ShardSpec) -> None:
        """Put a parameter before those that are in the bucket.

        Raises:
            PlanError: it is too long.
        """
        self.shards.append(shard)
        self.total += shard.numel
        if self.total > self.numel:
            raise _misfit(shard, f"in {self.key}, which has {self.numel} elements, and with it {self.total}")
        if self.numel - self.total <= self.rule.gap * len(self.shards):  # else more is missing than padding can be
            self.is_full = self.rule.lay_out(self.shards[::-1], is_first=self.is_first)[1] == self.numel

    def finish(self) -> Bucket:
        """Return it with what it holds."""
        shards = self.shards[::-1]
        starts, _ = self.rule.lay_out(shards, is_first=self.is_first)
        return Bucket(self.key, self.numel, tuple(map(BucketEntry, shards, starts)))


@dataclass
class _Buffer:
    """A buffer of Megatron's: the buckets of one model chunk whose parameters have one type."""

    dtype: str
    buckets: list[_Bucket | _JoinedBucket] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return all(bucket.is_full for bucket in self.buckets)

    def prepend(self, shard: ShardSpec) -> None:
        next(bucket for bucket in reversed(self.buckets) if not bucket.is_full).prepend(shard)


_Groups = dict[tuple[bool, int], list[_Buffer]]
"""The buffers of every data-parallel group in order, by whether it is one of experts, and its number."""


def _groups(pieces: Iterable[StoredRange], rule: _BucketRule | None) -> _Groups:
    """Make an empty bucket for each stored one; with a rule, one joined bucket for each buffer."""
    known: dict[tuple[bool, int, int], tuple[str, dict[int, _Bucket | _JoinedBucket]]] = {}
    for piece in pieces:
        match = _BUCKET.fullmatch(piece.key)
        if match is None:
            raise PlanError(f"{piece.key} is no bucket that this version knows")
        chained, group, buffer, dtype, bucket = match.groups()
        _, buckets = known.setdefault((chained == "1", int(group), int(buffer)), (dtype, {}))
        if rule is not None:
            buckets[0] = _JoinedBucket(piece.key, piece.numel, rule)
            continue
        bucket_of_piece = buckets.setdefault(int(bucket), _Bucket(piece.key))
        assert isinstance(bucket_of_piece, _Bucket)
        bucket_of_piece.edges.update((piece.offset, piece.offset + piece.numel))
    groups: defaultdict[tuple[bool, int], list[_Buffer]] = defaultdict(list)
    for (is_expert, group, _), (dtype, buckets) in sorted(known.items(), key=lambda item: item[0]):
        groups[is_expert, group].append(_Buffer(dtype, [buckets[number] for number in sorted(buckets)]))
    return groups


def _stages(groups: _Groups, is_expert: bool, numbers: Sequence[int], num_chunks: int) -> list[list[_Buffer]]:
    """List the buffers of all virtual stages in the order of depth, without virtual stages that have no parameters."""
    by_stage = [_chunks(groups.get((is_expert, number), ())) for number in numbers]
    return [chunks[index] for index in range(num_chunks) for chunks in by_stage if index < len(chunks)]


def _chunks(buffers: Iterable[_Buffer]) -> list[list[_Buffer]]:
    """Group buffers by model chunk: a chunk has one buffer of each type, so a type that comes again begins the next."""
    chunks: list[list[_Buffer]] = []
    for buffer in buffers:
        if not chunks or any(buffer.dtype == other.dtype for other in chunks[-1]):
            chunks.append([])
        chunks[-1].append(buffer)
    return chunks


def _fill_stages(parameters: Sequence[tuple[str, ShardSpec]], stages: Sequence[Sequence[_Buffer]]) -> None:
    """Fill the buckets of all stages with the parameters of one rank per stage, in the order of the model.

    Raises:
        PlanError: one does not fit.
    """
    left: Iterator[tuple[str, ShardSpec]] = iter(parameters)
    first = (bucket for buffers in stages[:1] for buffer in buffers for bucket in buffer.buckets)
    for joined in (bucket for bucket in first if isinstance(bucket, _JoinedBucket)):
        joined.is_first = True
    for buffers in stages:
        while not all(buffer.is_full for buffer in buffers):
            dtype, shard = next(left, (None, None))
            if shard is None:
                raise PlanError(f"nothing is left for {buffers[0].buckets[0].key}")
            buffer = next((each for each in buffers if each.dtype == dtype and not each.is_full), None)
            if buffer is None:
                raise _misfit(shard, f"in a bucket of {dtype}, and there is none, or it is full")
            buffer.prepend(shard)
    if (extra := next(left, None)) is not None:
        raise _misfit(extra[1], "in no bucket")


def _misfit(shard: ShardSpec, where: str) -> PlanError:
    return PlanError(f"{shard.name} {shard.blocks[0].box} would lie {where}")
