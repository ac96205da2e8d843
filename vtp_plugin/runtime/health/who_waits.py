"""Where each rank is, and who waits for whom: what a hanging run reports.

A rank that has waited too long names its peer, which may be healthy and wait itself. So every rank says where it
stands, and the line follows the waits from rank to rank: to one that does not answer, to one that waits for nobody, or
round a circle.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType

import torch.distributed as dist

from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.runtime.health.store_posts import parse_post

COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""The file of torch's collectives."""
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank is doing.

    Attributes:
        text: clause that follows the rank's number: "waits at boundary 0->1, forward, microbatch 1, for rank 0".
        peers: ranks for which it waits; empty if it waits for nobody.
        group: all ranks of the collective that it is in; empty outside collectives.
    """

    text: str
    peers: tuple[int, ...] = ()
    group: tuple[int, ...] = ()

    def dump(self) -> str:
        """Write it for the store; inverse of :func:`load_standing`."""
        return json.dumps(asdict(self))


def load_standing(text: str | bytes) -> Standing:
    """Read what another rank has posted; inverse of :meth:`Standing.dump`.

    Raises:
        PeerError: the post is something else.

    >>> load_standing(Standing(text="computes 1F0", peers=(2,)).dump())
    Standing(text='computes 1F0', peers=(2,), group=())
    """
    return parse_post(Standing, text, Topic.WATCH.key, "here")


def ranks_in(peer: str) -> tuple[int, ...]:
    """Return the ranks that a wait names.

    >>> ranks_in("ranks 0, 12"), ranks_in("the other ranks of the stage")
    ((0, 12), ())
    """
    return tuple(map(int, re.findall(r"\d+", peer))) if re.match(r"ranks? \d", peer) else ()


@dataclass(frozen=True, slots=True)
class BlockedCollective:
    """A collective of torch.distributed in which this process waits.

    Attributes:
        name: name of torch's function.
        ranks: ranks of its group; empty if the call does not say.
        frame: stack frame of the call; while it is referenced, no later call has the same one.
    """

    name: str
    ranks: tuple[int, ...]
    frame: FrameType


def find_collective() -> BlockedCollective | None:
    """Look through the stacks of all threads for a collective that blocks the host; None if there is none.

    On a device the CPU continues while the device waits, and then nothing is found.
    """
    for frame in sys._current_frames().values():
        for one in outwards(frame):
            # Private functions of that file are called by the one that a program has called.
            if one.f_code.co_filename.endswith(COLLECTIVES) and not one.f_code.co_name.startswith("_"):
                return BlockedCollective(one.f_code.co_name, _ranks_of(one.f_locals.get("group")), one)
    return None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ranks_of(group: object) -> tuple[int, ...]:
    with contextlib.suppress(Exception):  # a group that ends meanwhile; this only describes
        if group is None or isinstance(group, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(group))
    return ()


def follow(rank: int, own: Standing, ask: Callable[[int], Standing | None]) -> str:
    r"""Follow the waits from rank to rank; return what each of the other ranks does, after a semicolon.

    Args:
        rank: rank to start at.
        own: what that rank is doing.
        ask: returns what another rank is doing; None if it does not answer.

    >>> others = {0: Standing(text="waits at boundary 0->1, backward, microbatch 0, for rank 1", peers=(1,)),
    ...           1: Standing(text="stands in all_to_all_single of ranks 1, 2, inside 1F0", peers=(2,), group=(1, 2))}
    >>> own = Standing(text="waits at boundary 0->1, forward, microbatch 1, for rank 0", peers=(0,))
    >>> print(follow(2, own, others.get).replace("; ", "\n")[1:])
    rank 0 waits at boundary 0->1, backward, microbatch 0, for rank 1
    rank 1 stands in all_to_all_single of ranks 1, 2, inside 1F0
    ranks 2, 0, 1 wait for each other in a circle
    """
    path, here, text = [rank], own, ""
    for _ in range(_MOST_LINKS):
        standings = {peer: own if peer == rank else ask(peer) for peer in here.peers}
        missing = [peer for peer, one in standings.items() if not here.group or one is None or one.group != here.group]
        if not missing:
            return text + (f"; all ranks of that group stand in it: {_calls(standings)}" if here.peers else "")
        peer = missing[0]
        if peer in path:
            circle = path[path.index(peer) :]
            return f"{text}; ranks {', '.join(map(str, circle))} wait for each other in a circle"
        found = standings[peer]
        if found is None:
            return f"{text}; rank {peer} does not answer"
        text += f"; rank {peer} {found.text}"
        path.append(peer)
        here = found
    return text


def _calls(standings: dict[int, Standing | None]) -> str:
    texts: Sequence[str] = sorted({one.text for one in standings.values() if one is not None})
    return " | ".join(texts)
