"""What scripts do themselves in the cases of an audit: freeze or break weights. And what befalls a run."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import optimizer
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer

Hook = Callable[[dict[str, Any]], Callable[[], None] | None]
ROUNDING = {False: 1e-6, True: 1e-3}  # of a tensor's largest gradient; in half precision, True, coarser


def _when_built(change: Callable[[Any], None]) -> Hook:
    """Give a hook that changes every chunk of the model as a script would, before Megatron wraps it."""

    def hook(facts: dict[str, Any]) -> None:
        original = GPTModel.__init__

        def built(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            change(self)

        GPTModel.__init__ = built

    return hook


def _freezing(is_frozen: Callable[[str], bool]) -> Hook:
    """Give a hook that freezes weights by their names; a layer has its number in the whole model, from 1."""

    def freeze(model: Any) -> None:
        for name, weight in model.named_parameters():
            weight.requires_grad = not is_frozen(name) and weight.requires_grad
        for layer in model.decoder.layers:
            for name, weight in layer.named_parameters():
                weight.requires_grad = not is_frozen(f"layer {layer.layer_number}.{name}") and weight.requires_grad

    return _when_built(freeze)


def _break_a_weight(model: Any) -> None:
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            model.decoder.layers[0].mlp.linear_fc1.weight[0, 0] = math.nan


def _stop_one_rank(facts: dict[str, Any]) -> None:
    """Tell one rank to end, in its second step, as a scheduler of jobs does."""
    original = training.train_step
    calls: list[None] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    training.train_step = interrupted


def _limit_files(facts: dict[str, Any]) -> None:
    """Let no file of one rank grow over 64 KiB from its second save on, as a full disk or a quota does."""
    original = training.save_checkpoint
    calls: list[None] = []

    def limited(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
        return original(*args, **kwargs)

    training.save_checkpoint = limited


def _flush_events() -> None:
    """Write the last of TensorBoard's events, of which Megatron leaves some to a thread when it ends."""
    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()


def _note_small_gradients(facts: dict[str, Any]) -> Callable[[], None]:
    """Note for every step how many gradients here are 0 within rounding, but not 0; see that all events are written."""
    count, train_step = optimizer.count_zeros_fp32, training.train_step
    facts["small"] = []

    def counted(weights: Any, *args: Any, **kwargs: Any) -> Any:
        for weight in weights:
            size = weight.grad.abs()
            rounding = ROUNDING[getattr(get_args(), "fp16", False)] * size.max()
            facts["small"][-1] += int(((size > 0) & (size <= rounding)).sum())
        return count(weights, *args, **kwargs)

    def step(*args: Any, **kwargs: Any) -> Any:
        facts["small"].append(0)
        return train_step(*args, **kwargs)

    optimizer.count_zeros_fp32, training.train_step = counted, step
    return _flush_events


def _note_device_waits(facts: dict[str, Any]) -> None:
    """Note which timers wait for all that the device does, in training steps."""
    original = training.train_step
    facts["waits"] = set()

    def step(*args: Any, **kwargs: Any) -> Any:
        synchronize = torch.cuda.synchronize

        def noted() -> None:
            facts["waits"].add(sys._getframe(1).f_locals["self"].name)

        torch.cuda.synchronize = noted
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.synchronize = synchronize

    training.train_step = step


AUDIT_HOOKS: dict[str, Hook] = {
    "freeze_words": _freezing(lambda name: "word_embeddings" in name or "output_layer" in name),
    "freeze_embedding": _freezing(lambda name: "embedding" in name or "output_layer" in name),
    "freeze_first_layer": _freezing(lambda name: name.startswith("layer 1.")),
    "freeze_mlp": _freezing(lambda name: ".mlp." in name),
    "freeze_all_but_norms": _freezing(lambda name: "norm" not in name),
    "break_a_weight": _when_built(_break_a_weight),
    "stop_one_rank": _stop_one_rank,
    "limit_files": _limit_files,
    "note_device_waits": _note_device_waits,
    "note_small_gradients": _note_small_gradients,
}
