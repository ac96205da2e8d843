"""The replicas of the pipeline that this rank works in, and which of them a call means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.step.communicator import PipelineCommunicator
from vtp_plugin.session import Session

Group = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None
Ranks = int | Sequence[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica of the pipeline, as this rank sees it.

    Attributes:
        ranks: global ranks of this rank's pipeline group in the replica.
        next_ranks: leader of the next stage, then the member of that stage in this rank's pipeline group: what
            Megatron's query gives a rank that leads no stage. After the last stage comes the first.
        prev_ranks: leader and group member of the previous stage; before the first stage comes the last.
        communicator: communicator of the replica.
    """

    ranks: list[int]
    next_ranks: tuple[int, int]
    prev_ranks: tuple[int, int]
    communicator: PipelineCommunicator


def replicas_of(session: Session) -> list[Replica]:
    """List them in the order of the session's pipeline groups."""
    layout, own = session.planned.layout, session.planned.own
    replicas: list[Replica] = []
    for group in session.running.pipeline_groups:
        ranks = dist.get_process_group_ranks(group)
        places = {coord.stage: coord for coord in map(layout.coord, ranks)}
        peers = {layout.stage_of(rank): rank for rank in ranks}
        ends: list[tuple[int, int]] = []
        for step in (1, -1):
            place = places[(own.stage + step) % layout.num_stages]
            ends.append((layout.leader(place.stage, place.dp_rank, place.cp_rank), peers[place.stage]))
        communicator = next(one for one in session.running.communicators if _joins(one, ranks))
        replicas.append(Replica(ranks=ranks, next_ranks=ends[0], prev_ranks=ends[1], communicator=communicator))
    return replicas


def _joins(communicator: PipelineCommunicator, ranks: Sequence[int]) -> bool:
    """Tell whether a communicator leads to the neighbours among the ranks of a pipeline group."""
    endpoints = [communicator.channel(name).spec.src for name in ("recv_prev",) if communicator.reaches(name)]
    endpoints += [communicator.channel(name).spec.dst for name in ("send_next",) if communicator.reaches(name)]
    return all(not set(endpoint.ranks).isdisjoint(ranks) for endpoint in endpoints)


def choose_communicators(
    session: Session, operations: Sequence[str], *, group: Group, next_rank: Ranks, prev_rank: Ranks
) -> list[PipelineCommunicator]:
    """Return the communicator of each replica that is meant, in the given order.

    Args:
        session: session of a run whose channels are open.
        operations: operations of the call, such as ``send_next``.
        group: pipeline groups of this rank; None leaves the choice to the other arguments.
        next_rank: leaders of the next stage; None leaves the choice to the other arguments.
        prev_rank: leaders of the previous stage; None leaves the choice to the other arguments.

    Raises:
        ConfigError: there is no such neighbour, group or leader, they do not agree, or none is given and there are
            several replicas.
    """
    chosen = _chosen(session, operations, {"group": group, "next_rank": next_rank, "prev_rank": prev_rank})
    for operation in operations:
        if not chosen[0].reaches(operation):
            verb, _, neighbour = operation.partition("_")
            what = f"{'send to' if verb == 'send' else 'receive from'} the {neighbour}"
            raise ConfigError(
                f"stage {session.planned.own.stage} cannot {what} stage: there is none; only "
                "--layerwise-disaggregated-training joins the last stage and the first"
            )
    return chosen


def _chosen(session: Session, operations: Sequence[str], keywords: dict[str, Any]) -> list[PipelineCommunicator]:
    given: dict[str, list[Any]] = {
        name: list(value) if isinstance(value, Sequence) else [value]
        for name, value in keywords.items()
        if value is not None
    }
    if not given and len(session.running.communicators) == 1:
        return [*session.running.communicators]
    replicas = replicas_of(session)
    if not given:
        raise ConfigError(f"no group was given: {_own_groups(replicas)}")
    if len(lengths := {name: len(values) for name, values in given.items()}) > 1 and len({*lengths.values()}) > 1:
        raise ConfigError(f"lists of the lengths {lengths}; each names the same replicas of the pipeline in one order")
    rows = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    indexes = [_index_of(replicas, row, operations) for row in rows]
    if not indexes or len(set(indexes)) < len(indexes):
        raise ConfigError(f"the groups name the replicas {indexes}; name each that is meant once")
    return [replicas[index].communicator for index in indexes]


def _index_of(replicas: Sequence[Replica], row: dict[str, Any], operations: Sequence[str]) -> int:
    """Return the number of the replica that a group and ranks name together."""
    found: list[set[int]] = []
    for name, value in row.items():
        if name == "group":
            ranks = dist.get_process_group_ranks(value)
            fits = {i for i, one in enumerate(replicas) if one.ranks == ranks}
            problem = f"the ranks {ranks} are not such a group: {_own_groups(replicas)}"
        else:
            ends = [one.next_ranks if name == "next_rank" else one.prev_ranks for one in replicas]
            fits = {i for i, ranks in enumerate(ends) if value in ranks}
            stage = "next" if name == "next_rank" else "previous"
            leaders = sorted({ranks[0] for ranks in ends})
            problem = f"{name}={value} does not lead the {stage} stage; give a leader of {leaders}, or leave it out"
        if not fits:
            raise ConfigError(problem)
        found.append(fits)
    fitting = sorted(set.intersection(*found))
    shown = {name: dist.get_process_group_ranks(one) if name == "group" else one for name, one in row.items()}
    if not fitting:
        raise ConfigError(f"{shown} name different replicas of the pipeline; name the same, or leave one out")
    ends = [replicas[index].communicator for index in fitting]
    ways = {tuple(one.channel(name).spec.name for name in operations if one.reaches(name)) for one in ends}
    if len(ways) > 1:
        raise ConfigError(f"{shown} fit several replicas of the pipeline; {_own_groups(replicas)}")
    return fitting[0]


def _own_groups(replicas: Sequence[Replica]) -> str:
    ranks = [one.ranks for one in replicas]
    return f"this rank's pipeline groups are those of the ranks {ranks}; use pipeline_groups()"
