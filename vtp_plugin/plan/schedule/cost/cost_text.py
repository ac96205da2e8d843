"""Costs as users write them and as a run prints them; costs from the measurements of many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.placement import Placement

_BYTES_PER_MS = 125.0  # 1 Mbit/s
_MOST_MBIT = 1e6  # faster than any link, so it means no limit
_EXAMPLE = "forward_ms=40,80,40 latency_ms=20"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What the key of a `name=value` cost means, for people.

    Attributes:
        unit: Unit of its numbers.
        meaning: What its numbers are, how many there are, and the default.
    """

    unit: str
    meaning: str


COST_KEYS: Mapping[str, CostKey] = MappingProxyType(
    {
        "forward_ms": CostKey(
            unit="milliseconds",
            meaning="forward of one microbatch, one number for each part of the model in its order; of a U that is the "
            "edge's first part, every cloud stage, the edge's last part (of two rings the edge's next part, every "
            "cloud stage and the edge's last part follow); must be given",
        ),
        "backward_ms": CostKey(unit="milliseconds", meaning="its backward, likewise; default twice the forward"),
        "weights_ms": CostKey(
            unit="milliseconds",
            meaning="the part of its backward that is for the gradients of weights, likewise; it counts with "
            "--vtp-split-backward alone; default half of it",
        ),
        "latency_ms": CostKey(
            unit="milliseconds",
            meaning="one way, from each part to the next; or one number for the links of the edge; default 0",
        ),
        "mbit": CostKey(
            unit="Mbit/s", meaning="bandwidth of the same links, written likewise; default, and from 1e6 on, no limit"
        ),
        "message_kib": CostKey(
            unit="KiB", meaning="size of an activation, one number, or one for each link; default as in the run"
        ),
    }
)
"""The words of :func:`parse_costs`, in the order in which they are printed."""


def parse_costs(words: Sequence[str], placement: Placement, *, message_bytes: int | None = None) -> Costs:
    """Read costs; times in the result are in ms.

    Args:
        words: `name=value,value,...` each:
            `forward_ms`: duration of a microbatch's forward, by virtual stage; the only one that must be there;
            `backward_ms`: of its whole backward, likewise; default twice the forward;
            `weights_ms`: of that the gradients of weights, likewise; default half;
            `latency_ms`: one way, from each virtual stage to the next, or one number for the links from and to stage 0;
            `mbit`: bandwidth of these links in Mbit/s, written likewise; default, and from 1e6 on, no limit;
            `message_kib`: size of an activation in KiB; one number, or one from each virtual stage to the next.
        placement: Which stage holds which virtual stage.
        message_bytes: Size of an activation where the words do not say it; None if it is not known.

    Raises:
        ConfigError: A name is unknown or repeated, a value is not a number, or the count of values is wrong.

    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> costs = parse_costs(("forward_ms=40,80,90,40", "latency_ms=20", "mbit=100", "message_kib=256"), u_placement(3))
    >>> costs.backward, costs.latency, costs.bandwidth
    ((80.0, 160.0, 180.0, 80.0), (20.0, 0.0, 20.0), (12500.0, inf, 12500.0))
    """
    values: dict[str, tuple[float, ...]] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in COST_KEYS or name in values:
            names = ", ".join(f"{key}=" for key in COST_KEYS)
            raise ConfigError(f"costs: {word!r} is not one of {names}, each at most once; write {_EXAMPLE}")
        values[name] = _numbers(name, text)
    num_vstages = placement.num_vstages
    forward = _entries(values, "forward_ms", num_vstages, "virtual stages")
    twice = tuple(2 * duration for duration in forward)
    bandwidth = _by_link(values, "mbit", placement, nothing=math.inf)
    message_kib = values.get("message_kib", () if message_bytes is None else (message_bytes / 1024,))
    if not message_kib and min(bandwidth, default=math.inf) < math.inf:
        raise ConfigError("costs: with mbit the size of an activation counts; give message_kib=, one number in KiB")
    if len(message_kib) > 1:
        _entries(values, "message_kib", num_vstages - 1, "links between virtual stages")
    else:
        message_kib = (message_kib or (0.0,)) * (num_vstages - 1)
    return Costs(
        forward=forward,
        backward=_entries(values, "backward_ms", num_vstages, "virtual stages") if "backward_ms" in values else twice,
        latency=_by_link(values, "latency_ms", placement, nothing=0.0),
        bandwidth=tuple(rate * _BYTES_PER_MS if rate < _MOST_MBIT else math.inf for rate in bandwidth),
        message_bytes=tuple(round(size * 1024) for size in message_kib),
        weights=_entries(values, "weights_ms", num_vstages, "virtual stages") if "weights_ms" in values else (),
    )


