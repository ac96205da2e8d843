"""What stock Megatron can run, as a question of its own."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.tune.search.problem import BatchSplit, LayerRule, SearchProblem


def in_megatron(question: SearchProblem, layers: LayerRule) -> SearchProblem:
    """Ask the same of stock Megatron: every stage has one tensor-parallel size, in Megatron's order.

    Args:
        question: what is asked.
        layers: what its stages may hold.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> speed = Speed(forward_s=(1.0,), backward_s=(2.0,))
    >>> two, one = {1: speed, 2: speed}, {1: speed}
    >>> pools = (NodePool(name="a", rooms=(2,), speeds=two), NodePool(name="b", rooms=(1,), speeds=one))
    >>> shape = BatchSplit(num_replicas=1, num_microbatches=4, micro_batch_size=1, pools=pools)
    >>> asked = in_megatron(SearchProblem(num_layers=1, shapes=(shape,), least_stages=1, most_stages=2), "any")
    >>> [[tuple(pool.speeds) for pool in shape.pools] for shape in asked.shapes]
    [[(1,), (1,)], [(2,), ()]]
    """
    shapes = tuple(
        _of_size(shape, size)
        for shape in question.shapes
        for size in sorted({size for pool in shape.pools for size in pool.speeds})
    )
    return replace(question, shapes=shapes, layers=layers, is_stock=True)


def _of_size(shape: BatchSplit, size: int) -> BatchSplit:
    pools = (
        replace(pool, speeds={own: speed for own, speed in pool.speeds.items() if own == size}) for pool in shape.pools
    )
    return replace(shape, pools=tuple(pools))
