"""The replicas of all stages as the workers of a schedule."""

from __future__ import annotations

from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.replicas import ReplicaMap
from vtp_plugin.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement


def place_workers(replicas: ReplicaMap, *, num_chunks: int, is_u_shaped: bool) -> Placement:
    """Place the chunks on the stages, and the microbatches of a copy of the pipeline on the replicas of every stage.

    Args:
        replicas: of the stages.
        num_chunks: model chunks of every stage, Megatron's virtual pipeline size.
        is_u_shaped: stage 0 holds both ends of the model.

    Raises:
        ConfigError: there are several chunks on stages of different data-parallel sizes.

    >>> place_workers(ReplicaMap(dp_sizes=(2, 4)), num_chunks=1, is_u_shaped=False).num_replicas
    (1, 2)
    """
    num_stages = len(replicas.dp_sizes)
    # Split microbatches join all replicas: to the schedule they are one.
    num_replicas = () if replicas.is_split else tuple(map(replicas.num_replicas, range(num_stages)))
    if is_u_shaped:
        return u_placement(num_stages, num_replicas=num_replicas)
    if replicas.is_equal:
        return interleaved_placement(num_stages, num_chunks)
    if num_chunks > 1:
        raise ConfigError(
            f"{num_chunks} model chunks on each stage do not work with --vtp-dp-list "
            f"{','.join(map(str, replicas.dp_sizes))}; use one chunk, or equal data-parallel sizes"
        )
    return plain_placement(num_stages, num_replicas=num_replicas)