def format_costs(costs: Costs) -> str:
    """Write costs in ms for :func:`parse_costs`, which inverts this up to rounding to four digits.

    If no link has a limit of bandwidth, `mbit` is left out; if only some have one, the others get 1,000,000 Mbit/s.
    Messages of one size are written as one number. `weights_ms` is left out if it is not known.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> format_costs(u_costs(2, latency=0.5))
    'forward_ms=1,2,1 backward_ms=2,4,2 latency_ms=0.5,0.5 message_kib=0'
    """
    rows = {
        "forward_ms": costs.forward,
        "backward_ms": costs.backward,
        "weights_ms": costs.weights,
        "latency_ms": costs.latency,
        "mbit": tuple(min(rate / _BYTES_PER_MS, _MOST_MBIT) for rate in costs.bandwidth),
        "message_kib": tuple(size / 1024 for size in costs.message_bytes),
    }
    if len(set(rows["message_kib"])) <= 1:
        rows["message_kib"] = rows["message_kib"][:1] or (0.0,)
    if min(rows["mbit"], default=_MOST_MBIT) >= _MOST_MBIT:
        del rows["mbit"]
    if not costs.weights:
        del rows["weights_ms"]
    return " ".join(f"{name}={','.join(f'{value:.4g}' for value in row)}" for name, row in rows.items())


def combine_reports(reports: Sequence[Mapping[str, Mapping[str, float]]], placement: Placement) -> Costs:
    """Combine what the ranks measured: the slowest value of every figure, in ms; messages of a ring have one size.

    Args:
        reports: One for each rank: by the names `forward_ms`, `backward_ms` (keys: virtual stage), `latency_ms`,
            `transfer_ms` and `message_bytes` (keys: virtual stage that the message comes from). `backward_ms` is that
            of whole backwards, and `weights_ms` what gradients of weights take of it: half where only other virtual
            stages have measured that. Keys are text, as in JSON.
        placement: Which stage holds which virtual stage; every one has been measured by some rank.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> edge = {"forward_ms": {"0": 4.0}, "backward_ms": {"0": 8.0}, "latency_ms": {"0": 3.0}}
    >>> slow = {"forward_ms": {"1": 5.0}, "backward_ms": {"1": 9.0}}
    >>> fast = {"forward_ms": {"1": 4.5}, "backward_ms": {"1": 9.5}}
    >>> format_costs(combine_reports([edge, slow, fast], plain_placement(2)))
    'forward_ms=4,5 backward_ms=8,9.5 latency_ms=3 message_kib=0'
    """

    def slowest(name: str, vstage: int) -> float:
        return max((report.get(name, {}).get(str(vstage), 0.0) for report in reports), default=0.0)

    vstages = range(placement.num_vstages)
    backward = tuple(slowest("backward_ms", v) for v in vstages)
    weights = tuple(slowest("weights_ms", v) or whole / 2 for v, whole in enumerate(backward))
    transfers = [slowest("transfer_ms", v) for v in vstages[:-1]]
    measured = [round(slowest("message_bytes", v)) for v in vstages[:-1]]
    # Of a replica's share, another stage may have measured the whole. In every ring something else crosses.
    rings = [placement.chunk(v) for v in vstages[:-1]]
    sizes = [max(size for size, other in zip(measured, rings, strict=True) if other == ring) for ring in rings]
    return Costs(
        forward=tuple(slowest("forward_ms", v) for v in vstages),
        backward=backward,
        latency=tuple(slowest("latency_ms", v) for v in vstages[:-1]),
        bandwidth=tuple(
            size / time if size and time else math.inf for size, time in zip(measured, transfers, strict=True)
        ),
        message_bytes=tuple(sizes),
        weights=weights if any("weights_ms" in one for one in reports) else (),
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"costs: {name}={text} is not a list of numbers; write {_EXAMPLE}") from None
    # Comparisons that are false for NaN, so that it is rejected as well.
    if not all(number > 0 if name == "mbit" else 0 <= number < math.inf for number in numbers):
        rule = "must be above 0" if name == "mbit" else "must be finite and not negative"
        raise ConfigError(f"costs: {name}={text}: every entry {rule}; write {_EXAMPLE}")
    return numbers


def _entries(values: Mapping[str, tuple[float, ...]], name: str, length: int, what: str) -> tuple[float, ...]:
    found = values.get(name, ())
    if len(found) != length:
        raise ConfigError(f"costs: {name} has {len(found)} entries; this pipeline has {length} {what}")
    return found


def _by_link(
    values: Mapping[str, tuple[float, ...]], name: str, placement: Placement, *, nothing: float
) -> tuple[float, ...]:
    """Return the value of every link; a single value counts for the links from and to stage 0."""
    links = [(placement.stages[v], placement.stages[after]) for v, after in enumerate(placement.successors)]
    found = values.get(name, (nothing,))
    if len(found) != 1:
        return _entries(values, name, len(links), "links between virtual stages")
    return tuple(found[0] if 0 in link else nothing for link in links)
