"""What a step costs: durations of the virtual stages, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.order.placement import Placement, u_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations and links of a placement. Times may have any unit, as long as all have the same one.

    The two directions of a boundary do not share bandwidth: each has a channel, on which messages go one after the
    other. A message takes `message_bytes / bandwidth + latency`.

    Attributes:
        forward: Duration of one microbatch's forward, by virtual stage.
        backward: Duration of one microbatch's whole backward, by virtual stage.
        latency: One-way latency from virtual stage v to v + 1, and back, by v. Not used if one stage holds both.
        bandwidth: Bytes per unit of time on the same link, in each direction; `math.inf` for no limit.
        message_bytes: Size of an activation from v to v + 1, and of its gradient.
        weights: The part of `backward` that is for the gradients of weights, by virtual stage; empty if it is not
            known, and then it is taken for half.

    Raises:
        ConfigError: A tuple has the wrong length, a duration or latency is negative or not finite, a bandwidth is not
            above 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: tuple[float, ...]
    bandwidth: tuple[float, ...]
    message_bytes: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check lengths and values."""
        num_vstages = len(self.forward)
        lengths = {"backward": num_vstages} | dict.fromkeys(("latency", "bandwidth", "message_bytes"), num_vstages - 1)
        if self.weights:
            lengths["weights"] = num_vstages
        for name, length in lengths.items():
            found = len(getattr(self, name))
            if found != length:
                raise ConfigError(f"{name} has {found} entries: {num_vstages} virtual stages need {length}")
        for name in ("forward", "backward", "latency", "message_bytes", "weights"):
            if not all(0 <= value < math.inf for value in getattr(self, name)):
                raise ConfigError(f"{name} {getattr(self, name)}: every entry must be finite and not negative")
        if any(part > whole for part, whole in zip(self.weights, self.backward, strict=False)):
            raise ConfigError(f"weights {self.weights}: no entry may be longer than its backward, of {self.backward}")
        if not all(value > 0 for value in self.bandwidth):
            raise ConfigError(f"bandwidth {self.bandwidth}: every entry must be above 0")

    @property
    def of_weights(self) -> tuple[float, ...]:
        """Duration of the gradients of weights, where a backward is split, by virtual stage."""
        return self.weights or tuple(whole / 2 for whole in self.backward)

    @property
    def of_input(self) -> tuple[float, ...]:
        """Duration of the gradient of the input, where a backward is split, by virtual stage."""
        return tuple(whole - part for whole, part in zip(self.backward, self.of_weights, strict=True))

    def transfer_time(self, vstage: int) -> float:
        """Return how long a message from a virtual stage to the next keeps its channel busy, without the latency."""
        return self.message_bytes[vstage] / self.bandwidth[vstage]


def uniform_costs(placement: Placement, *, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0) -> Costs:
    """Give every virtual stage the same durations and every boundary the same latency, without limit of bandwidth.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> uniform_costs(plain_placement(3), latency=0.5).latency
    (0.5, 0.5)
    """
    num_vstages, num_links = placement.num_vstages, placement.num_vstages - 1
    return Costs(
        forward=(forward,) * num_vstages,
        backward=(backward,) * num_vstages,
        latency=(latency,) * num_links,
        bandwidth=(math.inf,) * num_links,
        message_bytes=(0,) * num_links,
    )


def split_costs(placement: Placement, costs: Costs) -> Costs:
    """Return the costs of a pipeline with replicas in the mode `split`, for the placement without replicas.

    L is the least common multiple of the numbers of replicas. One microbatch of the schedule stands for L microbatches
    of `costs`, so a step has m / L: a stage with n replicas runs L / n of them at once, as one microbatch that takes
    L / n times as long. Each pair of workers has a link to itself in both modes, so a link between n and n' replicas
    carries L / max(n, n') times the bytes at once. If all pairs share one link, divide its bandwidth by their number,
    in both modes.

    Args:
        placement: Placement with its replicas.
        costs: Costs of one microbatch in `placement`, where replicas run them in turn.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(3, num_replicas=(1, 1, 2))
    >>> costs = replace(uniform_costs(placement), message_bytes=(8, 8))
    >>> split_costs(placement, costs).forward, split_costs(placement, costs).message_bytes
    ((2.0, 2.0, 1.0), (16, 8))
    """
    multiple = math.lcm(*placement.num_replicas)
    replicas = [placement.num_replicas[stage] for stage in placement.stages]
    return replace(
        costs,
        forward=tuple(multiple // n * duration for n, duration in zip(replicas, costs.forward, strict=True)),
        backward=tuple(multiple // n * duration for n, duration in zip(replicas, costs.backward, strict=True)),
        weights=tuple(multiple // n * duration for n, duration in zip(replicas, costs.weights, strict=False)),
        message_bytes=tuple(
            multiple // max(pair) * size for pair, size in zip(pairwise(replicas), costs.message_bytes, strict=True)
        ),
    )


def u_costs(
    num_stages: int, *, cloud: float = 2.0, latency: float = 0.0, edge: float = 1.0, num_rings: int = 1
) -> Costs:
    """Costs of the model U-shape: backward takes twice the forward, latency only between edge and cloud.

    Args:
        num_stages: Pipeline stages, the edge included.
        cloud: Forward of a cloud stage.
        latency: One way, between the edge and the first, and the edge and the last cloud stage.
        edge: Forward of each of the edge's parts.
        num_rings: How often a microbatch passes the cloud.

    >>> u_costs(3, latency=0.5).latency, u_costs(3).backward
    ((0.5, 0.0, 0.5), (2.0, 4.0, 4.0, 2.0))
    """
    placement = u_placement(num_stages, num_rings=num_rings)
    forward = tuple(cloud if stage else edge for stage in placement.stages)
    num_links = placement.num_vstages - 1
    latencies = [latency if 0 in placement.stages[v : v + 2] else 0.0 for v in range(num_links)]
    return Costs(
        forward=forward,
        backward=tuple(2 * duration for duration in forward),
        latency=tuple(latencies),
        bandwidth=(math.inf,) * num_links,
        message_bytes=(0,) * num_links,
    )
