"""The run's store: the plugin writes only what this closed list of topics names.

The plugin opens every part of the store by :func:`part_of` with a :class:`Topic`. So the topics list all that it tells
other ranks outside the process groups. Torch keeps the addresses of its process groups in the same store.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.store_posts import require_word
from vtp_plugin.runtime.health.waiting import STORE_KEEPER, until_store_ends


class Topic(Enum):
    """What the plugin posts to the store, with a sentence on its content."""

    CHECKS = (
        "agree",
        "Start-up and step checks: the arguments that must be equal (between sites as digests, except values of the "
        "plugin's layout flags), versions, sizes of the vocabulary, digests of plans; errors (between sites their "
        "type, or the plugin's own text about layout flags); the numbers of ranks that are missing.",
    )
    WATCH = (
        "monitor",
        "Liveness: a counter for every rank; how often ranks got on, and the numbers of those that do nothing; when "
        "one ends, its number, the reason (between sites as for the checks), the boundary, load or save at which it "
        "stood, and how many checks and steps it has begun; when one is missed or has waited too long, where every "
        "rank stands: boundary and microbatch, or the name of a collective and its ranks; a random name, under which "
        "all this lies.",
    )
    REPORTS = (
        "reports",
        "Measured durations of computing, of steps and of the links, and the costs made of them; with --vtp-timing "
        "what each rank did in a step and when, by names of boundaries and numbers of microbatches, between sites also "
        "the bytes of each message, how many TCP segments were sent again, and a digest that tells network namespaces "
        "apart; where a script "
        "asks for adapters, the names of the layers of every stage and how many of each there are.",
    )
    CLOCKS = (
        "clocks",
        "With --vtp-trace and --vtp-timing: readings of clocks, by which ranks find out how far these are apart.",
    )
    ATTEMPTS = (
        "attempts",
        "Where the launcher keeps the store: how often ranks have met in it, how many they were, a random name of each "
        "process, the numbers of ranks that are missing, and the port at which ranks meet with --vtp-stages.",
    )
    NODES = ("nodes", "How many ranks each node of the launcher has.")
    CARDS = (
        "cards",
        "With --vtp-stages: of every rank the name of its machine (between sites a digest, or what --vtp-node says), "
        "its site, the kind of its device, whether it works and versions; who gets which rank, the chosen layout, from "
        "which each rank works out its own flags, and how far the attempt before came; an error (between sites as for "
        "the checks); how many ranks have ended.",
    )
    FOLDER = (
        "folder",
        "A random file name, by which ranks find out whether they share the folder of --save, and a random name of the "
        "run, which the lock of that folder and traces hold.",
    )
    VOCABULARY = ("vocabulary", "The two sizes of the edge's vocabulary.")
    BRIDGES = (
        "bridges",
        "Checks of bridges between modules: the modules' grids, the type and dimensions of tensors, errors as for the "
        "checks.",
    )

    def __init__(self, key: str, sentence: str) -> None:
        self.key = key
        self.sentence = sentence


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
