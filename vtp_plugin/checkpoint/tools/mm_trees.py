"""Reads the trees of files that MindSpeed-MM's converters write: a file for every rank of a run.

Every rank of a stage holds its part of the stage's tensors, chunk by chunk. In every chunk layers are counted from 0,
so their numbers in the model follow from how many layers the chunks before have: first the first chunk of all stages,
then the second one. MindSpeed-MM's own U has a tree for each tensor-parallel size: of one the edge loads its files, the
first stage's, of the other the cloud loads the others'.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vtp_plugin.checkpoint.format.checkpoint_files import DamagedError, Extent, tensors_inside
from vtp_plugin.checkpoint.format.resolver import TRACKER, read_tracker
from vtp_plugin.errors import ConfigError

_FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_FILE: Final = "model_optim_rng.pt"
_CHUNK: Final = re.compile(r"model(\d?)")
_WAY_OUT: Final = "give the folders that hf_to_mm_ldt was given as mm_dir, first the edge's, then the cloud's"


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a tensor.

    Attributes:
        extent: where it lies.
        dtype: type of its elements.
        shape: its shape.
    """

    extent: Extent
    dtype: str
    shape: tuple[int, ...]


_Held = Mapping[tuple[int, str], RankPart]
"""What a rank's file holds, by chunk and name."""
_Counts = Mapping[tuple[int, str], int]
"""Number of layers that a stage has, by chunk and what the names of their tensors begin with."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The files of a tree, by stage and rank of the stage."""

    folder: Path
    files: Mapping[tuple[int, int], Path]

    @property
    def stages(self) -> list[int]:
        return sorted({stage for stage, _ in self.files})

    def ranks(self, stage: int) -> list[int]:
        return sorted(rank for of, rank in self.files if of == stage)


class MMTrees:
    """The weights of a model in one tree, or in those of an edge and a cloud.

    Args:
        folders: the folder of the tree, or those of the edge's and the cloud's.
        layers: for each part of a model with layers, what its tensors' names begin with, up to the number of the layer.

    Attributes:
        folder: a folder that holds both.
        files: all files that are read.
        tensors: by the name that a tensor has in the whole model, the parts of all ranks of its stage.
        num_layers: the number of layers of each part of the model.

    Raises:
        ConfigError: a file is missing or damaged, or the trees do not belong together.
    """

    def __init__(self, folders: Sequence[Path], layers: Sequence[str]) -> None:
        self.folder = Path(os.path.commonpath([folder.resolve() for folder in folders]))
        self._layers = layers
        trees = [_tree(folder.resolve()) for folder in folders]
        chosen = _chosen(trees)
        self.files = tuple(tree.files[stage, rank] for stage, tree in chosen.items() for rank in tree.ranks(stage))
        held = {
            stage: [self._held(tree.files[stage, rank]) for rank in tree.ranks(stage)] for stage, tree in chosen.items()
        }
        self._require_alike(held, chosen)
        counts = {stage: self._counts(ranks[0], chosen[stage].folder, stage) for stage, ranks in held.items()}
        if len(trees) > 1:
            self._require_same_lists(trees, counts)
        num_chunks = 1 + max(chunk for ranks in held.values() for chunk, _ in ranks[0])
        starts, self.num_layers = _starts(counts, layers, num_chunks)
        self.tensors: dict[str, list[RankPart]] = {}
        for stage, ranks in held.items():
            for chunk, name in ranks[0]:
                whole = self._renumbered(name, starts[stage, chunk])
                if whole in self.tensors:
                    raise ConfigError(
                        f"{chosen[stage].folder}: {whole} lies in two chunks; a model has it once; {_WAY_OUT}"
                    )
                self.tensors[whole] = [parts[chunk, name] for parts in ranks]

    def __repr__(self) -> str:
        return f"<{len(self.tensors)} tensors of {self.folder}>"

    def _held(self, file: Path) -> _Held:
        """Read which tensors a file holds, by chunk and name."""
        extent = Extent(str(file.relative_to(self.folder)))
        try:
            inside = [*tensors_inside(self.folder, extent)]
        except DamagedError as error:
            raise ConfigError(f"{file} {error}; a rank's weights lie in it; convert again") from None
        found: dict[tuple[int, str], RankPart] = {}
        for place, dtype, shape in inside:
            chunk, *names = place.path
            if (match := _CHUNK.fullmatch(chunk)) is not None and len(names) == 1:
                found[int(match.group(1) or 0), names[0]] = RankPart(place, dtype, shape)
        if not found:
            raise ConfigError(f"{file} holds no weights of a model; {_WAY_OUT}")
        return found

    def _counts(self, held: _Held, folder: Path, stage: int) -> _Counts:
        """Count the layers of each part in each chunk."""
        numbers: dict[tuple[int, str], set[int]] = defaultdict(set)
        for chunk, name in held:
            for begin in self._layers:
                if name.startswith(begin):
                    numbers[chunk, begin].add(_number(name, begin))
        for (chunk, begin), found in numbers.items():
            if (missing := next((number for number in range(len(found)) if number not in found), None)) is not None:
                raise ConfigError(
                    f"{folder}: {begin}{missing} is missing in chunk {chunk} of stage {stage}, which has later ones; "
                    "layers are counted from 0 in every chunk; convert again"
                )
        return {place: len(found) for place, found in numbers.items()}

    def _require_alike(self, held: Mapping[int, Sequence[_Held]], chosen: Mapping[int, _Tree]) -> None:
        """Refuse a stage whose ranks hold different tensors."""
        for stage, ranks in held.items():
            for rank, parts in enumerate(ranks):
                for chunk, name in sorted(ranks[0].keys() ^ parts.keys())[:1]:
                    raise ConfigError(
                        f"{chosen[stage].folder}: only one of ranks 0 and {rank} of stage {stage} holds {name} of "
                        f"chunk {chunk}; all ranks of a stage hold parts of the same tensors; convert again"
                    )

    def _require_same_lists(self, trees: Sequence[_Tree], counts: Mapping[int, _Counts]) -> None:
        """Refuse trees of different lists, as far as they hold the other's stages, too."""
        for tree in trees:
            for stage in (stage for stage in tree.stages if stage in counts):
                file = tree.files[stage, tree.ranks(stage)[0]]
                found = self._counts(self._held(file), tree.folder, stage)
                for chunk, begin in sorted(found.keys() | counts[stage].keys()):
                    here, there = found.get((chunk, begin), 0), counts[stage].get((chunk, begin), 0)
                    if here != there:
                        raise ConfigError(
                            f"{' and '.join(str(each.folder) for each in trees)} are of different lists: chunk {chunk} "
                            f"of stage {stage} has {min(here, there)} of {begin.rstrip('.')} in one and "
                            f"{max(here, there)} in the other; both are of one run; convert one again, with the lists "
                            "of the other"
                        )

    def _renumbered(self, name: str, starts: Mapping[str, int]) -> str:
        """Return the name that a tensor of a chunk has in the whole model."""
        for begin in self._layers:
            if name.startswith(begin):
                number = _number(name, begin)
                return f"{begin}{starts[begin] + number}{name[len(begin) + len(str(number)) :]}"
        return name


