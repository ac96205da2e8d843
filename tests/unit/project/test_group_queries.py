"""Every function of Megatron and MindSpeed that reads a group's ranks, or compares groups, is in the table.

Its recorder caught 32 callers of Megatron 0.19 and 0.12 of which nobody had said whether the answer is right for them
(f7a0aaa), and eight more of 0.12 and 0.16 (d5d6325).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group_queries.finder import callers_in, qualname_at, queries_of
from tests.group_queries.table import TABLE, answers, known_callers, unknown_callers
from tests.support.hosts import TREE


def sources() -> Iterator[tuple[str, Path]]:
    """Yield the packages that are here: Megatron's wheel, and the trees that the path variables name."""
    for package in ("megatron.core", "megatron.training"):
        spec = importlib.util.find_spec(package) if importlib.util.find_spec("megatron") else None
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield package, Path(folder)
    trees = {"megatron.training": TREE, **{name.lower()[4:]: os.environ.get(name, "") for name in _TREES}}
    for package, tree in trees.items():
        folder = Path(tree, *package.split("."))
        if tree and folder.is_dir():
            yield package, folder


_TREES = ("VTP_MINDSPEED", "VTP_MINDSPEED_LLM")


def test_all_readers_of_ranks_are_in_the_table() -> None:
    found = [caller for package, folder in sources() for caller in callers_in(folder, package)]
    assert found, "there is no Megatron here"
    assert sorted(set(found) - known_callers()) == []


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("def f(group):\n  return torch.distributed.get_process_group_ranks(group)", ("f", "ranks")),
        ("class C:\n  def f(self):\n    return self.group == other", ("C.f", "identity")),
        ("def f(pg_collection):\n  return [x for x in y if x.pg is mpu.get_model_parallel_group()]", ("f", "identity")),
    ],
)
def test_a_new_reader_is_found(source: str, asks: tuple[str, str]) -> None:
    assert list(queries_of(source)) == [asks]


def test_what_compares_no_group_is_not_found() -> None:
    assert list(queries_of("def f(group):\n  return group is None or group != 'tp' or size == 3")) == []


def test_the_name_of_a_function_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("class C:\n    @property\n    def f(self):\n        def g():\n            pass\n\n\nx = 1\n")
    assert [qualname_at(str(path), line) for line in (2, 3, 5, 8)] == ["C.f", "C.f", "C.f", "<module>"]


def test_every_answer_says_what_is_given_and_what_is_true() -> None:
    for kind, found in answers().items():
        callers = [caller for answer in found for caller in answer.names()]
        assert len(callers) == len(set(callers)), f"{kind}: a caller is there twice"
        assert all(answer.gets and answer.true and answer.callers for answer in found)


def test_a_caller_is_known_by_the_kind_of_its_group() -> None:
    caller = "megatron.core.tensor_parallel.data:broadcast_data"
    assert unknown_callers([(caller, "stage", "rank")]) == []
    (line,) = unknown_callers([(caller, "model", "rank")])
    assert line.startswith(f"{caller} asks a model group: rank; ") and TABLE in line


def test_the_recorder_leaves_nothing_behind() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    from tests.group_queries.recorder import recorded

    owners = (dist, distributed_c10d, dist.ProcessGroup, parallel_state)
    before = [dict(vars(owner)) for owner in owners]
    with recorded():
        assert [dict(vars(owner)) != then for owner, then in zip(owners, before, strict=True)] == [True] * 4
    assert [dict(vars(owner)) for owner in owners] == before
