"""What a run notes of a model that was published: logits and, in the place of weights, gradients."""

from __future__ import annotations

from typing import Any

import megatron.training.training as training
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args

from tests.multiproc.hooks.in_place import Facts, around, before

GRADIENT_STEP = 2
"""Its gradients are stored as weights; the step before changes nothing, those behind it go on from the old weights."""


def note_logits(facts: Facts) -> None:
    """Note the tokens and the logits of every microbatch, where they are, as numpy has them."""
    facts |= {"tokens": [], "labels": [], "logits": []}

    @before(GPTModel, "forward")
    def note_tokens(self: Any, input_ids: Any, *_args: Any, **_kwargs: Any) -> None:
        if self.pre_process:  # in a U, the end gets the tokens as well
            facts["tokens"].append(input_ids.detach().clone().numpy())

    @before(LanguageModule, "compute_language_model_loss")
    def note_labels(_self: Any, labels: Any, logits: Any) -> None:
        facts["labels"].append(labels.detach().clone().numpy())
        facts["logits"].append(logits.detach().float().transpose(0, 1).contiguous().clone().numpy())


def store_gradients(facts: Facts) -> None:
    """Put the gradients of a step in the place of the weights until the checkpoint after it is written."""
    kept: list[tuple[Any, Any]] = []

    @around(training, "train_step")
    def train_step(original: Any, step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        number = get_args().curr_iteration + 1
        for weight, value in kept:
            weight.data.copy_(value)
        kept.clear()

        def no_step() -> tuple[bool, float, None]:
            if number == GRADIENT_STEP:
                for weight in (each for chunk in model for each in chunk.parameters() if each.requires_grad):
                    kept.append((weight, weight.data.clone()))
                    weight.data.copy_(weight.main_grad)
            return True, 0.0, None

        if number > GRADIENT_STEP:
            return original(step, data, model, optimizer, *args, **kwargs)
        real, optimizer.step = optimizer.step, no_step
        try:
            return original(step, data, model, optimizer, *args, **kwargs)
        finally:
            optimizer.step = real


def frequencies(size: int, factor: float) -> Any:
    """Give the frequencies of Megatron's positions for Llama 3, as a job."""
    scaled = {"rope_scaling": True, "rope_scaling_factor": factor}
    made = RotaryEmbedding(size, 1.0, rotary_base=500000, use_cpu_initialization=True, **scaled)
    return made.inv_freq.numpy()
