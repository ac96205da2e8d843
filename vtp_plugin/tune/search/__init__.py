"""Which list of sizes is best on nodes whose cards differ, from what layers cost on them: pure functions.

``problem`` states the search problem: numbers alone, and the objective, the shortest step or the most cards used.
``find_best`` solves it. A ``SearchSpace`` is the problem with one split of its batch; all others are asked about one:
``enumerate_lists`` enumerates the lists that the cards allow and prunes them by lower bounds, ``layer_split`` splits
the layers between the stages of a list, ``node_assignment`` assigns nodes, ``stage_cost`` gives the cost of a stage and
of a boundary with each transport, and says what fits the memory (``fits_memory``), and ``evaluate`` simulates the step,
by the times of ``schedule_time``, which also orders stages and states the problem of Megatron without the plugin.
``fixed_edge`` makes spaces of a U's clouds.

Words:
    pool: nodes that are alike: one site, one kind of card.
    stage type: a stage without its layers: the pools of its replicas, its tensor-parallel size.
    split: how the samples of a step are shared out: replicas, microbatches and their size.
    source: of a time: measured, fitted to what was measured, or from a data sheet.
    bound: a lower bound: no step of a list, or with given layers, is shorter.
    candidate: a layout with its simulated step.
"""
