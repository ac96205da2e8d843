"""Bridges between modules with grids of their own, on ranks apart or on the same ones.

Words:
    axes: in which order a module has the dimensions of what crosses (``BatchAxes``).
    colocated: between modules on the same ranks; the others are between modules on ranks of their own.
"""
