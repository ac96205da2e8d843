"""Plans of heterogeneous clusters, ours and others', as text that both judges read.

A plan is the microbatch size and its stages: `mbs 2: 18 on 8 A100-40 > 8 on 4 V100-16 tp 2 + 1 A100-40`. A stage has
so many layers (as Sailor counts them: the embedding is the first, the head the last) and replicas, each on so many
cards of a kind as `tp` says, one without it. `9,4 on 8 V100-16` are two such stages. Pipelines that share the samples
evenly are joined by ` & `.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

from vtp_plugin.tune.search.evaluate import Candidate


class Replica(NamedTuple):
    """A kind of card, and how many of them share each layer."""

    kind: str
    tp: int


class Stage(NamedTuple):
    """Layers, both ends of the model among them, and replicas."""

    layers: int
    replicas: tuple[Replica, ...]


class Plan(NamedTuple):
    """A microbatch size, and pipelines of stages."""

    micro: int
    pipelines: tuple[tuple[Stage, ...], ...]

    @property
    def micros(self) -> tuple[int, ...]:
        """Samples that a replica of each stage of the first pipeline runs at once: as many in all as on its first."""
        own = self.pipelines[0]
        return tuple(self.micro * len(own[0].replicas) // len(stage.replicas) for stage in own)

    @property
    def has_equal_replicas(self) -> bool:
        """Whether all stages of a pipeline have as many replicas."""
        return all(len({len(stage.replicas) for stage in stages}) == 1 for stages in self.pipelines)


def read_plan(text: str) -> Plan:
    """Read a plan.

    >>> plan = read_plan("mbs 2: 18 on 2 A100-40 > 8 on 1 V100-16 tp 2 + 1 A100-40")
    >>> plan.micro, plan.pipelines[0][1]
    (2, Stage(layers=8, replicas=(Replica(kind='V100-16', tp=2), Replica(kind='A100-40', tp=1))))
    >>> show_plan(plan)
    'mbs 2: 18 on 2 A100-40 > 8 on 1 V100-16 tp 2 + 1 A100-40'
    """
    head, _, rest = text.partition(": ")
    return Plan(int(head.removeprefix("mbs ")), tuple(_read_pipeline(own) for own in rest.split(" & ")))


def _read_pipeline(text: str) -> tuple[Stage, ...]:
    stages = []
    for part in text.split(" > "):
        layers, _, groups = part.partition(" on ")
        replicas: list[Replica] = []
        for group in groups.split(" + "):
            found = re.fullmatch(r"(\d+) (\S+)(?: tp (\d+))?", group.strip())
            assert found is not None, group
            replicas += [Replica(found[2], int(found[3] or 1))] * int(found[1])
        stages += [Stage(int(own), tuple(replicas)) for own in layers.split(",")]
    return tuple(stages)


def show_plan(plan: Plan) -> str:
    """Write a plan."""

    def cards(replicas: tuple[Replica, ...]) -> str:
        groups = [(replica, len([*own])) for replica, own in groupby(replicas)]
        return " + ".join(
            f"{number} {each.kind}" + (f" tp {each.tp}" if each.tp > 1 else "") for each, number in groups
        )

    def pipeline(stages: tuple[Stage, ...]) -> str:
        alike = groupby(stages, key=lambda stage: stage.replicas)
        return " > ".join(f"{','.join(str(stage.layers) for stage in own)} on {cards(each)}" for each, own in alike)

    return f"mbs {plan.micro}: " + " & ".join(map(pipeline, plan.pipelines))


def plan_of(candidate: Candidate) -> Plan:
    """Write what ``search`` chose as a plan: both ends of the model count as layers."""
    stages = []
    for number, (kind, layers) in enumerate(zip(candidate.stage_types, candidate.layers, strict=True)):
        ends = (number == 0) + (number == len(candidate.stage_types) - 1)
        replicas = tuple(Replica(candidate.split.pools[place].name, kind.tp) for place in kind.replica_pools)
        stages.append(Stage(layers + ends, replicas))
    return Plan(candidate.split.micro_batch_size, (tuple(stages),))
