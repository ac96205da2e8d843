"""How the numbers of two runs are compared: sketches of whole tensors, tolerances from changed references, verdicts.

A *sketch* of a tensor is what a few fixed random vectors give when multiplied with each block of its rows. Those of
the parts of a tensor lie side by side in that of the whole one, so no tensor has to be moved to be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

FACTOR: Final = 10.0
"""So many times what the changed references differ by is taken for rounding."""
EPS: Final = {"fp32": 2.0**-23, "bf16": 2.0**-7}
"""Relative distance of two neighbouring numbers, by type."""
LEAST: Final = 8 * EPS["fp32"]
"""Least tolerance: losses and gradients are added in fp32, and the order of a sum depends on the sizes."""
TOO_LARGE: Final = 0.5
"""With a larger tolerance of the losses, whatever a run computes would be accepted."""
_COARSE: Final = 1e-3
"""A gradient that is known better than to this share has hardly an element whose sign is not known."""
_NO_NUMBER: Final = "nan"


def _value(value: object) -> float:
    """Take a number, or the text that stands for none in JSON.

    Raises:
        ValueError: it is neither.
    """
    if value == _NO_NUMBER:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number or {_NO_NUMBER}")
    return float(value)


def finite(value: Any) -> Any:
    """Write text for what JSON has no number for, in lists and dictionaries of any depth.

    >>> finite({"a": [1.0, math.nan], "b": (math.inf,)})
    {'a': [1.0, 'nan'], 'b': ['nan']}
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return _NO_NUMBER if isinstance(value, float) and not math.isfinite(value) else value


