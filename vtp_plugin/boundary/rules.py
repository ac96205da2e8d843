"""Which strategy carries a boundary, given the layout, the sites and the size of the tensor."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.errors import LayoutError
from vtp_plugin.layout.pipeline import PipelineLayout

SLICED_FROM_BYTES = 256 * 1024
"""Below this size the leaders were faster on every network that `benchmarks/boundary.py` measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRules:
    """What decides how a boundary is crossed.

    Attributes:
        transport: `"auto"`, `"rank0"` or `"sliced"`.
        sites: Site of every stage; empty for one site.
        tensor_bytes: Size of the tensor that crosses between stages of the largest context- and data-parallel size;
            None if it is not known beforehand.
        threshold_bytes: From this size on, tensors cross in slices if there is a choice; None if no option gave it.
    """

    transport: str = "auto"
    sites: tuple[str, ...] = ()
    tensor_bytes: int | None = None
    threshold_bytes: int | None = None

    def is_open(self, layout: PipelineLayout, upstream: int, downstream: int) -> bool:
        """Whether a run tries both strategies at its start and takes the faster one; offline, `choose` says sliced.

        >>> layout = PipelineLayout.from_sizes((1, 4, 4), world_size=9)
        >>> [TransportRules(tensor_bytes=1 << 20).is_open(layout, v, v + 1) for v in range(2)]
        [True, False]
        """
        src, dst = layout.stages[upstream], layout.stages[downstream]
        has_choice = self.transport == "auto" and src.cp == dst.cp and src.tp != dst.tp
        is_large = self.tensor_bytes is not None and self.tensor_bytes >= SLICED_FROM_BYTES
        crosses_sites = self._crosses_sites(upstream, downstream)
        return has_choice and not crosses_sites and is_large and self.threshold_bytes is None

    def choose(self, layout: PipelineLayout, upstream: int, downstream: int) -> tuple[str, str]:
        """Choose the strategy of a boundary, with the reason for the log; the same on every rank.

        Raises:
            ConfigError: The context-parallel sizes differ, and the leaders were asked to carry it alone.

        >>> layout = PipelineLayout.from_sizes((1, 4, 4), world_size=9)
        >>> TransportRules(sites=("edge", "cloud", "cloud")).choose(layout, 0, 1)
        ('rank0', 'crosses from site edge to site cloud')
        >>> TransportRules().choose(layout, 1, 2)
        ('sliced', 'both stages have one size: rank to rank')
        """
        src, dst = layout.stages[upstream], layout.stages[downstream]
        crosses_sites = self._crosses_sites(upstream, downstream)
        if src.cp != dst.cp and (self.transport == "rank0" or (self.transport == "auto" and crosses_sites)):
            obstacle = "--vtp-transport rank0 was given" if self.transport == "rank0" else "it crosses sites"
            raise LayoutError(
                f"boundary {upstream}->{downstream} joins context-parallel sizes {src.cp} and {dst.cp}, which only "
                f"slices can cross, but {obstacle}; use --vtp-transport sliced, where every rank of one stage sends to "
                "ranks of the other, or equal sizes"
            )
        if self.transport != "auto":
            return self.transport, "asked for"
        if src.cp != dst.cp:
            return "sliced", "context-parallel sizes differ"
        if crosses_sites:
            return "rank0", f"crosses from site {self.sites[upstream]} to site {self.sites[downstream]}"
        if src.tp == dst.tp:
            return "sliced", "both stages have one size: rank to rank"
        limit_bytes = SLICED_FROM_BYTES if self.threshold_bytes is None else self.threshold_bytes
        if self.tensor_bytes is not None and self.tensor_bytes < limit_bytes:
            said = "where slices begin to pay" if self.threshold_bytes is None else "as --vtp-transport-threshold says"
            return "rank0", f"{self.tensor_bytes} bytes are fewer than {limit_bytes}, {said}"
        if self.is_open(layout, upstream, downstream):
            return "sliced", "the stages' sizes differ; a run tries rank0 as well at its start and takes the faster one"
        return "sliced", "the stages' sizes differ: every link carries its share"

    def _crosses_sites(self, upstream: int, downstream: int) -> bool:
        return bool(self.sites) and self.sites[upstream] != self.sites[downstream]
