"""A list as one rank has chosen it for all, which each rank checks against its own flags before it takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vtp_plugin.config.parse_values import format_value
from vtp_plugin.errors import LayoutError
from vtp_plugin.tune.fit.constraints import Constraints


class HasList(Protocol):
    """What has a list, such as :class:`~vtp_plugin.tune.fit.fit_search.FittedLayout`; see there."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel size of every stage."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of every stage."""
        ...

    @property
    def num_replicas(self) -> int:
        """Of every stage."""
        ...

    @property
    def sites(self) -> tuple[str, ...]:
        """Of every stage."""
        ...

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Of every stage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A list, as it crosses between ranks.

    Attributes:
        sizes: tensor-parallel size of every stage.
        layers: of every stage; of a U one part more, the edge's last.
        num_replicas: of every stage.
        sites: of every stage; empty names where there are none.
        in_flight: most microbatches in flight on every stage; empty for the usual.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    sites: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()

    @classmethod
    def of(cls, fitted: HasList) -> Chosen:
        """Take the list out of what was fitted."""
        return cls(
            sizes=fitted.sizes,
            layers=fitted.layers,
            num_replicas=fitted.num_replicas,
            sites=fitted.sites,
            in_flight=fitted.in_flight,
        )

    def require(self, ask: Constraints, num_ranks: int) -> None:
        """Go on only with a list that this rank could have been given.

        Args:
            ask: what this rank's own flags want.
            num_ranks: that have a seat.

        Raises:
            ConfigError: it could not; a restart may cure it.
        """
        for problem in self._problems(ask, num_ranks):
            raise LayoutError(
                f"the list that rank 0 chose, {format_value(self.sizes)} with layers {format_value(self.layers)} and "
                f"{self.num_replicas} replicas: {problem}, as this rank's own flags say; start every rank with the "
                "same command line, and let nobody else reach MASTER_PORT",
                is_final=False,
            )

    def _problems(self, ask: Constraints, num_ranks: int) -> Iterator[str]:
        num_stages = len(self.sizes)
        if not ask.least_stages <= num_stages <= ask.most_stages:
            yield f"{num_stages} stages, not {ask.least_stages} to {ask.most_stages}"
        # Before sizes are tried: that takes time for each.
        needed = sum(self.sizes) * ask.cp * self.num_replicas
        if min((*self.sizes, self.num_replicas), default=0) < 1 or needed != num_ranks:
            yield f"it needs {needed} ranks, and {num_ranks} have a seat"
        yield from (problem for size in dict.fromkeys(self.sizes) for problem in ask.problems_of_size(size))
        if ask.num_replicas not in (None, self.num_replicas):
            yield f"--vtp-data-parallel-size is {ask.num_replicas}"
        yield from ask.problems_of_replicas(self.num_replicas)
        yield from self._problems_of_layers(ask)
        named = tuple(dict.fromkeys(self.sites)) if any(self.sites) else ()
        if named != ask.sites or len(self.sites) not in (0, num_stages):
            yield f"its sites are {','.join(self.sites) or 'none'}, --vtp-sites is {','.join(ask.sites) or 'not given'}"
        # A stage may be allowed more than there are.
        most = ask.num_microbatches(self.num_replicas) + num_stages
        if len(self.in_flight) not in (0, 1, num_stages) or not all(1 <= one <= most for one in self.in_flight):
            yield f"{format_value(self.in_flight)} microbatches in flight, above {most}"

    def _problems_of_layers(self, ask: Constraints) -> Iterator[str]:
        inner = self.layers
        if ask.ends is not None:
            if (inner[:1], inner[-1:]) != (ask.ends[:1], ask.ends[1:]):
                yield f"the edge's parts have {ask.ends[0]} and {ask.ends[1]} layers"
            inner = inner[1:-1]
        if len(inner) != len(self.sizes) - (ask.ends is not None):
            yield f"{len(self.layers)} parts of layers for {len(self.sizes)} stages"
        if min(inner, default=1) < 1 or sum(inner) != ask.num_layers:
            yield f"its layers are not --num-layers {ask.args.num_layers}"
