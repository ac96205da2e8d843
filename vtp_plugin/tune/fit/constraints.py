"""What a layout must satisfy, and the check of each part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import LayoutError
from vtp_plugin.host.rules.checks.batch import check_batches
from vtp_plugin.host.rules.checks.divisibility import check_sizes
from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.tune.cluster.stage_memory import CountedTwice, HeldBytes
from vtp_plugin.tune.search.problem import LayerRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a layout must satisfy.

    Attributes:
        args: Megatron's parsed arguments, for what they say of the model and of batches.
        least_stages: fewest pipeline stages.
        most_stages: most pipeline stages.
        num_replicas: number of replicas of every stage; None for as many as make the step shortest.
        sites: the sites in the order of the pipeline, each with at least one stage; empty where there are none.
        cp: context-parallel size of every stage.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.
        order: how ranks are numbered, in Megatron's notation.
        ends: number of layers of the first and of the last part of a U's edge; None without a U.
        layers: how many layers stages may hold.
        held_bytes: called for the bytes that a stage holds; None where that is not known.
        counted_twice: called for the bytes that a stage with several virtual stages holds once; None for nothing.
    """

    args: Any
    least_stages: int
    most_stages: int
    num_replicas: int | None = None
    sites: tuple[str, ...] = ()
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: RankOrder = RankOrder.STAGE_MAJOR
    ends: tuple[int, int] | None = None
    layers: LayerRule = "any"
    held_bytes: HeldBytes | None = None
    counted_twice: CountedTwice | None = None

    def __post_init__(self) -> None:
        flags = {
            "--num-layers": self.args.num_layers,
            "--micro-batch-size": self.args.micro_batch_size,
            "--global-batch-size": self.args.global_batch_size,
        }
        if missing := [flag for flag, value in flags.items() if not value]:
            raise LayoutError(
                f"{', '.join(missing)} missing; the layout is chosen for this model and this batch; give them"
            )
        if self.ends is not None and len(self.sites) < 2:
            raise LayoutError(
                "--layerwise-disaggregated-training with --vtp-size-list auto; nothing says which machine is the edge; "
                "give --vtp-sites edge,cloud to all, and to each machine its --vtp-site"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers to share out: those of the model, in a U without the edge's."""
        return int(self.args.num_layers) - sum(self.ends or ())

    def problems_of_size(self, size: int) -> tuple[str, ...]:
        """Say why no stage can have a tensor-parallel size; empty if it can.

        Any stage may become the first or the last one when others are lost, so it must also cut the vocabulary.

        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=12)
        >>> constraints = Constraints(args=args, least_stages=1, most_stages=2)
        >>> constraints.problems_of_size(3), len(constraints.problems_of_size(5))
        ((), 1)
        """
        context = OptionContext(
            tp_sizes=(size,),
            cp_sizes=(self.cp,),
            ep_sizes=(self.ep,),
            etp_sizes=() if self.etp is None else (self.etp,),
        )
        return check_sizes(self.args, context)

    def sizes(self, num_cards: int, num_replicas: int) -> tuple[int, ...]:
        """List the tensor-parallel sizes that a stage can have in a node with so many cards, ascending.

        The experts' sizes must divide the ranks of all its replicas.
        """
        return tuple(
            size
            for size in range(1, num_cards // self.cp + 1)
            if not self.problems_of_size(size) and self.layout((size,), num_replicas) is not None
        )

    def problems_of_replicas(self, number: int) -> tuple[str, ...]:
        """Say why batches cannot be shared by so many replicas; empty if they can."""
        return check_batches(self.args, ReplicaMap(dp_sizes=(number,)))

    def num_microbatches(self, num_replicas: int) -> int:
        """Return how many microbatches a replica runs in a step."""
        return int(self.args.global_batch_size) // (int(self.args.micro_batch_size) * num_replicas)

    def layout(self, sizes: Sequence[int], num_replicas: int) -> PipelineLayout | None:
        """Lay out stages; None if the experts' sizes do not divide their ranks."""
        world_size = sum(sizes) * self.cp * num_replicas
        try:
            return PipelineLayout.from_sizes(
                sizes, world_size=world_size, cp=self.cp, order=self.order, ep=self.ep, etp=self.etp
            )
        except LayoutError:
            return None
