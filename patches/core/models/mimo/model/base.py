"""`mimo-split-sizes`: images of different sizes cross a bridge whichever module has more replicas."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment


@replaces(
    "megatron.core.models.mimo.model.base:MimoModel._attach_modality_split_sizes",
    id="mimo-split-sizes",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
)
def _attach(
    original: Callable[..., None], model: Any, output: torch.Tensor, input_ids: torch.Tensor | None, encoder_name: str
) -> None:
    """Note the tokens of every sample on the encoder's output; the replicas of the modules do not matter.

    Why: it asserts that the encoder has no more replicas than the language model where samples have different numbers
    of tokens; our bridge sends them along.

    Remove when: Megatron's bridge takes such samples in fan-in.
    """
    # What it reads of the model; of modules on other ranks it would ask for their replicas.
    seen = SimpleNamespace(special_token_ids=model.special_token_ids, role=SimpleNamespace(mode=None))
    original(seen, output, input_ids, encoder_name)
