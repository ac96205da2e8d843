"""A script that a check of its own ends on one rank, as some of Megatron's do: the others must not wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hang.ranks import Server, run

pytest.importorskip("megatron.training", reason="whole scripts need megatron.training")

SCRIPT = """\
import sys
import torch.distributed as dist
from megatron.training.arguments import parse_args, validate_args
validate_args(parse_args())
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    sys.exit(3)
dist.barrier()
"""
LAUNCH = """\
import sys
from vtp_plugin.cli import main
main(["run", {script!r}, *sys.argv[3:]])
"""
FLAGS = (
    *("--vtp-size-list", "1,1", "--vtp-force", "--vtp-device", "cpu", "--vtp-timeout-s", "600"),
    *("--pipeline-model-parallel-size", "2", "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--max-position-embeddings", "8", "--micro-batch-size", "1", "--global-batch-size", "1"),
    *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    *("--distributed-backend", "gloo"),
)


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_that_exits_on_rank_0_ends_all(rank_server: Server, tmp_path: Path, is_forked: bool) -> None:
    """Rank 0 keeps the store and leaves last, so it would wait for the others, and they in a barrier for it."""
    script, start = tmp_path / "script.py", tmp_path / "start.py"
    script.write_text(SCRIPT)
    start.write_text(LAUNCH.format(script=str(script)))
    with run(tmp_path, rank_server if is_forked else None, world_size=2) as whole:
        for rank in range(2):
            whole.start(rank, *FLAGS, script=str(start))
        whole.ended(range(2), 120.0 * whole.pace)
        assert whole.ranks[0].status() == 3, whole.ranks[0].text()[-3000:]
        assert whole.ranks[1].status() == 1, whole.ranks[1].text()[-3000:]
        assert "rank 0 failed: SystemExit: 3" in whole.ranks[1].error_line()
