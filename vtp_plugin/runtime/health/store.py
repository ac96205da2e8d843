"""The run's store: the closed list of what the plugin posts there, and how posts are read.

Posts of other ranks in the store, read as values of a declared shape.

Every process that reaches the store can post there, under any key and of any size. So every post is read by a function
of this module: as a number, a word or JSON of a declared shape, in a bounded size, without characters that a terminal
obeys. Anything else is an error of one line that names the key.

The run's store: the plugin writes only what this closed list of topics names.

The plugin opens every part of the store by :func:`part_of` with a :class:`Topic`. So the topics list all that it tells
other ranks outside the process groups. Torch keeps the addresses of its process groups in the same store.

The notices that every monitor reads: one text in the store, which changes atomically.

So no rank sees half of a change, even if another rank dies meanwhile or changes it as well.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar, cast

import torch.distributed as dist

from vtp_plugin.errors import LayoutError, PeerError
from vtp_plugin.runtime.health.startup_waiting import STORE_KEEPER, WAITED, poll, some_ranks, until_store_ends
from vtp_plugin.util.text import one_line
from vtp_plugin.util.typed_json import ShapeError, read_typed

_MOST_SHOWN = 80

_Kind = TypeVar("_Kind")


class PostError(PeerError):
    """A post is not what ranks of this version write."""

    def __init__(self, topic: str, key: str, problem: str) -> None:
        text = (
            f"the post {topic}/{key} in the store {problem}; only a rank of another version, or a stranger, writes "
            "that; install one version everywhere, and let nobody else reach MASTER_PORT (docs/guides/edge-cloud.md)"
        )
        super().__init__(text, shared=text)


def write_post(value: Any) -> str:
    """Write JSON that the readers below take: an option may be infinite, a number in JSON may not.

    >>> write_post({"share": float("inf"), "sizes": (1, 2)})
    '{"share": "inf", "sizes": [1, 2]}'
    """
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("list[Any]", value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_post(kind: type[_Kind], data: str | bytes, topic: str, key: str) -> _Kind:
    """Parse a post that was already read from the store; arguments and error are those of :func:`read_post`."""
    try:
        return read_typed(kind, data)
    except ShapeError as error:
        raise PostError(topic, key, str(error)) from None


def read_post(kind: type[_Kind], part: dist.Store, key: str, topic: str) -> _Kind:
    """Read JSON of a declared shape, see :func:`~vtp_plugin.util.typed_json.read_typed`.

    Args:
        kind: declared shape.
        part: part of the store that belongs to the topic.
        key: key of the post; the call waits until it is there.
        topic: key of the topic, for the error.

    Raises:
        PostError: the post has another shape.
    """
    return parse_post(kind, part.get(key), topic, key)


def read_number(part: dist.Store, key: str, topic: str, least: int, most: int) -> int:
    """Read a whole number from `least` to `most`; arguments and error are those of :func:`read_post`."""
    number = read_post(int, part, key, topic)
    if not least <= number <= most:
        raise PostError(topic, key, f"is {number}, not between {least} and {most}")
    return number


def read_text(part: dist.Store, key: str) -> str:
    """Read any post as one plain line, cut to a bounded length."""
    return shown(part.get(key))


def require_word(data: bytes, topic: str, key: str, pattern: str) -> str:
    """Parse a word that a pattern matches as a whole, from a post that was already read.

    Raises:
        PostError: the post is something else.
    """
    if not re.fullmatch(pattern.encode(), data):
        raise PostError(topic, key, f"is {one_line(shown(data), _MOST_SHOWN)!r}, which is no such name")
    return data.decode()


def shown(data: bytes) -> str:
    """Return a post as one plain line, cut to a bounded length."""
    # UTF-8 has at most four bytes for a character.
    return one_line(data[:8004].decode(errors="backslashreplace"))


class Topic(Enum):
    """What the plugin posts to the store, with a sentence on its content.

    Attributes:
        CHECKS: Start-up and step checks: the arguments that must be equal (between sites as digests, except values of
            the plugin's layout flags), versions, sizes of the vocabulary, digests of plans; errors (between sites their
            type, or the plugin's own text about layout flags); the numbers of ranks that are missing.
        WATCH: Liveness: a counter for every rank; how often ranks got on, and the numbers of those that do nothing;
            when one ends, its number, the reason (between sites as for the checks), the boundary, load or save at which
            it stood, and how many checks and steps it has begun; when one is missed or has waited too long, where every
            rank stands: boundary and microbatch, or the name of a collective and its ranks; a random name, under which
            all this lies.
        REPORTS: Measured durations of computing, of steps and of the links, and the costs made of them; with
            --vtp-timing what each rank did in a step and when, by names of boundaries and numbers of microbatches,
            between sites also the bytes of each message, how many TCP segments were sent again, and a digest that tells
            network namespaces apart; where a script asks for adapters, the names of the layers of every stage and how
            many of each there are; before a load the iterations that each rank has, with digests of their saves, and
            which of them are partial at which site.
        CLOCKS: With --vtp-trace and --vtp-timing: readings of clocks, by which ranks find out how far these are apart.
        ATTEMPTS: Where the launcher keeps the store: how often ranks have met in it, how many they were, a random name
            of each process, the numbers of ranks that are missing, and the port at which ranks meet with --vtp-stages.
        NODES: How many ranks each node of the launcher has.
        CARDS: With --vtp-stages: of every rank the name of its machine (between sites a digest, or what --vtp-node
            says), its site, the kind of its device, whether it works, what kind of error it has reported, and versions;
            who gets which rank, the chosen layout, from which each rank works out its own flags, and how far the
            attempt before came; an error (between sites as for the checks); how many ranks have ended.
        FOLDER: A random name of the run, which the lock of the folder of --save and traces hold, and by which ranks
            find out who shares that folder.
        VOCABULARY: The two sizes of the edge's vocabulary.
        BRIDGES: Checks of bridges between modules: the modules' grids, the type and dimensions of tensors, errors as
            for the checks.
    """

    CHECKS = "agree"
    WATCH = "monitor"
    REPORTS = "reports"
    CLOCKS = "clocks"
    ATTEMPTS = "attempts"
    NODES = "nodes"
    CARDS = "cards"
    FOLDER = "folder"
    VOCABULARY = "vocabulary"
    BRIDGES = "bridges"

    @property
    def key(self) -> str:
        """Name of its part of the store."""
        return self.value


def part_of(store: dist.Store, topic: Topic, share: str = "") -> dist.Store:
    """Open the part of the run's store that belongs to a topic, or a share of it; the plugin writes nowhere else."""
    return dist.PrefixStore(f"{topic.key} {share}".rstrip(), store)


@until_store_ends(STORE_KEEPER, "the name of the run")
def name_run(store: dist.Store) -> str:
    """Return a random name of this attempt of a run, the same on all ranks that reach the store."""
    name = part_of(store, Topic.FOLDER).compare_set("run", "", uuid.uuid4().hex)
    return require_word(name, Topic.FOLDER.key, "run", "[0-9a-f]{32}")


@until_store_ends(STORE_KEEPER, "another connection to it")
def connect_again(store: dist.Store) -> dist.Store:
    """Open a connection to the run's store that nobody else uses, so that one long wait does not delay another.

    All ranks reach the same part of the store by it: its name is random, since what a store puts before its keys cannot
    be read. (``store.clone()`` knows it, but torch 2.7 has no such method.)

    Args:
        store: reaches all ranks.

    Raises:
        PeerError: the posted name is not one that ranks write.
    """
    found = part_of(store, Topic.WATCH).compare_set("name", "", f"{Topic.WATCH.key} {uuid.uuid4()}")
    name = require_word(found, Topic.WATCH.key, "name", rf"{Topic.WATCH.key} [0-9a-f-]{{36}}")
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    untyped: Any = store  # torch's types leave out some attributes
    if isinstance(store, dist.TCPStore):
        timeout = untyped.timeout
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    elif isinstance(store, dist.FileStore):
        store = dist.FileStore(untyped.path)
    return dist.PrefixStore(name, store)


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange between ranks over a part of a store; all of them make the same exchanges there, in one order.

    Attributes:
        part: part of the store for exchanges of this kind.
        number: number of the exchange, from 1 on.
    """

    part: dist.Store
    number: int

    @property
    def posts(self) -> dist.Store:
        """Part of the store for the posts of this exchange."""
        return dist.PrefixStore(str(self.number), self.part)

    def clear_last(self, keys: Iterable[str]) -> None:
        """Delete the posts of the exchange before, so that a store does not grow with a run.

        One rank does so, once all ranks have posted in this exchange: only then has each of them left the last one.
        """
        last = dist.PrefixStore(str(self.number - 1), self.part)
        for key in keys if self.number > 1 else ():
            last.delete_key(key)


@until_store_ends(STORE_KEEPER, "an exchange between ranks")
def open_round(part: dist.Store, rank: int) -> Round:
    """Begin the next exchange.

    Each rank counts its calls, and all make the same calls, so all get the same exchange without talking.

    Args:
        part: part of a store, for exchanges of one kind.
        rank: this rank.
    """
    return Round(part, count(part, f"rounds of {rank}"))


def count(part: dist.Store, key: str) -> int:
    """Count one more at a key that ranks count at, and return the number.

    Raises:
        PeerError: the store is gone. Torch's server closes the connection of who counts where no number stands.
    """
    try:
        return part.add(key, 1)
    except (dist.DistError, ValueError, IndexError) as error:  # the last ones of a store in memory or in a file
        text = (
            f"the store cannot count {key!r}: the process that keeps it ended, or only a stranger writes what stands "
            "there; look for a rank that ended, and let nobody else reach MASTER_PORT (docs/guides/edge-cloud.md)"
        )
        raise PeerError(text, shared=text) from error


_KEY = "board"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """The rank that was the first to end without an error, and how far it came.

    Attributes:
        rank: global rank.
        num_passes: number of joint operations (checks, steps, evaluations) that it has begun.
        is_inside: whether it had not finished the last of them.
    """

    rank: int
    num_passes: int
    is_inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """The text on the board.

    Attributes:
        num_calls: number of liveness checks so far.
        leaver: first rank that has ended without an error; None while there is none.
        failure: first failure that was posted; None while there is none.
    """

    num_calls: int = 0
    leaver: Leaver | None = None
    failure: str | None = None

    @classmethod
    def of(cls, text: str) -> Notices:
        """Parse the text of the board; it is empty at first.

        Raises:
            PeerError: the text is not one that a rank writes.

        >>> Notices.of(Notices(num_calls=2, leaver=Leaver(rank=1, num_passes=3, is_inside=False)).text).leaver.rank
        1
        """
        return parse_post(cls, text, Topic.WATCH.key, _KEY) if text else cls()

    @property
    def text(self) -> str:
        """The notices as they are written to the store."""
        return json.dumps(asdict(self))


class Board:
    """Reads and changes the notices, by few requests to the store; a change is one request.

    Args:
        store: store of the monitors.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._text = ""

    def read(self) -> Notices:
        """Return the notices; a text that no rank writes counts as a failure, which ends the run."""
        # The store has no read that neither waits nor fails where nothing was written.
        self._text = _decoded(self._store.compare_set(_KEY, "", ""))
        try:
            return Notices.of(self._text)
        except PostError as error:
            return Notices(failure=str(error))

    def call_all(self) -> int:
        """Begin a liveness check and return its number."""
        before = self.read().num_calls
        return self._change(lambda now: replace(now, num_calls=max(now.num_calls, before + 1))).num_calls

    def leave(self, leaver: Leaver) -> Leaver:
        """Note that a rank ends without an error, and return the first rank that did."""
        first = self._change(lambda now: replace(now, leaver=now.leaver or leaver)).leaver
        return first or leaver

    def post(self, failure: str) -> str:
        """Post a failure, and return the first one that was posted."""
        own = one_line(failure)
        first = self._change(lambda now: replace(now, failure=now.failure or own)).failure
        return failure if first in (None, own) else first

    def _change(self, change: Callable[[Notices], Notices]) -> Notices:
        """Apply a change, again if another rank changes the text meanwhile, and return the result."""
        text = self._text
        while True:
            try:
                now = Notices.of(text)
            except PostError as error:
                return Notices(failure=str(error))
            wanted = change(now)
            if wanted == now:
                return now
            found = _decoded(self._store.compare_set(_KEY, text, wanted.text))
            if found == wanted.text:
                self._text = found
                return wanted
            if found == text:  # bytes that only look like it
                return Notices(failure=str(PostError(Topic.WATCH.key, _KEY, "is no UTF-8")))
            text = found


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


# Most round trips are as long as the shortest; a few are held up. On each, rank 0 answers once.
_NUM_ROUND_TRIPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a rank's clock was behind that of rank 0.

    Attributes:
        at_s: time of the estimate, in seconds of the rank's own clock.
        offset_s: seconds to add to the rank's clock to get that of rank 0.
        error_s: largest error of the offset, in seconds: half of the shortest round trip.
    """

    at_s: float
    offset_s: float
    error_s: float


@until_store_ends(STORE_KEEPER, "comparison of clocks")
def estimate_offset(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> ClockOffset:
    """Compare this rank's clock, ``time.perf_counter``, with that of rank 0; a collective call of all ranks.

    A rank asks, and rank 0 answers with its time, which lies between the question and the answer: the middle is off by
    at most half of the round trip. The shortest of a few round trips counts. Rank 0 serves one rank after another.

    Args:
        store: reaches all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for another rank.

    Raises:
        PeerError: no answer came within the timeout, or it is no time.
    """
    exchange = open_round(part_of(store, Topic.CLOCKS), rank)
    posts, limit = exchange.posts, timedelta(seconds=timeout_s)
    numbers = range(_NUM_ROUND_TRIPS)
    try:
        if rank == 0:
            others = range(1, world_size)
            for other in others:
                for number in numbers:
                    posts.wait([f"{other} asks {number}"], limit)
                    posts.set(f"{other} hears {number}", repr(time.perf_counter()))
            exchange.clear_last(
                [f"{other} {word} {n}" for other in others for n in numbers for word in ("asks", "hears")]
            )
            return ClockOffset(at_s=time.perf_counter(), offset_s=0.0, error_s=0.0)
        return min((_ask(posts, rank, number, limit) for number in numbers), key=lambda offset: offset.error_s)
    except dist.DistStoreError as error:
        whom = "another rank" if rank == 0 else "rank 0"
        raise PeerError(f"comparison of clocks: waited {timeout_s:g} s for {whom}: no answer") from error


def _ask(posts: dist.Store, rank: int, number: int, limit: timedelta) -> ClockOffset:
    """Make one round trip."""
    asked_s = time.perf_counter()
    posts.set(f"{rank} asks {number}", "")
    posts.wait([f"{rank} hears {number}"], limit)
    # The answer is there now; reading it takes one more round trip, which is to count for nothing.
    heard_s = time.perf_counter()
    other_s = read_post(float, posts, f"{rank} hears {number}", Topic.CLOCKS.key)
    middle_s = (asked_s + heard_s) / 2
    return ClockOffset(at_s=middle_s, offset_s=other_s - middle_s, error_s=(heard_s - asked_s) / 2)


_MOST_RANKS = 1 << 20


@until_store_ends(STORE_KEEPER, "the ranks of each node")
def gather_node_sizes(
    store: dist.Store, environment: Mapping[str, str], *, divisor: int, timeout_s: float
) -> tuple[int, ...]:
    """Share how many tensor-parallel ranks each node of the launcher has.

    Args:
        store: the run's store.
        environment: variables of this process, with torchrun's ``GROUP_RANK``, ``GROUP_WORLD_SIZE`` and
            ``LOCAL_WORLD_SIZE``.
        divisor: number of ranks of a node with the same tensor-parallel rank: data- times context-parallel size.
        timeout_s: how long to wait for the other nodes.

    Returns:
        ``LOCAL_WORLD_SIZE / divisor`` of node 0, 1, ...

    Raises:
        ConfigError: a variable is missing, or a node's ranks do not divide.
        PeerError: a node did not answer, or posted no number.
    """
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in names:
        if not environment.get(name, "").isdigit():
            raise LayoutError(
                f"--vtp-size-list auto needs the launcher's {name}, which is not set; use torchrun, or give the TP "
                "size of every stage"
            )
    node, num_nodes, num_local = (int(environment[name]) for name in names)
    nodes = part_of(store, Topic.NODES)
    nodes.set(str(node), str(0 if num_local % divisor else num_local // divisor))
    if num_local % divisor:
        raise LayoutError(
            f"--vtp-size-list auto: node {node} has {num_local} ranks, not a multiple of data- times context-parallel "
            f"size {divisor}; start another number of ranks there, or give the TP size of every stage"
        )
    keys = [str(i) for i in range(num_nodes)]
    if not poll(lambda: nodes.check(keys), timeout_s):
        missing = [int(key) for key in keys if not nodes.check([key])]
        raise PeerError(
            f"{WAITED} {timeout_s:.1f} s for node {some_ranks(missing)}: no answer; look for a node that did not start"
        )
    sizes = tuple(read_number(nodes, key, Topic.NODES.key, 0, _MOST_RANKS) for key in keys)
    if 0 in sizes:
        raise LayoutError(
            f"--vtp-size-list auto: the number of ranks of node {sizes.index(0)} does not fit; see its message"
        )
    return sizes
