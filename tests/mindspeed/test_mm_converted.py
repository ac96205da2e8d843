"""Files of MindSpeed-MM's converter that no rank of a list can load, by the names in them; without its tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
from vtp_plugin.patches.mindspeed.known_mm import problems_of_converted

_EMBEDDING, _LAYER, _HEAD = (
    {f"text_decoder.{name}.weight": torch.zeros(2)}
    for name in ("embedding.word_embeddings", "decoder.layers.0.mlp.linear_fc2", "output_layer")
)
_VISION = {"image_encoder.encoder.blocks.layers.0.mlp.linear_fc2.weight": torch.zeros(2)}
ITS_U_EDGE = [_VISION, {**_VISION, **_EMBEDDING}, {**_LAYER, **_HEAD}]
ITS_U_CLOUD = [_VISION, _LAYER, {}]
WHOLE = [{**_VISION, **_EMBEDDING, **_LAYER, **_HEAD}]


def write(folder: Path, rank: str, chunks: Sequence[dict[str, torch.Tensor]], **besides: Any) -> None:
    """Write a file for a rank, as the converter does."""
    file = folder / "release" / rank / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    torch.save({**dict(zip(names, chunks, strict=True)), "checkpoint_version": 3.0, **besides}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


def found(folder: Path, *sizes: int, is_u_shaped: bool = False) -> list[str]:
    """Return what is said about a folder."""
    layout: Any = SimpleNamespace(tp_sizes=sizes)
    return list(problems_of_converted(str(folder), layout, is_u_shaped=is_u_shaped))


@pytest.mark.parametrize("sizes", [(1, 2), (1, 1)])
@pytest.mark.parametrize("is_u_shaped", [False, True])
@pytest.mark.parametrize(
    ("rank", "chunks"), [("mp_rank_00_000", ITS_U_EDGE), ("mp_rank_01_001", ITS_U_CLOUD)], ids=["edge", "cloud"]
)
def test_trees_of_its_own_u_are_refused(
    tmp_path: Path, rank: str, chunks: list[dict[str, torch.Tensor]], sizes: tuple[int, ...], is_u_shaped: bool
) -> None:
    write(tmp_path, rank, chunks)
    (line,) = found(tmp_path, *sizes, is_u_shaped=is_u_shaped)
    assert "hf_to_mm_ldt" in line and "checkpoint import --mm EDGE CLOUD --like MODEL" in line and "\n" not in line


def test_files_of_a_uniform_run_are_refused_where_ranks_are_others(tmp_path: Path) -> None:
    write(tmp_path, "mp_rank_00", WHOLE)
    assert found(tmp_path, 1) == []
    for is_u_shaped, sizes in ((False, (1, 2)), (True, (1, 1))):
        (line,) = found(tmp_path, *sizes, is_u_shaped=is_u_shaped)
        assert (
            "hf_to_mm," in line and "ldt" not in line and f"import --mm {tmp_path} --like" in line and "\n" not in line
        )


@pytest.mark.parametrize("last", [_HEAD, _LAYER])
def test_chunks_of_an_interleaved_pipeline_are_none_of_its_u(tmp_path: Path, last: dict[str, torch.Tensor]) -> None:
    write(tmp_path, "mp_rank_00_001", [_LAYER, last])
    assert found(tmp_path, 1, 1) == []


def test_what_a_run_saved_or_what_cannot_be_read_is_left_to_other_checks(tmp_path: Path) -> None:
    saved, damaged = tmp_path / "saved", tmp_path / "damaged"
    write(saved, "mp_rank_00_000", ITS_U_EDGE, args=SimpleNamespace(tensor_model_parallel_size=1))
    write(damaged, "mp_rank_00_000", ITS_U_EDGE)
    (damaged / "release" / "mp_rank_00_000" / "model_optim_rng.pt").write_bytes(b"PK")
    for folder in (saved, damaged, tmp_path):
        assert found(folder, 1, 2) == []
    assert list(problems_of_converted(None, SimpleNamespace(), is_u_shaped=True)) == []  # pyright: ignore