def _number(name: str, begin: str) -> int:
    number = name[len(begin) :].partition(".")[0]
    if not re.fullmatch(r"0|[1-9]\d{0,4}", number):
        raise ConfigError(f"{name[:100]!a} is the name of no layer's tensor; layers have numbers; {_WAY_OUT}")
    return int(number)


def _tree(folder: Path) -> _Tree:
    """Find the files of a tree."""
    said = read_tracker(folder)
    if said is None:
        raise ConfigError(
            f"{folder} holds no {TRACKER}; MindSpeed-MM's converter writes it beside its files; {_WAY_OUT}"
        )
    if not re.fullmatch(r"release|\d{1,9}", said):
        raise ConfigError(f"{folder / TRACKER} says {said[:40]!a}; it names an iteration, or release; {_WAY_OUT}")
    inner = folder / ("release" if said == "release" else f"iter_{said:>07}")
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(inner.glob("mp_rank_*")):
        if (match := _FOLDER.fullmatch(path.name)) is None:
            raise ConfigError(
                f"{path} is of a run with experts in parallel; only ranks and stages are read; {_WAY_OUT}"
            )
        files[int(match.group(2) or 0), int(match.group(1))] = path / _FILE
    if not files:
        raise ConfigError(
            f"{inner} holds no mp_rank_00_000; every rank's weights have a folder of such a name; {_WAY_OUT}"
        )
    tree = _Tree(folder, files)
    for stage in tree.stages:
        if (ranks := tree.ranks(stage)) != [*range(len(ranks))]:
            raise ConfigError(
                f"{inner} holds ranks {', '.join(map(str, ranks))} of stage {stage}; one of those before them is "
                "missing; copy all folders of the stage"
            )
    return tree


def _chosen(trees: Sequence[_Tree]) -> dict[int, _Tree]:
    """Choose the tree of every stage: the first stage is the edge's, the others are the cloud's."""
    edge, cloud = trees[0], trees[-1]
    num_stages = 1 + max(cloud.stages[-1], edge.stages[-1])
    chosen = {stage: cloud if stage else edge for stage in range(num_stages)}
    for stage, tree in chosen.items():
        if stage not in tree.stages:
            raise ConfigError(
                f"{tree.folder} holds no rank of stage {stage}, of {num_stages}; all are needed; {_WAY_OUT}"
            )
    return chosen


def _starts(
    counts: Mapping[int, _Counts], layers: Sequence[str], num_chunks: int
) -> tuple[dict[tuple[int, int], dict[str, int]], dict[str, int]]:
    """Return the number of the first layer of each part in each chunk of each stage, and how many each part has."""
    total = dict.fromkeys(layers, 0)
    starts: dict[tuple[int, int], dict[str, int]] = {}
    for chunk in range(num_chunks):
        for stage in counts:
            starts[stage, chunk] = dict(total)
            for begin in layers:
                total[begin] += counts[stage].get((chunk, begin), 0)
    return starts, total
