"""What to start on each node: which ranks it has, and the command, for each launcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, format_ranks
from vtp_plugin.util.text import MODULE, own_command

USUAL_DEVICES = 8
"""Devices of a node whose number is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """A node and its ranks.

    Attributes:
        name: name of the node.
        ranks: its ranks, ascending.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def blocks(self) -> tuple[range, ...]:
        """The ranks as blocks: a launcher numbers the processes of one agent one after another.

        >>> NodeRanks(name="a", ranks=(0, 1, 4)).blocks
        (range(0, 2), range(4, 5))
        """
        groups = groupby(enumerate(self.ranks), key=lambda one: one[1] - one[0])
        runs = [[rank for _, rank in group] for _, group in groups]
        return tuple(range(run[0], run[-1] + 1) for run in runs)

    def stages(self, layout: PipelineLayout) -> tuple[int, ...]:
        """Return the stages that have ranks here, ascending."""
        return tuple(sorted({layout.stage_of(rank) for rank in self.ranks}))

    def __str__(self) -> str:
        return f"{self.name}: rank{'s'[: len(self.ranks) > 1]} {format_ranks(self.ranks)}"


def ranks_by_node(node_names: Sequence[Sequence[str]], layout: PipelineLayout) -> dict[str, list[int]]:
    """Return the ranks of every node: by stage, then by replica.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=6)
    >>> ranks_by_node([["a", "b"], ["b", "a"]], layout)
    {'a': [0, 4, 5], 'b': [1, 2, 3]}
    """
    ranks: dict[str, list[int]] = {}
    for stage, names in enumerate(node_names):
        for replica, name in enumerate(names):
            for cp_rank in range(layout.stages[stage].cp):
                ranks.setdefault(name, []).extend(layout.tp_ranks(stage, replica, cp_rank))
    return ranks


def named_nodes(node_names: Sequence[Sequence[str]], layout: PipelineLayout) -> tuple[NodeRanks, ...]:
    """Return the nodes of a layout whose places are chosen, in the order of their first ranks.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.
    """
    nodes = [
        NodeRanks(name=name, ranks=tuple(sorted(ranks))) for name, ranks in ranks_by_node(node_names, layout).items()
    ]
    return tuple(sorted(nodes, key=lambda node: node.ranks))


def fill_nodes(layout: PipelineLayout, num_devices: Sequence[int]) -> tuple[NodeRanks, ...]:
    """Give nodes their ranks, one node after another.

    A tensor-parallel group that does not fit what is left of a node is begun on the next one. If the nodes are then too
    few, each one gets as many ranks as it has devices.

    Args:
        layout: the pipeline layout.
        num_devices: number of devices of every node.

    Raises:
        ConfigError: the nodes have fewer devices than the layout has ranks.

    >>> layout = PipelineLayout.from_sizes((2, 4), world_size=6)
    >>> [str(node) for node in fill_nodes(layout, (4, 4))]
    ['node 0: ranks 0-1', 'node 1: ranks 2-5']
    >>> [str(node) for node in fill_nodes(layout, (4, 2))]
    ['node 0: ranks 0-3', 'node 1: ranks 4-5']
    """
    if sum(num_devices) < layout.world_size:
        shown = ",".join(map(str, num_devices))
        raise LayoutError(
            f"--nodes {shown}: {sum(num_devices)} devices; the layout has {layout.world_size} ranks, one for each "
            "device; give more nodes, or a smaller layout"
        )
    taken = _whole_groups(layout, num_devices)
    if taken is None:
        taken, left = [], layout.world_size
        for number in num_devices:
            taken.append(min(number, left))
            left -= taken[-1]
    return _numbered(taken)


def _whole_groups(layout: PipelineLayout, num_devices: Sequence[int]) -> list[int] | None:
    """Count the ranks of every node if no tensor-parallel group is split; None if they do not fit so."""
    taken = [0] * len(num_devices)
    node = 0
    for size in _groups(layout):
        while node < len(taken) and taken[node] + size > num_devices[node]:
            node += 1
        if node == len(taken):
            return None
        taken[node] += size
    return taken


def _groups(layout: PipelineLayout) -> Iterator[int]:
    """Yield the sizes of the tensor-parallel groups, in the order of their ranks."""
    rank = 0
    while rank < layout.world_size:
        size = layout.stages[layout.stage_of(rank)].tp
        yield size
        rank += size


def usual_nodes(layout: PipelineLayout, sites: Sequence[str] = ()) -> tuple[NodeRanks, ...]:
    """Give nodes their ranks where nothing is known of the nodes.

    What fits into one node of eight devices is one node, for each site of its own. Else each stage has a node, or as
    many as it needs; where ranks are numbered replica by replica, so has each stage of each replica.

    Args:
        layout: the pipeline layout.
        sites: site of every stage; empty where there are none.

    >>> [str(node) for node in usual_nodes(PipelineLayout.from_sizes((8, 6), world_size=14))]
    ['node 0: ranks 0-7', 'node 1: ranks 8-13']
    >>> [str(node) for node in usual_nodes(PipelineLayout.from_sizes((4, 8), world_size=24))]
    ['node 0: ranks 0-7', 'node 1: ranks 8-15', 'node 2: ranks 16-23']
    >>> layout = PipelineLayout.from_sizes((1, 2, 2), world_size=5)
    >>> [str(node) for node in usual_nodes(layout, ("edge", "cloud", "cloud"))]
    ['node 0: rank 0', 'node 1: ranks 1-4']
    """
    stages = [layout.stage_of(rank) for rank in range(layout.world_size)]
    taken: list[int] = []
    for _, of_site in groupby(stages, key=lambda stage: sites[stage] if sites else ""):
        own = [*of_site]
        if len(own) <= USUAL_DEVICES:
            taken.append(len(own))
            continue
        for stage, group in groupby(own):
            tp, size = layout.stages[stage].tp, len([*group])
            most = USUAL_DEVICES // tp * tp or USUAL_DEVICES
            taken += [min(most, size - start) for start in range(0, size, most)]
    return _numbered(taken)


def _numbered(taken: Sequence[int]) -> tuple[NodeRanks, ...]:
    """Make nodes of so many consecutive ranks each; those without any are left out, and keep their number."""
    nodes, first = [], 0
    for number, size in enumerate(taken):
        if size:
            nodes.append(NodeRanks(name=f"node {number}", ranks=tuple(range(first, first + size))))
        first += size
    return tuple(nodes)


def split_groups(layout: PipelineLayout, nodes: Sequence[NodeRanks]) -> dict[int, tuple[str, ...]]:
    """Find the stages with a tensor-parallel group on several nodes, and the nodes of the first such group.

    >>> layout = PipelineLayout.from_sizes((2, 4), world_size=6)
    >>> split_groups(layout, fill_nodes(layout, (4, 2)))
    {1: ('node 0', 'node 1')}
    """
    node_of = {rank: node.name for node in nodes for rank in node.ranks}
    found: dict[int, tuple[str, ...]] = {}
    for stage, grid in enumerate(layout.stages):
        for dp_rank in range(grid.dp):
            for cp_rank in range(grid.cp):
                names = dict.fromkeys(node_of[rank] for rank in layout.tp_ranks(stage, dp_rank, cp_rank))
                if len(names) > 1:
                    found.setdefault(stage, tuple(names))
    return found


# Alike nodes in a row that are one entry, and entries that a text has at most.
_LEAST_FOLDED = 3
_MAX_ENTRIES = 6
_MAX_WARNINGS = 2
_WIDTH = 110


def torchrun_words(num_nodes: object, node_rank: object, num_processes: object) -> str:
    """Write a static torchrun of one node, up to where its nodes meet.

    >>> torchrun_words(2, "$NODE", 6)
    'torchrun --nnodes 2 --node-rank $NODE --nproc-per-node 6'
    """
    return f"torchrun --nnodes {num_nodes} --node-rank {node_rank} --nproc-per-node {num_processes}"


def meeting_words(address: str = "$MASTER_ADDR", port: str = "$MASTER_PORT") -> str:
    """Write where the nodes of a static torchrun meet."""
    return f"--master-addr {address} --master-port {port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One torchrun: it starts consecutive ranks.

    Attributes:
        ranks: its ranks.
        devices: which of the devices that its node uses are its own; None if all are.
    """

    ranks: range
    devices: range | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    r"""A layout on nodes, and what each of its processes runs.

    Attributes:
        layout: the pipeline layout.
        nodes: the nodes with their ranks, in the order of their first ranks.
        program: words behind those of torchrun, quoted for a shell.
        visible: variable that says which devices of a node a process sees.
        by_variables: whether variables say what torchrun's flags would, as ms-swift reads them.

    >>> layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    >>> nodes = (NodeRanks(name="a", ranks=(0, 1)), NodeRanks(name="b", ranks=(2,)))
    >>> print(*Launch(layout=layout, nodes=nodes, program=("SCRIPT",)).lines(), sep="\n")
    node 0 (a): ranks 0-1, stage 0
        torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr $MASTER_ADDR --master-port $MASTER_PORT \
            SCRIPT
    node 1 (b): rank 2, stage 1
        torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr $MASTER_ADDR --master-port $MASTER_PORT \
            SCRIPT
    """

    layout: PipelineLayout
    nodes: tuple[NodeRanks, ...]
    program: tuple[str, ...]
    visible: str = "CUDA_VISIBLE_DEVICES"
    by_variables: bool = False

    @property
    def is_consecutive(self) -> bool:
        """Whether the ranks of every node are consecutive, so that one torchrun for each node starts them all."""
        return all(len(node.blocks) == 1 for node in self.nodes)

    def agents(self, node: NodeRanks) -> tuple[Agent, ...]:
        """Return the agents of a node."""
        found, first = [], 0
        for block in node.blocks:
            devices = None if len(node.blocks) == 1 else range(first, first + len(block))
            found.append(Agent(ranks=block, devices=devices))
            first += len(block)
        return tuple(found)

    def node_ranks(self) -> dict[int, int]:
        """Return torchrun's node rank of every agent, by its first rank; they follow the order of the ranks."""
        firsts = sorted(agent.ranks.start for node in self.nodes for agent in self.agents(node))
        return {first: number for number, first in enumerate(firsts)}

    def label(self, node: NodeRanks) -> str:
        """Name a node by its torchrun's node rank, which no other number is then taken for."""
        ranks = self.node_ranks()
        if len(ranks) == 1:
            return node.name
        numbers = [str(ranks[agent.ranks.start]) for agent in self.agents(node)]
        label = f"node{'s'[: len(numbers) > 1]} {' and '.join(numbers)}"
        own = "your " if node.name.startswith("node ") else ""
        return label if node.name == label else f"{label} ({own}{node.name})"

    def _starts(self, node: NodeRanks, numbers: Mapping[int, object]) -> tuple[str, ...]:
        """Return torchrun's own words of each command that a node starts; the program follows."""
        if len(numbers) == 1:
            return (f"{'NPROC_PER_NODE=' if self.by_variables else 'torchrun --nproc-per-node '}{len(node.ranks)}",)
        found = []
        for agent in self.agents(node):
            seen = f"{self.visible}={_listed(agent.devices)} " if agent.devices else ""
            number, size = numbers[agent.ranks.start], len(agent.ranks)
            words = f"{torchrun_words(len(numbers), number, size)} {meeting_words()}"
            if self.by_variables:
                words = f"NNODES={len(numbers)} NODE_RANK={number} NPROC_PER_NODE={size} "
                words += "MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT"
            found.append(f"{seen}{words}")
        return tuple(found)

    def commands(self) -> Iterator[tuple[NodeRanks, tuple[str, ...]]]:
        """Yield each node with the commands that it starts side by side, whole."""
        numbers = self.node_ranks()
        for node in self.nodes:
            yield node, tuple(" ".join((start, *self.program)) for start in self._starts(node, numbers))

    def lines(self) -> Iterator[str]:
        """Write what to start on each node; alike nodes in a row are one entry."""
        numbers = self.node_ranks()
        entries = [*_entries(self.nodes, self.layout)]
        for entry in entries[:_MAX_ENTRIES]:
            yield from self._folded(entry, numbers) if len(entry) > 1 else self._single(entry[0], numbers)
        if len(entries) > _MAX_ENTRIES:
            number = sum(len(entry) for entry in entries[_MAX_ENTRIES:])
            yield f"... and {number} more node{'s'[: number > 1]}; --json has all"

    def warnings(self) -> Iterator[str]:
        """Name the stages whose ranks lie where they are slow."""
        for stage, names in [*split_groups(self.layout, self.nodes).items()][:_MAX_WARNINGS]:
            yield (
                f"stage {stage}: a TP group lies across {' and '.join(names[:2])}; every layer sends between them, "
                "which is slow; prefer TP sizes that fit into a node"
            )

    def _single(self, node: NodeRanks, numbers: Mapping[int, int]) -> Iterator[str]:
        *others, last = self._starts(node, numbers)
        apart = "; they are not consecutive, so start these side by side:" if others else ""
        yield f"{replace(node, name=self.label(node))}, {_stages_text(node.stages(self.layout))}{apart}"
        for start in others:
            yield from self._wrapped(start, " &")
        yield from self._wrapped(last)

    def _folded(self, nodes: Sequence[NodeRanks], numbers: Mapping[int, int]) -> Iterator[str]:
        first, last = nodes[0].ranks[0], nodes[-1].ranks
        yield (
            f"{self.label(nodes[0])} to {self.label(nodes[-1])}: ranks {format_ranks(range(first, last[-1] + 1))}, "
            f"{len(last)} on each, {_stages_text(nodes[0].stages(self.layout))}; NODE_RANK from {numbers[first]} to "
            f"{numbers[last[0]]}, in this order"
        )
        for start in self._starts(nodes[0], dict.fromkeys(numbers, "$NODE_RANK")):
            yield from self._wrapped(start)

    def _wrapped(self, start: str, end: str = "") -> Iterator[str]:
        """Write a command with its continuation lines; a word that is longer than a line is cut."""
        words = [word if len(word) <= _WIDTH else f"{word[: _WIDTH - 3]}..." for word in self.program]
        *pieces, last = _pieces(words)
        if not pieces and len(start) + len(last) < _WIDTH:
            yield f"    {start} {last}{end}"
            return
        yield f"    {start} \\"
        yield from (f"        {piece} \\" for piece in pieces)
        yield f"        {last}{end}"

    def slurm_lines(self) -> tuple[str, ...]:
        """Write a batch script: one task on each node starts the agents of that node.

        Nodes that start different numbers of processes are components of a heterogeneous job, in the order of the
        ranks, so that Slurm's number of a task is that of its node.
        """
        groups = [[*group] for _, group in groupby(self.nodes, key=lambda node: len(node.ranks))]
        heads = [
            f"#SBATCH --nodes={len(group)} --ntasks-per-node=1 --gpus-per-node={len(group[0].ranks)}"
            for group in groups
        ]
        srun = "srun" if len(groups) == 1 else f"srun --het-group=0-{len(groups) - 1}"
        first, *between, last = self._slurm_agents() if self.is_consecutive else self._slurm_blocks()
        *pieces, end = _pieces(self.program)
        return (
            "#!/bin/bash",
            *"\n#SBATCH hetjob\n".join(heads).splitlines(),
            "export MASTER_ADDR=$(hostname) MASTER_PORT=29500",
            f"{srun} bash -c '{first}",
            *between,
            f"{last}' torchrun \\",
            *(f"    {piece} \\" for piece in pieces),
            f"    {end}",
        )

    def _slurm_agents(self) -> tuple[str, ...]:
        sizes = [len(node.ranks) for node in self.nodes]
        head, number = "", str(sizes[0])
        if len(set(sizes)) > 1:
            head, number = f"PROCESSES=({' '.join(map(str, sizes))}); ", "${PROCESSES[$SLURM_PROCID]}"
        return (
            f"{head}{torchrun_words(len(sizes), '$SLURM_PROCID', number)} \\",
            f'    {meeting_words()} "$@"',
        )

    def _slurm_blocks(self) -> tuple[str, ...]:
        numbers = self.node_ranks()
        cases = []
        for task, node in enumerate(self.nodes):
            calls = [
                f"agent {_listed(agent.devices or range(len(agent.ranks)))} {numbers[agent.ranks.start]} "
                f"{len(agent.ranks)}"
                for agent in self.agents(node)
            ]
            cases.append(f"        {task}) {'; '.join(calls)} ;;")
        return (
            'PROGRAM=("$@")',
            f"    agent() {{ {self.visible}=$1 {torchrun_words(len(numbers), '$2', '$3')} \\",
            f'        {meeting_words()} "${{PROGRAM[@]}}" & }}',
            "    case $SLURM_PROCID in",
            *cases,
            "    esac",
            "    for agent in $(jobs -p); do wait $agent || exit 1; done",
        )

    def as_json(self, *, is_slurm: bool) -> dict[str, object]:
        """Return everything for ``--json``."""
        return {
            "nodes": [
                {
                    "node": node.name,
                    "ranks": list(node.ranks),
                    "stages": list(node.stages(self.layout)),
                    "commands": list(commands),
                }
                for node, commands in self.commands()
            ],
            "stages_across_nodes": list(split_groups(self.layout, self.nodes)),
            "slurm": list(self.slurm_lines()) if is_slurm else None,
        }


