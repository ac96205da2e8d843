"""The optimizer of a checkpoint as a load opens it: what is read and checked is read and checked once."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.support.checkpoints import STOCK_SHAPES, as_stock, by_bucket, make_model
from vtp_plugin.checkpoint.format import contents as contents_module
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.shard_map import ShardSpec, block_at, row_major
from vtp_plugin.checkpoint.load.stored_optimizer import StoredOptimizer, Wanted, require_masters
from vtp_plugin.patches.core.dist_checkpointing.serialization import common_of, index_of, require_plain_checkpoint
from vtp_plugin.session import loading
from vtp_plugin.util.index_boxes import whole_box


def _whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(name=name, shape=shape, blocks=(block_at(whole_box(shape), 0, row_major(shape)),))


@pytest.mark.parametrize("write", [by_bucket, as_stock], ids=["with a map", "without"])
def test_a_load_reads_the_index_once_and_checks_the_map_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    """As in a run: what is looked at before anything is unpickled, what all ranks share, the proof, the optimizer."""
    model, calls = make_model(shapes=STOCK_SHAPES), list[str]()
    checkpoint = write(tmp_path / "a", model)

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs))

    for owner, name in ((loading, "read_index"), (contents_module, "read_index"), (contents_module, "check_map")):
        counted(owner, name)
    for name in ("infer_map", "load_map"):
        counted(contents_module, name)
    counted(FileSystemReader, "read_metadata")
    session: Any = types.SimpleNamespace(loading=loading.Loading())
    require_plain_checkpoint(session, checkpoint)
    assert common_of(session, checkpoint) is not None
    contents = Contents(checkpoint, index_of(session, checkpoint))
    require_masters(contents)
    stored = StoredOptimizer(contents, FileSystemReader(checkpoint))
    assert sorted(calls) == sorted(
        ["read_index", "load_map", "check_map", *([] if write is by_bucket else ["infer_map"])]
    )
    names = [*STOCK_SHAPES]
    wanted = [
        Wanted(_whole(name, STOCK_SHAPES[name]), 0, model.states["param", name].numel(), ("exp_avg",)) for name in names
    ]
    found = [{"exp_avg": torch.zeros(model.states["exp_avg", name].numel())} for name in names]
    plan = stored.plan(wanted)
    stored.read((copy, tensors) for copies, tensors in zip(plan, found, strict=True) for copy in copies)
    for name, tensors in zip(names, found, strict=True):
        assert torch.equal(tensors["exp_avg"].view(STOCK_SHAPES[name]), model.states["exp_avg", name])


def test_an_index_that_was_let_go_is_read_again(tmp_path: Path) -> None:
    """The next load of the same checkpoint wants it whole; between them only the places of objects are kept."""
    checkpoint = by_bucket(tmp_path / "a", make_model())
    session: Any = types.SimpleNamespace(loading=loading.Loading())
    first = index_of(session, checkpoint)
    session.loading.drop_index()
    assert common_of(session, checkpoint) is not None and session.loading._index is None
    again = index_of(session, checkpoint)
    assert again == first and again is not first and index_of(session, checkpoint) is again
