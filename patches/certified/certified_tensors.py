"""Which part of which whole tensor a rank has: of parameters, and of what modules give out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

from vtp_plugin.certify.compare import PartSketch
from vtp_plugin.runtime.step.sketch import sketch

_WATCHED = (
    *("embedding", "input_layernorm", "linear_qkv", "core_attention", "linear_proj"),
    *("pre_mlp_layernorm", "router", "linear_fc1", "linear_fc2", "final_layernorm", "output_layer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPart:
    """A parameter on this rank.

    Attributes:
        parameter: Megatron's.
        dim: the dimension along which it is cut; None where each tensor-parallel rank has all of it.
        index: which part this rank has.
        count: number of parts.
        is_gated: each part has rows of a gate, then as many of the values: two tensors, which are cut alike.
    """

    parameter: Any
    dim: int | None
    index: int
    count: int
    is_gated: bool = False

    def sketches(
        self, name: str, values: torch.Tensor, noise: float = 0.0, *, is_exact: bool = False
    ) -> dict[str, PartSketch]:
        """Give the sketches, by name, of values that lie as this parameter does: its own, or its gradient.

        Args:
            name: of the parameter.
            values: of its shape.
            noise: norm of what their storage rounds away.
            is_exact: digests instead.
        """
        place: dict[str, Any] = {"dim": self.dim, "index": self.index, "count": self.count}
        names = [f"{name}[{half}]" for half in ("gate", "value")] if self.is_gated else [name]
        halves = values.detach().chunk(len(names))
        found = zip(names, halves, strict=True)
        return {one: sketch(one, half, **place, noise=noise, is_exact=is_exact) for one, half in found}


def named_parts(chunks: list[Any], num_experts: int = 0) -> dict[str, NamedPart]:
    """Give the parameters of this rank by names with the layers' and experts' numbers in the whole model.

    Args:
        chunks: model chunks of this rank, wrapped or not.
        num_experts: of a layer; 0 for dense ones.
    """
    parts: dict[str, NamedPart] = {}
    for chunk in map(bare, chunks):
        for name, parameter in chunk.named_parameters():
            words = global_words(chunk, name)
            index, count = (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_world_size(),
            )
            if not getattr(parameter, "allreduce", True):
                group: Any = parallel_state.get_expert_tensor_parallel_group()
                index, count = group.rank(), group.size()
                if "local_experts" in words:
                    at = words.index("local_experts") + 1
                    own = num_experts // parallel_state.get_expert_model_parallel_world_size()
                    words[at] = str(parallel_state.get_expert_model_parallel_rank() * own + int(words[at]))
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            dim = parameter.partition_dim if is_cut else None
            is_gated = "linear_fc1" in words and chunk.config.gated_linear_unit
            parts[".".join(words)] = NamedPart(
                parameter=parameter, dim=dim, index=index, count=count, is_gated=is_gated
            )
    return parts


def global_words(chunk: Any, name: str) -> list[str]:
    """Cut a parameter's or a module's name into words, with the layer's number in the whole model."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"] and words[2:]:
        words[2] = str(chunk.decoder.layers[int(words[2])].layer_number)
    return words


def bare(chunk: Any) -> Any:
    """Give the model inside Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _named_modules(chunks: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the modules of this rank: their names with the layers' numbers in the whole model, they, and the config."""
    for chunk in map(bare, chunks):
        for name, module in chunk.named_modules():
            yield ".".join(global_words(chunk, name)), module, chunk.config


def feed(chunks: list[Any], file: Path, *, is_kept: bool) -> None:
    """Keep the input ``[S, B, H]`` of a layer in the first microbatch, or give the layer what a uniform run has kept.

    Args:
        chunks: model chunks of this rank, wrapped or not.
        file: where it is kept; its name is the layer's.
        is_kept: keep it. Each rank of this run has the whole input; that of another one takes its part.
    """
    index, count = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )

    def watch(module: Any, config: Any) -> None:
        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hook.remove()
            values = args[0] if args else kwargs["hidden_states"]
            if is_kept:
                torch.save(values.detach().cpu(), file)
            else:
                given = torch.load(file, weights_only=True)
                values.data.copy_(given.chunk(count)[index] if config.sequence_parallel else given)

        hook = module.register_forward_pre_hook(before, with_kwargs=True)

    for name, module, config in _named_modules(chunks):
        if name == file.name:
            watch(module, config)


class TensorRecorder:
    """Keeps sketches of what the modules of this rank give out in each step, and of the gradients of that.

    In the first microbatch of the batch these are all modules that are watched; in the others of the first step the
    layers, and what stands before and behind them.

    Args:
        chunks: model chunks of this rank, wrapped or not.
        scale: of the gradients; replicas divide the loss by their own microbatches, and average afterwards.
    """

    def __init__(self, chunks: list[Any], scale: float = 1.0) -> None:
        self._scale = scale
        self._step = 0
        self._outputs: dict[str, PartSketch] = {}
        self._gradients: dict[str, PartSketch] = {}
        self._counts: Counter[str] = Counter()
        self._index = parallel_state.get_tensor_model_parallel_rank()
        self._count = parallel_state.get_tensor_model_parallel_world_size()
        for name, module, config in _named_modules(chunks):
            is_layer = name.startswith("decoder.layers.") and name.count(".") == 2
            if (is_layer or name.endswith(_WATCHED)) and "experts" not in name:
                self._watch(name, module, config, is_layer=is_layer or name.count(".") == 0)

    def begin_step(self, outputs: dict[str, PartSketch], gradients: dict[str, PartSketch]) -> None:
        """Begin a step.

        Args:
            outputs: what it keeps by the names of the modules, in the order in which they run.
            gradients: the same of the gradients, in the order of the backward.
        """
        self._step += 1
        self._outputs, self._gradients = outputs, gradients
        self._counts.clear()

    def _watch(self, name: str, module: Any, config: Any, *, is_layer: bool) -> None:
        gated = name.endswith("linear_fc1") and config.gated_linear_unit
        replica, num_replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

        def behind(_module: Any, _inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # it runs again, in the backward
                return
            microbatch = self._counts[name] * num_replicas + replica
            self._counts[name] += 1
            values = output[0] if isinstance(output, tuple) else output
            if not torch.is_tensor(values) or gated:  # a gate and its values lie by rank, not as in the whole
                return
            if microbatch and not (is_layer and self._step == 1):
                return
            is_column = getattr(module, "parallel_mode", "") == "column"  # of Transformer Engine
            is_column |= isinstance(module, ColumnParallelLinear) and not module.gather_output
            dim = 2 if is_column or name.endswith("core_attention") else 0 if config.sequence_parallel else None
            place: dict[str, Any] = {"dim": dim, "index": self._index, "count": self._count}
            shown = f"{name} in microbatch {microbatch}" if microbatch else name
            self._outputs[shown] = sketch(name, values, **place)
            gradients = self._gradients
            if values.requires_grad:

                def note(gradient: torch.Tensor) -> None:
                    gradients.setdefault(shown, sketch(name, gradient * self._scale, **place))

                values.register_hook(note)

        module.register_forward_hook(behind)
