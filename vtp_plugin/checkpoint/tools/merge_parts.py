"""Makes one checkpoint of the parts that sites keep, and parts of one: for whoever may see all of it.

Elements are copied as they are, piece by piece; only a piece that holds layers of two sites is cut.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.contents import Contents, Part, name_of
from vtp_plugin.checkpoint.format.index import INDEX, Extent, StoredTensor, read_extent
from vtp_plugin.checkpoint.format.resolver import BY_BUCKET, IN_BUCKETS, IN_MODEL_SPACE, PLAIN
from vtp_plugin.checkpoint.format.shard_map import MAP, Bucket, Strided, dump_map, row_major
from vtp_plugin.checkpoint.format.site_part import PART, SitePart, digest_of_save, read_part, require_whole
from vtp_plugin.checkpoint.load.stored_optimizer import Elements
from vtp_plugin.checkpoint.tools.verify import OF_RANKS, problems_of_cover
from vtp_plugin.checkpoint.tools.writer import Ending, NewPiece, PieceWriter
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.util.index_boxes import Box, box_shape, intersect
from vtp_plugin.util.text import own_command
from vtp_plugin.util.typed_json import MAX_INDEX_BYTES, read_bytes

_COMMON: Final = "common_state/"
_SHARD: Final = re.compile(r"(?P<name>.+)/shard_(?P<at>\d+)[.\d]*_[.\d]+")
_OF_GROUP: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+")
_LAYERS: Final = "decoder.layers."
_BY_RANK: Final = "rerun_state_machine_state"


def plan_merge(parts: Sequence[Contents], target: Path) -> tuple[PieceWriter, Ending]:
    """Plan one checkpoint of all its parts.

    Args:
        parts: the parts, in any order.
        target: folder of the new checkpoint.

    Returns:
        The writer of its pieces, and what it writes behind them.

    Raises:
        ConfigError: they are not all parts of one save, overlap, or leave elements out.
    """
    ordered = _ordered(parts)
    found: dict[str, StoredTensor] = {}
    objects: dict[str, Extent] = {}
    twice: list[str] = []
    for part in ordered:
        for key, tensor in part.index.tensors.items():
            own = tuple((box, _absolute(part.folder, extent)) for box, extent in tensor.extents)
            known = found.get(key, replace(tensor, extents=()))
            if (known.dtype, known.shape, known.flattened) != (tensor.dtype, tensor.shape, tensor.flattened):
                raise ConfigError(
                    f"{part.folder} holds {key} as {tensor.dtype} {tensor.shape}, another part as {known.dtype} "
                    f"{known.shape}; parts of one save fit together; copy them again"
                )
            found[key] = replace(known, extents=(*known.extents, *own))
        for key, extent in part.index.objects.items():
            if key in objects and not key.startswith(_COMMON):
                twice.append(f"{part.folder} and another part hold {key}; one site has it; copy the parts again")
            objects.setdefault(key, _absolute(part.folder, extent))
    names = " and ".join(str(part.folder) for part in ordered)
    problems = (
        f"{names}: {key} {problem}; parts of one save fit together; copy them again"
        for key, tensor in found.items()
        for problem in problems_of_cover(tensor)
    )
    refuse([*problems, *twice][:1])
    shared = next(key for key in objects if key.startswith(_COMMON))
    pieces = [
        NewPiece(key, tensor.dtype, tensor.shape, box, extent, flattened=tensor.flattened)
        for key, tensor in found.items()
        for box, extent in tensor.extents
    ]
    pieces += [NewPiece(key, None, (), (), extent) for key, extent in objects.items() if key != shared]
    first = ordered[0]
    files = {"metadata.json": read_bytes(first.folder / "metadata.json")}
    if all(part.has_map for part in ordered):
        files[MAP] = _map_of([bucket for part in ordered for bucket in part.stored().buckets.values()])
    identity = " ".join(_identity(part.folder) for part in ordered)
    work = PieceWriter(pieces, Elements(first.folder), target, identity)
    return work, Ending(common=read_extent(first.folder, objects[shared]), common_key=shared, files=files)


def _ordered(parts: Sequence[Contents]) -> list[Contents]:
    """Return the parts in the order of their sites."""
    notes: dict[str, tuple[SitePart, Contents]] = {}
    for part in parts:
        if (note := read_part(part.folder)) is None:
            raise ConfigError(f"{part.folder} is a whole checkpoint, and no part; it needs no merge; load it as it is")
        if note.site in notes:
            raise ConfigError(f"{part.folder} and {notes[note.site][1].folder} are parts of site {note.site}; give one")
        notes[note.site] = note, part
    first, of_first = next(iter(notes.values()))
    for note, part in notes.values():
        if (note.save, note.sites) == (first.save, first.sites):
            continue
        iterations = [each.common.get("iteration") for each in (of_first, part)]
        lists = [each.arguments.get("vtp_size_list") for each in (of_first, part)]
        differ = (f"{kind}, {a} and {b}" for kind, (a, b) in (("iterations", iterations), ("lists", lists)) if a != b)
        what = next(differ, "runs, or of one run that saved that iteration twice")
        raise ConfigError(
            f"{of_first.folder} and {part.folder} are parts of different {what}; one save has one part at each site; "
            "give those of one iteration of one run"
        )
    if missing := [site for site in first.sites if site not in notes]:
        raise ConfigError(
            f"the part of site {missing[0]} is not among {', '.join(str(part.folder) for part in parts)}; all of "
            f"{', '.join(first.sites)} are needed; give its folder with --from, too"
        )
    return [notes[site][1] for site in first.sites]


def _absolute(folder: Path, extent: Extent) -> Extent:
    """Name the file of an extent so that a reader of another folder finds it, too."""
    return replace(extent, file=str((folder / extent.file).absolute()))


def _map_of(buckets: Sequence[Bucket]) -> bytes:
    return dump_map(sorted(buckets, key=lambda bucket: bucket.key)).encode()


def _identity(folder: Path) -> str:
    return hashlib.sha256(read_bytes(folder / INDEX, MAX_INDEX_BYTES)).hexdigest()


@dataclass(frozen=True, slots=True)
class Cut:
    """Which site has which layers.

    Attributes:
        layers: number of layers of each part of the U, the edge's first and last.
        sites: site of each stage, the edge first.

    >>> cut = Cut((1, 2, 3, 1), ("edge", "cloud", "cloud"))
    >>> [cut.site_of(layer) for layer in (0, 1, 5, 6)], cut.ranges("edge"), cut.ranges("cloud")
    (['edge', 'cloud', 'cloud', 'edge'], [(0, 1), (6, 7)], [(1, 3), (3, 6)])
    """

    layers: tuple[int, ...]
    sites: tuple[str, ...]

    def ranges(self, site: str) -> list[tuple[int, int]]:
        """Return the layers of a site, as ranges."""
        ends = [*accumulate(self.layers)]
        owners = (*self.sites, self.sites[0])
        return [(end - n, end) for n, end, own in zip(self.layers, ends, owners, strict=True) if own == site]

    def site_of(self, layer: int) -> str:
        """Return the site of a layer."""
        return next(site for site in self.sites for first, end in self.ranges(site) if first <= layer < end)


def cut_of(contents: Contents, layers: Sequence[int] | None, sites: Sequence[str] | None) -> Cut:
    """Find out how a checkpoint is to be split: as it is asked for, or else as the run was that saved it.

    Raises:
        ConfigError: nobody says it, or it does not fit the model.
    """
    stored = contents.arguments
    text = stored.get("num_layer_list") or ()
    own = tuple(layers or (map(int, text.split(",")) if isinstance(text, str) else text))
    named = sites or stored.get("vtp_sites") or ("edge", *("cloud",) * (len(own) - 2))
    names = tuple(named.split(",") if isinstance(named, str) else named)
    if not own or len(names) != len(own) - 1 or sum(own) != stored.get("num_layers"):
        raise ConfigError(
            f"{contents.folder}: layers {','.join(map(str, own)) or 'unknown'} at sites {','.join(names)}; each stage "
            f"has some of {stored.get('num_layers')} layers, the edge also the last, and each has a site; give "
            "--num-layer-list, such as 1,2,1, and --vtp-sites"
        )
    return Cut(own, names)


def plan_split(contents: Contents, cut: Cut, targets: Mapping[str, Path]) -> dict[str, tuple[PieceWriter, Ending]]:
    """Plan the parts of a checkpoint.

    Args:
        contents: the whole checkpoint.
        cut: which site has which layers.
        targets: folder of the part of each site.

    Returns:
        For each site the writer of its pieces, and what it writes behind them.

    Raises:
        ConfigError: what is stored cannot be told apart by site.
    """
    require_whole(contents.folder)
    if contents.form not in (None, PLAIN, BY_BUCKET, IN_MODEL_SPACE):
        raise ConfigError(
            f"{contents.folder} holds the optimizer as {contents.form}, as older Megatrons do; parts are loaded from "
            f"0.19 on; {own_command()} checkpoint reshard --form {IN_MODEL_SPACE} writes it so"
        )
    if encoder := next((key for key in contents.index.tensors if ".encoder." in f".{key}"), None):
        raise ConfigError(
            f"{contents.folder} holds {encoder}, and which site has an encoder's layers is not known here; let both "
            "sites load it from one folder"
        )
    owners = _owners_of_buckets(contents, cut)
    shared = next(key for key in contents.index.objects if key.startswith(_COMMON))
    common = read_extent(contents.folder, contents.index.objects[shared])
    identity = _identity(contents.folder)
    sites = tuple(dict.fromkeys(cut.sites))
    iteration = str(contents.common.get("iteration") or 0)
    planned: dict[str, tuple[PieceWriter, Ending]] = {}
    for site in sites:
        pieces = [*_pieces_of(contents, cut, site, owners)]
        files = {"metadata.json": read_bytes(contents.folder / "metadata.json")}
        if contents.has_map:
            held = contents.stored().buckets.values()
            files[MAP] = _map_of([bucket for bucket in held if owners[_group_of(bucket.key)] == site])
        save = digest_of_save(f"{identity} {cut}", iteration)
        files[PART] = SitePart(site=site, sites=sites, save=save).dump().encode()
        work = PieceWriter(pieces, Elements(contents.folder), targets[site], f"{identity} {site} {cut}")
        planned[site] = work, Ending(common=common, common_key=shared, files=files)
    return planned


def _owners_of_buckets(contents: Contents, cut: Cut) -> dict[str, str]:
    """Return the site of each group of replicas, by what its buckets hold."""
    owners: dict[str, str] = {}
    for bucket in contents.stored().buckets.values() if contents.form in IN_BUCKETS else ():
        group = _group_of(bucket.key)
        for part in bucket.parts:
            boxes = [block.box for block in part.shard.blocks]
            for site in {each for box in boxes for each, _ in _shares(part.shard.name, part.shard.shape, box, cut)}:
                if owners.setdefault(group, site) != site:
                    raise ConfigError(
                        f"{contents.folder}: {bucket.key} holds parameters of two sites; such a bucket is not cut; "
                        f"{own_command()} checkpoint reshard writes it by parameter"
                    )
    return owners


def _group_of(key: str) -> str:
    match = _OF_GROUP.match(key)
    return "" if match is None else match.group()


def _site_of(name: str, layer: int, cut: Cut) -> str:
    """Return the site of what belongs to a layer, whose number may stand in the name, or else to no layer."""
    if not name.startswith(_LAYERS):
        return cut.sites[0]
    number = name.removeprefix(_LAYERS).partition(".")[0]
    return cut.site_of(int(number) if number.isdecimal() else layer)


def _shares(name: str, shape: tuple[int, ...], box: Box, cut: Cut) -> Iterator[tuple[str, Box]]:
    """Yield which site has which boxes of a part of a parameter: layers by their place, all else the edge's."""
    if not name.startswith(_LAYERS) or name[len(_LAYERS)].isdecimal():
        yield _site_of(name, 0, cut), box
        return
    if not shape or shape[0] != sum(cut.layers):
        raise ConfigError(f"{name} has the shape {shape}, and not {sum(cut.layers)} layers; nobody knows whose it is")
    for site in dict.fromkeys(cut.sites):
        for layers in cut.ranges(site):
            inner = intersect(box, (layers, *box[1:]))
            if inner is not None:
                yield site, inner


