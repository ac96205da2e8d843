"""What routers note for the log, in the families before 0.18."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron.core import parallel_state

from vtp_plugin.patches.hosts.megatron_host import MegatronHost, RouterMetric


class NotedMetrics(MegatronHost):
    """A family whose routers note their numbers in plain dictionaries.

    Attributes:
        averages_replicas: the family averages the numbers over the replicas.
    """

    averages_replicas: ClassVar[bool] = True

    def router_metrics(self, *args: Any, **kwargs: Any) -> Iterator[RouterMetric]:
        noted, names = self._noted(), args[0] if args else kwargs.get("track_names")
        for name in noted if names is None else names:
            entry = noted[name]
            group = entry.get("reduce_group")
            mean_group, is_whole = entry.get("avg_group"), entry.get("reduce_group_has_dp", False)
            is_averaged = self.averages_replicas and group is not None and not is_whole
            is_whole = is_whole or mean_group is not None
            if group is None and mean_group is None:
                # The z loss: Megatron logs that of the tokens of one rank, of which stages have other numbers.
                mean_group = parallel_state.get_tensor_and_context_parallel_group()
            yield RouterMetric(entry["values"], group, mean_group, is_averaged, is_whole)

    def _noted(self) -> Mapping[str, Any]:
        """Return what was noted, by name."""
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
