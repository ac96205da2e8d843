"""The configuration of a run, from flags and arguments.

The plugin's flags on Megatron's command line: the list of them, and how they are read.

The fields of :class:`~vtp_plugin.config.VtpConfig` declare their flags. :data:`VTP_FLAGS` adds those that only the
command line has; parsers, ``--help`` and the documentation are made from it.

What is certainly wrong with the command line of a run: found before torch or Megatron is imported, in a moment.

What may still come from elsewhere is left to the checks of the run itself: a script's own flags, a file of arguments, a
checkpoint. Megatron's parser knows all flags, so it alone can say that one is unknown and near none of the plugin's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.config.flag import Flag, FlagGroup, format_value
from vtp_plugin.errors import ConfigError, LayoutError, VtpError
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.link.guard import require_protected
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.grids import check_world, equal_dp
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap
from vtp_plugin.plan.schedule.cost.costs import COST_KEYS, Costs, parse_costs
from vtp_plugin.plan.schedule.make.u_shape import by_stage, check_in_flight
from vtp_plugin.plan.schedule.order.placement import Placement, plain_placement, u_placement
from vtp_plugin.util.text import own_command, question

_COST_KEYS = " Keys:\n" + "\n".join(f"{name} ({key.unit}): {key.meaning};" for name, key in COST_KEYS.items())
VTP_FLAGS: tuple[Flag, ...] = (
    # The keys of costs are known here only: config lies below the package that reads them.
    *(replace(flag, help=flag.help + _COST_KEYS) if flag.field == "costs" else flag for flag in flags_of_fields()),
    Flag(
        name="--vtp-node",
        group=FlagGroup.WHERE,
        metavar="NAME",
        help="with --vtp-stages: name of this machine, which stages follow; default: its host name, between "
        "sites a digest of it. Agents of one machine that shall count as several give each its own",
    ),
    Flag(
        name="--vtp-forgive",
        group=FlagGroup.FAILURE,
        help="with --vtp-stages: use devices again that are excluded because they failed; without it a device that "
        "failed twice stays excluded. It acts once for each start of the launcher, not when that restarts the ranks",
    ),
    Flag(
        name="--vtp-on-loss",
        group=FlagGroup.FAILURE,
        metavar="COMMAND",
        help="with --vtp-stages: a shell command that rank 0's machine runs when the run restarts after a loss, or "
        "when no layout fits any more; VTP_LOSS holds the line that says what happened. It has 10 seconds",
    ),
    Flag(
        name="--vtp-site",
        group=FlagGroup.TRUST,
        metavar="edge",
        help="site of this machine, one of --vtp-sites; a rank whose stage belongs to another site ends the run",
    ),
)
"""All flags; ``--help`` shows them group by group, each group in this order."""


def add_vtp_arguments(parser: argparse.ArgumentParser, declared: Collection[str] = ()) -> argparse.ArgumentParser:
    """Declare the plugin's flags, group by group. A flag that is not given has the value None.

    Args:
        parser: parser that gets the flags.
        declared: flags that somebody else declares with the same meaning.
    """
    for group in FlagGroup:
        section = parser.add_argument_group(title=group.value)
        for flag in (flag for flag in VTP_FLAGS if flag.group is group and flag.name not in declared):
            if flag.metavar is None:
                section.add_argument(flag.name, action="store_true", default=None, help=flag.help)
            else:
                section.add_argument(
                    flag.name,
                    metavar=flag.metavar,
                    type=flag.type,
                    nargs=flag.nargs,
                    const=flag.const,
                    help=flag.help,
                )
    return parser


def read_flags(args: argparse.Namespace, given: VtpConfig, declared: Collection[str] = ()) -> VtpConfig:
    """Add the flags to what ``apply()`` was given.

    Args:
        args: parsed with the flags of :func:`add_vtp_arguments`; attributes of flags not given may be missing.
        given: what ``apply()`` was given.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what ``apply()`` was given, or needs another flag.
    """
    argv = {flag: getattr(args, flag.dest, None) for flag in VTP_FLAGS}
    # A switch that somebody else declares is False where it was not given.
    values = {flag.field: flag.read(None if word is False else word) for flag, word in argv.items() if flag.field}
    # MindSpeed-LLM has a list of layers for any pipeline; only that of a U-shape is ours.
    if "--num-layer-list" in declared and not (given.layerwise_disaggregated or values["layerwise_disaggregated"]):
        del values["num_layer_list"]
    return merge(given, values)


def merge(base: VtpConfig, flags: Mapping[str, object]) -> VtpConfig:
    """Add flags to what ``apply()`` was given; a flag with the value ``None`` was not given.

    >>> merge(VtpConfig(size_list=(1, 2)), {"device": "cpu", "size_list": None}).device
    'cpu'

    Raises:
        ConfigError: a flag contradicts a keyword argument.
    """
    paths = {flag.field for flag in flags_of_fields() if flag.compared is not None and flag.compared.is_path}
    default, changes = VtpConfig(), {name: value for name, value in flags.items() if value is not None}
    for name, value in changes.items():
        given = getattr(base, name)
        if given not in (getattr(default, name), value):
            both = f"apply() was given {name}={format_value(given)}, the command line says {format_value(value)}"
            text = f"{both}; give it in one place"
            raise ConfigError(text, shared=None if name in paths else text)
    return replace(base, **changes)


_NUMBERS = re.compile(r"[\d,]+")


def reject_spaces(words: Sequence[str], declared: Collection[str] = ()) -> None:
    """Reject numbers that spaces separate: parsers would take the first one, and call the others unknown.

    Args:
        words: the words of a command line.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        LayoutError: a flag that takes numbers in one word has several words of numbers.

    >>> reject_spaces(["--vtp-size-list", "1,2", "--num-layers", "4"])
    >>> reject_spaces(["--vtp-size-list", "1,", "2", "--num-layers", "4"])
    Traceback (most recent call last):
    ...
    vtp_plugin.errors.LayoutError: --vtp-size-list 1, 2 has a space; it takes one word; write --vtp-size-list 1,2
    """
    names = {flag.name for flag in VTP_FLAGS if _NUMBERS.fullmatch(flag.metavar or "")} - {*declared}
    for place, word in enumerate(words, start=1):
        name, separator, value = word.partition("=")
        found = [*([value] if separator else []), *takewhile(_NUMBERS.fullmatch, words[place:])]
        if name in names and len(found) > 1 and _NUMBERS.fullmatch(found[0]):
            joined = ",".join(part for text in found for part in text.split(",") if part)
            raise LayoutError(f"{name} {' '.join(found)} has a space; it takes one word; write {name} {joined}")


_TAKEN = ("--layerwise-disaggregated-training", "--num-layer-list")


def hide_taken_flags(argv: Sequence[str]) -> list[str]:
    """Remove the flags that MindSpeed-LLM would take for its own layerwise-disaggregated training, if a list is given.

    >>> hide_taken_flags(["s.py", "--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--lr", "0.1"])
    ['s.py', '--layerwise-disaggregated-training', '--num-layer-list', '1,2,1', '--lr', '0.1']
    >>> argv = ["s.py", "--layerwise-disaggregated-training", "--num-layer-list=1,2,1", "--vtp-size-list", "1,2"]
    >>> hide_taken_flags(argv)
    ['s.py', '--vtp-size-list', '1,2']
    """
    names = {word.partition("=")[0] for word in argv}
    if not {"--vtp-size-list", _TAKEN[0]} <= names:
        return list(argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_TAKEN[0], action="store_true")
    parser.add_argument(_TAKEN[1], nargs="?")
    return [argv[0], *parser.parse_known_args(list(argv[1:]))[1]]


def take_flags(words: Sequence[str]) -> tuple[VtpConfig, list[str]]:
    """Read the plugin's flags among words, for a framework whose own parser does not know them.

    Returns:
        What they ask for, and the other words.

    Raises:
        ConfigError: a flag's value is wrong, or flags contradict each other.

    >>> config, rest = take_flags(["--vtp-size-list", "1,2", "--lr", "0.1"])
    >>> config.size_list, rest
    ((1, 2), ['--lr', '0.1'])
    """
    reject_spaces(words)
    parser = add_vtp_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False))
    try:
        args, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; `{own_command()} run --help-all` says what it takes; correct it") from None
    return read_flags(args, VtpConfig()), rest


def peek_device(argv: Sequence[str]) -> str | None:
    """Read the platform from a command line that has not been parsed yet.

    >>> peek_device(["script.py", "--vtp-device", "cpu", "--lr", "0.1"]), peek_device(["script.py"])
    ('cpu', None)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--vtp-device")
    try:
        return parser.parse_known_args(list(argv))[0].vtp_device
    except argparse.ArgumentError:
        return None  # the script's parser says what is wrong


