"""The command of each node, for torchrun and for Slurm, whose nodes may start different numbers of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from vtp_plugin.plan.launch.node_ranks import NodeRanks, split_groups
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

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

    >>> layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    >>> nodes = (NodeRanks(name="a", ranks=(0, 1)), NodeRanks(name="b", ranks=(2,)))
    >>> print(*Launch(layout=layout, nodes=nodes, program=("SCRIPT",)).lines(), sep="\n")
    a: ranks 0-1, stage 0
        torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr $MASTER_ADDR --master-port $MASTER_PORT \
            SCRIPT
    b: rank 2, stage 1
        torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr $MASTER_ADDR --master-port $MASTER_PORT \
            SCRIPT
    """

    layout: PipelineLayout
    nodes: tuple[NodeRanks, ...]
    program: tuple[str, ...]
    visible: str = "CUDA_VISIBLE_DEVICES"

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

    def _starts(self, node: NodeRanks, numbers: Mapping[int, object]) -> tuple[str, ...]:
        """Return torchrun's own words of each command that a node starts; the program follows."""
        if len(numbers) == 1:
            return (f"torchrun --nproc-per-node {len(node.ranks)}",)
        found = []
        for agent in self.agents(node):
            seen = f"{self.visible}={_listed(agent.devices)} " if agent.devices else ""
            words = torchrun_words(len(numbers), numbers[agent.ranks.start], len(agent.ranks))
            found.append(f"{seen}{words} {meeting_words()}")
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
        apart = "; they are not consecutive, so start these torchruns side by side:" if others else ""
        yield f"{node}, {_stages_text(node.stages(self.layout))}{apart}"
        for start in others:
            yield from self._wrapped(start, " &")
        yield from self._wrapped(last)

    def _folded(self, nodes: Sequence[NodeRanks], numbers: Mapping[int, int]) -> Iterator[str]:
        first, last = nodes[0].ranks[0], nodes[-1].ranks
        yield (
            f"{nodes[0].name} to {nodes[-1].name}: ranks {format_ranks(range(first, last[-1] + 1))}, {len(last)} on "
            f"each, {_stages_text(nodes[0].stages(self.layout))}; NODE_RANK from {numbers[first]} to "
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
