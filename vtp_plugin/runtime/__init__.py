"""The only code that communicates: it carries out finished plans of the pure packages.

Four rooms, the lowest first; each may import those before it:

* ``life``: how ranks live together. They meet, compare what they were asked for, watch each other, end with one line.
* ``wire``: how one tensor crosses.
* ``bridges``: how tensors cross between modules with grids of their own.
* ``step``: how one training step runs.
"""