def check_without_stages(config: VtpConfig) -> tuple[str, ...]:
    """Find options that need stages, in a run without a list of their sizes.

    Returns:
        One line for each list of other sizes, for a seed of the edge, and for a planned schedule.
    """
    lists = (
        ("--vtp-cp-list", config.cp_list),
        ("--vtp-dp-list", config.dp_list),
        ("--vtp-ep-list", config.ep_list),
        ("--vtp-etp-list", config.etp_list),
    )
    problems = [
        f"{flag} {','.join(map(str, sizes))} needs stages: give --vtp-size-list, such as {','.join('1' * len(sizes))}"
        for flag, sizes in lists
        if sizes
    ]
    problems += check_edge_seed(config)
    if config.lora_rank is not None:
        problems.append("--vtp-lora-rank needs stages: give --vtp-size-list, such as 1,1")
    # Modules with grids of their own have stages without a list.
    if config.has_planned_schedule and not config.bridges:
        problems.append("planned schedules need stages: give --vtp-size-list, such as 1,1")
    return tuple(problems)


def check_edge_seed(config: VtpConfig) -> tuple[str, ...]:
    """Find a seed of the edge in a run that has no edge at a site of its own.

    >>> print(*check_edge_seed(VtpConfig(edge_seed="random")))  # doctest: +ELLIPSIS
    --vtp-edge-seed is for a U-shaped pipeline of two sites; give --vtp-size-list, ...
    >>> check_edge_seed(VtpConfig(edge_seed="random", sites=("edge", "cloud"), layerwise_disaggregated=True))
    ()
    """
    if config.edge_seed is None or config.has_own_edge:
        return ()
    return (
        "--vtp-edge-seed is for a U-shaped pipeline of two sites; give --vtp-size-list, "
        "--layerwise-disaggregated-training and two names in --vtp-sites, such as edge,cloud, or leave it out",
    )


