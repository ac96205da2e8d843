"""A map for a checkpoint that has none: where Megatron has put each parameter, worked out from what is stored.

Megatron takes the parameters of a rank in the reverse order of its model, and lays each behind the one before, at the
next multiple of 64 elements. How many buckets there are, and how long, is known from what is stored, and so is where
parameters may begin and end. So the buckets of all stages, walked through in the order of depth and each from its end,
take the parameters of the whole model in its order: how layers are shared out among stages, and how large Megatron
wanted its buckets, need not be known. Where Megatron 0.12 stores buckets joined, of which only the sum of their lengths
is known, parameters are laid out as it does, until they are as long. That a parameter is where this says is proved by
its master weights (``vtp_plugin/checkpoint/load/masters.py``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import StoredTensor
from vtp_plugin.checkpoint.format.model_order import OUTPUT, WORD_EMBEDDING, ModelParameter, expert_ranks, parameters_of
from vtp_plugin.checkpoint.format.shard_map import Bucket, BucketEntry, ShardSpec, StoredRange
from vtp_plugin.errors import PlanError

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
    """Work out the map of a checkpoint.

    Args:
        weights: of the checkpoint.
        pieces: of all its buckets.
        arguments: of the run that wrote it.
        is_joined: whether all buckets of a buffer are stored as one, without what is between them.

    Raises:
        PlanError: a parameter does not fit; the text names the first one.
    """
    if len(set(arguments.get("vtp_size_list") or ())) > 1:
        raise PlanError("stages were of unequal sizes")
    if missing := [name for name in _NEEDED if not arguments.get(name)]:
        raise PlanError(f"its arguments do not say {missing[0]}")
    is_tied = OUTPUT not in weights and arguments["pipeline_model_parallel_size"] > 1
    groups = _groups(pieces, _Rule(arguments, is_tied) if is_joined else None)
    parameters = parameters_of(weights, arguments)
    tp, pp = arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]
    num_chunks = arguments.get("virtual_pipeline_model_parallel_size") or 1
    has_own_experts = any(is_expert for is_expert, _ in groups)
    dense = [parameter for parameter in parameters if parameter.expert is None or not has_own_experts]
    for rank in range(tp):
        own = [(parameter.dtype, parameter.cuts[rank]) for parameter in dense]
        if is_tied:
            # The last stage has the embedding once more.
            own += [
                (parameter.dtype, replace(parameter.cuts[rank], is_copy=True))
                for parameter in dense
                if parameter.cuts[rank].name == WORD_EMBEDDING
            ]
        _deal(own, _stages(groups, False, [rank + tp * stage for stage in range(pp)], num_chunks))
    if has_own_experts:
        _deal_experts([each for each in parameters if each.expert is not None], groups, arguments, num_chunks)
    return [bucket.made() for buffers in groups.values() for buffer in buffers for bucket in buffer.buckets]


def _deal_experts(
    experts: Sequence[ModelParameter], groups: _Groups, arguments: Mapping[str, Any], num_chunks: int
) -> None:
    """Put experts into buckets of their own, which the ranks of each share of the experts have."""
    ep, etp = arguments.get("expert_model_parallel_size") or 1, expert_ranks(arguments)
    share = len({parameter.expert for parameter in experts}) // ep
    for part in range(ep):
        held = range(part * share, (part + 1) * share)
        for rank in range(etp):
            own = [(parameter.dtype, parameter.cuts[rank]) for parameter in experts if parameter.expert in held]
            stages = range(arguments["pipeline_model_parallel_size"])
            _deal(own, _stages(groups, True, [rank + etp * (part + ep * stage) for stage in stages], num_chunks))


@dataclass
class _Bucket:
    """A bucket that is filled from its end.

    Attributes:
        key: its name.
        edges: where its stored pieces begin and end.
        limit: where what is next must end at the latest.
    """

    key: str
    edges: set[int] = field(default_factory=lambda: {0})
    parts: list[BucketEntry] = field(default_factory=list)
    limit: int = -1

    @property
    def is_full(self) -> bool:
        """Whether it begins with a parameter."""
        return self.limit == 0

    def put(self, cut: ShardSpec) -> None:
        """Put a parameter before what is there.

        Raises:
            PlanError: none is stored there.
        """
        limit = max(self.edges) if self.limit < 0 else self.limit
        start = (limit - cut.numel) // _ALIGNMENT * _ALIGNMENT
        if not {start, start + cut.numel} <= self.edges:
            raise _misfit(cut, f"at {start}:{start + cut.numel} of {self.key}, where no stored piece begins and ends")
        self.limit = start
        self.parts.append(BucketEntry(cut, start))

    def made(self) -> Bucket:
        """Return it with what it holds."""
        return Bucket(self.key, max(self.edges), tuple(self.parts[::-1]))


class _Rule:
    """How Megatron 0.12 shares out parameters among buckets.

    Args:
        arguments: of the run.
        is_tied: whether two stages have the embedding.

    Attributes:
        size: elements at which a bucket is large enough; None if there is no limit.
        gap: elements that lie between two parameters at most.

    Raises:
        PlanError: the rule for these arguments is not known.
    """

    def __init__(self, arguments: Mapping[str, Any], is_tied: bool) -> None:
        if arguments.get("ddp_num_buckets"):
            raise PlanError("--ddp-num-buckets counts the parameters of a rank")
        num_ranks = (arguments.get("data_parallel_size") or 1) * (arguments.get("context_parallel_size") or 1)
        self._num_ranks, self.gap = num_ranks, math.lcm(num_ranks, _BUCKET_ALIGNMENT)
        self._alone = WORD_EMBEDDING if is_tied else None
        self.size: int | None = None
        if arguments.get("overlap_grad_reduce") and not arguments.get("overlap_param_gather_with_optimizer_step"):
            self.size = arguments.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * num_ranks)

    def lay_out(self, cuts: Sequence[ShardSpec], *, is_first: bool) -> tuple[list[int], int]:
        """Say where parameters lie, if nothing of what is between buckets is stored.

        Args:
            cuts: in the order of the buffer, which is the reverse one of the model.
            is_first: whether it is the first chunk of the first stage, the only one in several buckets for their size.

        Returns:
            Offset of each, and how long all of it is.
        """
        starts: list[int] = []
        bucket = end = 0  # where the bucket begins, and how long it is
        for cut in cuts:
            start = _padded(end, _ALIGNMENT)
            if cut.name == self._alone and end:
                # The one before ends where this begins.
                is_shared = start % self._num_ranks == 0
                bucket += start if is_shared else _padded(start, self.gap)
                start = 0
            starts.append(bucket + start)
            end = start + cut.numel
            if cut.name == self._alone or (is_first and self.size is not None and end >= self.size):
                bucket, end = bucket + end, 0
        return starts, bucket + end


def _padded(count: int, divisor: int) -> int:
    return -(-count // divisor) * divisor


@dataclass
class _Joined:
    """All buckets of a buffer, stored one behind the other as if they were one.

    Attributes:
        key: its name.
        numel: its elements.
        rule: how it is shared out.
        is_first: whether it belongs to the first chunk of the first stage.
        cuts: what it holds, in the order of the model.
        total: elements of all of them.
        is_full: whether they are as long as it is.
    """

    key: str
    numel: int
    rule: _Rule
    is_first: bool = False
    cuts: list[ShardSpec] = field(default_factory=list)
    total: int = 0
    is_full: bool = False

    def put(self, cut: ShardSpec) -> None:
        """Put a parameter before what is there.

        Raises:
            PlanError: it is too long.
        """
        self.cuts.append(cut)
        self.total += cut.numel
        if self.total > self.numel:
            raise _misfit(cut, f"in {self.key}, which has {self.numel} elements, and with it {self.total}")
        if self.numel - self.total <= self.rule.gap * len(self.cuts):  # else more is missing than padding can be
            self.is_full = self.rule.lay_out(self.cuts[::-1], is_first=self.is_first)[1] == self.numel

    def made(self) -> Bucket:
        """Return it with what it holds."""
        cuts = self.cuts[::-1]
        starts, _ = self.rule.lay_out(cuts, is_first=self.is_first)
        return Bucket(self.key, self.numel, tuple(map(BucketEntry, cuts, starts)))


@dataclass
class _Buffer:
    """Buckets of parameters of one type, of one chunk of a model."""

    dtype: str
    buckets: list[_Bucket | _Joined] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return all(bucket.is_full for bucket in self.buckets)

    def put(self, cut: ShardSpec) -> None:
        next(bucket for bucket in reversed(self.buckets) if not bucket.is_full).put(cut)


_Groups = dict[tuple[bool, int], list[_Buffer]]
"""The buffers of every data-parallel group in order, by whether it is one of experts, and its number."""


def _groups(pieces: Iterable[StoredRange], rule: _Rule | None) -> _Groups:
    """Make empty buckets of what is stored; with a rule, they are joined."""
    known: dict[tuple[bool, int, int], tuple[str, dict[int, _Bucket | _Joined]]] = {}
    for piece in pieces:
        match = _BUCKET.fullmatch(piece.key)
        if match is None:
            raise PlanError(f"{piece.key} is no bucket that this version knows")
        chained, group, buffer, dtype, bucket = match.groups()
        _, buckets = known.setdefault((chained == "1", int(group), int(buffer)), (dtype, {}))
        if rule is not None:
            buckets[0] = _Joined(piece.key, piece.numel, rule)
            continue
        made = buckets.setdefault(int(bucket), _Bucket(piece.key))
        assert isinstance(made, _Bucket)
        made.edges.update((piece.offset, piece.offset + piece.numel))
    groups: defaultdict[tuple[bool, int], list[_Buffer]] = defaultdict(list)
    for (is_expert, group, _), (dtype, buckets) in sorted(known.items(), key=lambda item: item[0]):
        groups[is_expert, group].append(_Buffer(dtype, [buckets[number] for number in sorted(buckets)]))
    return groups


def _stages(groups: _Groups, is_expert: bool, numbers: Sequence[int], num_chunks: int) -> list[list[_Buffer]]:
    """List the buffers of all virtual stages in the order of depth; a stage without parameters has none."""
    by_stage = [_chunks(groups.get((is_expert, number), ())) for number in numbers]
    return [chunks[index] for index in range(num_chunks) for chunks in by_stage if index < len(chunks)]


def _chunks(buffers: Iterable[_Buffer]) -> list[list[_Buffer]]:
    """Tell the buffers of one chunk from those of the next, which begins where a type comes again."""
    chunks: list[list[_Buffer]] = []
    for buffer in buffers:
        if not chunks or any(buffer.dtype == other.dtype for other in chunks[-1]):
            chunks.append([])
        chunks[-1].append(buffer)
    return chunks


def _deal(parameters: Sequence[tuple[str, ShardSpec]], stages: Sequence[Sequence[_Buffer]]) -> None:
    """Put the parameters of one rank of every stage, in the order of the model, into the buckets of the stages.

    Raises:
        PlanError: one does not fit.
    """
    left: Iterator[tuple[str, ShardSpec]] = iter(parameters)
    first = (bucket for buffers in stages[:1] for buffer in buffers for bucket in buffer.buckets)
    for joined in (bucket for bucket in first if isinstance(bucket, _Joined)):
        joined.is_first = True
    for buffers in stages:
        while not all(buffer.is_full for buffer in buffers):
            dtype, cut = next(left, (None, None))
            if cut is None:
                raise PlanError(f"nothing is left for {buffers[0].buckets[0].key}")
            buffer = next((each for each in buffers if each.dtype == dtype and not each.is_full), None)
            if buffer is None:
                raise _misfit(cut, f"in a bucket of {dtype}, and there is none, or it is full")
            buffer.put(cut)
    if (extra := next(left, None)) is not None:
        raise _misfit(extra[1], "in no bucket")


def _misfit(cut: ShardSpec, where: str) -> PlanError:
    return PlanError(f"{cut.name} {cut.blocks[0].box} would lie {where}")
