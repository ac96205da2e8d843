"""What ``benchmarks/boundary.py`` measures, as data: written, read, and compared with the floor."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
ONE_LINK = "one link"
ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Times of one way to move one tensor.

    Attributes:
        network: ``"limited"`` or ``"loopback"``.
        sizes: tensor-parallel sizes upstream and downstream.
        name: name of the exchange or of the finish; ONE_LINK for a message between two ranks alone.
        num_bytes: bytes of the whole tensor, about: see :func:`shape_of`.
        times_s: seconds of each exchange, in the order measured; from the common start to the last finisher.
    """

    network: str
    sizes: tuple[int, int]
    name: str
    num_bytes: int
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median of the times."""
        return statistics.median(self.times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run of the benchmark.

    Attributes:
        settings: What the run was told and where it ran, for the reader.
        boundaries: Exchanges between two stages, and ONE_LINK.
        finishes: Exchanges inside a receiving stage of ``sizes[1]`` ranks.
    """

    settings: dict[str, str]
    boundaries: tuple[Record, ...]
    finishes: tuple[Record, ...]

    def median_s(self, network: str, sizes: tuple[int, int], name: str, num_bytes: int) -> float | None:
        """Return a median time of `boundaries`; None if it was not measured."""
        for record in self.boundaries:
            if (record.network, record.sizes, record.name, record.num_bytes) == (network, sizes, name, num_bytes):
                return record.median_s
        return None

    def goodput(self, sizes: tuple[int, int]) -> float:
        """Return what one limited link carries, in bytes/s, from the largest message that was measured."""
        records = [r for r in self.boundaries if (r.network, r.sizes, r.name) == ("limited", sizes, ONE_LINK)]
        largest = max(records, key=lambda record: record.num_bytes)
        return tensor_bytes(largest.num_bytes) / largest.median_s

    def floor_s(self, sizes: tuple[int, int], num_bytes: int) -> float:
        """Return the least time on limited links: the bytes of the busiest link over the goodput of one link."""
        return busiest_link_bytes(sizes, num_bytes) / self.goodput(sizes)


def shape_of(num_bytes: int) -> tuple[int, int, int]:
    """Give the shape ``[S, B, H]`` of a float32 tensor of about this size, nearly square.

    The rows divide by 12, that is by every stage's size here, as sequence parallelism asks for; the size is met to
    within half a percent.

    >>> shape_of(64 * KIB), tensor_bytes(64 * KIB) / KIB
    ((132, 1, 124), 63.9375)
    """
    elements = num_bytes // ELEMENT_BYTES
    rows = 12 * round(elements**0.5 / 12)
    return rows, 1, round(elements / rows)


def tensor_bytes(num_bytes: int) -> int:
    """Count the bytes of a tensor of a shape of :func:`shape_of`."""
    return prod(shape_of(num_bytes)) * ELEMENT_BYTES


def busiest_link_bytes(sizes: tuple[int, int], num_bytes: int) -> int:
    """Count what the busiest link carries at least: an equal share of the narrower stage.

    >>> busiest_link_bytes((2, 3), 64 * KIB) / tensor_bytes(64 * KIB)
    0.5
    """
    return tensor_bytes(num_bytes) // min(sizes)


def save(results: Results, path: Path) -> None:
    """Write as JSON, one record a line."""
    lines = [f'"settings": {json.dumps(results.settings, indent=1)}']
    for part, records in (("boundaries", results.boundaries), ("finishes", results.finishes)):
        dicts = [{**asdict(record), "times_s": [round(time_s, 6) for time_s in record.times_s]} for record in records]
        lines.append(f'"{part}": [\n' + ",\n".join(json.dumps(item) for item in dicts) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> Results:
    """Read what :func:`save` wrote."""
    data = json.loads(path.read_text())
    boundaries, finishes = (tuple(_record(**item) for item in data[part]) for part in ("boundaries", "finishes"))
    return Results(settings=data["settings"], boundaries=boundaries, finishes=finishes)


def _record(network: str, sizes: list[int], name: str, num_bytes: int, times_s: list[float]) -> Record:
    upstream, downstream = sizes
    return Record(network=network, sizes=(upstream, downstream), name=name, num_bytes=num_bytes, times_s=tuple(times_s))