_NAMES = tuple(flag.name for flag in VTP_FLAGS if flag.name.startswith("--vtp-"))
# With these the sizes, or the world, are not what the command line says.
_ELSEWHERE = ("--yaml-cfg", "--use-checkpoint-args", "--fake-process-group")


class _Parser(argparse.ArgumentParser):
    """Raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{own_command()} run --help-all` lists the flags")


def check_command_line(
    argv: Sequence[str], given: VtpConfig, environment: Mapping[str, str], declared: Collection[str] = ()
) -> None:
    """Reject flags of the plugin that are misspelt, values that break their rule, and a wrong number of processes.

    And a way between sites that is public and not encrypted, before anybody waits for anybody.

    Args:
        argv: the script and its flags.
        given: what ``apply()`` was given.
        environment: variables of this process; the number of processes is not checked without ``WORLD_SIZE``.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        ConfigError: one of them is certainly wrong; all ranks that were started with this command line find it.
    """
    script, *words = argv or [""]
    words = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    # With another prefix it may be a flag of a package that the script imports, such as --tp-sizes.
    own = [name for name in names if sorted(name.lstrip("-")[:3]) == ["p", "t", "v"] and name not in _NAMES]
    unknown = {name: hint for name in own if (hint := question(name, _NAMES))}
    known = [flag.name for flag in VTP_FLAGS if flag.name in names]
    if {"-h", "--help"} & set(names) or not (unknown or known):
        return  # help is shown whatever else is wrong
    try:
        sources = _sources(Path(script)) if unknown else ""
        for name, hint in unknown.items():
            if not _mentions(sources, name):
                raise ConfigError(f"{name} is unknown{hint}")
        try:
            config = _read(words, given, declared)
            _check_processes(words, config, environment)
            require_protected(config.sites or (), config.link_is_protected, environment)
        except VtpError:
            # Read only now: a run that is right need not read its script and the modules beside it.
            sources = sources or _sources(Path(script))
            if not any(_declares(sources, name) for name in known):
                raise
    except VtpError as error:
        error.is_known_to_node = is_as_started(argv)
        raise


def is_as_started(argv: Sequence[str]) -> bool:
    """Tell whether a command line is that of this process: a launcher gives it to all ranks of a machine.

    Args:
        argv: the script and its flags; a script may have changed them.
    """
    number = len(argv) - 1
    return number <= 0 or sys.orig_argv[-number:] == list(argv[1:])


def _sources(script: Path) -> str:
    """Read the script and the modules beside it, which may declare flags of their own."""
    texts: list[str] = []
    for path in {script, *script.parent.glob("*.py")} if script.is_file() else ():
        with contextlib.suppress(OSError):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def _mentions(sources: str, name: str) -> bool:
    """Tell whether a flag stands in the script, or an argument of its name: it may be a flag of the script."""
    argument = name.lstrip("-").replace("-", "_")
    return re.search(rf"(?<![\w-])({re.escape(name)}|{argument})(?![\w-])", sources) is not None


def _declares(sources: str, name: str) -> bool:
    """Tell whether the script's own parser has a flag of the plugin, which then may mean something else there."""
    return re.search(rf"""add_argument\([^()]*["']{re.escape(name)}["']""", sources) is not None


