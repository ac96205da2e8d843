"""Every name that Megatron's modules can store, against what is known of their order: none is new without a word."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import STOCK_SHAPES, Writer, as_stock, by_name, make_model, run_action
from vtp_plugin.checkpoint.format import shard_map

# Of which models of GPT's kind consist.
PLACES = ("transformer", "tensor_parallel", "fusions", "extensions", "ssm", "models/common", "models/gpt")
_SSM, _SPARSE = "layers with a state (Mamba, gated delta nets)", "sparse attention"
REFUSED = {
    **dict.fromkeys(("A_log", "D", "conv1d_weight", "conv1d_bias", "dt_bias", "in_proj", "out_norm", "out_proj"), _SSM),
    **dict.fromkeys(("mixer", "norm", "conv1d"), _SSM),
    **dict.fromkeys(("indexer", "k_norm", "linear_weights_proj", "linear_wk", "linear_wq_b"), _SPARSE),
    **dict.fromkeys(
        ("linear_q", "linear_kv", "cross_attention", "pre_cross_attn_layernorm"), "attention to an encoder"
    ),
    **dict.fromkeys(("eh_proj", "enorm", "hnorm", "mtp_model_layer"), "multi-token prediction"),
    "linear_qkv_down_proj": "latent attention with one projection for queries and keys",
}
# Attributes that are no modules with parameters of their own, and, of older families, experts in one tensor, which are
# stored as linear_fc1 and linear_fc2.
WITHOUT = {
    *("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda", "submodules", "submodules_config"),
    *("activation_func", "transformer_layer", "weight1", "weight2"),
}


@functools.cache
def _modules() -> tuple[ast.AST, ...]:
    """Return the syntax trees of the host's modules."""
    return tuple(_nodes())


def _nodes() -> Iterator[ast.AST]:
    found = find_spec("megatron.core")
    assert found is not None and found.submodule_search_locations
    (root,) = (Path(place) for place in found.submodule_search_locations)
    for place in PLACES:
        for file in sorted((root / place).rglob("*.py")):
            yield from ast.walk(ast.parse(file.read_text()))


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _is_stored(call: ast.Call) -> bool:
    said = [word.value for word in call.keywords if word.arg == "persistent"]
    return not (said and isinstance(said[0], ast.Constant) and said[0].value is False)


def _registered(function: str) -> set[str]:
    """Return the names under which a method of a module registers something that is stored."""
    calls = (node for node in _modules() if isinstance(node, ast.Call) and _called(node) == function)
    names = (call.args[0] for call in calls if call.args and _is_stored(call))
    return {str(name.value) for name in names if isinstance(name, ast.Constant)}


def _assigned(*makers: str) -> set[str]:
    """Return the attributes of modules that are made by some functions."""
    pairs = ((node.targets, node.value) for node in _modules() if isinstance(node, ast.Assign))
    return {
        target.attr
        for targets, value in pairs
        if any(maker in (_called(value), ast.unparse(value).partition("(")[0].partition(".")[0]) for maker in makers)
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }


def test_every_buffer_that_is_stored_is_known() -> None:
    found = _registered("register_buffer")
    assert found >= {"expert_bias"}
    unknown = {name for name in found if not shard_map._BUFFERS.fullmatch(f"decoder.layers.mlp.router.{name}")}
    assert unknown == set()


def test_every_parameter_is_known_or_refused() -> None:
    found = _assigned("Parameter") | _registered("register_parameter")
    assert found >= {"weight", "bias"}
    assert found - {*shard_map._LEAVES} - WITHOUT - REFUSED.keys() == set()


def test_every_module_is_known_or_refused() -> None:
    """What is refused is refused by its name, before any value is read."""
    known = {part for name in (*shard_map._MODULES, *shard_map._SECTIONS) for part in name.split(".")}
    found = _assigned("build_module", "submodules") - WITHOUT
    assert found >= {"linear_qkv", "linear_fc1"}
    assert found - known - REFUSED.keys() == set()


@pytest.mark.parametrize("name", ["expert_bias", "qb_beta"])
def test_a_router_with_a_buffer_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without a map, too: a buffer has no state of the optimizer."""
    model, run = make_model(shapes=STOCK_SHAPES), functools.partial(run_action, capsys)
    key = f"decoder.layers.mlp.router.{name}"
    finish = Writer.finish

    def with_buffer(writer: Writer, *args: Any, **kwargs: Any) -> Path:
        writer.tensor(key, (3, 4), (0, 0), torch.arange(12.0).view(3, 4), 0)
        return finish(writer, *args, **kwargs)

    monkeypatch.setattr(Writer, "finish", with_buffer)
    folders = [as_stock(tmp_path / "a", model), by_name(tmp_path / "b", model)]
    assert run("diff", *folders)[0] == 0
    assert run("reshard", "--from", folders[0], "--to", tmp_path / "c")[0] == 0
    assert run("diff", tmp_path / "c", folders[1])[0] == 0
