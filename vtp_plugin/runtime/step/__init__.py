"""How one step runs: channels, the executor, what is measured, tied weights and sums of gradients.

Words:
    stage channel: a channel or a bridge that knows how its tensors cross; it posts, sends, takes (``StageChannel``).
    inputs: what a forward takes, one tensor or several (``Inputs``).
    companion: a tensor of a batch that later stages need, which crosses before the activation (``Companion``).
    report: figures that a rank has measured, for all ranks (``Report``).
"""
