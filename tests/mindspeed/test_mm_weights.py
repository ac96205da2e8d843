"""Weights of MindSpeed-MM's model: saved by one layout and loaded by another, and made by its own converter.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`. Gathered weights are what a sharded checkpoint holds, read whole.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.mindspeed import test_mm_lane
from tests.mindspeed.mm.converted import convert, write_hugging_face
from tests.mindspeed.mm.model import TEXT_LAYERS, VISION_LAYERS, write_files
from tests.mindspeed.test_mm_lane import DEVICE, STEPS, Numbers, assert_equal, numbers, start, start_u
from tests.multiproc.cases.script_cases import num_ranks
from vtp_plugin.checkpoint.format.resolver import TRACKER

pytestmark = test_mm_lane.pytestmark
SHARDED = ("--ckpt-format", "torch_dist")
SGD = ("--optimizer", "sgd", "--lr", "1e-1")
MIDDLE = 3
LEFT = STEPS - MIDDLE
LISTS = {
    "1,2": ([2, 0], [1, 3]),
    "2,1": ([2, 0], [3, 1]),
    "1,1,2": ([2, 0, 0], [1, 1, 2]),
    "U 1,2": ([[2, 0], [0, 0]], [[1, 2], [1, 0]]),
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Megatron stores the norms of the language model under the names that they have where they are fused with what follows.
_NORMS = {
    "text_decoder.decoder.layers.input_layernorm.": "text_decoder.decoder.layers.self_attention.linear_qkv.layer_norm_",
    "text_decoder.decoder.layers.pre_mlp_layernorm.": "text_decoder.decoder.layers.mlp.linear_fc1.layer_norm_",
}
Tensors = dict[str, torch.Tensor]


def train(layout: str, *extra: str) -> str:
    """Run a layout, or one rank of the unmodified script, and return what it wrote.

    Args:
        layout: of :data:`LISTS`; "" is one rank.
        extra: flags besides the common ones.
    """
    if not layout:
        code, output = start(1, [VISION_LAYERS], [TEXT_LAYERS], *extra)
    elif layout.startswith("U "):
        code, output = start_u(layout[2:], *LISTS[layout], *extra)
    else:
        words = (*DEVICE, "--vtp-size-list", layout, *extra)
        code, output = start(num_ranks(layout, 1), *LISTS[layout], *words, is_run=True)
    assert code == 0, output[-6000:]
    return output


def stored(folder: Path, layout: str, *extra: str) -> Path:
    """Let a layout load something, store it sharded and end; return where."""
    output = train(layout, *extra, "--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(folder))
    assert "> converted checkpoint" in output, output[-6000:]
    return folder / "torch_dist"


def gathered(folder: Path, step: int) -> Tensors:
    """Read all tensors of a sharded checkpoint, whole; of step 0, also as it is published."""
    release = folder / "release"
    reader = dcp.FileSystemReader(release if release.is_dir() else folder / f"iter_{step:07d}")
    found: Tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, dcp.metadata.TensorStorageMetadata):
            found[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(found, storage_reader=reader)
    return found


def weights(tensors: Tensors) -> Tensors:
    """Leave out the states of an optimizer."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def assert_bitwise(found: Tensors, expected: Tensors) -> None:
    """Compare all tensors of two checkpoints."""
    assert found.keys() == expected.keys()
    differ = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not differ, differ


