"""What a search is asked for, from flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.cli import model_flags
from vtp_plugin.cli.command_base import named, with_values
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import parse_bytes, parse_cp_list, parse_ep_list, parse_etp_list
from vtp_plugin.config.resolve import read_flags, transport_rules
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.rules.run_checks import with_judged
from vtp_plugin.host.rules.table.rows import check_options, refusals
from vtp_plugin.host.rules.table.rows_parallelism import SPLIT_RULES
from vtp_plugin.host.versions import HOSTS, find_megatron
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activation_rows import Microbatch
from vtp_plugin.plan.memory.footprint import Training
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.tune.cluster.machines import Cluster, Nodes
from vtp_plugin.tune.cluster.read_cluster import StageMemory, check_origins, features, speed_of
from vtp_plugin.tune.cluster.speed import Batch
from vtp_plugin.tune.fit import fit_layout
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem
from vtp_plugin.util.text import in_digits

CARD_MEMORY = "--card-memory"
"""The flag with the memory of a device, for messages."""


def add_have_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    group.add_argument(
        "--have",
        metavar="8,6,8",
        help="devices of every node, with sites edge:1,cloud:8: a layout of them is found",
    )
    group.add_argument(
        "--card-memory",
        type=parse_bytes,
        metavar="80GiB",
        help="with --have or a page: memory of a device; each stage must fit",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The layout that was fitted to ``--have``.

    Attributes:
        candidate: the layout.
        reasons: why it was fitted, line by line.
        flags: flags that say it.
        stock: the best one that stock Megatron can run, if it was asked for and there is one.
    """

    candidate: Candidate
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    stock: Candidate | None = None


def fit_to_cards(args: argparse.Namespace, config: VtpConfig) -> tuple[VtpConfig, Fitted]:
    """Fit a layout to ``--have``.

    Returns:
        The options with the layout, and the layout.

    Raises:
        ConfigError: nothing fits, a flag says what is to be fitted, or what the memory depends on is not known.
    """
    if isinstance(config.size_list, tuple):
        raise ConfigError("--have and sizes in --vtp-size-list say the same thing twice; give one of them")
    nodes = [replace(node, memory_bytes=args.card_memory) for node in fit_layout.read_have(args.have)]
    sites = tuple(dict.fromkeys(node.site for node in nodes if node.site))
    if sites and config.sites is None:
        config = replace(config, sites=sites)
    has_memory = args.card_memory is not None
    if has_memory and (reason := model_flags.why_unknown(args, lacks_parts=False)):
        raise ConfigError(f"{CARD_MEMORY}: the memory of a rank is {reason}" if "not known" in reason else reason)

    constraints = fit_layout.read_constraints(args, config, config.stages or (1, max(2, 2 * len(nodes))))
    if has_memory:
        constraints = _with_memory(args, constraints)
    layouts = fit_layout.fit(nodes, constraints)
    best, reasons = layouts[0], fit_layout.describe(layouts, constraints)
    if config.split_backward:
        best = fit_layout.fit_split(nodes, constraints, best)
        reasons += (_about_split(best),)
        config = replace(config, split_backward=best.order.is_split)
    chosen = fit_layout.Chosen.of(best)
    is_forced = len({*chosen.sizes}) == 1 and not config.layerwise_disaggregated
    flags = fit_layout.fitted_flags(chosen, constraints, num_predicting=args.mtp_num_layers or 0, is_forced=is_forced)
    stock = fit_layout.fit_stock(nodes, constraints) if getattr(args, "framework", None) else None
    flags = (*flags, *fit_layout.order_flags(best, constraints))
    return fit_layout.write_fitted(config, chosen), Fitted(candidate=best, reasons=reasons, flags=flags, stock=stock)


def _about_split(best: Candidate) -> str:
    if best.whole is None:
        return "--vtp-split-backward: gains nothing here, or the memory is too small; left out"
    step, whole = (in_digits(each.step_s, 6) for each in (best, best.whole))
    return f"--vtp-split-backward: a simulated step takes {step}, {whole} without"


