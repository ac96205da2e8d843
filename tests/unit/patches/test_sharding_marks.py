"""Which weights are marked as cut and stored whole, or stored in parts and not marked: models as small as can be."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from vtp_plugin.patches.core.optimizer.optimizer import problems_of_marks


class Stored(nn.Module):
    """A weight of which a rank stores one of so many parts; a layer or an expert has one more axis."""

    def __init__(self, *, num_parts: int = 1, is_marked: bool = False, num_experts: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.num_parts, self.num_experts = num_parts, num_experts
        if is_marked:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        assert metadata == {"dp_cp_group": None}
        layers = ((0, 1, self.num_experts),) if self.num_experts else ()
        cut = ((len(layers), 0, self.num_parts),) if self.num_parts > 1 else ()
        key = f"{prefix}weight"
        return {key: ShardedTensor.from_rank_offsets(key, self.weight, *layers, *cut, prepend_axis_num=len(layers))}


class Gated(Stored):
    """Two matrices in one weight, each of which is cut: a factory stores them apart."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        key, count = f"{prefix}weight", 2 * self.num_parts
        factory: Any = ShardedTensorFactory

        def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
            halves = tensor.chunk(2)
            return [
                ShardedTensor.from_rank_offsets(key, half, (0, place * self.num_parts, count))
                for place, half in enumerate(halves)
            ]

        return {key: factory(key, self.weight, build, lambda parts: parts)}


class Turned(Stored):
    """A factory stores it in another form, as one tensor."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        key = f"{prefix}weight"
        factory: Any = ShardedTensorFactory

        def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, tensor.t(), (1, 0, self.num_parts))

        return {key: factory(key, self.weight, build, lambda part: part)}


class Holder(nn.Module):
    """Stores what its children cannot: as whole, unless told otherwise."""

    def __init__(self, child: nn.Module, *, num_parts: int = 1) -> None:
        super().__init__()
        self.child, self.num_parts = child, num_parts

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        cut = ((0, 0, self.num_parts),) if self.num_parts > 1 else ()
        weights = self.state_dict(keep_vars=True).items()
        return {prefix + name: ShardedTensor.from_rank_offsets(prefix + name, each, *cut) for name, each in weights}


class Adapted(nn.Module):
    """A layer with adapters around it: nobody has told it how Megatron stores weights."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def problems(model: nn.Module, *, tp: int = 2, etp: int = 1) -> list[str]:
    return list(problems_of_marks(model, tp=tp, etp=etp, metadata={"dp_cp_group": None}))


def test_right_marks() -> None:
    right = nn.ModuleDict(
        {
            "whole": Stored(),
            "cut": Stored(num_parts=2, is_marked=True),
            "gated": Gated(num_parts=2, is_marked=True),
            "turned": Turned(num_parts=2, is_marked=True),
            "expert of a layer": Stored(num_experts=4),
            "norm": Holder(nn.LayerNorm(4)),
            "adapted": Holder(Adapted(Stored(num_parts=2, is_marked=True))),
        }
    )
    assert problems(right) == []


def test_a_cut_weight_without_a_mark_is_named() -> None:
    model = nn.ModuleDict(
        {
            "sinks": Stored(num_parts=2),
            "gated": Gated(num_parts=2),
            "turned": Turned(num_parts=2),
            "held": Holder(nn.Linear(2, 4, bias=False), num_parts=2),
        }
    )
    lines = problems(model)
    names = ["sinks.weight", "gated.weight", "turned.weight", "held.child.weight"]
    assert [line.split(" ")[0] for line in lines] == names
    assert lines[0] == (
        "sinks.weight has no tensor_model_parallel mark and sharded_state_dict cuts it; norms and clipping would count "
        "it on one rank only, so they would depend on the sizes of the stages; call "
        "set_tensor_model_parallel_attributes where it is made"
    )


def test_a_whole_weight_with_a_mark_is_named() -> None:
    model = nn.ModuleDict({"whole": Stored(is_marked=True), "gated": Gated(is_marked=True)})
    lines = problems(model)
    assert [line.split(" ")[0] for line in lines] == ["whole.weight", "gated.weight"]
    assert lines[0].startswith("whole.weight has a tensor_model_parallel mark and sharded_state_dict stores it whole; ")


def test_experts_are_cut_by_their_own_size() -> None:
    """One with groups of its own is whole where these have one rank, whatever its mark says."""
    model = Stored(is_marked=True)
    assert len(problems(model)) == 1
    model.weight.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
    assert problems(model, etp=1) == [] and len(problems(model, etp=2)) == 1


def test_one_rank_has_all_there_is() -> None:
    assert problems(Stored(is_marked=True), tp=1) == problems(Stored(num_parts=2), tp=1) == []


def test_who_cannot_be_stored_is_not_judged() -> None:
    class Broken(Stored):
        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            raise AssertionError("no last chunk has an output layer")

    assert problems(Broken(is_marked=True)) == []
