"""Checkpoints of which every site keeps its own part: whether this run saves so, and the ranks of this site."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from vtp_plugin.checkpoint.format.site_part import SitePart, digest_of_save
from vtp_plugin.checkpoint.save.atomic_dir import tracker_text
from vtp_plugin.runtime.comm.collectives import open_group
from vtp_plugin.session.planned_run import PlannedRun


class SiteParts:
    """What is known of such checkpoints on this rank.

    Attributes:
        run: random name of this start, if it saves so; None where all ranks share the folder of ``--save``.
        is_seen: whether Megatron takes this site for the world now.
    """

    def __init__(self) -> None:
        self.run: str | None = None
        self.is_seen = False
        self._group: dist.ProcessGroup | None = None

    def keep_apart(self, run: str) -> None:
        """Let each site keep its part from now on; the name is that of this start."""
        self.run = run

    def open(self, planned: PlannedRun) -> dist.ProcessGroup:
        """Return the group of this site's ranks, in their order; at first all ranks of the run call this together."""
        if self._group is None:
            world = range(dist.get_world_size())
            for site in planned.reporting_ranks:
                ranks = [rank for rank in world if planned.site_of(rank) == site]
                group = open_group(
                    ranks,
                    platform=planned.platform,
                    timeout_s=planned.config.timeout_s,
                    description="checkpoints of a site",
                )
                self._group = self._group or group
        assert self._group is not None
        return self._group

    def is_first(self, planned: PlannedRun) -> bool:
        """Tell whether this rank writes what all ranks share that write together: those of the site, or of the run."""
        return dist.get_rank(None if self.run is None else self.open(planned)) == 0

    def part_of(self, final: Path, planned: PlannedRun) -> SitePart:
        """Say which part of a save this site keeps, in a run that keeps parts."""
        assert self.run is not None
        save = digest_of_save(self.run, tracker_text(final))
        return SitePart(site=planned.site_of(dist.get_rank()), sites=tuple(planned.reporting_ranks), save=save)
