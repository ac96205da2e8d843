"""Where Megatron does not load what ``--ckpt-step`` names, and what to do so that it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vtp_plugin.checkpoint.format.resolver import TRACKER, Asked, of_iteration


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
