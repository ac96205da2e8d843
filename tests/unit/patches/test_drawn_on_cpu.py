"""`cpu-initialization`: with a list of sizes, a model drawn on the CPU moves to the device before it is wrapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vtp_plugin.patches.training.models.dist_utils import _move_to_device

pytestmark = pytest.mark.needs("records_of_0_19")


class Chunk:
    """A model chunk that notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def cuda(self) -> None:
        self.events.append("moved")


@pytest.mark.parametrize("is_drawn_on_cpu", [True, False])
def test_only_what_the_cpu_drew_moves(is_drawn_on_cpu: bool) -> None:
    chunks = [Chunk(), Chunk()]

    def wrap(given: list[Chunk], *_: object) -> list[Chunk]:
        for chunk in given:
            chunk.events.append("wrapped")
        return given

    config = SimpleNamespace(use_cpu_initialization=is_drawn_on_cpu)
    assert _move_to_device(wrap, chunks, config, None) == chunks
    wanted = ["moved", "wrapped"] if is_drawn_on_cpu else ["wrapped"]
    assert [chunk.events for chunk in chunks] == [wanted, wanted]