def _read(words: Sequence[str], given: VtpConfig, declared: Collection[str]) -> VtpConfig:
    """Read the plugin's flags as the run will do."""
    reject_spaces(words, declared)
    parser = _Parser(add_help=False, allow_abbrev=False)
    args, _ = add_vtp_arguments(parser).parse_known_args(list(words))
    return read_flags(args, given, declared)


def _check_processes(words: Sequence[str], config: VtpConfig, environment: Mapping[str, str]) -> None:
    """Reject a number of processes that the sizes of no run divide, whatever else this one is told."""
    started, sizes = environment.get("WORLD_SIZE", ""), config.size_list
    if not isinstance(sizes, tuple) or not started.isdigit() or any(word.startswith(_ELSEWHERE) for word in words):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--context-parallel-size", type=int)
    try:
        cp = parser.parse_known_args(list(words))[0].context_parallel_size
    except argparse.ArgumentError:
        return  # Megatron's parser says what is wrong
    if cp is not None and cp < 1:
        return
    cp_sizes = choose_cp_sizes(config.cp_list, cp or 1, num_stages=len(sizes))
    if config.dp_list is None:
        equal_dp(sizes, cp_sizes, int(started))
        return
    stages = tuple(zip(sizes, cp_sizes, config.dp_list, strict=True))
    # A script may have another context-parallel size by default.
    if cp or config.cp_list or int(started) % sum(map(math.prod, stages)):
        check_world(stages, int(started))


