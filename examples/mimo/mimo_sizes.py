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
        stage_tp: tensor-parallel size of every stage, where they differ; then `tp` and `pp` are not used.
        sequence_parallel: tensor-parallel ranks share the rows between the layers.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    stage_tp: tuple[int, ...] = ()
    sequence_parallel: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the module."""
        return sum(self.stage_tp or (self.tp,) * self.pp) * self.cp * self.dp

    def __str__(self) -> str:
        sizes = [f"stages {','.join(map(str, self.stage_tp))}"] if self.stage_tp else []
        sizes += [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(self, name) > 1]
        return (" ".join(sizes) or "one rank") + " sp" * self.sequence_parallel
