"""No source writes into Megatron or torch but through the patching engine, which lists and undoes what it writes.

Came with the mend of what it would have caught: writes that nothing listed or undid (3a829d1).
"""

from __future__ import annotations

import pytest

from tests.rules.import_rules import sources
from tests.rules.write_rules import broken_rules


def test_all_writes_into_megatron_and_torch_are_records() -> None:
    found = [line for module, source in sources() for line in broken_rules(module, source)]
    assert found == []


STATE = "from megatron.core import parallel_state\n"


@pytest.mark.parametrize(
    "source",
    [
        STATE + "parallel_state._MODEL_PARALLEL_GROUP = None",
        STATE + "parallel_state._LIST, x = None, 1",
        STATE + "del parallel_state._GROUP",
        STATE + "setattr(parallel_state, 'x', 1)",
        STATE + "vars(parallel_state)['x'] = 1",
        STATE + "vars(parallel_state).update(x=1)",
        STATE + "parallel_state._LIST.append(1)",
        STATE + "parallel_state._COUNT += 1",
        STATE + "state = parallel_state\nstate._GROUP: object = None",
        "def f():\n    import megatron.core.utils as utils\n    utils.x = 1",
        "from torch.distributed.distributed_c10d import _world\n_world.pg_map[group] = 1",
        "import torch\ntorch.Tensor.cuda = 1",
        "from megatron.core.optimizer import Optimizer\nOptimizer.step = 1",
        "def hide(builder):\n    def build(): ...\n    builder.build = build",
        "def hide(builder):\n    builder.build = lambda: 1",
    ],
)
def test_a_write_is_found(source: str) -> None:
    (line,) = broken_rules("vtp_plugin.patches.core.x", source)
    assert line.endswith("; make it a PatchRecord or a WriteRecord")


@pytest.mark.parametrize(
    "source",
    [
        STATE + "group = parallel_state._MODEL_PARALLEL_GROUP",
        "import torch\nx = torch.zeros(1)\nx.data = x",
        "import argparse\ndef f(args):\n    args.world_size = 1",
        "import torch\nclass C(torch.nn.Module):\n    def __init__(self):\n        self.x = 1",
        "writes['x'].put(1)",
    ],
)
def test_what_is_the_plugins_own_may_be_written(source: str) -> None:
    assert broken_rules("vtp_plugin.patches.core.x", source) == []