def _with_memory(args: argparse.Namespace, constraints: Constraints) -> Constraints:
    """Ask with what stages hold, with the activations of their microbatches in flight, if those are known."""
    layout = PipelineLayout.from_sizes((1,), world_size=constraints.cp, cp=constraints.cp)
    microbatch = None if model_flags.why_no_activations(args, layout) else model_flags.read_microbatch(args)
    model, training = read_padded_model(args, constraints), model_flags.read_training(args, layout)
    memory = _stage_memory(constraints, model, training, microbatch)
    return replace(constraints, held_bytes=memory.held_bytes, counted_twice=memory.counted_twice)


def _stage_memory(
    constraints: Constraints, model: GPTModel, training: Training, microbatch: Microbatch | None
) -> StageMemory:
    sizes = named(constraints, "cp", "ep", "etp")
    return StageMemory(model, training, microbatch, **sizes)


# Sizes that are one for all stages, by the name of the plugin's list.
_LISTS = {
    "cp": ("--context-parallel-size", parse_cp_list),
    "ep": ("--expert-model-parallel-size", parse_ep_list),
    "etp": ("--expert-tensor-parallel-size", parse_etp_list),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A request to ``search``: the problem, and what its result is printed with.

    Attributes:
        problem: the search problem.
        constraints: what the layout must satisfy.
        vocab: rows of the vocabulary, as every layout pads it.
        megatron: name and version of the Megatron in whose flags layouts are given.
        about_memory: what the memory figures include.
        silent: notes on what counts as zero, since the file does not give it.
        limits: flags that leave layouts out which stock Megatron could run, too.
        unlimited: the problem without them; None where they leave nothing out.
    """

    problem: SearchProblem
    constraints: Constraints
    vocab: int
    megatron: str
    about_memory: str
    silent: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    unlimited: SearchProblem | None = None


def read_request(args: argparse.Namespace, cluster: Cluster) -> SearchRequest:
    """Read the request.

    Args:
        args: parsed arguments.
        cluster: the machines.

    Raises:
        ConfigError: a flag that the times follow from is missing, or says what is searched.
    """
    limits, wider_args = _without_limits(args)
    sizes = args.micro_batch_sizes or [args.micro_batch_size]
    named = with_values(args, vtp_sites=_sites(args, cluster), micro_batch_size=args.micro_batch_size or sizes[0])
    constraints, model = read_any_list(named, "search")
    args = constraints.args
    if unknown := set(constraints.sites) - {group.site for group in cluster.nodes}:
        raise ConfigError(
            f"--vtp-sites {','.join(constraints.sites)}: no nodes of the cluster are at {sorted(unknown)[0]}"
        )
    origins = [group.card.origin for group in cluster.nodes if group.card.origin is not None]
    check_origins(origins, features_of(args, model))
    one_rank = PipelineLayout.from_sizes((1,), world_size=1)
    training = model_flags.read_training(args, one_rank)
    microbatch = model_flags.read_microbatch(args)
    why_not = model_flags.why_no_activations(
        args, PipelineLayout.from_sizes((1,), world_size=constraints.cp, cp=constraints.cp)
    )
    if why_not and not microbatch.is_engine:
        # What is not known is left out, and the attention taken for one that keeps no probabilities.
        microbatch = replace(microbatch, recompute=replace(microbatch.recompute, core_attention=True))
    splits = tuple(_batch_splits(args, constraints, cluster, model, microbatch, training, sizes))
    if not splits:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{', '.join(map(str, sizes))}; give another one"
        )
    problem = SearchProblem(
        num_layers=model.num_layers,
        splits=splits,
        least_stages=constraints.least_stages,
        most_stages=constraints.most_stages,
        across=cluster.links.across,
        edge=constraints.sites[0] if constraints.ends else "",
        edge_layers=constraints.ends,
        rules=transport_rules(read_flags(args, VtpConfig()), None, is_sharded=args.sequence_parallel),
        chunks=tuple(args.virtual_stages or ()),
        layers=constraints.layers,
        split_backward=args.vtp_split_backward,
        num_frozen=training.lora.first_layer(model.num_layers) if training.lora else 0,
        tied_bytes=model.vocab * model.hidden * training.gradient_itemsize_bytes if model.is_tied else 0,
    )
    wider = read_request(wider_args, cluster).problem if limits and constraints.ends is None else problem
    is_limited = any(getattr(wider, name) != getattr(problem, name) for name in ("least_stages", "most_stages"))
    is_limited |= len(wider.splits) > len(problem.splits)
    about = "overhead, " + ("estimated activations" if why_not or microbatch.is_estimated else "activations")
    about += f" ({why_not})" if why_not else ""
    return SearchRequest(
        problem=problem,
        constraints=constraints,
        vocab=model.vocab,
        megatron=_megatron()[1],
        about_memory=f"memory of a rank (weights, gradients, optimizer, {about})",
        silent=tuple(dict.fromkeys(_silent(cluster))),
        limits=limits if is_limited else (),
        unlimited=wider if is_limited else None,
    )


def _without_limits(args: argparse.Namespace) -> tuple[tuple[str, ...], argparse.Namespace]:
    """Give the flags that limit stages and replicas, and the arguments without them; sizes of lists stay."""
    names = ("stages", "data_parallel_size", *(f"{name}_list" for name in _LISTS))
    given = {f"vtp_{name}": value for name in names if (value := getattr(args, f"vtp_{name}")) is not None}
    limits = tuple(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    return limits, with_values(args, vtp_stages=None, vtp_data_parallel_size=None, **_read_lists(args)[1])


def _megatron() -> tuple[str, str]:
    """Give the version of the Megatron that is installed here, or the newest one that is known, and its name."""
    if (installed := find_megatron()) is not None:
        return installed.version, f"Megatron {installed.version}"
    newest = HOSTS[-1].first
    return newest, f"Megatron {newest} (none is installed here)"


def _silent(cluster: Cluster) -> Iterator[str]:
    for group in cluster.nodes:
        card = group.card
        if card.memory_bytes_per_s is None and not any(time.part == "update" for time in card.times):
            yield (
                f"cards.{card.name} has no memory_tbyte_per_s: its optimizer counts as 0 s; give that, or profile it"
            )


def _sites(args: argparse.Namespace, cluster: Cluster) -> str | None:
    """Give the sites, as a user writes them: in a U the site with the name edge is the edge, where none was named."""
    if not args.layerwise_disaggregated_training or args.vtp_sites is not None:
        return args.vtp_sites
    sites = sorted({group.site for group in cluster.nodes})
    if "edge" not in sites or len(sites) < 2:
        named = ", ".join(site for site in sites if site) or "none"
        raise ConfigError(
            f"sites {named} in the cluster; a U-shape needs an edge and another site; name the edge first in "
            "--vtp-sites, or call a site edge in the file"
        )
    return ",".join(["edge", *(site for site in sites if site != "edge")])


def read_any_list(args: argparse.Namespace, command: str) -> tuple[Constraints, GPTModel]:
    """Read what a layout that is still to be found must satisfy, and the model that it trains.

    Every layout pads the vocabulary so that all sizes divide it, as the flags of the best one will say.

    Args:
        args: parsed arguments.
        command: name of the command, for errors.

    Returns:
        What the layout must satisfy, with the arguments that say so, and the model.

    Raises:
        ConfigError: a flag that times follow from is missing, says what is to be found, or is not known here.
    """
    if args.vtp_size_list not in (None, "auto"):
        raise ConfigError(
            f"--vtp-size-list {args.vtp_size_list} with {command}, which is for all layouts; leave it out"
        )
    stages, sizes = _read_lists(args)
    args = with_values(allowing_split(args), vtp_size_list="auto", **sizes)
    config = read_flags(args, VtpConfig())
    if stages is not None and config.stages not in (None, (stages, stages)):
        raise ConfigError(
            f"--vtp-stages {':'.join(map(str, config.stages or ()))} with sizes of {stages} stages; leave one out"
        )
    if command == "search":
        _check_options(args, config)
    constraints = fit_layout.read_constraints(
        args,
        config,
        config.stages or (stages or 1, stages or args.num_layers or 1),
        "any" if config.layerwise_disaggregated else fit_layout.layer_rule(_megatron()[0]),
    )
    _check(args, command)
    return constraints, read_padded_model(args, constraints)


def _check_options(args: argparse.Namespace, config: VtpConfig) -> None:
    """Refuse what no run of unequal stages supports, since layouts of these are what is searched."""
    context = OptionContext(
        tp_sizes=(1, 2),
        is_planned=config.has_planned_schedule,
        has_split_backward=config.split_backward,
        lora=config.lora,
        is_u_shaped=config.layerwise_disaggregated,
    )
    refuse(check_options(with_judged(args, args.unknown, context), context))


def allowing_split(args: argparse.Namespace) -> argparse.Namespace:
    """Let ``--vtp-split-backward`` alone allow split backwards: the planned schedule that they need is advised, too.

    Args:
        args: parsed arguments.

    Raises:
        ConfigError: no run could split its backwards.
    """
    if not args.vtp_split_backward:
        return args
    refuse(refusals(SPLIT_RULES, args, OptionContext(tp_sizes=(1,), has_split_backward=True)))
    return with_values(args, vtp_schedule="planned")


def read_padded_model(args: argparse.Namespace, constraints: Constraints) -> GPTModel:
    """Read the model with its vocabulary padded as every layout pads it.

    Args:
        args: parsed arguments.
        constraints: what the layout must satisfy.
    """
    model = model_flags.read_model(args, PipelineLayout.from_sizes((1,), world_size=1))
    if multiple := fit_layout.vocabulary_multiple((1,), constraints):
        model = replace(model, vocab=-(-args.vocab_size // multiple) * multiple)
    return model


def _read_lists(args: argparse.Namespace) -> tuple[int | None, dict[str, int | None]]:
    """Read lists of other sizes than that of tensor parallelism, which must be one size for all stages.

    Returns:
        The number of stages that they are for, None without a list, and the arguments that say the same without lists.
    """
    num_stages: dict[str, int] = {}
    found: dict[str, int | None] = {}
    for name, (flag, parse) in _LISTS.items():
        text = getattr(args, f"vtp_{name}_list")
        if text is None:
            continue
        sizes = parse(text)
        if len(set(sizes)) > 1:
            raise ConfigError(f"--vtp-{name}-list {text}: search knows one size for all stages; give {flag} instead")
        if (getattr(args, flag[2:].replace("-", "_")) or sizes[0]) != sizes[0]:
            raise ConfigError(f"--vtp-{name}-list {text} contradicts {flag}; leave one of them out")
        found |= {flag[2:].replace("-", "_"): sizes[0], f"vtp_{name}_list": None}
        num_stages[name] = len(sizes)
    if len(set(num_stages.values())) > 1:
        shown = ", ".join(f"--vtp-{name}-list {number}" for name, number in num_stages.items())
        raise ConfigError(f"lists of different lengths: {shown} stages; give one size for every stage")
    return next(iter(num_stages.values()), None), found


def features_of(args: argparse.Namespace, model: GPTModel) -> dict[str, object]:
    """List the properties of a model that the times of its parts depend on."""
    microbatch = model_flags.read_microbatch(args)
    return features(model, itemsize_bytes=microbatch.itemsize_bytes, topk=_topk(microbatch))


def _topk(microbatch: Microbatch) -> int:
    """Give the experts of a token; 0 without experts."""
    return 0 if microbatch.routing is None else microbatch.routing.topk


def _check(args: argparse.Namespace, command: str) -> None:
    if args.layerwise_disaggregated_training and command == "profile":
        raise ConfigError(
            "--layerwise-disaggregated-training with profile, which times parts of any pipeline; leave it"
        )
    for flag, _ in _LISTS.values():
        size = getattr(args, flag[2:].replace("-", "_"))
        if (size or 1) > 1 and command == "profile":
            raise ConfigError(f"{flag} {size} with profile, which times a device that has no such peers; leave it out")
    if args.mtp_num_layers:
        raise ConfigError(f"--mtp-num-layers with {command}, which does not know what such a layer costs; leave it out")
    if reason := model_flags.why_unknown(args, lacks_parts=False):
        raise ConfigError(f"{command} needs to know the model: {reason}")
    if not args.seq_length:
        raise ConfigError("--seq-length is missing; what a layer costs depends on it")


def _batch_splits(
    args: argparse.Namespace,
    constraints: Constraints,
    cluster: Cluster,
    model: GPTModel,
    microbatch: Microbatch,
    training: Training,
    sizes: Sequence[int],
) -> Iterator[BatchSplit]:
    num_cards = sum(group.num_nodes * group.num_cards for group in cluster.nodes)
    largest = max(group.num_cards for group in cluster.nodes)
    if largest < constraints.cp:
        raise ConfigError(
            f"--context-parallel-size {constraints.cp}: no node has so many devices; "
            "a replica of a stage is inside one node"
        )
    if problems := constraints.problems_of_size(1):
        raise ConfigError(problems[0])
    most = num_cards // (constraints.cp * constraints.least_stages)
    all_replicas = range(1, most + 1) if constraints.num_replicas is None else (constraints.num_replicas,)
    for size in sizes:
        batch = Batch(
            size=size,
            length=args.seq_length,
            itemsize_bytes=microbatch.itemsize_bytes,
            gradient_itemsize_bytes=training.gradient_itemsize_bytes,
            topk=_topk(microbatch),
            is_recomputed=args.recompute_granularity == "full",
            shares_update=args.use_distributed_optimizer,
            **named(constraints, "cp", "ep", "etp"),
            is_gathered=microbatch.routing is not None and microbatch.routing.is_gathered,
            lora=training.lora,
        )
        memory = _stage_memory(constraints, model, training, replace(microbatch, size=size))
        for replicas in all_replicas:
            tp_sizes = () if args.global_batch_size % (size * replicas) else constraints.sizes(largest, replicas)
            if not tp_sizes:
                continue
            yield BatchSplit(
                num_replicas=replicas,
                num_microbatches=args.global_batch_size // (size * replicas),
                micro_batch_size=size,
                pools=tuple(_pool(group, cluster, model, batch, replicas, tp_sizes) for group in cluster.nodes),
                message_bytes=batch.num_tokens * model.hidden * batch.itemsize_bytes,
                cp=constraints.cp,
                held_bytes=memory.held_bytes,
                counted_twice=memory.counted_twice,
            )


def _pool(
    group: Nodes, cluster: Cluster, model: GPTModel, batch: Batch, replicas: int, tp_sizes: Sequence[int]
) -> NodePool:
    links, per_node = cluster.links, group.num_cards // batch.cp
    return NodePool(
        name=group.name,
        cards_per_node=(per_node,) * group.num_nodes,
        speeds={tp: speed_of(group.card, links, model, batch, tp, replicas) for tp in tp_sizes if tp <= per_node},
        inside=links.inside_of(group.card.name),
        between=links.between_of(group.site, group.card.name),
        site=group.site,
        memory_bytes=group.card.memory_bytes,
        card_price=group.card.price_per_hour,
        nodes=group.each,
    )
