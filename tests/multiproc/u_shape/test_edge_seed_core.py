"""A seed of the edge's own for scripts on megatron-core alone, with every Megatron version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.cases.core_cases import Case
from tests.support.pool import Pool

JOB = "tests.multiproc.jobs.variants:draw"
SITES = ("edge", "cloud")


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A file with a key."""
    file = tmp_path / "key"
    file.write_bytes(bytes(range(100, 132)))
    file.chmod(0o600)
    return str(file)


def _case(*sizes: int, dp: int = 1) -> Case:
    return Case.of(sizes=sizes, layers=(1, 2, 1), dp=dp, sites=SITES, tied=True)


def _run(pool: Pool, case: Case, world_size: int, **options: Any) -> list[tuple[int, dict[str, Any], list[str]]]:
    return pool.run(world_size, JOB, {"case": case, **options})


def test_a_script_draws_the_edges_weights_from_the_key(pool: Pool, key: str) -> None:
    """Two replicas of two ranks hold slices of what one rank draws; the cloud draws from the seed."""
    one = _run(pool, _case(1, 1), 2, edge_seed=key)
    wide = _run(pool, _case(2, 1, dp=2), 6, edge_seed=key)
    assert [stage for stage, *_ in wide] == [0, 0, 0, 0, 1, 1]
    for name, (whole, _) in one[0][1].items():
        parts = [weights[name] for _, weights, _ in wide[:4]]
        assert torch.equal(parts[0][0], parts[2][0]) and torch.equal(parts[1][0], parts[3][0]), name
        dim = parts[0][1]
        joined = parts[0][0] if dim is None else torch.cat([parts[0][0], parts[1][0]], dim)
        assert torch.equal(joined, whole), name
    shared, random = (_run(pool, _case(1, 1), 2, edge_seed=seed) for seed in ("shared", None))
    drawn = [name for name, (values, _) in shared[0][1].items() if values.std() > 0]
    assert len(drawn) > 10
    for name in drawn:
        values = [run[0][1][name][0] for run in (one, shared, random)]
        assert not any(torch.equal(values[i], values[j]) for i, j in ((0, 1), (0, 2), (1, 2))), name
    for name, (values, _) in shared[1][1].items():
        assert all(torch.equal(values, run[1][1][name][0]) for run in (one, random)), name
    word, head = (one[0][1][name][0] for name in one[0][1] if name.endswith(("word_embeddings.weight", "layer.weight")))
    assert torch.equal(word, head), "a tied weight was drawn twice"


def test_a_script_that_draws_from_its_own_seed_is_told_so(pool: Pool) -> None:
    case = _case(1, 1).but(num_steps=2)
    for is_told, seed in ((True, None), (False, "shared"), (False, None)):
        runs = _run(pool, case, 2, edge_seed=seed, is_told=is_told, num_steps=2)
        said = [sum("drawing_edge_weights" in line for line in lines) for *_, lines in runs]
        assert said == [0 if is_told or seed == "shared" else 1, 0], (is_told, seed)
