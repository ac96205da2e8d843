"""`adapters`: every chunk of a GPT is frozen and gets adapters (LoRA) as it is built.

They lie beside Megatron's linear layers: one pair of factors for each published matrix.

The layers stay where they are and keep their names; they become instances of a subclass, which adds what the adapters
compute. Factors are Megatron's own linear layers where they are cut. The replicated ones are marked as
sequence-parallel, so that `finalize_model_grads` sums their gradients over the ranks that hold parts of the sequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.model.lora import ADAPTER, EXPERTS, Lora, LoraTarget, Matrices, is_adapter, matrices_of
from vtp_plugin.runtime.step.adapter_start import fill, whole_factor
from vtp_plugin.session import Session


class ReplicatedFactor(torch.nn.Linear):
    """The factor of a pair that every rank of a stage has whole.

    Args:
        columns: width of its input.
        rows: width of its output.
        base: the layer that it is beside.
    """

    def __init__(self, columns: int, rows: int, base: Any) -> None:
        super().__init__(columns, rows, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        self.group, self.is_expert = _group_of(base), base.is_expert
        self.weight.sequence_parallel = base.config.sequence_parallel and not base.is_expert
        if base.is_expert:
            self.weight.allreduce = base.weight.allreduce

    def reset_parameters(self) -> None:
        """Draw nothing: random states go on as without adapters, and :func:`add_adapters` fills it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply. Of an expert that is cut each rank has a part of the gradient, which the backward adds up."""
        weight: torch.Tensor = self.weight
        if self.is_expert and self.group.size() > 1:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)
        return torch.nn.functional.linear(input, weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Say how it is stored: once, by one rank."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]} if self.is_expert else {}
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, **groups)


class Pair(torch.nn.Module):
    """The two factors beside one published matrix.

    Args:
        base: the layer that holds the matrix.
        seconds: name of B and rows of the whole matrix; several where matrices share an A, in the order of their rows.
        lora: the adapters of the run.
    """

    def __init__(self, base: Any, seconds: Mapping[str, int], lora: Lora) -> None:
        super().__init__()
        self.scale, self.dropout, self.seconds = lora.scale, lora.dropout, tuple(seconds)
        self.group = _group_of(base)
        self.cut_axis = -1 if isinstance(base, RowParallelLinear) else 0 if base.config.sequence_parallel else None
        options: dict[str, Any] = {"config": base.config, "init_method": _draw_nothing, "bias": False}
        options |= {"is_expert": base.is_expert}
        if hasattr(base, "tp_group"):
            options["tp_group"] = base.tp_group
        if isinstance(base, ColumnParallelLinear):
            self.linear_in: Any = ReplicatedFactor(base.input_size, lora.rank, base)
            for name, rows in seconds.items():
                self.add_module(name, ColumnParallelLinear(lora.rank, rows, gather_output=False, **options))
        else:
            options |= {"input_is_parallel": True, "skip_bias_add": True}
            self.linear_in = RowParallelLinear(base.input_size, lora.rank, **options)
            for name, rows in seconds.items():
                self.add_module(name, ReplicatedFactor(lora.rank, rows, base))
        self.shapes = {"linear_in": (lora.rank, base.input_size)}
        self.shapes |= {name: (rows, lora.rank) for name, rows in seconds.items()}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute what the adapter adds to the layer's output, as that is cut."""
        if self.dropout and self.training:
            inputs = _drop(inputs, self.dropout, self.cut_axis, self.group)
        between = _first(self.linear_in(inputs)) * self.scale
        added = [_first(getattr(self, name)(between)) for name in self.seconds]
        return added[0] if len(added) == 1 else torch.cat(added, dim=-1)


def _drop(inputs: torch.Tensor, share: float, cut_axis: int | None, group: Any) -> torch.Tensor:
    """Leave out a share of the inputs; what is left is scaled up.

    Masks are drawn for the whole tensor, by a random state that the ranks of a stage share, and cut as the tensor is;
    recomputation sets that state back as Megatron's own.

    Args:
        inputs: what this rank has of them.
        share: which share is left out.
        cut_axis: the dimension of which each rank has a part; None where each has all.
        group: the ranks of the stage.
    """
    shape = [*inputs.shape]
    if cut_axis is not None:
        shape[cut_axis] *= group.size()
    with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
        kept = torch.empty(shape, device=inputs.device, dtype=torch.bool).bernoulli_(1 - share)
    if cut_axis is not None:
        kept = kept.chunk(group.size(), cut_axis)[group.rank()].contiguous()
    return torch.where(kept, inputs, 0.0) / (1 - share)