Vector = tuple[Annotated[float, _value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSketch:
    """The sketch of one rank's part of a tensor.

    Attributes:
        values: of the sketch, block by block; those of all parts make up the whole tensor's.
        index: which part it is.
        count: number of parts.
        is_cut: the parts lie side by side; else each rank has the whole tensor.
        noise: norm of what the storage of the values rounds away, in the measure of the sketch.
        norm: of the part itself.
    """

    values: Vector
    index: int = 0
    count: int = 1
    is_cut: bool = False
    noise: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """What one rank saw.

    Attributes:
        logged: losses and gradient norm by step, by name; losses only where they are known.
        batch: digests of the rows of the first step's batch, where this rank has them whole.
        tensors: sketches of parts of tensors in order of execution, by name, by a kind of :func:`kinds`.
        step_s: time of the last step, in seconds.
        link: latency, in seconds, and bytes per second between ranks 0 and 1, where they were timed.
    """

    logged: Mapping[str, Vector] = field(default_factory=dict[str, Vector])
    batch: Vector = ()
    tensors: Mapping[str, Mapping[str, PartSketch]] = field(default_factory=dict[str, Any])
    step_s: float = 0.0
    link: Vector = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a whole run computed.

    Attributes:
        vectors: losses and gradient norms by step, and sketches of whole tensors, by name; tensors in the order in
            which they are computed.
        parts: of each tensor, the ranks that hold a part of it, and the part.
    """

    vectors: Mapping[str, Vector]
    parts: Mapping[str, Sequence[tuple[int, PartSketch]]] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How far a number of a run lies from the reference's.

    Attributes:
        name: of the number or tensor.
        difference: norm of the difference, relative to that of the reference.
        tolerance: of it, see :func:`tolerances`.
    """

    name: str
    difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether it is the same to rounding."""
        return self.difference <= self.tolerance

    @property
    def ratio(self) -> float:
        """The difference in tolerances; not a number, too, is too far."""
        return self.difference / self.tolerance if self.tolerance else math.inf if self.difference else 0.0


def relative_difference(ours: Sequence[float], theirs: Sequence[float], whole: Sequence[float] = ()) -> float:
    """Give the norm of the difference over that of the second; infinite where a number is none, or lengths differ.

    Args:
        ours: a vector.
        theirs: another.
        whole: over whose norm instead, where these are parts of it.

    >>> relative_difference([3.0, 4.5], [3.0, 4.0]), relative_difference([0.0], [0.0])
    (0.1, 0.0)
    >>> relative_difference([math.nan], [1.0]), relative_difference([1.0], [0.0])
    (inf, inf)
    """
    if len(ours) != len(theirs):
        return math.inf
    distance = math.dist(ours, theirs)
    if distance == 0:
        return 0.0
    size = math.hypot(*(whole or theirs))
    return distance / size if math.isfinite(distance) and 0 < size < math.inf else math.inf


START: Final = "start of"
"""The kind of start weights, of which exact digests are kept."""


def kinds(step: int) -> tuple[str, str, str, str]:
    """Name the kinds of tensors of a step, from 1 on, in order of execution.

    They are what modules give out, and the gradients there; gradients of weights before clipping; how much weights have
    changed since the start.

    >>> kinds(1)[0], kinds(2)[0]
    ('output of', "step 2's output of")
    """
    when = f"step {step}'s " if step > 1 else ""
    return (f"{when}output of", f"{when}gradient at", f"{when}gradient of", f"{when}weight")


NORM: Final = "gradient norm"
_EXACT: Final = (START, "batch")
_KIND: Final = re.compile(r"start of|(step \d+'s )?(output of|gradient at|gradient of|weight)(?= )")
_LAYER: Final = re.compile(r"output of (decoder\.layers\.\d+|decoder\.final_layernorm|output_layer)(\.\S+)?$")


def assemble(ranks: Sequence[RankNumbers]) -> Numbers:
    """Put the numbers of a run together from those of its ranks.

    >>> cut = [RankNumbers(tensors={"gradient of": {"w": PartSketch(values=(n,), index=i, count=2, is_cut=True)}})
    ...        for i, n in enumerate((1.0, 2.0))]
    >>> assemble(cut).vectors["gradient of w"]
    (1.0, 2.0)
    """
    parts: dict[str, list[tuple[int, PartSketch]]] = {}
    numbered = list(enumerate(ranks))
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank.tensors):
        found: dict[str, list[tuple[int, PartSketch]]] = {}
        for rank, own in reversed(numbered) if kind.endswith("gradient at") else numbered:
            for name, part in own.tensors.get(kind, {}).items():
                found.setdefault(f"{kind} {name}", []).append((rank, part))
        parts |= dict(reversed(found.items())) if kind.endswith("gradient of") else found
    for name in sorted(dict.fromkeys(name for rank in ranks for name in rank.logged), key=NORM.__eq__):
        parts[name] = [(rank, PartSketch(values=own.logged[name])) for rank, own in numbered if name in own.logged]
    parts = {name: sorted(held, key=lambda one: one[0]) for name, held in parts.items()}
    batch = tuple(sorted({digest for rank in ranks for digest in rank.batch}))
    vectors = {"batch": batch} if batch else {}
    return Numbers(vectors=vectors | {name: _whole(held) for name, held in parts.items()}, parts=parts)


def _whole(held: Sequence[tuple[int, PartSketch]]) -> Vector:
    """Put the parts of a tensor side by side; of copies, in a stage or on another one, the first counts."""
    count = held[0][1].count
    first = {part.index if part.is_cut else 0: part.values for _, part in reversed(held) if part.count == count}
    return tuple(value for _, values in sorted(first.items()) for value in values)


def factor_of(ours: Sequence[float], theirs: Sequence[float], *, tolerance: float = 1e-3) -> float | None:
    """Give the number by which one vector is a multiple of the other; None if it is none.

    >>> factor_of([2.0, 4.0], [1.0, 2.0]), factor_of([2.0, 5.0], [1.0, 2.0])
    (2.0, None)
    """
    square = sum(b * b for b in theirs)
    if len(ours) != len(theirs) or not 0 < square < math.inf:
        return None
    factor = sum(a * b for a, b in zip(ours, theirs, strict=True)) / square
    rest = relative_difference(ours, [factor * b for b in theirs])
    return factor if factor and rest <= tolerance else None


def tolerances(reference: Numbers, changed: Sequence[Numbers]) -> dict[str, float]:
    """Give how far each number may lie from the reference's.

    That is :data:`FACTOR` times what the reference differs by itself when each start weight is changed by a rounding:
    a number that amplifies rounding gets a large tolerance, and one that does not a small one. The change of
    a weight is the difference of two stored numbers, so it is not known better than these are stored; and Adam changes
    a weight by the sign of its gradient, so where that is known to a share r only, as in bf16, a share r / pi of
    the signs may be others. What every run begins with, weights and batch, must be the same to the last bit.

    Args:
        reference: the uniform run.
        changed: the same with changed start weights.

    >>> one, other = (Numbers(vectors={"losses": (x,)}) for x in (1.0, 1.5))
    >>> tolerances(one, [other])
    {'losses': 5.0}
    """
    found = {
        name: 0.0
        if _kind(name) in _EXACT
        else max(
            FACTOR * max((relative_difference(run.vectors.get(name, ()), values) for run in changed), default=0.0),
            LEAST,
            2 * _noise(reference.parts.get(name, ())) / (math.hypot(*values) or 1.0),
        )
        for name, values in reference.vectors.items()
    }
    for name in (name for name in found if _kind(name).endswith("weight")):
        share = found.get(name.replace("weight ", "gradient of ", 1), 0.0)
        found[name] = max(found[name], 2 * math.sqrt(share / math.pi) * (share > _COARSE))
    return found


def _noise(parts: Sequence[tuple[int, PartSketch]]) -> float:
    return math.hypot(*{part.index: part.noise for _, part in parts}.values())


def _norm(parts: Sequence[PartSketch]) -> float:
    """Give the norm of a tensor, which no permutation changes."""
    return math.hypot(*{part.index if part.is_cut else 0: part.norm for part in parts}.values())


def judge(run: Numbers, reference: Numbers, allowed: Mapping[str, float]) -> list[Judged]:
    """Compare all numbers of a run, the worst first; of a tensor that several ranks have, the copy that lies furthest.

    A tensor that only one of them has is infinitely far; but a kind of tensors of which the run has none was not
    recorded, such as gradients that the distributed optimizer cuts.

    >>> one, other = (Numbers(vectors={"losses": (x,)}) for x in (1.0, 1.5))
    >>> judge(other, one, {"losses": 0.1})
    [Judged(name='losses', difference=0.5, tolerance=0.1)]
    """
    recorded = {_kind(name) for name in run.vectors}
    theirs = (name for name in reference.vectors if _kind(name) in recorded)
    names: Iterable[str] = dict.fromkeys([*theirs, *run.vectors])
    found = [
        Judged(
            name=name,
            difference=_furthest(name, run, reference.vectors.get(name, ())),
            tolerance=allowed.get(name, 0.0),
        )
        for name in names
    ]
    return sorted(found, key=lambda one: one.ratio, reverse=True)


def _furthest(name: str, run: Numbers, whole: Vector) -> float:
    """Give the largest difference of a number or tensor, and of each rank's part or copy, relative to the whole."""
    parts = [relative_difference(part.values, _own(part, whole), whole) for _, part in run.parts.get(name, ())]
    return max([relative_difference(run.vectors.get(name, ()), whole), *parts])


def is_loss(name: str) -> bool:
    """Tell whether a number was logged by a script, and is no gradient norm.

    >>> [name for name in ("batch", "lm loss", "gradient norm", "weight w") if is_loss(name)]
    ['lm loss']
    """
    return _kind(name) == name and name not in (NORM, "batch")


def _kind(name: str) -> str:
    found = _KIND.match(name)
    return found[0] if found else name


def layer_of(name: str) -> str:
    """Name the layer that gives out a tensor, or inside which one arises; empty for gradients, and other modules.

    >>> [layer_of(name) for name in ("output of decoder.layers.3.mlp.linear_fc2", "output of output_layer", "weight w")]
    ['decoder.layers.3', 'output_layer', '']
    """
    found = _LAYER.match(name)
    return found[1] if found else ""


def first_fault(run: Numbers, reference: Numbers, found: Iterable[Judged]) -> str:
    """Describe the first tensor in order of execution that differs: on which ranks, and by which factor.

    Behind it, the first weight whose gradient is a multiple of what it should be: that has a cause of its own.

    Args:
        run: the run.
        reference: the uniform one.
        found: what :func:`judge` gave.

    Returns:
        A line; empty if all are the same to rounding.

    >>> parts = [PartSketch(values=(x, x)) for x in (1.0, 2.0)]
    >>> one, other = (assemble([RankNumbers(tensors={"gradient of": {"w": part}})]) for part in parts)
    >>> first_fault(other, one, judge(other, one, {"gradient of w": 0.1}))
    'gradient of w is 2 times that of the uniform run on rank 0'
    """
    wrong = {one.name: one for one in found if not one.is_equal}
    name = first_wrong(wrong, reference)
    if not name:
        return ""
    own = [_described(one, wrong[one].tolerance, run, reference) for one in reference.parts if one in wrong]
    scaled = next((line for line in own if line.startswith("gradient of") and " times " in line), "")
    line = _described(name, wrong[name].tolerance, run, reference)
    return f"{line}; {scaled}" if scaled and " times " not in line else line


def _described(name: str, tolerance: float, run: Numbers, reference: Numbers) -> str:
    """Say how a tensor differs."""
    whole, held = reference.vectors.get(name, ()), run.parts.get(name, ())
    if _kind(name) in _EXACT:
        differing = [str(rank) for rank, part in held if _differs(part, _own(part, whole), 0.0)]
        where = f" on rank{'s'[: len(differing) != 1]} {', '.join(differing)}" if differing else ""
        return f"{name} is not what the uniform run began with{where}"
    if not whole or not held or name not in run.vectors:
        return f"{name} differs" if whole and name in run.vectors else f"{name} is missing in one of the runs"
    faults = {rank: (part, wanted) for rank, part in held if _differs(part, wanted := _own(part, whole), tolerance)}
    where = f"on rank{'s'[: len(faults) != 1]} {', '.join(map(str, faults))}"
    if any(not math.isfinite(value) for part, _ in faults.values() for value in part.values):
        return f"{name} has infinite numbers or NaN {where}"
    factors = {factor_of(part.values, wanted, tolerance=max(tolerance, 1e-3)) for part, wanted in faults.values()}
    texts = {None if factor is None else f"{factor:.4g}" for factor in factors}
    if len(texts) == 1 and not texts & {None, "1"}:
        return f"{name} is {texts.pop()} times that of the uniform run {where}"
    parts = [part for part, _ in faults.values()]
    sums = tuple(map(sum, zip(*(part.values for part in parts), strict=True)))
    if not any(part.is_cut for part in parts) and relative_difference(sums, whole) <= max(tolerance, 1e-3):
        return f"{name} is one rank's share {where}: a sum over these ranks is left out"
    own, theirs = (_norm([part for _, part in run_of.parts[name]]) for run_of in (run, reference))
    is_moved = theirs > 0 and relative_difference([own], [theirs]) <= max(tolerance, LEAST)
    return f"{name} differs {where}, {'as if in another order' if is_moved else 'by no single factor'}"


def first_wrong(wrong: Collection[str], reference: Numbers) -> str:
    """Give the first of some names in order of execution; of weights, which change all at once, the worst.

    Args:
        wrong: names of what differs, the worst first.
        reference: the uniform run, which has them in order.
    """
    first = next((name for name in ("batch", *reference.parts, *wrong) if name in wrong), "")
    return (
        next((name for name in wrong if _kind(name) == _kind(first)), "") if _kind(first).endswith("weight") else first
    )


def _own(part: PartSketch, whole: Vector) -> Vector:
    """Give what a part should be, of the whole tensor; an empty one if blocks and parts do not fit together."""
    size = len(whole) // part.count
    return whole[part.index * size : (part.index + 1) * size] if part.is_cut else whole


def _differs(part: PartSketch, wanted: Vector, tolerance: float) -> bool:
    return relative_difference(part.values, wanted) > tolerance
