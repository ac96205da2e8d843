"""Bridges between modules with grids of their own, on ranks apart or on the same ones.

Words:
    axes: the order in which a module has the dimensions of the tensor that crosses (``BatchAxes``).
    colocated: between modules on the same ranks; the others are between modules on ranks of their own.
"""
