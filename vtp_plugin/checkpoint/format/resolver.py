"""Which checkpoint of a folder is loaded.

Which checkpoint Megatron loads. Its ``_load_base_checkpoint`` decides so; whoever foretells it asks here.

Megatron reads the tracker of a folder, and that of the folder for checkpoints that are not persistent. It loads the
newer one, whatever ``--ckpt-step`` says, and the release where the tracker names one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vtp_plugin.checkpoint.format.site_part import save_of
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.typed_json import read_bytes

FORM: Final = "distrib_optim_sharding_type"
"""Where a checkpoint says in which form it holds it."""
TYPE: Final = "param_state_sharding_type"
"""Where each optimizer says so."""
BY_BUCKET: Final = "dp_reshardable"
"""Bucket by bucket, as it lies in memory: what Megatron does by itself from 0.15 on."""
IN_MODEL_SPACE: Final = "fully_reshardable"
"""Parameter by parameter, so that any layout can load it."""
BY_BUCKET_OLDER: Final = "fully_sharded_bucket_space"
"""The same with Megatron 0.12, with padding, which it does if it is asked to."""
BY_BLOCK: Final = "fully_sharded_model_space"
"""Parameter by parameter, each rank's block flat, on one grid for all: what Megatron 0.12 to 0.14 does by itself."""

BY_RANK: Final = "dp_zero_gather_scatter"
"""One object for each data-parallel group, with its buckets: Megatron 0.12 with ``--no-ckpt-fully-parallel-save``."""
PLAIN: Final = "plain"
"""Our word for an optimizer that is not distributed."""
IN_BUCKETS: Final = (BY_BUCKET, BY_BUCKET_OLDER, BY_RANK)
"""Forms that do not say which parameter lies where."""


