"""The only code that communicates: it carries out finished plans of the pure packages.

Four packages, the lowest first; each may import those before it:

* ``health``: ranks meet, compare what they were asked for, watch each other, and end with one line.
* ``comm``: how one tensor crosses.
* ``bridges``: how tensors cross between modules with grids of their own.
* ``step``: how one training step runs.
"""
