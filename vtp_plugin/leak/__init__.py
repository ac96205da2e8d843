"""How much of a text can be read from what crosses a cut: attacks on a small model, and on recorded states.

Words:
    cut: the boundary behind so many layers; its states cross from the edge to the cloud.
    share: how many of the held-out tokens an attack names right, from 0 to 1.
"""
