"""Checkpoints as they lie on disk.

Words:
    iteration: step after which a checkpoint was saved, as its folder says.
    tracker: the file that names the newest iteration.
    damaged: a file that cannot hold what was written; cut off where its end is missing.
"""
