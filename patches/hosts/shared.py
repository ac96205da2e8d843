"""What several families of Megatron share: their states, metrics, and torch's stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from vtp_plugin.patches.hosts.megatron_host import MegatronHost, RouterMetric


def load_in_passes(
    original: Callable[..., dict[str, Any]], strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any
) -> dict[str, Any]:
    """Run `TorchDistLoadShardedStrategy.load`, a second time for what this rank loads twice; a collective call.

    Args:
        original: Megatron's method.
        strategy: that loads.
        sharded_state_dict: what this rank asks for; not changed.
        checkpoint_dir: where it lies.
    """
    seen: set[tuple[object, ...]] = set()

    def is_first(value: Any) -> bool:
        if not isinstance(value, ShardedTensor):
            return True
        # Not its range in a flattened tensor: that of the other copy may be another, and overlap.
        place = value.key, value.global_offset
        is_new = place not in seen
        seen.add(place)
        return is_new

    first, again = extract_matching_values(sharded_state_dict, is_first, return_lists_as_dicts=True)
    loaded = original(strategy, first, checkpoint_dir)
    # On ranks that have nothing twice as well: loading is collective.
    return _in_lists(sharded_state_dict, merge(loaded, original(strategy, again, checkpoint_dir)))


def _in_lists(asked: Any, loaded: Any) -> Any:
    """Give what was loaded as it was asked for, with lists where dictionaries have stood for them.

    >>> _in_lists({"w": ["a", {"b": 0}], "none": {}}, {"w": {0: 1, 1: {"b": 2}}})
    {'w': [1, {'b': 2}], 'none': {}}
    """
    if not isinstance(asked, dict | list):
        return loaded
    items = asked.items() if isinstance(asked, dict) else enumerate(asked)
    # Containers of nothing are in neither part.
    found = {
        name: _in_lists(value, loaded.get(name, {}))
        for name, value in items
        if name in loaded or isinstance(value, dict | list)
    }
    return found if isinstance(asked, dict) else list(found.values())


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
