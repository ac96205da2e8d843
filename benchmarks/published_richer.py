"""What a search of a richer space would find: a bound on what others' plans have that ``search`` does not look for.

Replicas need not divide the samples of a step: the last microbatch is one that some of them lack, as Sailor has it
(with up to 64 cards, else the search takes too long). And stages may have replicas of their own: cards that share each
layer of a microbatch may instead share its samples, as Metis has it, and a run with `--vtp-dp-list` and
`--vtp-dp-mode split`. Each kind of card does what is quicker there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.published_cluster import Artifact, held_bytes
from benchmarks.published_plans import Plan, Replica, Stage
from vtp_plugin.tune.cluster.read_cluster import HeldBytes, HeldPart
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem

# With more only numbers of replicas count that divide the samples.
_MOST_CARDS = 64


class Richer:
    """A search problem in which cards share samples where that is quicker.

    Args:
        artifact: what was read of the checkout.
        problem: the problem of ``search``.

    Attributes:
        problem: the problem in the richer space.
    """

    def __init__(self, artifact: Artifact, problem: SearchProblem) -> None:
        self._artifact = artifact
        splits = {split.micro_batch_size: split for split in problem.splits}
        self._speeds = {
            (size, pool.name, tp): speed
            for size, split in splits.items()
            for pool in split.pools
            for tp, speed in pool.speeds.items()
        }
        cards = sum(sum(pool.cards_per_node) for pool in next(iter(splits.values())).pools)
        batch = artifact.training["global_batch_size"]
        self.problem = replace(
            problem,
            splits=tuple(
                self._batch_split(split, replicas, math.ceil(batch / (size * replicas)))
                for size, split in splits.items()
                for replicas in range(1, cards + 1)
                if cards <= _MOST_CARDS or batch % (size * replicas) == 0
            ),
        )

    def _ways(self, size: int, kind: str, width: int) -> list[tuple[float, int, Speed]]:
        """List what so many cards take for a microbatch, the quickest first, as how many replicas, and all costs."""
        found = []
        for parts in range(1, width + 1):
            speed = self._speeds.get((size // parts, kind, width // parts))
            if speed is not None and not width % parts and not size % parts:
                found.append((sum(speed.forward_s) + sum(speed.backward_s), parts, speed))
        return sorted(found, key=lambda way: way[:2])

    def _batch_split(self, split: BatchSplit, replicas: int, num_microbatches: int) -> BatchSplit:
        pools = tuple(self._pool(split.micro_batch_size, replicas, pool) for pool in split.pools)
        return replace(
            split,
            num_replicas=replicas,
            num_microbatches=num_microbatches,
            pools=pools,
            held_bytes=self._held(split.micro_batch_size, pools),
        )

    def _pool(self, size: int, replicas: int, pool: NodePool) -> NodePool:
        speeds = {}
        for width in range(1, max(pool.cards_per_node) + 1):
            for _, parts, speed in self._ways(size, pool.name, width)[:1]:
                number = replicas * parts
                # More replicas sum more of a tensor.
                share = (1 - 1 / number) / (1 - 1 / replicas) if replicas > 1 else 1.0
                speeds[width] = replace(speed, gradient_bytes=tuple(round(share * own) for own in speed.gradient_bytes))
        return replace(pool, speeds=speeds)

    def _held(self, size: int, pools: tuple[NodePool, ...]) -> HeldBytes:
        """Count the fuller of the ways that are taken."""
        widths = {(pool.name, width) for pool in pools for width in pool.speeds}
        parts = {(width, self._ways(size, kind, width)[0][1]) for kind, width in widths}
        rules = {number: held_bytes(self._artifact, size // number) for _, number in parts}

        def held(part: HeldPart) -> int:
            own_parts = (number for own, number in parts if own == part.tp)
            return max(rules[number](part._replace(tp=part.tp // number)) for number in own_parts)

        return held

    def plan_of(self, candidate: Candidate) -> Plan:
        """Write what was chosen as a plan: with the replicas, and the microbatch size, of each stage."""
        size, pools = candidate.split.micro_batch_size, candidate.split.pools
        stages, firsts = [], []
        for number, (stage_type, layers) in enumerate(zip(candidate.stage_types, candidate.layers, strict=True)):
            ends = (number == 0) + (number == len(candidate.stage_types) - 1)
            names = [pools[pool_index].name for pool_index in stage_type.replica_pools]
            parts = [self._ways(size, name, stage_type.tp)[0][1] for name in names]
            replicas = [
                Replica(name, stage_type.tp // own) for name, own in zip(names, parts, strict=True) for _ in range(own)
            ]
            stages.append(Stage(layers + ends, tuple(replicas)))
            firsts.append(parts[0])
        return Plan(size // firsts[0], (tuple(stages),))