_ORDERS = {"tp-cp-ep-dp-pp": RankOrder.STAGE_MAJOR, "tp-cp-ep-pp-dp": RankOrder.REPLICA_MAJOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The user's options for a planned order.

    Attributes:
        costs: durations and links, in ms; None lets the first steps measure them.
        in_flight: most microbatches in flight, on all stages or on each; None for the default.
        replan_share: if a step is longer or shorter than planned by more than this share, measured costs are measured
            again.
        report_interval_steps: training steps from one comparison of planned and real times to the next.
        split_backward: whether gradients of weights may be computed later than those of inputs.
    """

    costs: Costs | None = None
    in_flight: tuple[int, ...] | None = None
    replan_share: float = 0.25
    report_interval_steps: int = 100
    split_backward: bool = False


def plan_layout(
    config: VtpConfig,
    *,
    world_size: int,
    pipeline_size: int,
    tensor_size: int | None,
    cp: int,
    order: str,
    ep: int = 1,
    etp: int | None = None,
) -> PipelineLayout:
    """Make the layout from the plugin's lists and Megatron's sizes.

    Args:
        config: the plugin's configuration, with a list of sizes.
        world_size: number of ranks.
        pipeline_size: Megatron's pipeline size; 1 counts as not given.
        tensor_size: Megatron's tensor size; None counts as not given.
        cp: Megatron's context-parallel size; with --vtp-cp-list, 1 counts as not given.
        order: Megatron's rank order.
        ep: Megatron's expert-parallel size; with --vtp-ep-list, 1 counts as not given.
        etp: Megatron's tensor-parallel size of the experts; None is each stage's own tensor-parallel size.

    Raises:
        ConfigError: the sizes contradict each other or the number of ranks.

    >>> config = VtpConfig(size_list=(1, 2))
    >>> plan_layout(config, world_size=6, pipeline_size=1, tensor_size=None, cp=1, order="tp-cp-ep-dp-pp").dp_sizes
    (2, 2)
    """
    sizes = config.size_list
    assert isinstance(sizes, tuple)
    shown = format_value(sizes)
    if pipeline_size not in (1, len(sizes)):
        raise LayoutError(
            f"--pipeline-model-parallel-size {pipeline_size} contradicts --vtp-size-list {shown} with {len(sizes)} "
            "stages; leave it out or make both equal"
        )
    if tensor_size not in (None, max(sizes)):
        raise LayoutError(
            f"--tensor-model-parallel-size {tensor_size} contradicts --vtp-size-list {shown}; leave it out or give "
            f"the largest size of the list, {max(sizes)}"
        )
    if order not in _ORDERS:
        raise LayoutError(f"rank order {order!r} is unknown to the plugin; use one of {', '.join(_ORDERS)}")
    layout = PipelineLayout.from_sizes(
        sizes,
        world_size=world_size,
        cp=choose_cp_sizes(config.cp_list, cp, num_stages=len(sizes)),
        dp=config.dp_list,
        order=_ORDERS[order],
        ep=choose_sizes(config.ep_list, ep, flag="--expert-model-parallel-size", list_flag="--vtp-ep-list") or 1,
        etp=choose_sizes(config.etp_list, etp, flag="--expert-tensor-parallel-size", list_flag="--vtp-etp-list"),
    )
    dp = layout.stages[0].dp
    if config.data_parallel_size not in (None, dp):
        raise LayoutError(
            f"--vtp-data-parallel-size {config.data_parallel_size}; this run has {world_size} ranks, a replica needs "
            f"{world_size // dp}, so there are {dp} replicas; give {dp}, or start "
            f"{config.data_parallel_size * (world_size // dp)} processes"
        )
    return layout


def check_call(layout: PipelineLayout, stage: int, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Find arguments of `initialize_model_parallel` that contradict those that megatron.training has validated.

    Args:
        layout: made from the validated arguments.
        stage: stage of the calling rank; Megatron's arguments have its sizes. Those that the plugin's lists give may be
            left out.
        options: arguments of the call, by name.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> call = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
    >>> call |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "order": "tp-cp-ep-dp-pp"}
    >>> check_call(layout, 1, call)
    ()
    >>> print(*check_call(layout, 1, {**call, "context_parallel_size": 2}))
    initialize_model_parallel(context_parallel_size=2); Megatron's validated arguments say 1; give the same in both
    """
    orders = {order: name for name, order in _ORDERS.items()}
    own_sizes = {
        "tensor_model_parallel_size": (layout.tp_sizes[stage], True),
        "pipeline_model_parallel_size": (layout.num_stages, True),
        "context_parallel_size": (layout.cp_sizes[stage], len(set(layout.cp_sizes)) > 1),
        "expert_model_parallel_size": (layout.ep_sizes[stage], len(set(layout.ep_sizes)) > 1),
        "expert_tensor_parallel_size": (layout.etp_sizes[stage], len(set(layout.etp_sizes)) > 1),
    }
    fitting: dict[str, tuple[object, ...]] = {
        name: (own, None, 1) if is_listed else (own, None) for name, (own, is_listed) in own_sizes.items()
    }
    fitting["order"] = (orders[layout.order],)
    return tuple(
        f"initialize_model_parallel({name}={options[name]}); Megatron's validated arguments say {values[0]}; give the "
        "same in both"
        for name, values in fitting.items()
        if options[name] not in values
    )


def replica_map(config: VtpConfig, layout: PipelineLayout) -> ReplicaMap:
    """Return which replicas of the stages work together.

    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, dp=(1, 2))
    >>> replica_map(VtpConfig(size_list=(1, 1), dp_list=(1, 2), dp_mode="split"), layout).is_split
    True
    """
    return ReplicaMap(dp_sizes=layout.dp_sizes, mode=DpMode(config.dp_mode))


def is_active(config: VtpConfig, layout: PipelineLayout) -> bool:
    """Tell whether the plugin's groups and communicator are in use: if stages differ, or an option needs them.

    >>> layout = PipelineLayout.from_sizes((2, 2), world_size=4)
    >>> [is_active(VtpConfig(size_list=(2, 2), force=force), layout) for force in (False, True)]
    [False, True]
    """
    return config.is_forced or not layout.is_uniform


def crossing_bytes(options: Any, cp_sizes: Sequence[int]) -> int | None:
    """Return the size of a tensor that crosses between stages of the largest context-parallel size; None if unknown.

    Args:
        options: Megatron's arguments.
        cp_sizes: context-parallel size of every stage.

    >>> from types import SimpleNamespace
    >>> options = SimpleNamespace(seq_length=12, micro_batch_size=2, hidden_size=5, fp16=False, bf16=True)
    >>> crossing_bytes(options, (1, 3))
    80
    """
    if not (options.hidden_size and options.seq_length and options.micro_batch_size):
        return None
    itemsize_bytes = 2 if options.fp16 or options.bf16 else 4
    return options.seq_length // max(cp_sizes) * options.micro_batch_size * options.hidden_size * itemsize_bytes


def transport_rules(config: VtpConfig, tensor_bytes: int | None, *, is_sharded: bool = False) -> TransportRules:
    """Return the rules that choose the strategy of every boundary.

    Args:
        config: the plugin's configuration.
        tensor_bytes: size of the tensors that cross; None if it is not known beforehand.
        is_sharded: whether ranks hold slices of these tensors (sequence parallelism).

    >>> transport_rules(VtpConfig(size_list=(1, 2), transport="rank0"), None).transport
    'rank0'
    """
    return TransportRules(
        transport=config.transport,
        sites=config.sites or (),
        tensor_bytes=tensor_bytes,
        threshold_bytes=config.transport_threshold_bytes,
        is_sharded=is_sharded,
        is_split=config.dp_mode == "split",
    )


def option_context(config: VtpConfig, layout: PipelineLayout, *, device: str = "auto") -> OptionContext:
    """Return what Megatron's options are checked against.

    Args:
        config: the plugin's configuration.
        layout: the ranks of every stage.
        device: name of the platform.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> context = option_context(VtpConfig(size_list=(1, 2), force=True), layout)
    >>> context.layout_text, context.forced, context.is_planned
    ('--vtp-size-list 1,2', True, False)
    """
    return OptionContext(
        tp_sizes=layout.tp_sizes,
        cp_sizes=layout.cp_sizes,
        dp_sizes=layout.dp_sizes,
        ep_sizes=layout.ep_sizes,
        etp_sizes=layout.etp_sizes,
        is_split=replica_map(config, layout).is_split,
        forced=config.is_forced,
        is_planned=config.has_planned_schedule and layout.num_stages > 1,
        has_split_backward=config.split_backward,
        lora=config.lora,
        is_u_shaped=config.layerwise_disaggregated,
        num_rings=config.num_rings,
        device=device,
    )


def choose_cp_sizes(cp_list: Sequence[int] | None, context_parallel_size: int, *, num_stages: int) -> tuple[int, ...]:
    """Return the context-parallel size of every stage, from the plugin's list or Megatron's one size.

    >>> choose_cp_sizes(None, 2, num_stages=3), choose_cp_sizes((1, 2), 2, num_stages=2)
    ((2, 2, 2), (1, 2))

    Raises:
        ConfigError: both are given, and Megatron's is not the largest of the list.
    """
    chosen = choose_sizes(cp_list, context_parallel_size, flag="--context-parallel-size", list_flag="--vtp-cp-list")
    return chosen if isinstance(chosen, tuple) else (context_parallel_size,) * num_stages


def choose_sizes(
    sizes: Sequence[int] | None, size: int | None, *, flag: str, list_flag: str
) -> tuple[int, ...] | int | None:
    """Return the plugin's list if it is given, else Megatron's one size.

    Args:
        sizes: the plugin's list.
        size: Megatron's size; beside a list, 1 and None count as not given.
        flag: flag of Megatron's size, for the error.
        list_flag: flag of the list, for the error.

    Raises:
        ConfigError: both are given, and Megatron's is not the largest of the list.

    >>> choose_sizes((1, 2), 1, flag="--context-parallel-size", list_flag="--vtp-cp-list")
    (1, 2)
    """
    if sizes is None:
        return size
    if size not in (None, 1, max(sizes)):
        raise LayoutError(
            f"{flag} {size} contradicts {list_flag} {format_value(tuple(sizes))}; leave it out or give the largest "
            f"size of the list, {max(sizes)}"
        )
    return tuple(sizes)


def stage_boundaries(config: VtpConfig, num_stages: int) -> tuple[tuple[int, int], ...]:
    """List the neighbouring stages; in a U the last stage and stage 0 are neighbours, too.

    >>> stage_boundaries(VtpConfig(size_list=(1, 2, 2), layerwise_disaggregated=True), 3)
    ((0, 1), (1, 2), (2, 0))
    """
    is_u_shaped = config.layerwise_disaggregated and num_stages > 1
    return (u_placement(num_stages) if is_u_shaped else plain_placement(num_stages)).boundaries


def stage_sites(config: VtpConfig, num_stages: int) -> tuple[str, ...]:
    """Return the site of every stage; a U-shaped pipeline has an edge and a cloud even if no sites were named.

    >>> stage_sites(VtpConfig(size_list=(1, 2, 2), layerwise_disaggregated=True), 3)
    ('edge', 'cloud', 'cloud')
    >>> stage_sites(VtpConfig(size_list=(1, 2)), 2)
    ('', '')
    """
    if config.sites is not None:
        return config.sites
    return ("edge",) + ("cloud",) * (num_stages - 1) if config.layerwise_disaggregated else ("",) * num_stages


def reporting_ranks(layout: PipelineLayout, sites: Sequence[str]) -> dict[str, int]:
    """Return the rank of every site that shows log lines of level INFO: the first leader of the site's first stage.

    >>> reporting_ranks(PipelineLayout.from_sizes((1, 2, 2), world_size=5), ("edge", "cloud", "cloud"))
    {'edge': 0, 'cloud': 1}
    """
    return {site: layout.leader(list(sites).index(site)) for site in dict.fromkeys(sites)}


def read_schedule_options(
    config: VtpConfig,
    num_stages: int,
    message_bytes: int | None,
    *,
    num_chunks: int = 1,
    fixed: Placement | None = None,
    report_interval_steps: int = 100,
) -> ScheduleOptions:
    """Read the options of the order.

    Args:
        config: the plugin's configuration.
        num_stages: number of pipeline stages.
        message_bytes: size of an activation, if known.
        num_chunks: model chunks of every stage.
        fixed: placement of a pipeline that is no U; without it costs are rejected or, for split backwards, not read.
        report_interval_steps: training steps from one comparison of planned and real times to the next.

    Raises:
        ConfigError: limits or costs do not fit the pipeline, or its order is fixed.
    """
    is_u = config.layerwise_disaggregated
    if config.costs is not None and fixed is None and not (is_u or config.split_backward):
        way_out = "leave it out, or add --layerwise-disaggregated-training or --vtp-split-backward"
        raise LayoutError(f"--vtp-costs is for a U or split backwards; {way_out}")
    in_flight = config.in_flight
    if in_flight is not None:
        if not config.has_planned_schedule or (num_chunks > 1 and not is_u):
            raise LayoutError(
                f"--vtp-in-flight {','.join(map(str, in_flight))}; it is used by planned schedules without "
                "interleaving only; add --vtp-schedule planned and leave interleaving out, or leave --vtp-in-flight out"
            )
        check_in_flight(in_flight, num_stages)
        if not is_u:
            in_flight = by_stage(in_flight, num_stages)
    costs, placement = None, fixed or (u_placement(num_stages, num_rings=config.num_rings) if is_u else None)
    if config.costs is not None and placement is not None:
        costs = parse_costs(config.costs, placement, message_bytes=message_bytes)
    return ScheduleOptions(
        costs=costs,
        in_flight=in_flight,
        replan_share=config.replan_share,
        report_interval_steps=report_interval_steps,
        split_backward=config.split_backward,
    )
