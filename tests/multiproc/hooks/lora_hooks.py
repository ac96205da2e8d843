"""What runs with the plugin's adapters start from in tests, what they note, and the public faults that are planted."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.parallel_state import get_expert_tensor_parallel_rank, get_tensor_model_parallel_rank

from tests.multiproc.hooks.in_place import Facts, after, around, before
from vtp_plugin.patches import lora_layers


def random_adapters(facts: Facts) -> None:
    """Start from factors that are not zero: with B = 0 the first gradient of A is."""

    @around(lora_layers, "whole_factor")
    def whole(_original: Any, name: str, shape: tuple[int, int], *, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator) / 8


def note_lora(facts: Facts) -> Callable[[], None]:
    """Note all factors of this rank before the first step and at the end, and whether the base stays to the bit."""
    chunks: list[Any] = []
    before_steps: list[dict[str, torch.Tensor]] = []

    @after(gpt_model.GPTModel, "__init__")
    def keep(_none: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
        chunks.append(self)

    def parameters(*, are_adapters: bool) -> dict[str, torch.Tensor]:
        found = {}
        for number, chunk in enumerate(chunks):
            for name, weight in chunk.named_parameters():
                if (".adapter." in name) == are_adapters:
                    found[_whole_name(chunk, name) if are_adapters else f"{number} {name}"] = weight.detach().clone()
        return found

    @before(training, "train_step")
    def note(*_args: Any, **_kwargs: Any) -> None:
        if not before_steps:
            before_steps.append(parameters(are_adapters=False))
            facts["start"] = {name: weight.float().numpy() for name, weight in parameters(are_adapters=True).items()}
            facts["tp_rank"] = get_tensor_model_parallel_rank()
            facts["etp_rank"] = get_expert_tensor_parallel_rank()

    def finish() -> None:
        facts["adapters"] = {name: weight.float().numpy() for name, weight in parameters(are_adapters=True).items()}
        base = parameters(are_adapters=False)
        facts["base is as it was"] = all(torch.equal(base[name], weight) for name, weight in before_steps[0].items())
        facts["num_base"] = len(base)

    return finish


def _whole_name(chunk: Any, name: str) -> str:
    """Name a factor as in the whole model."""
    words = name.split(".")
    place = words.index("layers") + 1
    layer = chunk.decoder.layers[int(words[place])]
    words[place] = str(layer.layer_number - 1)
    if "local_experts" in words:
        experts, own = layer.mlp.experts, words.index("local_experts") + 1
        words[own] = str(experts.ep_group.rank() * experts.num_local_experts + int(words[own]))
    return ".".join(words)


def unsummed_factor(facts: Facts) -> None:
    """The fault of mcore-bridge 173: the replicated factor is not marked, so nobody sums its gradient."""

    @after(lora_layers.ReplicatedFactor, "__init__")
    def unmark(_none: None, self: Any, *_args: Any) -> None:
        self.weight.sequence_parallel = False


def unsummed_expert(facts: Facts) -> None:
    """The fault of Megatron-Bridge 5634: of an expert that is cut, nobody sums the replicated factor's gradient."""

    @around(lora_layers, "copy_to_tensor_model_parallel_region")
    def leave(_original: Any, weight: torch.Tensor, **_options: Any) -> torch.Tensor:
        return weight


def factors_of_shards(facts: Facts) -> None:
    """The fault of Megatron-Bridge 5840: factors are drawn for the part that a rank holds."""

    @around(lora_layers, "fill")
    def fill(_original: Any, weight: torch.Tensor, whole: torch.Tensor, *, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 8)


def no_gradient_of_inputs(facts: Facts) -> None:
    """The trap of a frozen embedding: reentrant checkpoints train nothing."""

    @around(lora_layers, "_need_gradient")
    def leave(_original: Any, _embedding: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output


def changed_base(facts: Facts) -> None:
    """A weight of the base changes by one bit in the third step."""

    @after(gpt_model.GPTModel, "__init__")
    def change(_none: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
        weight = self.decoder.layers[0].mlp.linear_fc2.weight
        calls: list[int] = []

        @before(training, "train_step")
        def flip(*_args: Any, **_kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                weight.data.view(torch.int32).view(-1)[0] ^= 1
