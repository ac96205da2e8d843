"""The layout that rank 0 has chosen for all ranks; each rank checks it against its own flags before it uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vtp_plugin.config.parse_values import format_value
from vtp_plugin.errors import LayoutError
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.evaluate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A list, as ranks send it to each other, and as flags say it.

    Attributes:
        sizes: tensor-parallel size of every stage.
        layers: number of layers of every stage; in a U one part more, the edge's last.
        num_replicas: number of replicas of every stage.
        sites: site of every stage; empty names where there are none.
        in_flight: most microbatches in flight on every stage; empty for the default.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    sites: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()

    @classmethod
    def of(cls, candidate: Candidate) -> Chosen:
        """Take the list from a layout that the search found."""
        return cls(
            sizes=candidate.sizes,
            layers=candidate.layers,
            num_replicas=candidate.num_replicas,
            sites=candidate.sites,
            in_flight=candidate.order.in_flight,
        )

    def require(self, constraints: Constraints, num_ranks: int) -> None:
        """Refuse a list that this rank's flags do not allow.

        Args:
            constraints: what this rank's own flags require of a list.
            num_ranks: number of ranks that take part.

        Raises:
            ConfigError: the list does not satisfy them; a restart may cure it.
        """
        for problem in self._problems(constraints, num_ranks):
            raise LayoutError(
                f"rank 0 chose TP sizes {format_value(self.sizes)}, layers {format_value(self.layers)} and "
                f"{self.num_replicas} replicas, which do not fit this rank's own flags: {problem}; start every rank "
                "with the same command line, and let nobody else reach MASTER_PORT",
                is_final=False,
            )

    def _problems(self, constraints: Constraints, num_ranks: int) -> Iterator[str]:
        num_stages = len(self.sizes)
        if not constraints.least_stages <= num_stages <= constraints.most_stages:
            yield f"{num_stages} stages, not {constraints.least_stages} to {constraints.most_stages}"
        # Before sizes are tried: that takes time for each.
        needed = sum(self.sizes) * constraints.cp * self.num_replicas
        if min((*self.sizes, self.num_replicas), default=0) < 1 or needed != num_ranks:
            yield f"{needed} ranks are needed, and {num_ranks} take part"
        yield from (problem for size in dict.fromkeys(self.sizes) for problem in constraints.problems_of_size(size))
        if constraints.num_replicas not in (None, self.num_replicas):
            yield f"--vtp-data-parallel-size is {constraints.num_replicas}"
        yield from constraints.problems_of_replicas(self.num_replicas)
        yield from self._problems_of_layers(constraints)
        named = tuple(dict.fromkeys(self.sites)) if any(self.sites) else ()
        if named != constraints.sites or len(self.sites) not in (0, num_stages):
            yield (
                f"its sites are {','.join(self.sites) or 'none'}, "
                f"--vtp-sites is {','.join(constraints.sites) or 'not given'}"
            )
        # A stage may be allowed more than there are.
        most = constraints.num_microbatches(self.num_replicas) + num_stages
        if len(self.in_flight) not in (0, 1, num_stages) or not all(1 <= one <= most for one in self.in_flight):
            yield f"{format_value(self.in_flight)} microbatches in flight, above {most}"

    def _problems_of_layers(self, constraints: Constraints) -> Iterator[str]:
        inner = self.layers
        if constraints.ends is not None:
            if (inner[:1], inner[-1:]) != (constraints.ends[:1], constraints.ends[1:]):
                yield f"the edge's parts have {constraints.ends[0]} and {constraints.ends[1]} layers"
            inner = inner[1:-1]
        if len(inner) != len(self.sizes) - (constraints.ends is not None):
            yield f"{len(self.layers)} parts of layers for {len(self.sizes)} stages"
        if min(inner, default=1) < 1 or sum(inner) != constraints.num_layers:
            yield f"its layers are not --num-layers {constraints.args.num_layers}"
