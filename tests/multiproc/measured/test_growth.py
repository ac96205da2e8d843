"""Nothing grows with the steps of a run: keys of the store, descriptors, threads, files, objects, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import DISTRIBUTED, Case
from tests.multiproc.cases.mimo_cases import MimoCase, Sizes
from tests.multiproc.cases.picture_cases import PictureCase
from tests.multiproc.jobs.growth_job import Held
from tests.support.hosts import fitted, host_name
from tests.support.pool import Pool

MARKS = (150, 300)
# Far less than one a step of what is counted exactly; memory is what the allocator makes of it.
MOST_OBJECTS, MOST_BYTES = 20, 2 << 20
FEW: dict[str, Any] = {"num_microbatches": 2}
REPLANNED: dict[str, Any] = {"replan_share": 1e-9}

CORE: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case.of(sizes=(1, 2), num_evaluations=1, **FEW), {}),
    "rank0": (Case.of(sizes=(2, 1), transport="rank0", **FEW), {}),
    "sliced": (Case.of(sizes=(2, 1), transport="sliced", **FEW), {}),
    "sequence parallel": (Case.of(sizes=(1, 2), sequence_parallel=True, seq=6, **FEW), {}),
    "interleaved": (Case.of(sizes=(1, 2), vpp=2, **FEW), {}),
    "planned": (Case.of(sizes=(1, 2), schedule="planned", **FEW), {}),
    "unequal replicas": (Case.of(sizes=(1, 1), dp_list=(1, 2), num_microbatches=2, **DISTRIBUTED), {}),
    "split": (Case.of(sizes=(1, 1), dp_list=(1, 2), dp_mode="split", num_microbatches=2), {}),
    "U": (Case.of(sizes=(1, 2), layers=(1, 1, 1), tied=True, num_evaluations=1, **FEW), {}),
    "U, planned anew": (Case.of(sizes=(1, 1, 1), layers=(1, 1, 1, 1), **FEW), REPLANNED),
    "audit": (Case.of(sizes=(1, 2), **FEW), {"audit": "audit.jsonl"}),
    "tied": (Case.of(sizes=(1, 2), tied=True, **FEW), {}),
    "experts": (Case.of(sizes=(1, 2), experts="balanced", has_bias=False, sequence_parallel=True, seq=12, **FEW), {}),
    "lengths": (Case.of(sizes=(1, 2), varying_lengths=True, num_microbatches=3), {}),
    "sites": (Case.of(sizes=(1, 1, 1), sites=("edge", "cloud", "cloud"), **FEW), {}),
}
BY_DEFAULT = ("U, planned anew",)
PICTURES = PictureCase(sizes=(1, 1, 1), encoder=(1, 1, 1, 1), language=(1, 1, 1, 1), num_microbatches=2)
MODULES = {
    "bridges": MimoCase(vision=Sizes(dp=2), language=Sizes(tp=2)),
    "bridges to a frozen encoder": MimoCase(vision=Sizes(), language=Sizes(pp=2), is_frozen=True),
    "planned modules": MimoCase(vision=Sizes(), language=Sizes(pp=2), is_planned=True),
}


def check(pool: Pool, job: str, world_size: int, case: object, options: dict[str, Any], folder: Path) -> None:
    kwargs = {"case": case, "marks": MARKS, "options": options, "folder": str(folder)}
    ranks: list[list[Held]] = pool.run(world_size, f"tests.multiproc.jobs.growth_job:{job}", kwargs)
    allowed = Held(0, 0, 0, 0, MOST_OBJECTS, MOST_BYTES)
    for rank, (first, *_, last) in enumerate(ranks):
        added = Held(*(b - a for a, b in zip(first, last, strict=True)))
        print(rank, first, added)
        assert all(a <= b for a, b in zip(added, allowed, strict=True)), f"rank {rank}: {first} has grown by {added}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.full]) for name in CORE]
)
def test_nothing_grows(pool: Pool, tmp_path: Path, name: str) -> None:
    case, options = CORE[name]
    check(pool, "grow_core", case.world_size, fitted(case, host_name()), options, tmp_path)


@pytest.mark.full
def test_nothing_grows_in_a_u_with_two_rings(pool: Pool, tmp_path: Path) -> None:
    check(pool, "grow_pictures", PICTURES.world_size, PICTURES, {}, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", MODULES)
def test_nothing_grows_between_modules(pool: Pool, tmp_path: Path, name: str) -> None:
    check(pool, "grow_modules", MODULES[name].world_size, MODULES[name], {}, tmp_path)
