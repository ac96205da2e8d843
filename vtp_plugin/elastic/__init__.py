"""A run that loses cards: try them, remember them, decide on a layout, join the run or wait outside it.

Words:
    card: one device of a rank; it is tried before every start.
    memory: the file beside the checkpoint that says which cards failed.
    marker: the file beside it that says what no restart cures.
    progress: how far a run came, and what was lost when it ended early.
    spare: a rank that the layout does without; it waits until the run ends.
"""