def _entries(nodes: Sequence[NodeRanks], layout: PipelineLayout) -> Iterator[Sequence[NodeRanks]]:
    """Yield the nodes, those together that are alike and follow each other."""

    def kind(node: NodeRanks) -> object:
        return node.name if len(node.blocks) > 1 else (len(node.ranks), node.stages(layout))

    for _, group in groupby(nodes, key=kind):
        alike = [*group]
        is_gapless = alike[-1].ranks[-1] - alike[0].ranks[0] + 1 == sum(len(node.ranks) for node in alike)
        if len(alike) >= _LEAST_FOLDED and is_gapless:
            yield alike
        else:
            yield from ([node] for node in alike)


def _stages_text(stages: Sequence[int]) -> str:
    return f"stage{'s'[: len(stages) > 1]} {format_ranks(stages)}"


def _listed(devices: range) -> str:
    return ",".join(map(str, devices))


def _pieces(words: Sequence[str]) -> list[str]:
    """Join words to pieces that fit into a line; what follows a flag stays with it.

    >>> _pieces(["a" * 60, "b" * 40, "--c", "d" * 40])[1][:5]
    '--c d'
    """
    flags: list[str] = []
    for word in words:
        if flags and not word.startswith("--"):
            flags[-1] += f" {word}"
        else:
            flags.append(word)
    pieces = flags[:1]
    for flag in flags[1:]:
        if len(pieces[-1]) + 1 + len(flag) > _WIDTH:
            pieces.append(flag)
        else:
            pieces[-1] += f" {flag}"
    return pieces


