"""Which models, and what of MindSpeed, have no linear layers that can leave the gradients of weights for later."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from vtp_plugin.errors import refuse
from vtp_plugin.patches.core.tensor_parallel.layers import layers_that_cannot_split
from vtp_plugin.patches.mindspeed import MindSpeed


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


HOME = "mindspeed.core.some.adaptor"
OTHERS = [
    "megatron.core.tensor_parallel.layers.VocabParallelEmbedding.forward",
    "megatron.core.tensor_parallel.layers.copy_tensor_model_parallel_attributes",
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear",
    "megatron.core.transformer.moe.experts.GroupedMLP",
]


def lines(monkeypatch: pytest.MonkeyPatch, *names: str, is_wrapped: bool, is_split: bool = True) -> Iterator[str]:
    """Say what is wrong where MindSpeed has put something of its own in the place of these names of Megatron."""
    own = type("Own", (), {"__module__": HOME})
    entry = SimpleNamespace(patch_func=None if is_wrapped else own, wrappers=[own] if is_wrapped else [])
    manager = SimpleNamespace(patches_info=dict.fromkeys(names, entry))
    for module, content in {
        "features_manager.features_manager": {"MindSpeedFeaturesManager": None},
        "features_manager.feature": {"MindSpeedFeature": None},
        "patch_utils": {"MindSpeedPatchesManager": manager},
    }.items():
        monkeypatch.setitem(sys.modules, f"mindspeed.{module}", SimpleNamespace(**content))
    return MindSpeed().problems(is_planned=True, is_split=is_split)


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [
        ("ColumnParallelLinear", False),
        ("RowParallelLinear", False),
        ("RowParallelLinear.forward", True),
        ("linear_with_grad_accumulation_and_async_allreduce", True),
        ("LinearWithGradAccumulationAndAsyncCommunication", False),
        ("LinearWithGradAccumulationAndAsyncCommunication.forward", True),
        ("LinearWithGradAccumulationAndAsyncCommunication.backward", False),
    ],
)
def test_what_mindspeed_has_in_the_place_of_linear_layers_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, is_wrapped: bool
) -> None:
    assert operator.attrgetter(name)(layers)  # this Megatron has it under this name
    (line,) = lines(monkeypatch, f"{layers.__name__}.{name}", *OTHERS, is_wrapped=is_wrapped)
    assert line.startswith(f"--vtp-split-backward with {HOME} of MindSpeed in the place of {layers.__name__}.{name}; ")
    assert line.count("; ") == 2 and "leave out the flag that switches it on" in line
    refuse(lines(monkeypatch, f"{layers.__name__}.{name}", is_wrapped=is_wrapped, is_split=False))


def test_what_else_mindspeed_has_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(lines(monkeypatch, *OTHERS, is_wrapped=False))
