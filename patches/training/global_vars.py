"""U7 and U8: in a U-shaped pipeline the edge reports, and it alone has a tokenizer."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

from vtp_plugin.errors import ConfigError
from vtp_plugin.patching import PatchRecord, Record, WriteRecord
from vtp_plugin.runtime.store import Topic, part_of
from vtp_plugin.session import Session

_VOCABULARY = "vocabulary of the edge"


def records(session: Session) -> tuple[Record, ...]:
    """Give the records of this module."""
    writers = tuple(
        PatchRecord(
            id=f"U7{suffix}",
            target=f"megatron.training.global_vars:{name}",
            build=functools.partial(_on_writer, session),
            why="it compares this rank with the world's last one, a cloud rank here, which has no loss",
            versions=">=0.19,<0.20",
            remove_when="with U1",
        )
        for suffix, name in (("", "_set_tensorboard_writer"), ("b", "_set_wandb_writer"), ("c", "_set_one_logger"))
    )
    variable = WriteRecord(
        id="U8b",
        target="megatron.training.global_vars:_GLOBAL_TOKENIZER",
        why="the replaced function keeps the tokenizer there; on the cloud it holds something that refuses to be used",
        versions=">=0.19,<0.20",
        remove_when="with U8",
    )
    tokenizer = PatchRecord(
        id="U8",
        target="megatron.training.global_vars:_build_tokenizer",
        build=functools.partial(_on_edge, session, variable),
        why="every rank builds the tokenizer at start-up; the cloud has no files for it and needs the two sizes of the "
        "vocabulary only",
        versions=">=0.19,<0.20",
        remove_when="Megatron builds it where data is read",
    )
    return (*writers, tokenizer, variable)


def _on_writer(
    session: Session, original: Callable[[argparse.Namespace], None]
) -> Callable[[argparse.Namespace], None]:
    @functools.wraps(original)
    def set_writer(args: argparse.Namespace) -> None:
        world_size = args.world_size
        # Of a world that ends with the writer this rank is the last one, or it is none of its ranks.
        args.world_size = session.planned.writer_rank + 1
        try:
            original(args)
        finally:
            args.world_size = world_size

    return set_writer


class NoTokenizer:
    """Stands where Megatron keeps the tokenizer, on the ranks of the cloud."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used.

        Raises:
            ConfigError: always; for Python's own look-ups ``AttributeError``.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"the script asks a cloud stage for the tokenizer's {name!r}, but only the edge has a tokenizer; ask where "
            "data is read, or take args.vocab_size and args.padded_vocab_size"
        )


def _on_edge(
    session: Session, variable: WriteRecord, original: Callable[[argparse.Namespace], Any]
) -> Callable[[argparse.Namespace], Any]:
    @functools.wraps(original)
    def _build_tokenizer(args: argparse.Namespace) -> Any:
        layout, store = session.planned.layout, session.ranks.store
        assert store is not None
        is_edge = layout.stage_of(args.rank) == 0
        built: list[Any] = []

        def prepare() -> dict[str, object]:
            if not is_edge:
                return {}
            built.append(original(args))
            sizes = json.dumps([args.vocab_size, args.padded_vocab_size])
            if args.rank == 0:
                part_of(store, Topic.VOCABULARY).set("sizes", sizes)
            return {_VOCABULARY: sizes}

        session.ranks.agree("the edge's tokenizer", prepare, is_partial=True)
        if is_edge:
            return built[0]
        args.vocab_size, args.padded_vocab_size = json.loads(part_of(store, Topic.VOCABULARY).get("sizes"))
        stand_in = NoTokenizer()
        variable.put(stand_in)
        return stand_in

    return _build_tokenizer
