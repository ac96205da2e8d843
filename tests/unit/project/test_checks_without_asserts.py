"""`python -O` removes assert statements: what protects a run must refuse all the same.

Came with the mend of what it would have caught: checks of plans, orders and user input were asserts in 27 files, and
`python -O` removed them (c885704).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.rules.import_rules import ROOT, sources
from tests.support.hosts import PYTHON_PATH

# One process runs all cases, since importing torch takes seconds; it prints the name of each and what came of it.
CASES = """
import sys
from dataclasses import replace
from types import SimpleNamespace

assert False, "python -O was not given"

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vtp_plugin.plan.boundary.check_boundary import require_valid as require_valid_plan
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import Endpoint
from vtp_plugin.plan.boundary.boundary_plan import Collective, CollectiveKind, Transfer
from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0
from vtp_plugin.plan.boundary.strategies.slices import plan_sliced
from vtp_plugin.plan.boundary.endpoint import Sharding, replicated
from vtp_plugin.errors import VtpError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.collectives import StageCollectives
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import PipelineCommunicator, open_channels
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.comm.channel import BoundChannel
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.comm.work import TimedWaits
from vtp_plugin.plan.schedule.cost.costs import uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.actions import parse_actions
from vtp_plugin.plan.schedule.cost.costs import make_route
from vtp_plugin.plan.schedule.proof.check_schedule import require_valid as require_valid_order
from vtp_plugin.plan.schedule.make.u_shape import plain_forward_only
from vtp_plugin.plan.schedule.order.placement import plain_placement

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
platform = CpuPlatform("of the test")
order = one_f_one_b(2, 1)
lowered = lower(order)
deadlocked = replace(order, orders=(parse_actions("0B0 0F0"), order.orders[1]))
unsent = replace(lowered, orders=(parse_actions("0F0"), lowered.orders[1]))
plan = plan_sliced(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
rank0 = plan_rank0(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
upper, down = Endpoint(ranks_by_cp=((0,),)), Endpoint(ranks_by_cp=((1, 2),))
spec = ChannelSpec(name="boundary 0->1, forward", src=upper, dst=down, strategy="sliced")
options = {"stage_group": None, "platform": platform, "monitor": None, "timeout_s": 5.0}
(channel,) = open_channels([spec], **options)
form = TensorFormat(dtype=torch.float32, has_variable_shapes=True)
stage = StageCollectives("boundary", None, None, TimedWaits(platform, None, Recorder(platform)), None)


class Compute:
    def __init__(self, output=None):
        self.output = output

    def forward(self, action, activation, *, is_split):
        return self.output


known = BoundChannel(channel, replace(form, has_variable_shapes=False), (4, 1, 2))
fixed = {(ChannelId.between(0, 1, Direction.FORWARD), 0): known}
long = Compute(torch.zeros(5, 1, 2))

CASES = {
    "an order that deadlocks": lambda: require_valid_order(deadlocked),
    "an order without a message": lambda: require_valid_order(unsent),
    "simulation of a deadlock": lambda: simulate(deadlocked, uniform_costs(order.placement)),
    "messages of a deadlock": lambda: lower(deadlocked),
    "costs of another placement": lambda: simulate(order, uniform_costs(plain_placement(3))),
    "route of another placement": lambda: make_route(plain_placement(2), uniform_costs(plain_placement(3))),
    "a plan without a transfer": lambda: require_valid_plan(replace(plan, transfers=plan.transfers[:1])),
    "a plan with a transfer too much": lambda: require_valid_plan(replace(plan, transfers=plan.transfers * 2)),
    "a plan with a wrong link": lambda: require_valid_plan(
        replace(plan, transfers=(Transfer(src=0, dst=3, boxes=plan.transfers[0].boxes), plan.transfers[1]))
    ),
    "a plan without its finish": lambda: require_valid_plan(replace(rank0, finish=Collective())),
    "a finish without ranks": lambda: Collective(kind=CollectiveKind.BROADCAST),
    "two shapes": lambda: plan_sliced(replicated((4,), (0, 1)), replicated((6,), (2, 3))),
    "a sharding with a hole": lambda: Sharding(shape=(5,), holdings=replicated((4,), (0, 1)).holdings),
    "a batch that does not divide": lambda: Endpoint(ranks_by_cp=((0,), (1,)), num_replicas=2).sharding(
        (4, 3, 1), is_sharded=False
    ),
    "a rank outside the world": lambda: PipelineLayout.from_sizes((1, 2), world_size=3).coord(3),
    "a tensor of another shape": lambda: BoundChannel(channel, form).send(torch.zeros(3, 2)),
    "a neighbour that is not there": lambda: PipelineCommunicator({}).exchange(
        form, recv_prev=True, shape=(1,), wait=True
    ),
    "a stage without a group": lambda: stage._timed("broadcast", (0, 1), "boundary"),
    "a forward without an output": lambda: Executor(lower(plain_forward_only(2, 1)), 0, {}, Compute()).run(),
    "an output of another length": lambda: Executor(lower(plain_forward_only(2, 1)), 0, fixed, long).run(),
}
for name, run in CASES.items():
    try:
        run()
    except VtpError as error:
        print(f"{name}: {type(error).__name__}: {error}")
    else:
        print(f"{name}: not refused")
"""


@pytest.mark.full
def test_checks_refuse_without_asserts() -> None:
    """In a new environment all of torch is compiled for it, which takes a minute."""
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-O", "-W", "ignore", "-c", CASES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 18
    wrong = [line for line in lines if ": PlanError: " not in line and ": ConfigError: " not in line]
    assert not wrong, wrong
    # What is no mistake of the user says so.
    assert all(("bug of vtp_plugin: please report" in line) == (": PlanError: " in line) for line in lines)


def narrows(test: ast.expr) -> bool:
    """Tell whether an asserted expression only says of which type something is."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and [*map(ast.unparse, test.comparators)] == ["None"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x is not None", True),
        ("x is not None and isinstance(y, int)", True),
        ("not problems", False),
        ("x is not None and y == 3", False),
        ("None not in works", False),
    ],
)
def test_the_kinds_of_asserts_are_told_apart(text: str, expected: bool) -> None:
    assert narrows(ast.parse(text, mode="eval").body) is expected


def test_asserts_only_tell_types() -> None:
    """Whatever else is worth a check is worth one that stays under `python -O`."""
    found = [
        f"{module}:{node.lineno}: assert {ast.unparse(node.test)}"
        for module, source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert not found, "\n" + "\n".join(found)
