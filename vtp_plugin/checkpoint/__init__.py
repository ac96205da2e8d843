"""Checkpoints as they lie on disk.

Words:
    iteration: step after which a checkpoint was saved, as its folder says.
    tracker: the file that names the newest iteration.
    damaged: a file that cannot hold what was written; cut off where its end is missing.
    whole parameter: as one rank alone would hold it, with the name and the shape that every layout gives it.
    part: what a rank holds of it; its shard (``ShardSpec``) says which blocks that is.
    bucket: parts that the distributed optimizer stores one behind another, as one flat tensor for every state.
    piece: a range of a bucket that lies together in a file; the bytes there are its extent.
    map: which part lies where in which bucket.

Whatever makes a checkpoint does so in ``with whole_folder(DIR / "iter_0000100") as folder`` of
:mod:`vtp_plugin.checkpoint.save.atomic_dir`: it is there with its manifest, synced, or not at all.
"""
