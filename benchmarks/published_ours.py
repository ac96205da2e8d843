"""This project's simulator as a judge of plans, also of those that no run of it could have.

A stage's replicas may be on several kinds of cards and have several sizes: it waits for the slowest. Stages may have
different numbers of replicas: one with half as many runs twice as large microbatches (`--vtp-dp-mode split`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published_cluster import Artifact
from benchmarks.published_plans import Plan, Stage
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.evaluate import evaluate
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem, SearchSpace, StageType


def samples_per_s(artifact: Artifact, problem: SearchProblem, plan: Plan) -> float | None:
    """Judge a plan; None if a size was not timed.

    Args:
        artifact: Sailor's artifact as it was read.
        problem: the problem of ``search`` for the same cards.
        plan: the plan to evaluate; pipelines that share the samples end together.
    """
    batch = artifact.training["global_batch_size"]
    steps = [_step_s(problem, plan, stages, batch) for stages in plan.pipelines]
    return None if None in steps else float(batch / max(step for step in steps if step is not None))


def _step_s(problem: SearchProblem, plan: Plan, stages: Sequence[Stage], batch: int) -> float | None:
    """Give the step of the slowest chain of replicas, one of each stage."""
    most = max(len(stage.replicas) for stage in stages)
    # All are taken to sum over as many as the stages with most replicas have: shares make up for it.
    replicas = most * len(plan.pipelines)
    sizes = plan.micros if len(plan.pipelines) == 1 else (plan.micro,) * len(stages)
    size = max(sizes)
    of_size = {split.micro_batch_size: split for split in problem.splits}
    if not all(own in of_size for own in sizes):
        return None
    ends = (0, len(stages) - 1)
    layers = [stage.layers - sum(number == end for end in ends) for number, stage in enumerate(stages)]
    steps = []
    for chain in {tuple(stage.replicas[number % len(stage.replicas)] for stage in stages) for number in range(most)}:
        pools = []
        for number, (stage, own, each) in enumerate(zip(stages, sizes, chain, strict=True)):
            known = {pool.name: pool.speeds for pool in of_size[own].pools}
            if any(one.tp not in known[one.kind] for one in stage.replicas):
                return None
            members = len(stage.replicas) * len(plan.pipelines)
            share = _ring_share(members) / (_ring_share(replicas) or 1.0)
            latency_share = (members - 1) / max(1, replicas - 1)
            largest = max((known[kind][tp].gradient_bytes for kind, tp in stage.replicas), key=sum)
            speed = replace(known[each.kind][each.tp], gradient_bytes=tuple(round(share * one) for one in largest))
            pools.append(_pool(of_size[own], str(number), stage, each.tp, speed, replicas, latency_share))
        split = replace(
            of_size[size],
            num_replicas=replicas,
            num_microbatches=math.ceil(batch / (plan.micro * len(stages[0].replicas) * len(plan.pipelines))),
            pools=tuple(pools),
            held_bytes=None,
        )
        stage_types = [StageType((number,) * replicas, each.tp) for number, each in enumerate(chain)]
        candidate = evaluate(SearchSpace.of(problem, split), stage_types, layers)
        steps.append(math.inf if candidate is None else candidate.step_s)
    return max(steps)


def _ring_share(number: int) -> float:
    """Say how much of a tensor a rank sends to sum it, in each half."""
    return (number - 1) / number


def _pool(
    split: BatchSplit, name: str, stage: Stage, tp: int, speed: Speed, replicas: int, latency_share: float
) -> NodePool:
    """Give a stage cards of its own, as far from others as any; the slowest link of its kinds of cards counts.

    They are one node, so that its replicas sum over links whose latency is that of as many as there are.
    """
    kinds = {each.kind for each in stage.replicas}
    links = [pool.between for pool in split.pools if pool.name in kinds]
    link = max(links, key=lambda link: link.time_s(split.message_bytes))
    ring = replace(link, latency_s=link.latency_s * latency_share)
    return NodePool(name=name, cards_per_node=(tp * replicas,), speeds={tp: speed}, inside=ring, between=link)