SHARE_VARIABLE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With the value 1 torchrun gives ranks a store of their own, which one of them keeps."""
STATIC: Final = "static torchrun, on each machine"
LOOP: Final = "one machine, in a shell loop"
SLURM: Final = "Slurm"
KEEPER: Final = "elastic torchrun, first on a machine that trains nothing"
ELASTIC: Final = "elastic torchrun, then on each machine that trains"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    STATIC: (
        f"{torchrun_words('$NODES', '$NODE', '$DEVICES')} \\",
        f"    {meeting_words('$FIRST', '$PORT')} --max-restarts 100 run ...",
    ),
    LOOP: (
        "until torchrun --nproc-per-node $DEVICES --master-port $PORT --max-restarts 3 run ...; do",
        "    [ -e CHECKPOINTS/vtp_stopped.txt ] && break",
        "    sleep 10",
        "done",
    ),
    SLURM: (
        "#SBATCH --nodes=3 --ntasks-per-node=1 --requeue --open-mode=append",
        "[ -e CHECKPOINTS/vtp_stopped.txt ] && exit 0",
        "export DEVICES=8 PORT=29500",
        'export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun bash -c '{torchrun_words('$SLURM_NNODES', '$SLURM_NODEID', '$DEVICES')} \\",
        f"    {meeting_words('$FIRST', '$PORT')} --max-restarts 100 run ...' || scontrol requeue $SLURM_JOB_ID",
    ),
    KEEPER: (f"{MODULE} rendezvous $KEEPER",),
    ELASTIC: (
        f"export {SHARE_VARIABLE}=1",
        "torchrun --nnodes 2:3 --nproc-per-node $DEVICES --max-restarts 100 --rdzv-backend c10d \\",
        "    --rdzv-endpoint $KEEPER --rdzv-id run1 --rdzv-conf is_host=0 run ...",
    ),
}
"""By launcher, the lines of its command; ``run ...`` stands for ``-m vtp_plugin run SCRIPT FLAGS``."""
PICKLE: Final = (
    "whoever reaches the port of a c10d rendezvous (--rdzv-backend c10d, --standalone) can run code on all machines of "
    "the run: torchrun keeps its state there as a pickle. Let it listen only on a network that is yours"
)
"""What a user of elastic torchrun must know."""
_NAMES = (
    "run ... stands for -m vtp_plugin run SCRIPT FLAGS --vtp-size-list auto --vtp-stages MIN:MAX",
    "$DEVICES: devices of a machine; $NODES: machines; $NODE: number of this one; $FIRST: address of the first one; "
    "$PORT: a port that is free there, such as 29500; $KEEPER: address and port of the rendezvous, as 10.8.0.1:29400",
)


def describe_launchers(environment: Mapping[str, str]) -> list[str]:
    """Return the commands as lines, with the effect that the variables of this process have on them.

    >>> lines = describe_launchers({})
    >>> lines[0]
    'run ... stands for -m vtp_plugin run SCRIPT FLAGS --vtp-size-list auto --vtp-stages MIN:MAX'
    >>> lines[-1]
    'TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1 here: elastic torchrun ends all when it loses the first machine'
    """
    is_set = environment.get(SHARE_VARIABLE) == "1"
    what = (
        "1 here, as elastic torchrun needs it"
        if is_set
        else ("not 1 here: elastic torchrun ends all when it loses the first machine")
    )
    return [
        *_NAMES,
        *(
            line
            for name, command in COMMANDS.items()
            for line in (f"{name}:", *(f"    {part.replace(MODULE, own_command())}" for part in command))
        ),
        PICKLE,
        f"{SHARE_VARIABLE} is {what}",
    ]
