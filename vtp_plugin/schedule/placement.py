"""Which pipeline stage holds which virtual stage."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the pieces of the model lie along its depth.

    A *virtual stage* is one consecutive piece of the model (a model chunk); virtual stage 0 takes the samples and the
    last one computes the loss. A *stage* is a pipeline stage, Megatron's pipeline rank.

    Attributes:
        stages: `stages[v]` is the stage that holds virtual stage v. Every stage from 0 on holds at least one.

    Raises:
        ConfigError: There is no virtual stage, or a stage number is left out.

    >>> u_placement(3).stages, u_placement(3).vstages(0), u_placement(3).chunk(3)
    ((0, 1, 2, 0), (0, 3), 1)
    """

    stages: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a placement with a stage that has no virtual stage."""
        if not self.stages:
            raise ConfigError("a placement needs at least one virtual stage")
        if set(self.stages) != set(range(max(self.stages) + 1)):
            raise ConfigError(
                f"placement {self.stages} leaves out a stage: "
                f"the stages 0 to {max(self.stages)} must each hold a virtual stage"
            )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return max(self.stages) + 1

    @property
    def num_vstages(self) -> int:
        """Number of virtual stages."""
        return len(self.stages)

    def vstages(self, stage: int) -> tuple[int, ...]:
        """List the virtual stages of a stage, in the order of the model's depth."""
        return tuple(v for v, holder in enumerate(self.stages) if holder == stage)

    def chunk(self, vstage: int) -> int:
        """Return the index of a virtual stage among those of its stage, Megatron's `vp_stage`."""
        return self.stages[:vstage].count(self.stages[vstage])

    def crosses(self, vstage: int) -> bool:
        """Whether the output of a virtual stage goes to another stage."""
        return vstage + 1 < self.num_vstages and self.stages[vstage] != self.stages[vstage + 1]

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """Pairs `(upstream stage, downstream stage)` that activations cross, each once, in the order of first crossing.

        >>> interleaved_placement(2, 2).boundaries, u_placement(3).boundaries
        (((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 0)))
        """
        pairs = [(self.stages[v], self.stages[v + 1]) for v in range(self.num_vstages - 1) if self.crosses(v)]
        return tuple(dict.fromkeys(pairs))


def plain_placement(num_stages: int) -> Placement:
    """Place one virtual stage on each stage: (0, 1, .., P-1).

    >>> plain_placement(3).stages
    (0, 1, 2)
    """
    return interleaved_placement(num_stages, 1)


def interleaved_placement(num_stages: int, num_chunks: int) -> Placement:
    """Go round all stages `num_chunks` times, as Megatron's virtual pipeline does.

    >>> interleaved_placement(2, 3).stages
    (0, 1, 0, 1, 0, 1)
    """
    if num_stages < 1 or num_chunks < 1:
        raise ConfigError(f"{num_stages} stages with {num_chunks} chunks each: both must be at least 1")
    return Placement(stages=tuple(range(num_stages)) * num_chunks)


def u_placement(num_stages: int) -> Placement:
    """Place the first and the last part of the model on stage 0, the edge: (0, 1, .., P-1, 0).

    Raises:
        ConfigError: Fewer than two stages: an edge without a cloud is no pipeline.

    >>> u_placement(2).stages
    (0, 1, 0)
    """
    if num_stages < 2:
        raise ConfigError(f"a U-shaped pipeline of {num_stages} stage: it needs an edge and at least one cloud stage")
    return Placement(stages=(*range(num_stages), 0))
