"""Compares two checkpoints tensor by tensor, whatever layout each was saved in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from vtp_plugin.checkpoint.format.checkpoint_files import itemsize
from vtp_plugin.checkpoint.format.contents import MASTER, WEIGHT, Contents, Part, Whole, pairs
from vtp_plugin.checkpoint.load.stored_optimizer import Elements, slabs, typed
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box

Key = tuple[str, str]
"""State and name of a parameter."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """How a tensor of one checkpoint compares with that of another.

    Attributes:
        state: name of the state: weight, master weight or moment.
        name: name of the parameter.
        is_equal: whether both are equal to the last bit.
        problem: why they cannot be compared element by element; None if they can.
        relative: the largest difference of two elements, over the largest absolute value of either tensor.
    """

    state: str
    name: str
    is_equal: bool
    problem: str | None = None
    relative: float = 0.0


class Comparison:
    """Two checkpoints.

    Args:
        a: the first.
        b: the second.
        is_weights_only: whether the optimizers are left out.

    Attributes:
        keys: state and name of everything that one of them holds, in the order in which it is compared.

    Raises:
        ConfigError: they have nothing in common, or the optimizer of one cannot be read by name.
    """

    def __init__(self, a: Contents, b: Contents, *, is_weights_only: bool) -> None:
        self._sides = tuple((_wholes(side, is_weights_only=is_weights_only), Elements(side.folder)) for side in (a, b))
        (ours, _), (theirs, _) = self._sides
        if not any(state == WEIGHT for state, _ in ours.keys() & theirs.keys()):
            raise ConfigError(
                f"{a.folder} and {b.folder} have no parameter in common; only checkpoints of one model can be "
                "compared; give two of them"
            )
        # Where the weights are float32, a plain optimizer has no copies of them.
        self._complete_masters(a, ours, theirs)
        self._complete_masters(b, theirs, ours)
        known = dict.fromkeys((*ours, *theirs))
        order = dict.fromkeys((WEIGHT, MASTER, *(state for state, _ in known)))
        self.keys = [key for state in order for key in known if key[0] == state]

    def __iter__(self) -> Iterator[ComparedTensor]:
        return map(self._compare, self.keys)

    @staticmethod
    def _complete_masters(side: Contents, own: dict[Key, Whole], other: Mapping[Key, Whole]) -> None:
        if side.form is not None and not any(state == MASTER for state, _ in own):
            own.update({key: own[WEIGHT, key[1]] for key in other if key[0] == MASTER and (WEIGHT, key[1]) in own})

    def _compare(self, key: Key) -> ComparedTensor:
        (ours, ours_read), (theirs, theirs_read) = self._sides
        found = _Found(_unlike(a := ours.get(key), b := theirs.get(key)))
        if found.problem is None:
            assert a is not None and b is not None
            common, found.problem = pairs(a, b)
            for of_a, of_b, box in common:
                found.add(ours_read, of_a, theirs_read, of_b, box)
        state, name = key
        is_equal = found.is_equal and found.problem is None
        return ComparedTensor(state=state, name=name, is_equal=is_equal, problem=found.problem, relative=found.relative)


def _unlike(a: Whole | None, b: Whole | None) -> str | None:
    """Say why two tensors have no common elements at all."""
    if a is None or b is None:
        return f"only in {'B' if a is None else 'A'}"
    return None if a.shape == b.shape else f"{a.shape} in A, {b.shape} in B"


class _Found:
    """The result of comparing two tensors, after some of their elements.

    Args:
        problem: why no elements can be compared.
    """

    def __init__(self, problem: str | None) -> None:
        self.is_equal = True
        self.problem = problem
        self._difference = self._value = 0.0

    @property
    def relative(self) -> float:
        return self._difference / self._value if self._value else self._difference

    def add(self, ours: Elements, of_a: Part, theirs: Elements, of_b: Part, box: Box) -> None:
        """Compare a box that both have."""
        dtypes = ours.dtype(of_a), theirs.dtype(of_b)
        if dtypes[0] != dtypes[1]:
            self.problem = f"{dtypes[0]} in A, {dtypes[1]} in B"
        for inner in slabs(box, max(dtypes, key=itemsize)):
            data = ours.read(of_a, inner), theirs.read(of_b, inner)
            is_equal = self.problem is None and torch.equal(*data)
            self.is_equal &= is_equal
            a, b = (typed(each, dtype) for each, dtype in zip(data, dtypes, strict=True))
            self._value = max(self._value, _largest(a), _largest(b))
            if not is_equal:
                self._difference = max(self._difference, _difference(a, b))


def _largest(values: torch.Tensor) -> float:
    """Return the largest absolute value that is finite."""
    low, high = (float(each) for each in torch.aminmax(values.float().nan_to_num(0.0, 0.0, 0.0)))
    return max(abs(low), abs(high))


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference of elements that are not the same bits; infinite where one is no finite number."""
    if a.dtype == b.dtype:
        bits = _BITS[a.element_size()]
        is_other = a.view(bits) != b.view(bits)
        a, b = a[is_other], b[is_other]
    found = (a.double() - b.double()).abs().nan_to_num(math.inf)
    return float(found.max()) if found.numel() else 0.0


def _wholes(side: Contents, *, is_weights_only: bool) -> dict[Key, Whole]:
    weights = {(WEIGHT, name): whole for name, whole in side.weights().items()}
    return weights if is_weights_only else weights | side.states()