class Fused(torch.nn.ModuleDict):
    """The pairs beside a layer that holds several published matrices.

    Args:
        pairs: under the names of their modules.
        rows: this rank's rows of each matrix, those without a pair included, in the order in which they lie.
        num_groups: how many groups of rows this rank has; each has rows of all matrices in turn.
    """

    def __init__(self, pairs: Mapping[str, Pair], rows: Mapping[str, int], num_groups: int) -> None:
        super().__init__(pairs)
        self.rows, self.num_groups = rows, num_groups

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute what the adapters add, interleaved as the layer's output is."""
        added = {name: pair(inputs) for name, pair in self.items()}
        first = next(iter(added.values()))
        parts = [
            added[name] if name in added else first.new_zeros((*first.shape[:-1], rows))
            for name, rows in self.rows.items()
        ]
        grouped = [part.unflatten(-1, (self.num_groups, -1)) for part in parts]
        return torch.cat(grouped, dim=-1).flatten(-2)


class Adapted:
    """What a linear layer of Megatron's becomes: it adds what its adapters compute, and stores them beside itself."""

    adapter: torch.nn.Module
    adapter_place: tuple[int, int]
    """Which of the layers with adapters this is, and how many there are."""
    is_expert: bool

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer, and add what its adapters compute."""
        output, bias = super().forward(input_, *args, **kwargs)
        return output + self.adapter(input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Say how the layer is stored, as without adapters, and how those are.

        Where layers are a dimension of what is stored, that of the adapters counts the layers that have some.
        """
        base: Any = super()
        stored = base.sharded_state_dict(prefix, sharded_offsets, metadata)
        before = f"{prefix}{ADAPTER}."
        found = {key: value for key, value in stored.items() if not key.startswith(before)}
        place, count = self.adapter_place
        # An expert's own dimension is the last of these.
        has_layers = len(sharded_offsets) > (self.is_expert and not (metadata or {}).get("singleton_local_shards"))
        own = [(0, place, count) if axis == 0 and has_layers else (axis, *rest) for axis, *rest in sharded_offsets]
        return found | _sharded(self.adapter, before, tuple(own), metadata)


@functools.cache
def _adapted(kind: type) -> type:
    """Make the subclass of a linear layer that has adapters."""
    return type(f"Adapted{kind.__name__}", (Adapted, kind), {})


def add_adapters(chunk: Any, lora: Lora, *, seed: int) -> None:
    """Freeze a chunk of a GPT, and give its linear layers adapters.

    Args:
        chunk: Megatron's ``GPTModel``, as it is built, before it is wrapped.
        lora: which adapters.
        seed: of the run; in a U whose edge has a key, what is drawn on the edge follows from that.

    Raises:
        ConfigError: its layers are not Megatron's own.
    """
    chunk.requires_grad_(False)
    config = chunk.config
    numbers = lora.layer_numbers(config.num_layers)
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        if number not in numbers:
            continue
        place = numbers.index(number), len(numbers)
        model = matrices_of(vars(config), has_experts=isinstance(layer.mlp, MoELayer))
        for (block, linear), pairs in itertools.groupby(lora.pairs(model), key=lambda pair: (pair.block, pair.linear)):
            wanted = [*pairs]
            for expert, module in _blocks(layer, block):
                _adapt(getattr(module, linear, None), wanted, lora, model, f"layers.{number}", expert, seed, place)
    has_adapters = any(layer.layer_number - 1 in numbers for layer in chunk.decoder.layers)
    if chunk.pre_process and has_adapters and config.recompute_granularity is not None:
        # A reentrant checkpoint whose inputs need no gradient gives its outputs none, and trains nothing inside.
        chunk.embedding.register_forward_hook(_need_gradient)


def _blocks(layer: Any, block: str) -> Iterator[tuple[int, Any]]:
    """Yield the modules of a layer that hold matrices of a block, the experts of this rank with their numbers."""
    if block != EXPERTS:
        yield 0, layer.self_attention if block == "self_attn" else layer.mlp
        return
    experts = layer.mlp.experts
    if not isinstance(experts, SequentialMLP):
        raise ConfigError(
            f"--vtp-lora-rank with {type(experts).__name__}; adapters of experts are for those that Megatron computes "
            "one by one; leave --moe-grouped-gemm out, or adapt the attention alone"
        )
    yield from enumerate(experts.local_experts, experts.ep_group.rank() * experts.num_local_experts)


