"""What is said before Megatron's own schedules run a step of stages of one size."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.patches.core.pipeline_parallel import schedules


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "options", "num_warnings"),
    [
        (2, 2, {"variable_seq_lengths": True}, 1),
        (2, 3, {"mtp_standalone": True}, 1),
        (2, 2, {"variable_seq_lengths": True, "overlap_p2p_comm": True}, 0),
        (2, 1, {"variable_seq_lengths": True}, 0),
        (3, 2, {"variable_seq_lengths": True}, 0),
        (2, 2, {}, 0),
    ],
)
def test_warns_of_crossed_shapes(
    num_stages: int, num_chunks: int, options: dict[str, bool], num_warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps; once is enough. An evaluation sends one way only."""
    said: list[str] = []
    monkeypatch.setattr(schedules.log, "warning", said.append)
    config = SimpleNamespace(**{"variable_seq_lengths": False, "overlap_p2p_comm": False, **options})
    pipeline = SimpleNamespace(
        is_warned=False, plan=SimpleNamespace(layout=SimpleNamespace(tp_sizes=(1,) * num_stages))
    )
    calls: list[dict[str, Any]] = []
    run = functools.partial(schedules._run_untouched, pipeline, lambda **call: calls.append(call))
    model = [SimpleNamespace(config=config) for _ in range(num_chunks)]
    run(model=model, forward_only=True)
    assert not said
    run(model=model, forward_only=False)
    run(model=model)
    assert len(said) == num_warnings
    assert [call["model"] for call in calls] == [model] * 3
    for line in said:
        assert "set overlap_p2p_comm=True and batch_p2p_comm=False, or give --vtp-force" in line
