"""What tests have a run of a training script save besides what Megatron saves."""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter


def name_a_date(facts: dict[str, Any]) -> None:
    """From the second save on, let the index name a class that none of our readers knows."""
    original, saves = FileSystemWriter.finish, list[int]()

    def finish(self: Any, metadata: Any, results: Any) -> None:
        saves.append(1)
        if len(saves) > 1:
            metadata.planner_data = datetime.date(2026, 11, 26)
        original(self, metadata, results)

    FileSystemWriter.finish = finish