def _pieces_of(contents: Contents, cut: Cut, site: str, owners: Mapping[str, str]) -> Iterator[NewPiece]:
    for key, tensor in contents.index.tensors.items():
        for box, extent in tensor.extents:
            if group := _group_of(key):
                shares = [(owners[group], box)]
            else:
                shares = [*_shares(name_of(key), tensor.shape, box, cut)]
            for owner, inner in shares:
                whole = Part(box, extent, Strided(0, row_major(box_shape(box))))
                how: dict[str, Any] = {"kept": extent} if inner == box else {"parts": (whole,)}
                if owner == site:
                    yield NewPiece(key, tensor.dtype, tensor.shape, inner, **how)
    for key, extent in contents.index.objects.items():
        if not key.startswith(_COMMON) and _owner_of_object(contents, key, cut, owners) == site:
            yield NewPiece(key, None, (), (), extent)


def _owner_of_object(contents: Contents, key: str, cut: Cut, owners: Mapping[str, str]) -> str | None:
    """Return the site of an object; None for one of a rank, where the stages are others."""
    if group := _group_of(key):
        return owners.get(group)
    if (match := _SHARD.fullmatch(key)) is None:
        return cut.sites[0]
    name, at = match["name"], int(match["at"])
    if key.startswith(OF_RANKS):
        stored = contents.arguments
        lists = [stored.get(f"vtp_{kind}_list") or [1] * len(cut.sites) for kind in ("size", "cp", "dp")]
        if {*map(len, lists)} != {len(cut.sites)} or stored.get("use_tp_pp_dp_mapping"):
            return None
        # By rank of the world, or by stage.
        ends = accumulate(math.prod(sizes) for sizes in zip(*lists, strict=True))
        stage = sum(at >= end for end in ends) if name == _BY_RANK else at
        return cut.sites[stage] if stage < len(cut.sites) else None
    return _site_of(name, at, cut)
