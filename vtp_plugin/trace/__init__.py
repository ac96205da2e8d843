"""Traces: what the ranks of a run did and when, compared with the plan; data and functions, no torch.

Words:
    cause: what a rank spends its time on, such as a forward or a wait (``Cause``).
    stretch: a piece of a rank's time with one cause, from a start to an end (``Stretch``).
    trace: the stretches of some steps, of all ranks, on one clock (``Trace``).
"""
