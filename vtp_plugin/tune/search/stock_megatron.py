"""The search problem of stock Megatron."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.tune.search.problem import BatchSplit, LayerRule, SearchProblem


def in_megatron(problem: SearchProblem, layers: LayerRule) -> SearchProblem:
    """Give the same problem for stock Megatron: one tensor-parallel size for all stages, in Megatron's order.

    Args:
        problem: the search problem.
        layers: how many layers its stages may hold.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> speed = Speed(forward_s=(1.0,), backward_s=(2.0,))
    >>> two, one = {1: speed, 2: speed}, {1: speed}
    >>> new = NodePool(name="a", cards_per_node=(2,), speeds=two)
    >>> old = NodePool(name="b", cards_per_node=(1,), speeds=one)
    >>> split = BatchSplit(num_replicas=1, num_microbatches=4, micro_batch_size=1, pools=(new, old))
    >>> stock = in_megatron(SearchProblem(num_layers=1, splits=(split,), least_stages=1, most_stages=2), "any")
    >>> [[tuple(pool.speeds) for pool in split.pools] for split in stock.splits]
    [[(1,), (1,)], [(2,), ()]]
    """
    splits = tuple(
        _of_size(split, size)
        for split in problem.splits
        for size in sorted({size for pool in split.pools for size in pool.speeds})
    )
    return replace(problem, splits=splits, layers=layers, is_stock=True)


def _of_size(split: BatchSplit, size: int) -> BatchSplit:
    pools = (
        replace(pool, speeds={own: speed for own, speed in pool.speeds.items() if own == size}) for pool in split.pools
    )
    return replace(split, pools=tuple(pools))
