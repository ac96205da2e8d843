"""The strategies by which a boundary can be crossed, and the choice between them. Pure: no torch, no processes.

``known_strategies`` says what a strategy is, lists those that there are, and chooses one for each boundary. ``leaders``
and ``slices`` hold their planners and promises; ``in_place`` plans between two shardings over the same ranks, which no
user asks for, so it has no row.

A new strategy is a module here, with its planner and its promise, and a row in ``known_strategies``.

Words:
    planner: makes a plan from two shardings (``Planner``).
    promise: what the links of a planner's plans may carry (``Promise``).
    offered: what `--vtp-transport` takes; its row says what the help says of it.
    rival: tried at the start of a run beside the strategy that the rules choose, if nothing else decides.
"""
