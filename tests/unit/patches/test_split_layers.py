"""Which models have no linear layers that can leave the gradients of weights for later."""

from __future__ import annotations

import torch

from vtp_plugin.errors import refuse
from vtp_plugin.patches.core.tensor_parallel.layers import layers_that_cannot_split


def layer(home: str, *shape: int) -> torch.nn.Module:
    kind = type("TELayer", (torch.nn.Module,), {"__module__": home})
    made = kind()
    made.weight = torch.nn.Parameter(torch.zeros(shape))
    return made


def test_one_line_names_a_layer_of_transformer_engine() -> None:
    engine = "megatron.core.extensions.transformer_engine"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer(engine, 3, 2), layer(engine, 3, 2))
    (line,) = layers_that_cannot_split([torch.nn.Linear(2, 2), model])
    assert line.startswith("--vtp-split-backward with a model of TELayer: ") and line.count("; ") == 1


def test_norms_of_transformer_engine_and_other_layers_do_no_harm() -> None:
    model = torch.nn.Sequential(layer("transformer_engine.pytorch", 3), layer("elsewhere", 3, 2))
    refuse(layers_that_cannot_split([model]))
