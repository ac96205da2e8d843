"""How one step runs: links, the executor, what is measured, tied weights and sums of gradients.

Words:
    link: a channel or a bridge that knows how its tensors cross; its verbs are post, send and take (``Link``).
    inputs: what a forward takes, one tensor or several (``Inputs``).
    companion: what of a microbatch crosses into the cloud before its activation (``Companion``).
    report: what a rank has measured, for all (``Report``).
"""
