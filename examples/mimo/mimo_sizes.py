"""How a module of the model is spread over ranks; without torch or Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a module is spread over its ranks.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline stages; the encoder has one.
        dp: replicas.
        stages: tensor-, context- and data-parallel size of every stage, where they differ; then only
            `sequence_parallel` is used beside it.
        sequence_parallel: tensor-parallel ranks share the rows between the layers.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[tuple[int, int, int], ...] = ()
    sequence_parallel: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the module."""
        return sum(tp * cp * dp for tp, cp, dp in self.stages or ((self.tp, self.cp, self.dp),) * self.pp)

    def __str__(self) -> str:
        pairs = [(name, getattr(self, name)) for name in ("tp", "cp", "pp", "dp")]
        if self.stages:
            pairs = [
                (name, size[0] if len(set(size)) == 1 else ",".join(map(str, size)))
                for name, size in zip(("stages", "cp", "dp"), zip(*self.stages, strict=True), strict=True)
            ]
        return (" ".join(f"{name} {size}" for name, size in pairs if size != 1) or "one rank") + (
            " sp" * self.sequence_parallel
        )