def assert_near(found: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    """Compare all weights of two runs, each with its own largest value."""
    assert found.keys() == expected.keys()
    off = {name: float((found[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()}
    worst = max(off, key=off.__getitem__)
    print(f"largest difference of weights: {off[worst]:.2e} of {worst}")
    assert off[worst] < tolerance, (worst, off[worst])


@functools.cache
def unbroken(*extra: str) -> tuple[Path, Numbers]:
    """One rank without the plugin trains five steps, and saves after each; return where, and what it logged."""
    folder = Path(tempfile.mkdtemp())
    output = train("", *SHARDED, "--save", str(folder), "--save-interval", "1", *extra)
    return folder, numbers(output)


def assert_goes_on(output: str, tolerance: float = 1e-5) -> None:
    """Compare a run that goes on from the middle with the unbroken one."""
    expected = {name: values[MIDDLE:] for name, values in unbroken()[1].items()}
    assert_equal(numbers(output, LEFT), expected, tolerance)


def test_one_rank_saves_and_goes_on(tmp_path: Path) -> None:
    """The unmodified script, without the plugin: Megatron's default finds all weights of MindSpeed-MM's modules."""
    folder, _ = unbroken()
    output = train(
        "", *SHARDED, "--load", str(folder), "--ckpt-step", str(MIDDLE), "--save", str(tmp_path), "--save-interval", "1"
    )
    assert_goes_on(output, 1e-12)
    assert_bitwise(gathered(tmp_path, STEPS), gathered(folder, STEPS))


@pytest.mark.parametrize("layout", ["1,2", "2,1", "U 1,2"])
def test_weights_move_to_another_layout_and_back(tmp_path: Path, layout: str) -> None:
    folder, _ = unbroken()
    of_one = (*SHARDED, "--load", str(folder), "--ckpt-step", str(MIDDLE), "--no-load-rng")
    there = stored(tmp_path, layout, *of_one)
    assert_bitwise(gathered(there, MIDDLE), gathered(folder, MIDDLE))
    assert_goes_on(train(layout, *of_one))
    assert_goes_on(train("", *SHARDED, "--load", str(there), "--no-load-rng"), 1e-12)


@pytest.mark.parametrize("layout", ["1,2", "U 1,2"])
def test_weights_after_five_steps_are_those_of_one_rank(tmp_path: Path, layout: str) -> None:
    """Every rank starts from its part of one set of weights, as of the names of its own parameters.

    Not by Adam, which divides a gradient by its own size, also where that is rounding, as in the biases of keys.
    """
    folder, expected = unbroken(*SGD)
    output = train(layout, *SHARDED, "--save", str(tmp_path), "--save-interval", str(STEPS), *SGD)
    assert_equal(numbers(output), expected)
    assert_near(weights(gathered(tmp_path, STEPS)), weights(gathered(folder, STEPS)))


@functools.cache
def hugging_face() -> Path:
    """Write the model of the tests as Hugging Face does, once."""
    folder = Path(tempfile.mkdtemp())
    write_files(folder, [VISION_LAYERS], [TEXT_LAYERS])
    write_hugging_face(folder / "hugging face", json.loads((folder / "model.json").read_text()))
    return folder / "hugging face"


@functools.cache
def converted() -> tuple[Path, Path, Numbers]:
    """Convert for one rank, let MindSpeed-MM's script store that sharded, and train from the converter's files."""
    folder = Path(tempfile.mkdtemp())
    tree = folder / "tree"
    convert("hf_to_mm", hugging_face(), tree, [[VISION_LAYERS]], [[TEXT_LAYERS]])
    of_tree = ("--load", str(tree), "--ckpt-format", "torch")
    sharded = stored(folder, "", *of_tree)
    # Megatron does not load a checkpoint of iteration 0, unless it is called a release.
    (sharded / "iter_0000000").rename(sharded / "release")
    (sharded / TRACKER).write_text("release")
    return tree, sharded, numbers(train("", *of_tree))


def layers_together(state: Tensors) -> Tensors:
    """Write weights of single layers as a sharded checkpoint does: one tensor of all layers."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        number, place = _LAYER.search(name), _LAYER.sub(".layers.", name)
        for here, stored_as in _NORMS.items():
            place = place.replace(here, stored_as)
        parts.setdefault(place, {})[int(number.group(1)) if number else -1] = tensor
    return {
        name: found[-1] if -1 in found else torch.stack([found[number] for number in sorted(found)])
        for name, found in parts.items()
    }


def test_a_converted_model_is_stored_as_it_is() -> None:
    tree, sharded, found = converted()
    state = torch.load(tree / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)["model"]
    assert_bitwise(weights(gathered(sharded, 0)), layers_together(state))
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("layout", ["1,2", "1,1,2", "U 1,2"])
def test_a_converted_model_trains_in_any_layout(tmp_path: Path, layout: str) -> None:
    _, sharded, expected = converted()
    output = train(layout, *SHARDED, "--load", str(sharded))
    assert_equal(numbers(output), expected)
    again = stored(tmp_path, layout, *SHARDED, "--load", str(sharded), "--no-load-rng")
    assert_bitwise(weights(gathered(again, 0)), weights(gathered(sharded, 0)))


@pytest.mark.parametrize(
    ("command", "layout", "words"),
    [
        (
            "hf_to_mm_ldt",
            "U 1,2",
            "is of MindSpeed-MM's hf_to_mm_ldt, .*; no layout of the plugin has these; make a checkpoint",
        ),
        (
            "hf_to_mm",
            "1,2",
            "is of MindSpeed-MM's hf_to_mm, .*; --vtp-size-list 1,2 has other ranks; make a checkpoint",
        ),
    ],
)
def test_converted_files_that_fit_no_rank_are_one_line(tmp_path: Path, command: str, layout: str, words: str) -> None:
    if command == "hf_to_mm_ldt":
        convert(command, hugging_face(), tmp_path, [[1, 0], [1, 0], [0, 0]], [[0, 0], [1, 2], [1, 0]])
        code, output = start_u("1,2", *LISTS[layout], "--ckpt-format", "torch", "--load", str(tmp_path))
    else:
        tree, _, _ = converted()
        flags = (*DEVICE, "--vtp-size-list", layout, "--ckpt-format", "torch", "--load", str(tree))
        code, output = start(3, *LISTS[layout], *flags, is_run=True)
    assert code != 0 and output.count("Traceback (most recent call last)") == 1, output[-6000:]
    assert re.search(words, output), output[-4000:]
