"""Stands for torchair.ge: names for annotations."""


class Tensor:
    """A tensor of a graph."""


class TensorSpec:
    """What a tensor of a graph looks like."""


class DataType:
    """The type of its elements."""
