"""What two rings cost over one: bytes between the sites, and a step over a line with latency.

    python -m benchmarks.two_rings            prints both tables; the second needs root and /dev/net/tun
    python -m benchmarks.two_rings --bytes    the first one alone

The model is that of MindSpeed-MM's document on layerwise disaggregated training: Qwen2.5-VL-32B in bf16, an edge of two
cards and four cloud stages of eight. A microbatch is one sample of 1,024 tokens with one picture of 1,024 patches.

* *two rings*: its lists, encoder and projector frozen; no gradient crosses in the first ring.
* *two rings, all backward*: the same with the encoder's backward, as MindSpeed-MM's own feature computes it.
* *one ring*: the whole encoder on the edge, with one language layer at each end.

Steps as in benchmarks/u_shape_wan.py: the executor, the channels, gloo and TCP are real, the line is emulated, compute
is sleep. t = 40 ms is the forward of 16 language layers on eight cards; the others follow from their multiplications. L
is the one-way latency, in t. Messages are as large as 10 Gbit/s would carry them at 13 ms, the time of such a forward
at 150 TFLOPS. A step has 16 microbatches; the median of five counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.wan.link import LinkUnavailableError
from benchmarks.wan.steps import Job, run_jobs
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.simulator import choose_lookahead, simulate
from vtp_plugin.plan.schedule.make.u_shape import choose_limits, plan_u_shape
from vtp_plugin.plan.schedule.order.actions import Schedule
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import u_placement

TOKENS, PATCHES = 1024, 1024
VISION, TEXT, WORDS = 1280, 5120, 152064
VISION_LAYER = PATCHES * VISION * (4 * VISION + 3 * 3456)
TEXT_LAYER = TOKENS * TEXT * (2 * TEXT + 2 * 1024 + 3 * 27648)
HEAD = TOKENS * TEXT * WORDS
T_S = 0.04
UNIT_S = T_S / (16 * TEXT_LAYER / 8)  # for a multiplication on a card
MBIT = 1000.0
# Float32, of the first and the last ring: a third of the bytes, at three times the time.
SHAPES = (256, 1, 768), (256, 1, 3072)
NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 5, 16, 5
LATENCIES = (0.0, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is compared.

    Attributes:
        forward: multiplications of every virtual stage's forward, on each of its cards.
        num_frozen: virtual stages without a backward.
        frozen: multiplications of the forward that a backward leaves out, on each card.
        num_rings: how often a microbatch passes the cloud.
    """

    forward: tuple[float, ...]
    num_rings: int
    num_frozen: int = 0
    frozen: tuple[float, ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of the outputs, by virtual stage."""
        return (SHAPES[0],) * (NUM_STAGES * (self.num_rings - 1)) + (SHAPES[1],) * (NUM_STAGES + 1)

    def costs(self, latency: float) -> Costs:
        """Give durations in seconds, the line between the edge and the cloud only."""
        ends = {v for v in range(len(self.forward) - 1) if v % NUM_STAGES in (0, NUM_STAGES - 1)}
        frozen = self.frozen or (0.0,) * len(self.forward)
        return Costs(
            forward=tuple(UNIT_S * work for work in self.forward),
            backward=tuple(2 * UNIT_S * (work - less) for work, less in zip(self.forward, frozen, strict=True)),
            latency=tuple(latency * T_S * (v in ends) for v in range(len(self.forward) - 1)),
            bandwidth=tuple(MBIT * 1e6 / 8 if v in ends else float("inf") for v in range(len(self.forward) - 1)),
            message_bytes=tuple(4 * length * batch * width for length, batch, width in self.shapes[:-1]),
        )

    def schedule(self, latency: float) -> Schedule:
        """Plan the order as a run does."""
        costs = self.costs(latency)
        placement = replace(u_placement(NUM_STAGES, num_rings=self.num_rings), num_frozen=self.num_frozen)
        limits, _ = choose_limits(None, placement, costs, NUM_MICROBATCHES)
        planned = plan_u_shape(
            NUM_STAGES,
            NUM_MICROBATCHES,
            costs,
            num_rings=self.num_rings,
            num_frozen=self.num_frozen,
            limits=limits,
        ).schedule
        return lower(planned, lookahead=choose_lookahead(planned, costs))


def _two_rings(*, is_frozen: bool) -> Layout:
    tower = (3 * VISION_LAYER / 2, *[7 * VISION_LAYER / 8] * 4, VISION_LAYER / 2)
    language = (*[16 * TEXT_LAYER / 8] * 4, HEAD / 2)
    return Layout(
        forward=(*tower, *language),
        num_rings=2,
        num_frozen=NUM_STAGES if is_frozen else 0,
        frozen=(*tower, *[0.0] * len(language)) if is_frozen else (),
    )


def _one_ring() -> Layout:
    tower = 32 * VISION_LAYER / 2
    cloud = [layers * TEXT_LAYER / 8 for layers in (16, 16, 15, 15)]
    forward = (tower + TEXT_LAYER / 2, *cloud, TEXT_LAYER / 2 + HEAD / 2)
    return Layout(forward=forward, num_rings=1, frozen=(tower, *[0.0] * NUM_STAGES))


LAYOUTS = {
    "two rings": _two_rings(is_frozen=True),
    "two rings, all backward": _two_rings(is_frozen=False),
    "one ring": _one_ring(),
}


def bytes_table() -> list[str]:
    """Say what crosses between the sites for each microbatch, both ways together.

    >>> print(bytes_table()[2])
    two rings                       5.24          41.94       28.74  47.21
    """
    first, last = 2 * PATCHES * VISION / 1e6, 2 * TOKENS * TEXT / 1e6
    lines = ["MB a microbatch          first ring   language ring   beside KB    sum", ""]
    for name, layout in LAYOUTS.items():
        in_first = (layout.num_rings - 1) * first * (2 if layout.num_frozen else 4)
        # Positions of every token; in two rings sizes of pictures, and a header for each tensor of the first ring.
        beside = 16 * TOKENS + (layout.num_rings - 1) * (12 * TOKENS + 32 * (2 if layout.num_frozen else 4))
        total = in_first + 4 * last + beside / 1e6
        lines.append(f"{name:24} {in_first:11.2f} {4 * last:14.2f} {beside / 1e3:11.2f} {total:6.2f}")
    return lines


def steps_table() -> list[str]:
    """Measure a step of each layout at each latency, all at once."""
    jobs = {
        (name, latency): Job(
            latency_ms=1e3 * latency * T_S,
            mbit=MBIT,
            costs=layout.costs(latency),
            schedules={name: layout.schedule(latency)},
            num_steps=NUM_STEPS,
            shape=SHAPES[1],
            shapes=layout.shapes,
        )
        for name, layout in LAYOUTS.items()
        for latency in LATENCIES
    }
    outcomes = dict(zip(jobs, run_jobs([*jobs.values()]), strict=True))
    lines = ["step in t                   L    planned   median  (fastest..slowest)", ""]
    for (name, latency), job in jobs.items():
        planned = simulate(job.schedules[name], job.costs, mode="rendezvous").makespan / T_S
        steps = [step_s / T_S for step_s in outcomes[name, latency].steps_s[name]]
        lines.append(_line(name, latency, planned, steps))
    return lines


def _line(name: str, latency: float, planned: float, steps: Sequence[float]) -> str:
    found = statistics.median(steps)
    return f"{name:24} {latency:4g}  {planned:9.1f}  {found:7.1f}  ({min(steps):.1f}..{max(steps):.1f})"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="what crosses, without a measurement")
    options = parser.parse_args()
    print(*bytes_table(), sep="\n")
    if options.bytes:
        return
    try:
        print("", *steps_table(), sep="\n")
    except LinkUnavailableError as reason:
        sys.exit(f"no steps: {reason}")


if __name__ == "__main__":
    main()