def trained_besides(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield one line where more than adapters would be trained: a model without any, or what a script added to one."""
    for name, weight in (each for chunk in chunks for each in chunk.named_parameters()):
        if weight.requires_grad and not is_adapter(name):
            yield (
                f"--vtp-lora-rank with a model that trains {name}; adapters are for Megatron's GPTModel, and the rest "
                "is frozen; freeze what the script adds, or leave --vtp-lora-rank out"
            )
            return


def _adapt(
    base: Any,
    wanted: Sequence[LoraTarget],
    lora: Lora,
    model: Matrices,
    layer: str,
    expert: int,
    seed: int,
    place: tuple[int, int],
) -> None:
    """Give one linear layer the adapters of the matrices that it holds."""
    if type(base) not in (ColumnParallelLinear, RowParallelLinear):
        raise ConfigError(
            f"--vtp-lora-rank with a layer of {type(base).__module__}.{type(base).__name__}; adapters are for "
            "Megatron's own linear layers; build the model with --transformer-impl local, or leave --vtp-lora-rank out"
        )
    group = _group_of(base)
    if wanted[0].child:
        rows, num_groups = _fused_rows(base, wanted[0].linear, group.size())
        if num_groups % group.size():
            raise ConfigError(
                f"adapters of {num_groups} groups of queries on {group.size()} ranks; ranks would share keys, of which "
                "adapters cannot be cut; give stages of sizes that divide the number of groups"
            )
        pairs = {target.child: Pair(base, {"linear_out": rows[target.child]}, lora) for target in wanted}
        own_rows = {name: number // group.size() for name, number in rows.items()}
        base.adapter = Fused(pairs, own_rows, num_groups // group.size())
    else:
        seconds = wanted[0].seconds(model)
        base.adapter = Pair(base, {name: base.output_size // len(seconds) for name in seconds}, lora)
        pairs = {"": base.adapter}
    base.adapter_place = place
    for target in wanted:
        pair = pairs[target.child]
        for name, shape in pair.shapes.items():
            whole = whole_factor(f"{layer}.{target.place.format(expert=expert)}.{name}", shape, seed=seed)
            fill(getattr(pair, name).weight, whole, rank=group.rank())
    base.__class__ = _adapted(type(base))


def _group_of(base: Any) -> Any:
    """Give the ranks that a layer is cut over."""
    return getattr(base, "tp_group", None) or get_tensor_model_parallel_group()


def _fused_rows(base: Any, linear: str, tp: int) -> tuple[dict[str, int], int]:
    """Return the rows of each matrix that a layer holds, and in how many groups they lie on all ranks together."""
    config = base.config
    if linear == "linear_qkv":
        num_groups = config.num_query_groups or config.num_attention_heads
        keys = num_groups * config.kv_channels
        return {
            "adapter_q": config.num_attention_heads * config.kv_channels,
            "adapter_k": keys,
            "adapter_v": keys,
        }, num_groups
    # Each rank has its part of the gate before its part of the rest.
    names = ("adapter_gate", "adapter_up") if config.gated_linear_unit else ("adapter_up",)
    return dict.fromkeys(names, base.output_size // len(names)), tp


def _sharded(module: torch.nn.Module, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
    """Say how all layers inside a module are stored."""
    found: dict[str, Any] = {}
    children: dict[str, Any] = dict(module.named_children())
    for name, child in children.items():
        stored = getattr(child, "sharded_state_dict", functools.partial(_sharded, child))
        found |= stored(f"{prefix}{name}.", sharded_offsets, metadata)
    # Megatron's layers store nothing but weights, and a place for what low precision keeps.
    return {key: value for key, value in found.items() if not key.endswith("_extra_state")}


def _first(output: Any) -> torch.Tensor:
    """Give the tensor of what a layer returns; Megatron's return a bias with it."""
    return output[0] if isinstance(output, tuple) else output


def _draw_nothing(_weight: torch.Tensor) -> None:
    """Leave a weight as it is: random states go on as without adapters."""


def _need_gradient(_embedding: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the backward pass reach what a frozen embedding gives."""
    return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()


_SEED = 1234  # as Megatron's --seed


@replaces(
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__", id="adapters", when=Moment.LORA, versions=">=0.19,<0.20"
)
def _build(session: Session, original: Callable[..., None], chunk: Any, *args: Any, **kwargs: Any) -> None:
    """Build a `GPTModel`, freeze it, and give it the adapters of the run.

    Why: the last point before a script's model is wrapped and its parameters are put into buffers, which frozen ones do
    not enter.

    Remove when: Megatron-core's own adapters are released and do not depend on the sizes.
    """
    original(chunk, *args, **kwargs)
    lora = session.config.lora
    assert lora is not None
    seed = _SEED
    if session.has_arguments:
        from megatron.training import get_args

        seed = get_args().seed
    add_adapters(chunk, lora, seed=seed)
