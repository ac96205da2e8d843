"""All checks of Megatron's options against the stages, as a run and the command line make them."""

from __future__ import annotations

from vtp_plugin.host.rules.checks.batch import check_batches, check_packed
from vtp_plugin.host.rules.checks.divisibility import check_sizes
from vtp_plugin.host.rules.checks.lora_fits import check_adapters
from vtp_plugin.host.rules.checks.stage_layers import check_layer_file
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.rules.table.rows import check_options
from vtp_plugin.plan.layout.replica_map import ReplicaMap


def check_run(args: object, context: OptionContext, replicas: ReplicaMap) -> tuple[str, ...]:
    """Find the options, model sizes and batches that do not fit the stages.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``.
        context: The run.
        replicas: Which replicas of the stages work together.

    Returns:
        One line for every problem, ``value; rule; way out``.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(use_sharp=True, num_attention_heads=6)
    >>> len(check_run(args, OptionContext(tp_sizes=(1, 4)), ReplicaMap(dp_sizes=(1, 1))))
    2
    """
    # Megatron itself refuses batches that do not fit equal data-parallel sizes, on all ranks alike.
    batches = () if replicas.is_equal else check_batches(args, replicas, context.version)
    return (
        *check_options(args, context),
        *check_sizes(args, context),
        *check_adapters(args, context),
        *check_layer_file(args, context),
        *check_packed(args, context),
        *batches,
    )
