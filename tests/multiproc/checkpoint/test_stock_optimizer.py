"""What stock Megatron saves by default, with the distributed optimizer and without our map, goes on in any list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.optimizer_state import assert_same_state
from tests.multiproc.cases.saved_runs import train_stock
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    num_ranks,
)

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("our_example")]
DISTRIBUTED = ["--use-distributed-optimizer", "--global-batch-size", "16", "--train-iters", "7"]
TIED_APART = ("--untie-embeddings-and-output-weights",)
GATED = ("--swiglu", "--group-query-attention", "--num-query-groups", "6", *TIED_APART)
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
U_SHAPE = ("--layerwise-disaggregated-training", "--num-layer-list", "1,1,1,1")
EXPERTS = (
    *("--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "128", "--sequence-parallel"),
)
OWN_EXPERTS = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
EXPERTS_2_1 = ("--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1")
Stock = Callable[..., tuple[Path, list[ScriptRun]]]


@pytest.fixture(scope="module")
def stock(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Runs of stock Megatron of seven steps, that save after the second one; each is made once."""
    known: dict[tuple[object, ...], tuple[Path, list[ScriptRun]]] = {}

    def write(tp: int, pp: int, dp: int, extra: Sequence[str] = ()) -> tuple[Path, list[ScriptRun]]:
        key = (tp, pp, dp, tuple(extra))
        if key not in known:
            folder = tmp_path_factory.mktemp("stock")
            sizes = ",".join([str(tp)] * pp)
            saving = [*DISTRIBUTED, *extra, "--save", str(folder), "--save-interval", "2"]
            runs = train_stock(scripts, sizes, saving, dp=dp, hooks=["dump_optimizer"])
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            assert not (folder / "iter_0000002" / "vtp_optimizer_map.json").exists()
            known[key] = folder, runs
        return known[key]

    return write


@dataclass(frozen=True, kw_only=True)
class FromStock:
    """From which uniform layout of stock Megatron the optimizer goes on in which list.

    Attributes:
        tp: of the writer.
        pp: the same.
        dp: the same.
        wrote: flags of its layout.
        target: list of the reader.
        target_dp: its number of replicas.
        reads: flags of its layout.
        model: flags of both.
    """

    target: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    target_dp: int = 1
    wrote: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    model: tuple[str, ...] = ()


def _case(name: str, *, is_full: bool = True, **values: Any) -> Any:
    return pytest.param(FromStock(**values), id=name, marks=[pytest.mark.full] if is_full else [])


@pytest.mark.parametrize(
    "case",
    [
        _case("tp1-to-1,2", target="1,2", is_full=False),
        _case("tp1-to-2,1-untied", target="2,1", model=TIED_APART),
        _case("dp2-to-1,2", dp=2, target="1,2"),
        _case("dp2-to-2,1-dp2", dp=2, target="2,1", target_dp=2),
        _case("dp2-bucketed-to-1,2", dp=2, target="1,2", wrote=("--overlap-grad-reduce", "--ddp-bucket-size", "20000")),
        _case("tp2-pp2-to-2,1", tp=2, pp=2, target="2,1", is_full=False),
        _case("tp2-pp2-to-1,2-untied", tp=2, pp=2, target="1,2", model=TIED_APART),
        _case("tp2-pp2-dp2-to-1,2", tp=2, pp=2, dp=2, target="1,2", model=GATED),
        _case("tp2-pp2-to-3,1,2-gated", tp=2, pp=2, target="3,1,2", model=(*GATED, "--num-layers", "6")),
        _case("tp2-pp2-to-1-bf16", tp=2, pp=2, target="1", model=("--bf16",)),
        _case("vpp2-to-1,2", pp=2, target="1,2", wrote=INTERLEAVED),
        _case("pp2-to-vpp2", pp=2, target="1,1", reads=INTERLEAVED),
        _case("tp2-pp2-to-u-1,2,2", tp=2, pp=2, target="1,2,2", reads=U_SHAPE),
        _case("ep2-to-2,1", tp=2, pp=2, target="2,1", model=EXPERTS, wrote=OWN_EXPERTS, reads=EXPERTS_2_1),
        _case("experts-to-1,2", tp=2, target="1,2", model=EXPERTS),
    ],
)
def test_what_stock_megatron_saved_goes_on(scripts: Scripts, stock: Stock, case: FromStock) -> None:
    """Masters, moments and steps are those of the writer bit by bit, and the next five steps are those that it took."""
    folder, whole = stock(case.tp, case.pp, case.dp, [*case.model, *case.wrote])
    loading = [*DISTRIBUTED, *case.model, *case.reads, "--load", str(folder)]
    runs = scripts.train(case.target, loading, dp=case.target_dp, hooks=["dump_optimizer"])
    assert "successfully loaded checkpoint" in runs[0].output
    assert [len(run.steps) for run in runs] == [5] * len(runs)
    assert_same_state(runs, whole)
    tolerance = 2e-2 if "--bf16" in case.model else 1e-5
    assert_same_training(runs, whole, first=2, tolerance=tolerance)


def test_another_model_is_refused(scripts: Scripts, stock: Stock) -> None:
    folder, _ = stock(1, 1, 1)
    _assert_refused(
        scripts, folder, ["--ffn-hidden-size", "384"], "the optimizer's ", "another model", "start with its options"
    )


def _assert_refused(scripts: Scripts, folder: Path, extra: Sequence[str], *words: str) -> None:
    """Check that all ranks of a list end with one line."""
    command = arguments("1,2", extra=[*DISTRIBUTED, "--load", str(folder), *extra])
    assert_refused(scripts.launch(num_ranks("1,2"), {"arguments": command}), f"{folder}/iter_0000002", *words)
