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
        words = [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(self, name) > 1]
        if self.stages:
            tp, *others = (",".join(map(str, sizes)) for sizes in zip(*self.stages, strict=True))
            words = [f"stages {tp}"]
            words += [
                f"{name} {sizes}" for name, sizes in zip(("cp", "dp"), others, strict=True) if {*sizes} != set("1,")
            ]
        return (" ".join(words) or "one rank") + " sp" * self.sequence_parallel
