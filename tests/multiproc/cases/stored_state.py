"""What a checkpoint holds, against what a run holds: the oracle was taken off the live optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.multiproc.cases.optimizer_state import Array, whole_state
from tests.multiproc.cases.script_cases import ScriptRun
from vtp_plugin.checkpoint.format.contents import MASTER, Contents, Whole
from vtp_plugin.checkpoint.load.stored_optimizer import Elements, typed

# The local layers keep their norms beside what they come before, and store them as part of it.
_STORED_AS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def assert_stored_as_held(contents: Contents, runs: Sequence[ScriptRun], *, num_layers: int = 4) -> None:
    """Check that a checkpoint and a run hold the same master weights, moments and steps, to the last bit."""
    states, elements = contents.states(), Elements(contents.folder)
    read = {key: _read_whole(states[key], elements) for key in states}
    seen: dict[tuple[str, str], set[int]] = {}
    for (name, kind), value in whole_state(runs).items():
        if kind == "step":
            assert contents.steps() == [value], name
            continue
        layer = re.search(r"\.layers\.(\d+)\.", name)
        stored = name if layer is None else name.replace(layer.group(), ".layers.")
        for own, other in _STORED_AS:
            stored = stored.replace(own, other)
        key = MASTER if kind == "weight" else kind, stored
        found = read[key] if layer is None else read[key][int(layer.group(1))]
        np.testing.assert_array_equal(found, value, err_msg=f"{kind} of {name}")
        seen.setdefault(key, set()).add(0 if layer is None else int(layer.group(1)))
    assert seen.keys() == read.keys()
    assert all(".layers." not in name or layers == set(range(num_layers)) for (_, name), layers in seen.items())


def _read_whole(whole: Whole, elements: Elements) -> Array:
    found: Any = np.full(whole.shape, np.nan, dtype=np.float32)
    for part in whole.parts():
        place = tuple(slice(start, stop) for start, stop in part.box)
        found[place] = typed(elements.read(part, part.box), "float32").numpy().reshape(found[place].shape)
    assert not np.isnan(found).any()
    return found
