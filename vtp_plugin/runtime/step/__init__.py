"""How one step runs: links, the executor, what is measured, tied weights and sums of gradients.

Words:
    link: a channel or a bridge that knows how its tensors cross; its verbs are post, send and take (``Link``).
    inputs: what a forward takes, one tensor or several (``Inputs``).
    lengths: of packed samples in a row, which cross before its activation (``Lengths``).
    report: what a rank has measured, for all (``Report``).
"""
