"""`tensorboard-on-edge`, `tokenizer-on-edge`: in a U-shaped pipeline the edge reports, and it alone has a tokenizer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Writes, Written, replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.health.startup_waiting import STORE_KEEPER, until_store_ends
from vtp_plugin.runtime.health.store import PostError, Topic, part_of, read_post
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack

_MODULE = "megatron.training.global_vars"
_VOCABULARY = "vocabulary of the edge"
_MOST_WORDS = 1 << 32


_TOKENIZER = Written(
    id="tokenizer-on-edge/global",
    target=f"{_MODULE}:_GLOBAL_TOKENIZER",
    when=Moment.U_SHAPE,
    why="the replaced function keeps the tokenizer there; on the cloud it holds a stand-in that raises when it is used",
    remove_when="with `tokenizer-on-edge`",
)


@replaces(f"{_MODULE}:_set_tensorboard_writer", id="tensorboard-on-edge", when=Moment.U_SHAPE)
@replaces(f"{_MODULE}:_set_wandb_writer", id="wandb-on-edge", when=Moment.U_SHAPE)
@replaces(f"{_MODULE}:_set_one_logger", id="one-logger-on-edge", when=Moment.U_SHAPE)
def _on_writer(session: Session, original: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run `_set_tensorboard_writer` and its like, which write on the last rank, so that the rank with the loss writes.

    Why: it compares this rank with the world's last one, a cloud rank here, which has no loss.

    Of a world that ends with the writer, this rank is the last one only if it is the writer.

    Remove when: with `last-stage`.
    """
    with UndoStack().during(Name(args, "world_size"), session.planned.writer_rank + 1):
        original(args)


class NoTokenizer:
    """Stands in for the tokenizer on the ranks of the cloud, and refuses to be used."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used.

        Raises:
            ConfigError: always; for Python's own look-ups ``AttributeError``.
        """
        # copy and pickle ask for such names, and expect this error.
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"the script asks a cloud stage for the tokenizer's {name!r}, but only the edge has a tokenizer; ask where "
            "data is read, or take args.vocab_size and args.padded_vocab_size"
        )


@replaces(f"{_MODULE}:_build_tokenizer", id="tokenizer-on-edge", when=Moment.U_SHAPE)
def _on_edge(
    session: Session,
    writes: Writes,
    original: Callable[[argparse.Namespace], Any],
    args: argparse.Namespace,
) -> Any:
    """Run `_build_tokenizer` on the edge only; the cloud gets the sizes of the vocabulary over the store.

    Why: every rank builds the tokenizer at start-up; the cloud has no files for it and needs only two sizes of the
    vocabulary.

    Remove when: Megatron builds it where data is read.
    """
    store = session.ranks.store
    assert store is not None
    is_edge = session.planned.layout.stage_of(args.rank) == 0
    tokenizer: Any = None if is_edge else NoTokenizer()

    def prepare() -> dict[str, object]:
        nonlocal tokenizer
        if not is_edge:
            return {}
        tokenizer = original(args)
        sizes = json.dumps([args.vocab_size, args.padded_vocab_size])
        if args.rank == 0:
            part_of(store, Topic.VOCABULARY).set("sizes", sizes)
        return {_VOCABULARY: sizes}

    # Partial: the cloud has nothing to compare.
    session.ranks.agree("the edge's tokenizer", prepare, is_partial=True)
    if not is_edge:
        args.vocab_size, args.padded_vocab_size = _read_sizes(store)
        writes[_TOKENIZER].put(tokenizer)
    return tokenizer


@until_store_ends(STORE_KEEPER, "the edge's tokenizer")
def _read_sizes(store: dist.Store) -> tuple[int, int]:
    """Read the two sizes of the edge's vocabulary.

    Raises:
        PeerError: they are no such sizes.
    """
    topic = Topic.VOCABULARY
    size, padded_size = read_post(tuple[int, int], part_of(store, topic), "sizes", topic.key)
    if not 1 <= size <= padded_size <= _MOST_WORDS:
        raise PostError(topic.key, "sizes", f"says {size} tokens, padded to {padded_size}, which is no vocabulary")
    return size, padded_size
