"""Modules that feed each other, as one placement of stages."""

from __future__ import annotations

import pytest

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import place_modules

SIZES = {"language": 3, "vision": 2, "sound": 1}


def test_encoders_come_first_whatever_the_order_of_the_names() -> None:
    placed = place_modules(SIZES, {"sound": ["language"], "vision": ["language"], "language": []})
    assert placed.first_stages == {"vision": 0, "sound": 2, "language": 3}
    assert placed.placement.successors == (1, 3, 3, 4, 5)
    found = [placed.inputs(stage) for stage in range(6)]
    assert found == [(), ("vision",), (), ("vision", "sound"), ("language",), ("language",)]
    schedule, _ = make_schedule(ScheduleRequest(placement=placed.placement, num_microbatches=2))
    words = schedule.describe().splitlines()[3].split()
    assert {"3WAIT_RECV_F0:1", "3WAIT_RECV_F0:2", "3SEND_B1:1", "3SEND_B1:2"} <= set(words)


@pytest.mark.parametrize(
    ("topology", "line"),
    [
        ({"vision": ["language", "sound"]}, "module 'vision' feeds language, sound"),
        ({"vision": ["language"]}, "the modules language, sound feed no other"),
        ({"vision": ["sound"], "sound": ["vision"]}, "modules feed each other in a circle"),
        ({"vision": ["sound"], "sound": ["language"], "language": ["vision"]}, "the modules of a circle feed no other"),
    ],
)
def test_modules_that_make_no_tree_are_refused(topology: dict[str, list[str]], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        place_modules(SIZES, topology)
