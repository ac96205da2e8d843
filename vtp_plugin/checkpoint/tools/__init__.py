"""Tools that compare and rewrite checkpoints without a run: one process, on CPUs, without process groups.

What needs no tensors, such as reading an index, is in ``vtp_plugin/checkpoint/format``. No more than some slabs are in
memory.

Words:
    slab: elements of a box that are read at once.
    state: weight, master weight or moment of a parameter.
"""
