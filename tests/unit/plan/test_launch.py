"""What each node starts: every rank once, on the node where the layout has it, by torchrun and by Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.launch.launch_commands import Launch, NodeRanks, fill_nodes, named_nodes, split_groups, usual_nodes
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder

PROGRAM = ("-m", "vtp_plugin", "run", "SCRIPT", "FLAGS")
AGENT = re.compile(r"torchrun --nnodes (\d+) --node-rank (\d+) --nproc-per-node (\d+) ")


@st.composite
def layouts(draw: st.DrawFn) -> PipelineLayout:
    """Layouts of any sizes: one order with equal replicas, or any replicas in the other."""
    tp_sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    if draw(st.booleans()):
        cp, dp, order = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from(RankOrder))
        return PipelineLayout.from_sizes(tp_sizes, world_size=sum(tp_sizes) * cp * dp, cp=cp, order=order)
    sizes = [(draw(st.integers(1, 2)), draw(st.integers(1, 3))) for _ in tp_sizes]
    world_size = sum(tp * cp * dp for tp, (cp, dp) in zip(tp_sizes, sizes, strict=True))
    cp_sizes, dp_sizes = zip(*sizes, strict=True)
    return PipelineLayout.from_sizes(tp_sizes, world_size=world_size, cp=cp_sizes, dp=dp_sizes)


def started(launch: Launch) -> dict[int, str]:
    """The node of every rank if torchrun numbers the processes of the printed commands: agent after agent."""
    agents: dict[int, tuple[int, str]] = {}
    entries: Any = launch.as_json(is_slurm=False)["nodes"]
    num_agents = 0
    for entry in entries:
        for command in entry["commands"]:
            found = AGENT.search(command)
            if found is None:
                assert len(entries) == 1 and len(entry["commands"]) == 1
                number = int(command.split("--nproc-per-node ")[1].split()[0])
                return dict.fromkeys(range(number), str(entry["node"]))
            assert int(found[2]) not in agents, "two agents with one node rank"
            agents[int(found[2])] = int(found[3]), entry["node"]
            num_agents = int(found[1])
    assert sorted(agents) == [*range(num_agents)]
    ranks: dict[int, str] = {}
    for _, (number, node) in sorted(agents.items()):
        ranks |= dict.fromkeys(range(len(ranks), len(ranks) + number), node)
    return ranks


def check(layout: PipelineLayout, nodes: tuple[NodeRanks, ...]) -> None:
    wanted = {rank: node.name for node in nodes for rank in node.ranks}
    assert sorted(wanted) == [*range(layout.world_size)]
    assert sum(len(node.ranks) for node in nodes) == layout.world_size
    assert started(Launch(layout=layout, nodes=nodes, program=PROGRAM)) == wanted


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), data=st.data())
def test_every_rank_is_started_once_on_its_node(layout: PipelineLayout, data: st.DataObject) -> None:
    """Nodes that are chosen for each replica of each stage, in any way; their ranks need not be consecutive."""
    names = [[data.draw(st.sampled_from("abc")) for _ in range(grid.dp)] for grid in layout.stages]
    nodes = named_nodes(names, layout)
    for stage, of_stage in enumerate(names):
        for dp_rank, name in enumerate(of_stage):
            (node,) = [node for node in nodes if node.name == name]
            for cp_rank in range(layout.stages[stage].cp):
                assert {*layout.tp_ranks(stage, dp_rank, cp_rank)} <= {*node.ranks}
    check(layout, nodes)
    # A node uses each of its devices once.
    launch = Launch(layout=layout, nodes=nodes, program=PROGRAM)
    for node in nodes:
        devices = [device for agent in launch.agents(node) for device in agent.devices or range(len(node.ranks))]
        assert devices == [*range(len(node.ranks))]


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), num_devices=st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_nodes_are_filled_without_a_gap(layout: PipelineLayout, num_devices: list[int]) -> None:
    if sum(num_devices) < layout.world_size:
        with pytest.raises(ConfigError, match=f"{sum(num_devices)} devices; the layout has {layout.world_size} ranks"):
            fill_nodes(layout, num_devices)
        return
    nodes = fill_nodes(layout, num_devices)
    assert all(len(node.ranks) <= num_devices[int(node.name.split()[1])] for node in nodes)
    check(layout, nodes)


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), names=st.lists(st.sampled_from(["edge", "cloud"]), min_size=4, max_size=4))
def test_unknown_nodes_have_eight_devices_at_most(layout: PipelineLayout, names: list[str]) -> None:
    for sites in ((), tuple(names[: layout.num_stages])):
        nodes = usual_nodes(layout, sites)
        assert all(len(node.ranks) <= 8 for node in nodes)
        assert not split_groups(layout, nodes), "tensor parallelism crosses the network"
        assert not sites or all(len({sites[stage] for stage in node.stages(layout)}) == 1 for node in nodes)
        check(layout, nodes)
    assert layout.world_size > 8 or len(usual_nodes(layout)) == 1


@pytest.mark.parametrize(
    ("sizes", "num_devices", "ranks", "split"),
    [
        ((8, 6), (8, 6), ["0-7", "8-13"], []),
        ((2, 4), (4, 4), ["0-1", "2-5"], []),  # not the half of stage 1 beside stage 0
        ((4, 8), (8, 6), ["0-7", "8-11"], [1]),
        ((2, 2), (1, 3), ["0", "1-3"], [0]),
    ],
)
def test_a_group_is_split_only_where_nothing_else_fits(
    sizes: tuple[int, ...], num_devices: tuple[int, ...], ranks: list[str], split: list[int]
) -> None:
    layout = PipelineLayout.from_sizes(sizes, world_size=sum(sizes))
    nodes = fill_nodes(layout, num_devices)
    launch = Launch(layout=layout, nodes=nodes, program=PROGRAM)
    assert [str(node).split()[-1] for node in nodes] == ranks
    assert [int(line.split()[1][:-1]) for line in launch.warnings()] == split


SRUN = """\
#!/bin/bash
# Stands for Slurm: one task on each node, in the order of the components of the job.
while [[ "$1" == --* ]]; do shift; done
for ((task = 0; task < $TASKS; task++)); do SLURM_PROCID=$task "$@"; done
"""
TORCHRUN = """\
#!/bin/bash
echo "$SLURM_PROCID ${CUDA_VISIBLE_DEVICES:-all} torchrun $*"
"""


@pytest.mark.parametrize("names", [[["a"], ["b"]], [["a", "a"], ["b", "b"]], [["a", "b"], ["b", "a"]]])
def test_slurm_starts_the_same(names: Sequence[Sequence[str]], tmp_path: Path) -> None:
    """The batch script, run with stand-ins for srun and torchrun: on each node its agents, with their devices."""
    layout = PipelineLayout.from_sizes((2, 1), world_size=3 * len(names[0]))
    launch = Launch(layout=layout, nodes=named_nodes(names, layout), program=(*PROGRAM, "--layout", "'E|t t'"))
    for name, text in (("srun", SRUN), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    lines = launch.slurm_lines()
    heads = [re.fullmatch(r"#SBATCH --nodes=(\d) --ntasks-per-node=1 --gpus-per-node=(\d)", line) for line in lines]
    counts = [int(head[2]) for head in heads if head for _ in range(int(head[1]))]
    assert counts == [len(node.ranks) for node in launch.nodes]
    assert lines.count("#SBATCH hetjob") == len({*counts}) - 1
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={"PATH": path, "TASKS": str(len(launch.nodes))},
        capture_output=True,
        text=True,
        check=True,
    )
    found = sorted(done.stdout.splitlines())
    wanted = []
    for task, node in enumerate(launch.nodes):
        for agent in launch.agents(node):
            devices = "all" if launch.is_consecutive else ",".join(map(str, agent.devices or range(len(node.ranks))))
            wanted.append(
                f"{task} {devices} torchrun --nnodes {len(launch.node_ranks())} --node-rank "
                f"{launch.node_ranks()[agent.ranks.start]} --nproc-per-node {len(agent.ranks)} "
            )
    assert [line.split("--master-addr")[0] for line in found] == sorted(wanted)
    assert all(line.endswith(" --layout E|t t") and "--master-port 29500 -m vtp_plugin run" in line for line in found)


def test_alike_nodes_are_one_entry_of_a_text() -> None:
    layout = PipelineLayout.from_sizes((8, 4), world_size=120)
    text = "\n".join(Launch(layout=layout, nodes=usual_nodes(layout), program=PROGRAM).lines())
    assert "node 0 to node 9: ranks 0-79, 8 on each, stage 0; NODE_RANK from 0 to 9, in this order" in text
    assert "node 10 to node 14: ranks 80-119, 8 on each, stage 1; NODE_RANK from 10 to 14, in this order" in text
    assert text.count("--nnodes 15 --node-rank $NODE_RANK --nproc-per-node 8") == 2


def test_numbers_of_nodes_are_node_ranks() -> None:
    layout = PipelineLayout.from_sizes((2, 1, 1), world_size=4)
    places = (("small 1", (0, 1)), ("node 0", (2,)), ("node 2", (3,)))
    nodes = tuple(NodeRanks(name=name, ranks=ranks) for name, ranks in places)
    launch = Launch(layout=layout, nodes=nodes, program=("x",))
    assert [launch.label(node) for node in nodes] == ["node 0 (small 1)", "node 1 (your node 0)", "node 2"]
    nodes = (NodeRanks(name="a", ranks=(0, 1, 3)), NodeRanks(name="b.0", ranks=(2,)))
    launch = Launch(layout=layout, nodes=nodes, program=("x",))
    assert [launch.label(node) for node in nodes] == ["nodes 0 and 2 (a)", "node 1 (b.0)"]
