"""What to start on each node, at the end of ``plan`` and ``search``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from itertools import takewhile

from vtp_plugin.cli.run_flags import Run
from vtp_plugin.config.resolve import VTP_FLAGS
from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.plan.launch.launch_commands import Launch, NodeRanks, fill_nodes, named_nodes, usual_nodes
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.tune.fit.fit_layout import OF_A_FIT

# Megatron's flags that say the layout; with those of the plugin they stand behind the script's own.
_LAYOUT_FLAGS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--use-tp-pp-dp-mapping"),
    *("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"),
    "--decoder-last-pipeline-num-layers",
)
# What a search decides by itself, besides what its flags say.
_FOUND = (*OF_A_FIT, "--vtp-split-backward")
_RUN = ("-m", "vtp_plugin", "run")
_SCRIPT = ("SCRIPT", "FLAGS")
_ABOUT = "SCRIPT: your training script; FLAGS: its own and Megatron's"


def add_slurm_flag(group: argparse._ArgumentGroup) -> None:
    """Declare ``--slurm``."""
    group.add_argument(
        "--slurm", action="store_true", help="end with a batch script for Slurm instead of each node's torchrun"
    )


def launch_of_run(options: argparse.Namespace, flags: Run) -> tuple[Launch, str]:
    """Give what to start for a layout that was given or fitted.

    Returns:
        The launch, and what else is to be said, such as how its nodes were chosen; may be empty.

    Raises:
        ConfigError: the nodes are said twice, or do not suffice.
    """
    layout, note = flags.layout, ""
    own = () if flags.fitted is None else flags.fitted.flags
    words = (*_given(options.argv, but=(*_FOUND, *own) if own else ()), *own)
    if options.nodes is not None and flags.fitted is not None:
        raise ConfigError("--nodes and --have say the devices of every node twice; leave --nodes out")
    if flags.fitted is not None:
        nodes = named_nodes(flags.fitted.candidate.node_names, layout)
        if "--vtp-force" in own:
            note = "--vtp-force: all stages have one size; so layouts of other sizes load the checkpoints, too\n"
    elif options.nodes is not None:
        nodes = fill_nodes(layout, options.nodes)
        note = "".join(_unused(nodes, options.nodes))
    else:
        nodes = usual_nodes(layout, flags.sites)
        note = _usual_text(nodes)
    visible = "ASCEND_RT_VISIBLE_DEVICES" if flags.config.device == "npu" else "CUDA_VISIBLE_DEVICES"
    return Launch(layout=layout, nodes=nodes, program=_quoted((*_RUN, *_SCRIPT, *words)), visible=visible), note


def launch_of_found(
    argv: Sequence[str], node_names: Sequence[Sequence[str]], layout: PipelineLayout, flags: Sequence[str]
) -> Launch:
    """Give what to start for a layout that the search found.

    Args:
        argv: command line of the search.
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.
        flags: flags that say the layout; without any of the plugin, the run does without it.
    """
    if any(flag.startswith("--vtp-") for flag in flags):
        words = [*_RUN, *_SCRIPT, *_given(argv, but=(*_FOUND, *flags))]
    else:
        words = [*_SCRIPT, *_given(argv, but=(*(flag.name for flag in VTP_FLAGS), *flags))]
    return Launch(layout=layout, nodes=named_nodes(node_names, layout), program=_quoted((*words, *flags)))


def launch_lines(
    launch: Launch, note: str = "", *, is_slurm: bool, what: str = "start", flags: str = _ABOUT
) -> Iterator[str]:
    """Write what to start.

    Args:
        launch: the layout on its nodes.
        note: what else is to be said, such as how the nodes were chosen.
        is_slurm: whether as a batch script.
        what: what is started.
        flags: what the words of the command stand for.
    """
    is_one, first = len(launch.nodes) == 1, launch.label(launch.nodes[0])
    if is_slurm:
        yield f"batch script for Slurm, to which you add what your cluster asks for ({flags}):"
        yield from launch.slurm_lines()  # not indented: sbatch reads its lines at their beginning only
    elif is_one:
        yield f"{what} ({flags}):"
        yield from launch.lines()
    else:
        yield f"{what} on each node ({flags};"
        yield f"MASTER_ADDR: address of {first}; MASTER_PORT: a port that is free there, such as 29500):"
        yield from launch.lines()
    yield from launch.warnings()
    if not launch.is_consecutive and _helps_replica_major(launch):
        yield "if you add --use-tp-pp-dp-mapping, the ranks of each node are consecutive: one torchrun on each"
    yield from note.splitlines()


def _unused(nodes: Sequence[NodeRanks], num_devices: Sequence[int]) -> Iterator[str]:
    """Write how many devices of each node no rank is for.

    >>> print(*_unused([NodeRanks(name="node 0", ranks=(0, 1))], [2, 3]), sep="", end="")
    node 1: no rank is for its 3 devices
    """
    used = {node.name: len(node.ranks) for node in nodes}
    for number, devices in enumerate(num_devices):
        ranks = used.get(name := f"node {number}", 0)
        if ranks < devices:
            yield f"{name}: no rank is for {f'{devices - ranks} of ' if ranks else ''}its {devices} devices\n"


def _usual_text(nodes: Sequence[NodeRanks]) -> str:
    sizes = ",".join(str(len(node.ranks)) for node in nodes)
    what = f"{len(nodes)} nodes were" if len(nodes) > 4 else f"nodes of {sizes} devices were"
    what = "one node was" if len(nodes) == 1 else what
    return f"{what} assumed; --nodes, such as --nodes 8,6, says how many devices each of yours has"


def _helps_replica_major(launch: Launch) -> bool:
    """Whether each node has consecutive ranks if these are numbered replica by replica."""
    layout = launch.layout
    node_of = {rank: node.name for node in launch.nodes for rank in node.ranks}
    names = [
        [node_of[layout.leader(stage, dp_rank)] for dp_rank in range(grid.dp)]
        for stage, grid in enumerate(layout.stages)
    ]
    try:
        other = PipelineLayout.from_sizes(
            layout.tp_sizes,
            world_size=layout.world_size,
            cp=layout.cp_sizes,
            dp=layout.dp_sizes,
            order=RankOrder.REPLICA_MAJOR,
        )
    except LayoutError:
        return False
    is_plain = not layout.has_expert_groups
    return is_plain and all(len(node.blocks) == 1 for node in named_nodes(names, other))


def _given(argv: Sequence[str], *, but: Sequence[str] = ()) -> list[str]:
    """Give those words of a command line that say the layout."""
    names = {*_LAYOUT_FLAGS, *(flag.name for flag in VTP_FLAGS)} - {*but}
    found: list[str] = []
    for number, word in enumerate(argv):
        if word.partition("=")[0] in names:
            found += [word, *takewhile(lambda value: not value.startswith("--"), argv[number + 1 :])]
    return found


def _quoted(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(shlex.quote, words))