def stored_optimizers(common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each optimizer of a chain, or the only one, says of itself; without one, nothing.

    Args:
        common: what all ranks share of a checkpoint.

    >>> [each[TYPE] for each in stored_optimizers({"optimizer": {0: {TYPE: BY_BLOCK}, 1: {TYPE: BY_BLOCK}}})]
    ['fully_sharded_model_space', 'fully_sharded_model_space']
    """
    stored = common.get("optimizer")
    parts = (stored, *stored.values()) if isinstance(stored, dict) else ()
    yield from (part for part in parts if isinstance(part, dict) and TYPE in part)


TRACKER: Final = "latest_checkpointed_iteration.txt"
"""The name of the file that says which checkpoint of a folder is the newest."""
RELEASE: Final = "release"
"""What Megatron calls weights without a step: it loads neither an optimizer nor random states with them."""
_NON_PERSISTENT: Final = "non_persistent"
_MAX_TRACKER_BYTES: Final = 200


def read_tracker(folder: Path) -> str | None:
    """Return what the note about the newest checkpoint of a folder says; None if there is none.

    Raises:
        ConfigError: it is no regular file, or too long.
    """
    try:
        return read_bytes(folder / TRACKER, _MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{folder / TRACKER} cannot be read ({error.strerror}); it must hold the iteration of a checkpoint, or the "
            "word release; remove it, and write that"
        ) from None


def of_iteration(folder: Path, name: str) -> Path:
    """Return where a checkpoint lies that the tracker names.

    >>> str(of_iteration(Path("runs"), "100")), str(of_iteration(Path("runs"), "release"))
    ('runs/iter_0000100', 'runs/release')
    """
    return folder / (f"iter_{int(name):07d}" if name.removeprefix("-").isdecimal() else name)


def number_of(name: str | None) -> int:
    """Return the iteration for which Megatron takes what a tracker says; -1 for none.

    >>> [number_of(name) for name in ("100", "release", None)]
    [100, 0, -1]
    """
    return 0 if name == RELEASE else int(name) if name is not None and name.isdecimal() else -1


def numbers_in(folder: Path) -> list[int]:
    """Give the iterations of the checkpoints in a folder, in order."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.glob("iter_*"))
    return sorted(int(name.group(1)) for name in names if name)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint.

    Attributes:
        folder: folder that holds it.
        name: its iteration, or ``release``.
        is_persistent: whether it is no non-persistent one.
        save: digest of the save of which it is a part; empty for a whole one.
    """

    folder: Path
    name: str
    is_persistent: bool = True
    save: str = ""

    @property
    def checkpoint(self) -> Path:
        """Its own folder."""
        return of_iteration(self.folder, self.name)

    @property
    def rank(self) -> tuple[int, bool]:
        """Megatron loads the one of two for which this is greater."""
        return number_of(self.name), not self.is_persistent


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Where a run looks for a checkpoint.

    Attributes:
        load_dir: folder of checkpoints; what is no path, such as ``msc://``, is not looked at.
        step: value of ``--ckpt-step``.
        kind: value of ``--non-persistent-ckpt-type``.
        other: value of ``--non-persistent-global-ckpt-dir``.
        passed_over: value of ``--load``, where ``load_dir`` is that of ``--pretrained-checkpoint``.
        trackers: what stands for trackers, by their folder; None for one that is hidden.

    >>> root = Path("/runs")
    >>> asked = Asked(load_dir="/runs", kind="global", trackers={root: "4", root / "non_persistent": "6"})
    >>> str(asked.resolve().checkpoint)
    '/runs/non_persistent/iter_0000006'
    >>> str(replace(asked, step=8).resolve().checkpoint)
    '/runs/iter_0000008'
    """

    load_dir: str | None
    step: int | None = None
    kind: str | None = None
    other: str | None = None
    passed_over: str | None = None
    trackers: Mapping[Path, str | None] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folder(self) -> Path | None:
        """Folder of the persistent ones; None where it is no path."""
        return _path(self.load_dir)

    @property
    def non_persistent(self) -> Path | None:
        """Folder of those that are not persistent; None where nobody looks there, or it is no path."""
        if self.kind != "global":
            return None
        return _path(self.other) if self.other or self.folder is None else self.folder / _NON_PERSISTENT

    @property
    def is_certain(self) -> bool:
        """Whether Megatron looks nowhere else."""
        return self.folder is not None and (self.kind is None or self.non_persistent is not None)

    @property
    def folders(self) -> list[tuple[Path, bool]]:
        """All folders, and whether those in it are persistent."""
        both = ((self.folder, True), (self.non_persistent, False))
        return [(folder, is_persistent) for folder, is_persistent in both if folder is not None]

    def tracker(self, folder: Path | None) -> str | None:
        """Return what Megatron reads as the tracker of a folder; None if there is none.

        Raises:
            ConfigError: it is no regular file, or too long.
        """
        if folder is None or folder in self.trackers:
            return None if folder is None else self.trackers[folder]
        return read_tracker(folder)

    def resolve(self) -> Found | None:
        """Return the checkpoint that Megatron will load; None if there is none, or the folder is no path.

        Raises:
            ConfigError: a tracker is no regular file, or too long.
        """
        folder, others = self.folder, self.non_persistent
        if folder is None:
            return None
        text, newest = self.tracker(folder), self.tracker(others)
        number = self.step or number_of(text)
        if others is not None and newest is not None and newest.isdecimal() and int(newest) >= number:
            return Found(others, str(int(newest)), is_persistent=False)
        return None if number == -1 else Found(folder, RELEASE if text == RELEASE else str(number))

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the checkpoint that Megatron will load; see :meth:`resolve`."""
        found = self.resolve()
        return None if found is None else found.checkpoint

    def chosen_from(self) -> Asked:
        """Return where ``--vtp-load-newest-valid`` looks: at what a run has saved before ``--pretrained-checkpoint``.

        Raises:
            ConfigError: a tracker is no regular file, or too long.
        """
        own = replace(self, load_dir=self.passed_over, passed_over=None, step=None)
        return own if self.passed_over is not None and own.candidates() else replace(self, step=None)

    def candidates(self) -> list[Found]:
        """Give what may be loaded, in the order in which Megatron would come to it, had it not those before.

        In each folder the first is the one that the tracker names, then come older ones. Without a readable tracker
        the newest comes first.

        Raises:
            ConfigError: a tracker is no regular file, or too long.
        """
        return self.merged(self.names())

    def names(self) -> list[list[str]]:
        """Give the names of the candidates in each of :attr:`folders`; errors are those of :meth:`candidates`."""
        return [_names_in(folder, self.tracker(folder), is_persistent) for folder, is_persistent in self.folders]

    def merged(self, names: Sequence[Sequence[str]]) -> list[Found]:
        """Give the checkpoints of :attr:`folders` that have certain names, in that order; a save may be behind one."""
        rows = [
            [Found(folder, name, is_persistent, *save) for name, *save in map(str.split, row)]
            for (folder, is_persistent), row in zip(self.folders, names, strict=False)
        ]
        found: list[Found] = []
        while full := [row for row in rows if row]:
            found.append(max(full, key=lambda row: row[0].rank).pop(0))
        return found


def _path(text: str | None) -> Path | None:
    return None if not text or "://" in text else Path(text)


def _names_in(folder: Path, text: str | None, is_persistent: bool) -> list[str]:
    """Give the names of the candidates of one folder; of parts of sites, with their saves, also what no tracker names.

    A site notes the newest when all sites have it: where one was stopped before, it may be there on all of them.
    """
    saves = [(number, save_of(of_iteration(folder, str(number)))) for number in reversed(numbers_in(folder))]
    if any(save for _, save in saves):
        return [f"{number} {save}".rstrip() for number, save in saves]
    first = [text] if text is not None and (text.isdecimal() or (text == RELEASE and is_persistent)) else []
    last = number_of(text) if first and text != RELEASE else None
    return first + [str(number) for number in reversed(numbers_in(folder)) if last is None or number < last]


def asked_by(args: Any, load_dir: str | None, trackers: Mapping[Path, str | None] = MappingProxyType({})) -> Asked:
    """Return where a run looks, after Megatron has chosen between ``--load`` and ``--pretrained-checkpoint``.

    Args:
        args: Megatron's.
        load_dir: folder of checkpoints that it has chosen.
        trackers: what stands for trackers, see :class:`Asked`.
    """
    is_other = load_dir == getattr(args, "pretrained_checkpoint", None) and load_dir != args.load
    return Asked(
        load_dir=load_dir,
        step=args.ckpt_step,
        kind=args.non_persistent_ckpt_type,
        other=args.non_persistent_global_ckpt_dir,
        passed_over=args.load if is_other else None,
        trackers=trackers,
    )


def asked_at_start(args: Any) -> Asked:
    """Return where a run looks, before Megatron has chosen.

    Args:
        args: Megatron's.

    Raises:
        ConfigError: the tracker of ``--load`` is no regular file, or too long.
    """
    pretrained, own = getattr(args, "pretrained_checkpoint", None), asked_by(args, args.load)
    has_own = args.load is not None and (own.folder is None or own.tracker(own.folder) is not None)
    return own if has_own or pretrained is None else asked_by(args, pretrained)


def overruled(asked: Asked, *, takes_optimizer_of_tracker: bool = False) -> Iterator[str]:
    """Say that Megatron loads something else than ``--ckpt-step`` names, if it does so.

    Args:
        asked: where the run looks.
        takes_optimizer_of_tracker: whether Megatron takes the optimizer from the iteration that the tracker names.

    Yields:
        One line ``value; rule; way out``.

    Raises:
        ConfigError: a tracker is no regular file, or too long.
    """
    if (step := asked.step) is None or asked.folder is None:
        return
    found, tracker = asked.resolve(), asked.folder / TRACKER
    folders = [*replace(asked, load_dir=asked.passed_over, kind=None).folders, *asked.folders]
    wanted = [place for folder, _ in folders if (place := of_iteration(folder, str(step))).is_dir()]
    is_beside = asked.passed_over is not None and wanted[:1] == [of_iteration(Path(asked.passed_over), str(step))]
    if found is not None and found.name == str(step) and not is_beside:
        if takes_optimizer_of_tracker and asked.tracker(asked.folder) != found.name:
            yield (
                f"--ckpt-step {step} with --ckpt-format torch and --use-distributed-optimizer; Megatron takes the "
                f"optimizer of the iteration that {tracker} names; write {step} into it"
            )
        elif not asked.is_certain:
            yield (
                f"--ckpt-step {step} with --non-persistent-ckpt-type {asked.kind}; Megatron loads a non-persistent "
                "checkpoint in its place if that is newer; leave --non-persistent-ckpt-type out"
            )
        return
    if is_beside:
        why = f"since {Path(asked.passed_over or '') / TRACKER} is missing"
    elif found is not None and not found.is_persistent:
        why = "which is newer and not persistent"
    elif step <= 0:
        why = "which takes 0 for none" if step == 0 else "since no step is below 0"
    else:
        why = f"since {tracker} says release"
    loads = "nothing" if found is None else found.checkpoint
    way = next(
        (way for way, then in _ways_to_step(asked, step) if then.checkpoint in wanted[:1]), "leave --ckpt-step out"
    )
    yield f"--ckpt-step {step}; Megatron loads {loads} in its place, {why}; {way}"


def _ways_to_step(asked: Asked, step: int) -> Iterator[tuple[str, Asked]]:
    """Yield what may be done so that the checkpoint of a step is loaded, and what is asked then."""
    named, others = str(step), asked.non_persistent
    for folder in (asked.passed_over, asked.load_dir):
        for place, _ in Asked(load_dir=folder).folders:
            then = replace(asked, load_dir=folder, trackers={**asked.trackers, place: named})
            yield f"write {step} into {place / TRACKER}", then
            if others is not None:
                yield f"move {others} away", replace(asked, trackers={**asked.trackers, others: None})
                hidden = replace(then, trackers={**then.trackers, others: None})
                yield f"write {step} into {place / TRACKER}, and move {others} away", hidden
    if others is not None:
        then = replace(asked, step=None, trackers={**asked.trackers, others: named})
        yield f"write {step} into {others / TRACKER}, and leave --ckpt-step out", then
        yield f"give --load {others}", replace(asked, load_dir=str(others))
