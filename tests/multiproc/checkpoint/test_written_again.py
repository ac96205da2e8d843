"""``checkpoint reshard`` on what real runs have saved, in each form of the host: uniform Megatron goes on with it.

What Megatron 0.12 has saved goes on in newer ones, too. For that, keep what these tests save there
(``--basetemp=DIR``), and name the folder in ``VTP_OLDER_CHECKPOINTS`` when they run with Megatron 0.19.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.optimizer_state import assert_same_state
from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import Scripts, assert_same_training
from tests.multiproc.cases.stored_state import assert_stored_as_held
from tests.support.checkpoints import as_older
from tests.support.hosts import host_name, reshardable_flags
from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, BY_BUCKET, BY_BUCKET_OLDER, BY_RANK, IN_MODEL_SPACE, PLAIN
from vtp_plugin.cli import main

pytestmark = [pytest.mark.needs("scripts_here")]
DISTRIBUTED = ("--use-distributed-optimizer",)
BY_OBJECT = (*DISTRIBUTED, "--no-ckpt-fully-parallel-save")
UNTIED = ("--untie-embeddings-and-output-weights",)
# Megatron 0.12 places a tied embedding only where the weights before it end at a multiple of 128 elements.
PLACED = ("--hidden-size", "128")
EXPERTS = (
    *("--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear", *UNTIED),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "128", "--sequence-parallel"),
)
OWN_EXPERTS = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
OLDER = os.environ.get("VTP_OLDER_CHECKPOINTS", "")
BUCKETED = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")


@dataclass(frozen=True, kw_only=True)
class WrittenAgain:
    """What is written again, and who goes on with it.

    Attributes:
        form: of what is saved.
        made: of what is written.
        source: list of the writer.
        is_stock: whether the writer is Megatron without the plugin.
        dp: its number of replicas.
        wrote: flags of the writer alone.
        model: flags of all.
        reads: flags of the readers alone.
        readers: lists of stock Megatron, and with a ``!`` before them of the plugin, that go on.
    """

    form: str
    made: str
    source: str
    is_stock: bool = False
    dp: int = 1
    wrote: tuple[str, ...] = ()
    model: tuple[str, ...] = UNTIED
    reads: tuple[str, ...] = ()
    readers: tuple[str, ...]


def _case(name: str, *, is_full: bool = True, **values: Any) -> Any:
    return pytest.param(WrittenAgain(**values), id=name, marks=[pytest.mark.full] if is_full else [])


def _by_rank(name: str, **values: Any) -> Any:
    """What stock Megatron 0.12 saves as one object for each rank."""
    return _case(f"rank-{name}", form=BY_RANK, made=BY_BLOCK, is_stock=True, **values)


# What unequal stages save with the distributed optimizer.
_OF_LISTS = (BY_BUCKET_OLDER, BY_BLOCK) if host_name() == "0.12" else (BY_BUCKET, IN_MODEL_SPACE)


@pytest.mark.needs("optimizer_by_rank", cases=("rank-", "blocks-"))
@pytest.mark.needs("forms_of_0_15", cases=("reshardable-",))
@pytest.mark.parametrize(
    "case",
    [
        _case("plain-1,2", is_full=False, form=PLAIN, made=PLAIN, source="1,2", readers=("1,1",)),
        _case("plain-2,1-tied", form=PLAIN, made=PLAIN, source="2,1", model=(), readers=("2", "!1,2")),
        _case(
            "buckets-1,2",
            form=_OF_LISTS[0],
            made=_OF_LISTS[1],
            source="1,2",
            dp=2,
            wrote=DISTRIBUTED,
            readers=("1,1", "2", "!2,1"),
        ),
        _case(
            "buckets-1,2-experts",
            form=_OF_LISTS[0],
            made=_OF_LISTS[1],
            source="1,2",
            wrote=(*DISTRIBUTED, "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"),
            model=EXPERTS,
            reads=OWN_EXPERTS,
            readers=("2,2",),
        ),
        _case(
            "reshardable-1,2",
            form=IN_MODEL_SPACE,
            made=IN_MODEL_SPACE,
            source="1,2",
            dp=2,
            wrote=(*DISTRIBUTED, *reshardable_flags()),
            readers=("1,1", "!2,1"),
        ),
        _case(
            "blocks-1,1",
            form=BY_BLOCK,
            made=BY_BLOCK,
            source="1,1",
            is_stock=True,
            dp=2,
            wrote=DISTRIBUTED,
            readers=("2", "!1,2"),
        ),
        _by_rank("1,1", is_full=False, source="1,1", dp=2, wrote=BY_OBJECT, readers=("2", "!1,2")),
        _by_rank("2,2-bucketed", source="2,2", dp=2, wrote=(*BY_OBJECT, *BUCKETED), readers=("1,1",)),
        _by_rank("1,1-tied", source="1,1", dp=2, wrote=BY_OBJECT, model=PLACED, readers=("2", "!1,2")),
        _by_rank(
            "2,2-experts",
            source="2,2",
            wrote=(*BY_OBJECT, *OWN_EXPERTS),
            model=EXPERTS,
            reads=OWN_EXPERTS,
            readers=("2",),
        ),
        _by_rank("2-bf16", source="2", wrote=BY_OBJECT, model=(*UNTIED, "--bf16", "--swiglu"), readers=("1", "!1,2")),
    ],
)
def test_uniform_megatron_goes_on(scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path, case: WrittenAgain) -> None:
    """Masters, moments and steps are those of the writer bit by bit, and the next steps are those that it took."""
    wrote = [*case.model, *case.wrote]
    folder, whole = saved_runs(case.source, wrote, dp=case.dp, is_stock=case.is_stock)
    assert Contents(find_checkpoint(folder)).form == case.form
    target = tmp_path / "again"
    main(["checkpoint", "reshard", "--from", str(folder), "--to", str(target)])
    assert Contents(find_checkpoint(target)).form == case.made
    flags = [*case.model, *case.reads, *(() if case.form == PLAIN else DISTRIBUTED)]
    for reader in case.readers:
        runs = resume(scripts, target, reader.strip("!"), flags, is_stock=not reader.startswith("!"))
        assert_same_state(runs, whole)
        assert_same_training(runs, whole, first=2, tolerance=2e-2 if "--bf16" in case.model else 1e-5)


@pytest.mark.full
@pytest.mark.needs("forgotten_blocks")
def test_blocks_of_older_megatrons_go_on(scripts: Scripts, saved_runs: SavedRuns, tmp_path: Path) -> None:
    """Newer ones do not read them; what is written again is as what they wrote themselves."""
    flags = [*DISTRIBUTED, *UNTIED]
    folder, whole = saved_runs("2,2", [*flags, *reshardable_flags()], dp=2)
    older = as_older(find_checkpoint(folder), tmp_path / "older" / "iter_0000002")
    assert Contents(older).form == BY_BLOCK
    target = tmp_path / "again"
    main(["checkpoint", "reshard", "--from", str(older), "--to", str(target), "--form", IN_MODEL_SPACE])
    for sizes, is_stock in (("1,1", True), ("1,2", False)):
        runs = resume(scripts, target, sizes, flags, is_stock=is_stock)
        assert_same_state(runs, whole)
        assert_same_training(runs, whole, first=2)


@pytest.mark.full
@pytest.mark.needs("forgotten_blocks")
@pytest.mark.skipif(not OLDER, reason="no folder in VTP_OLDER_CHECKPOINTS")
@pytest.mark.parametrize("form", [BY_BLOCK, BY_BUCKET_OLDER, BY_RANK])
def test_what_megatron_0_12_has_saved_goes_on(scripts: Scripts, tmp_path: Path, form: str) -> None:
    """Masters, moments and steps bit by bit, in stock Megatron and in unequal stages."""
    saved = [Contents(find_checkpoint(path.parent)) for path in sorted(Path(OLDER).glob("written?/latest_*.txt"))]
    older = next(each for each in saved if each.form == form and not each.arguments["swiglu"])
    target = tmp_path / "again"
    main(["checkpoint", "reshard", "--from", str(older.folder), "--to", str(target), "--form", IN_MODEL_SPACE])
    for sizes, is_stock, multiple in (("1,1", True, 12), ("1,2", False, 6)):
        vocabulary = ["--vocab-size", "4127", "--make-vocab-size-divisible-by", str(multiple)]
        runs = resume(scripts, target, sizes, [*DISTRIBUTED, *UNTIED, *vocabulary], is_stock=is_stock)
        assert_stored_as_held(older, runs)
