"""Fits a layout to the cards that are there."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import format_value
from vtp_plugin.errors import LayoutError, ShortageError, refuse
from vtp_plugin.host.rules.checks.divisibility import lcm_of_sizes, nearest_multiples
from vtp_plugin.host.versions import capability
from vtp_plugin.plan.launch.launch_commands import ranks_by_node
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.fit.constraints import Constraints, fit_problem
from vtp_plugin.tune.search.evaluate import Candidate, with_split
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import LayerRule
from vtp_plugin.tune.search.schedule_time import in_megatron


def assign_ranks(
    node_names: Sequence[Sequence[str]], layout: PipelineLayout, cards: Mapping[str, Sequence[int]]
) -> dict[int, int]:
    """Assign ranks to cards.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.
        cards: for every node the cards that work, each as a number, such as the rank that the launcher gave.

    Returns:
        The rank of every card that works in the run, by the card's number.

    >>> layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    >>> assign_ranks([["a"], ["b"]], layout, {"a": [2, 3], "b": [0, 1]})
    {2: 0, 3: 1, 0: 2}
    """
    return {
        card: rank
        for name, ranks in ranks_by_node(node_names, layout).items()
        for card, rank in zip(cards[name], ranks, strict=False)
    }


def read_have(text: str) -> tuple[Node, ...]:
    """Read cards per node, each with the name of its site before a colon where there are sites.

    >>> [(node.name, node.num_cards) for node in read_have("8,6")]
    [('node 0', 8), ('node 1', 6)]
    >>> read_have("edge:1,cloud:8")[0].site
    'edge'

    Raises:
        ConfigError: an entry is no number of cards.
    """
    nodes = []
    for index, entry in enumerate(text.split(",")):
        site, _, number = entry.strip().rpartition(":")
        if not number.isdecimal():
            raise LayoutError(
                f"--have {text!r} has the entry {entry!r}, which is no number of devices; write the devices of every "
                "node, such as 8,6,8, or with sites edge:1,cloud:8"
            )
        nodes.append(Node(name=f"node {index}", num_cards=int(number), site=site))
    return tuple(nodes)


def in_order(nodes: Iterable[Node], sites: Sequence[str]) -> tuple[Node, ...]:
    """Sort nodes in the order of the pipeline: by site, then by name, numbers in names as numbers.

    Args:
        nodes: the nodes, in any order.
        sites: the sites, in the order of the pipeline; empty where there are none.

    Raises:
        ConfigError: a node's site is none of these, two nodes have one name, or the kinds of cards are mixed.

    >>> [node.name for node in in_order([Node(name="n10", num_cards=1), Node(name="n9", num_cards=1)], ())]
    ['n9', 'n10']
    """
    found = [replace(node, site="") if not sites else node for node in nodes]
    for node in found:
        if sites and node.site not in sites:
            raise LayoutError(
                f"site {node.site!r} of {node.name} is none of --vtp-sites {','.join(sites)}; give --vtp-site there"
            )
    kinds = sorted({node.kind for node in found if node.num_cards})
    if len(kinds) > 1:
        one = {kind: next(node.name for node in found if node.kind == kind and node.num_cards) for kind in kinds}
        shown = ", ".join(f"{kind} on {name}" for kind, name in one.items())
        raise LayoutError(
            f"kinds of devices are mixed: {shown}; a run has one kind; give --vtp-device, or leave some out"
        )
    names = [node.name for node in found]
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"{names.count(name)} nodes are called {name}; give every node a name of its own")
    order = {site: number for number, site in enumerate(sites)}
    return tuple(sorted(found, key=lambda node: (order.get(node.site, 0), _natural(node.name))))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def fit(nodes: Sequence[Node], constraints: Constraints) -> tuple[Candidate, ...]:
    """Choose the best layout for the cards that are there; the result depends on the arguments alone.

    Each replica of a stage is inside one node. For every number of replicas that divides the batches, the list that
    leaves the fewest cards spare is taken; of several the one with fewest stages, then with the largest sizes. Among
    these, one for each number of replicas, the shortest step decides, then the fewest spare cards. Stages follow the
    names of sites and nodes, larger ones first inside a node.

    Args:
        nodes: the nodes, in any order.
        constraints: what a list must satisfy.

    Returns:
        The best layout, and behind it that of every other number of replicas that is possible.

    Raises:
        ShortageError: nothing fits; more cards would.
        ConfigError: nothing fits, however many cards there are; or a U-shape has lost its edge.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(
    ...     num_layers=12, micro_batch_size=1, global_batch_size=8, seq_length=64, sequence_parallel=True,
    ...     num_attention_heads=12, group_query_attention=True, num_query_groups=4)
    >>> nodes = [Node(name="a", num_cards=4), Node(name="b", num_cards=3)]
    >>> [best] = fit(nodes, Constraints(args=args, least_stages=2, most_stages=3, num_replicas=1))
    >>> best.sizes, best.layers, [number for _, number in best.spare_cards]
    ((4, 2, 1), (8, 3, 1), [0, 0])
    """
    ordered = in_order(nodes, constraints.sites)
    _require_sites(ordered, constraints)
    best = find_best(fit_problem(ordered, constraints)).best
    if not best:
        raise why_nothing(ordered, constraints)
    return best


def fit_stock(nodes: Sequence[Node], constraints: Constraints) -> Candidate | None:
    """Choose the best layout that stock Megatron can run on the cards that are there; None if none can.

    Args:
        nodes: the nodes, in any order.
        constraints: what the layout must satisfy.
    """
    problem = fit_problem(in_order(nodes, constraints.sites), constraints)
    if problem.edge_layers is not None:
        return None  # Megatron has no U
    found = find_best(in_megatron(replace(problem, split_backward=False), problem.layers)).best
    return found[0] if found else None


def fit_split(nodes: Sequence[Node], constraints: Constraints, fitted: Candidate) -> Candidate:
    """Split the backwards of a fitted layout where the memory allows it and its step is shorter.

    Args:
        nodes: the nodes, in any order.
        constraints: what the layout had to satisfy.
        fitted: the layout; a run would not choose another one, either.
    """
    return with_split(fit_problem(in_order(nodes, constraints.sites), constraints), fitted)


def _require_sites(nodes: Sequence[Node], constraints: Constraints) -> None:
    for site in constraints.sites:
        if not any(node.num_cards for node in nodes if node.site == site):
            is_edge = constraints.ends is not None and site == constraints.sites[0]
            what = "the edge holds the data and both ends of the model" if is_edge else "it has at least one stage"
            kind = LayoutError if is_edge else ShortageError
            raise kind(f"site {site} has no device left; {what}; bring one back, or leave the site out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A list, as ranks send it to each other, and as flags say it.

    Attributes:
        sizes: tensor-parallel size of every stage.
        layers: number of layers of every stage; in a U one part more, the edge's last.
        num_replicas: number of replicas of every stage.
        sites: site of every stage; empty names where there are none.
        in_flight: most microbatches in flight on every stage; empty for the default.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    sites: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()

    @classmethod
    def of(cls, candidate: Candidate) -> Chosen:
        """Take the list from a layout that the search found."""
        return cls(
            sizes=candidate.sizes,
            layers=candidate.layers,
            num_replicas=candidate.num_replicas,
            sites=candidate.sites,
            in_flight=candidate.order.in_flight,
        )

    def require(self, constraints: Constraints, num_ranks: int) -> None:
        """Refuse a list that this rank's flags do not allow.

        Args:
            constraints: what this rank's own flags require of a list.
            num_ranks: number of ranks that take part.

        Raises:
            ConfigError: the list does not satisfy them; a restart may cure it.
        """
        for problem in self._problems(constraints, num_ranks):
            raise LayoutError(
                f"rank 0 chose TP sizes {format_value(self.sizes)}, layers {format_value(self.layers)} and "
                f"{self.num_replicas} replicas, which do not fit this rank's own flags: {problem}; start every rank "
                "with the same command line, and let nobody else reach MASTER_PORT",
                is_final=False,
            )

    def _problems(self, constraints: Constraints, num_ranks: int) -> Iterator[str]:
        num_stages = len(self.sizes)
        if not constraints.least_stages <= num_stages <= constraints.most_stages:
            yield f"{num_stages} stages, not {constraints.least_stages} to {constraints.most_stages}"
        # Before sizes are tried: that takes time for each.
        needed = sum(self.sizes) * constraints.cp * self.num_replicas
        if min((*self.sizes, self.num_replicas), default=0) < 1 or needed != num_ranks:
            yield f"{needed} ranks are needed, and {num_ranks} take part"
        yield from (problem for size in dict.fromkeys(self.sizes) for problem in constraints.problems_of_size(size))
        if constraints.num_replicas not in (None, self.num_replicas):
            yield f"--vtp-data-parallel-size is {constraints.num_replicas}"
        yield from constraints.problems_of_replicas(self.num_replicas)
        yield from self._problems_of_layers(constraints)
        named = tuple(dict.fromkeys(self.sites)) if any(self.sites) else ()
        if named != constraints.sites or len(self.sites) not in (0, num_stages):
            yield (
                f"its sites are {','.join(self.sites) or 'none'}, "
                f"--vtp-sites is {','.join(constraints.sites) or 'not given'}"
            )
        # A stage may be allowed more than there are.
        most = constraints.num_microbatches(self.num_replicas) + num_stages
        if len(self.in_flight) not in (0, 1, num_stages) or not all(1 <= one <= most for one in self.in_flight):
            yield f"{format_value(self.in_flight)} microbatches in flight, above {most}"

    def _problems_of_layers(self, constraints: Constraints) -> Iterator[str]:
        inner = self.layers
        if constraints.ends is not None:
            if (inner[:1], inner[-1:]) != (constraints.ends[:1], constraints.ends[1:]):
                yield f"the edge's parts have {constraints.ends[0]} and {constraints.ends[1]} layers"
            inner = inner[1:-1]
        if len(inner) != len(self.sizes) - (constraints.ends is not None):
            yield f"{len(self.layers)} parts of layers for {len(self.sizes)} stages"
        if min(inner, default=1) < 1 or sum(inner) != constraints.num_layers:
            yield f"its layers are not --num-layers {constraints.args.num_layers}"


OF_A_FIT = ("--vtp-size-list", "--vtp-stages", "--vtp-data-parallel-size", "--vtp-sites", "--vtp-node")
"""Flags that a fit decides, and those that are for it alone."""


def fitted_flags(
    chosen: Chosen, constraints: Constraints, *, num_predicting: int = 0, is_forced: bool = True
) -> tuple[str, ...]:
    """Write a list as the flags that a user would give for it.

    A list of equal sizes is used like any other: the next one may be unequal, and both store checkpoints alike.

    Args:
        chosen: the list.
        constraints: what the list had to satisfy.
        num_predicting: number of layers of multi-token prediction.
        is_forced: whether the plugin is used even if all sizes are equal.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=4)
    >>> constraints = Constraints(args=args, least_stages=1, most_stages=2)
    >>> print(*fitted_flags(Chosen(sizes=(2, 1), layers=(3, 1), num_replicas=1), constraints))
    --vtp-size-list 2,1 --vtp-force --make-vocab-size-divisible-by 256 --decoder-first-pipeline-num-layers 3
    """
    argv = ["--vtp-size-list", format_value(chosen.sizes), *["--vtp-force"] * is_forced]
    if multiple := vocabulary_multiple(chosen.sizes, constraints):
        argv += ["--make-vocab-size-divisible-by", str(multiple)]
    if any(chosen.sites):
        argv += ["--vtp-sites", ",".join(chosen.sites)]
    if chosen.in_flight:
        argv += ["--vtp-in-flight", format_value(chosen.in_flight)]
    if len(chosen.layers) > len(chosen.sizes):
        return (*argv, "--num-layer-list", format_value(chosen.layers))
    return (*argv, *layer_flags(chosen.layers, num_predicting))


def order_flags(candidate: Candidate, constraints: Constraints) -> tuple[str, ...]:
    """Write the order of a layout's microbatches as flags, besides how many are in flight.

    A U and an interleaved pipeline of whole backwards have an order of their own; but only a planned one leaves out
    the backward of a stage that trains nothing.

    Args:
        candidate: the layout.
        constraints: what it had to satisfy.
    """
    order, argv = candidate.order, list[str]()
    has_own = candidate.num_chunks > 1 and not order.is_split and not candidate.placement.num_frozen
    if order.is_planned and constraints.ends is None and not has_own:
        argv += ["--vtp-schedule", "planned"]
    return (*argv, *["--vtp-split-backward"] * order.is_split)


def stock_flags(chosen: Chosen) -> tuple[str, ...]:
    """Write a list of equal sizes as the flags of Megatron without the plugin.

    Args:
        chosen: the list.
    """
    argv = ("--tensor-model-parallel-size", str(chosen.sizes[0]))
    argv += ("--pipeline-model-parallel-size", str(len(chosen.sizes)))
    return argv + layer_flags(chosen.layers, 0)


def vocabulary_multiple(sizes: Sequence[int], constraints: Constraints) -> int | None:
    """Return a list's value of ``--make-vocab-size-divisible-by``; None where the vocabulary is padded already.

    Every list of a model pads it alike, since the padding enters the loss and the checkpoint. Megatron pads it to a
    multiple of the sizes of the first and the last stage. Here it is a multiple of all sizes that a stage could have,
    up to 16.

    Args:
        sizes: tensor-parallel sizes of the stages.
        constraints: what the list had to satisfy.
    """
    if getattr(constraints.args, "padded_vocab_size", None):
        return None
    ends = math.lcm(sizes[0], sizes[-1])
    divisor = getattr(constraints.args, "make_vocab_size_divisible_by", None) or 128
    return divisor * lcm_of_sizes(ends, constraints.problems_of_size) // ends


def about_padding(sizes: Sequence[int], constraints: Constraints) -> str:
    """Say how :func:`vocabulary_multiple` pads the vocabulary, and what that does to the loss; empty if nothing.

    Args:
        sizes: tensor-parallel sizes of the stages.
        constraints: what the list had to satisfy.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=4)
    >>> args.vocab_size = 256
    >>> about_padding((1, 2), Constraints(args=args, least_stages=1, most_stages=2)).partition(", so")[0]
    'the vocabulary is padded to 512 tokens, 256 with TP size 1'
    """
    divisor = getattr(constraints.args, "make_vocab_size_divisible_by", None) or 128
    ends, tokens = math.lcm(sizes[0], sizes[-1]), getattr(constraints.args, "vocab_size", None)
    multiple = ends * (vocabulary_multiple(sizes, constraints) or 0)
    if multiple <= divisor:
        return ""
    least = lcm_of_sizes(ends, constraints.problems_of_size)
    why = "so that every TP size of this model loads the checkpoints"
    way_out = "; --make-vocab-size-divisible-by 1 pads to"
    if not tokens:
        more = f"{why}, which raises the loss{way_out} a multiple of {least:,}"
        return f"the vocabulary is padded to a multiple of {multiple:,} tokens, {more}"
    padded, usual, fewest = (-(-tokens // each) * each for each in (multiple, divisor, least))
    if padded == usual:
        return ""
    more = f"{why}, and the first loss is about {math.log(padded / usual):.2g} higher{way_out} {fewest:,}"
    return f"the vocabulary is padded to {padded:,} tokens, {usual:,} with TP size 1, {more}"


def layer_flags(layers: Sequence[int], num_predicting: int) -> tuple[str, ...]:
    """Write how many layers each stage holds as Megatron's flags, with those that most versions have.

    Args:
        layers: number of layers of every stage.
        num_predicting: number of layers of multi-token prediction, behind the last stage's.

    >>> layer_flags((2, 2), 0), layer_flags((1, 2, 2, 3), 0)[1::2], layer_flags((1, 2, 1, 3), 1)[1]
    ((), ('1', '3'), 'Et|tt|t|tttmL')
    """
    first, *between = layers
    if len(set(layers)) == 1:
        return ()
    first_words = ("--decoder-first-pipeline-num-layers", str(first))
    if len(layers) == 2:
        return first_words
    if len(set(between[:-1])) == 1:
        return (*first_words, "--decoder-last-pipeline-num-layers", str(layers[-1]))
    parts = ["t" * number for number in layers]
    return ("--pipeline-model-parallel-layout", f"E{'|'.join(parts)}{'m' * num_predicting}L")


def without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Leave out flags, each with its value.

    >>> without(["--a", "1", "--b=2", "--c"], ["--a", "--b"])
    ['--c']
    """
    left: list[str] = []
    skips = False
    for word in argv:
        name = word.partition("=")[0]
        if skips:
            skips = False
        elif name in flags:
            skips = name == word
        else:
            left.append(word)
    return left


# What says sizes or layers, which are fitted here.
_FIXED = {
    "tensor_model_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
}


def layer_rule(version: str) -> LayerRule:
    """Return how many layers the stages of a Megatron may hold: in 0.12 the first and the last one alone may differ."""
    return "any" if capability("layouts").has(version) else "ends"


def read_constraints(
    args: Any,
    config: VtpConfig,
    stages: tuple[int, int],
    layers: LayerRule = "any",
) -> Constraints:
    """Read what a list must satisfy.

    Args:
        args: Megatron's parsed arguments.
        config: the plugin's options.
        stages: the fewest and the most pipeline stages.
        layers: how many layers stages may hold.

    Raises:
        ConfigError: an argument says what is to be fitted, or what a fit needs is missing.
    """
    found = {name: getattr(args, name, None) for name in _FIXED}
    refuse(
        (
            f"--{name.replace('_', '-')} {found[name]} with --vtp-size-list auto --vtp-stages; sizes and layers are "
            "chosen for the devices that are there; leave it out"
            for name, unset in _FIXED.items()
            if found[name] not in (None, unset)
        ),
        LayoutError,
    )
    if config.encoder_layer_list is not None:
        raise LayoutError(
            "--vtp-encoder-layer-list with --vtp-stages; the layers of an encoder cannot be chosen automatically; give "
            "the TP size of every stage instead of auto"
        )
    parts = config.num_layer_list
    if config.layerwise_disaggregated and (parts is None or len(parts) < 2):
        raise LayoutError(
            "--layerwise-disaggregated-training with --vtp-stages needs --num-layer-list for the edge's two parts, "
            "such as 1,3,3,1; the parts between are chosen"
        )
    least, most = stages
    is_replica_major = getattr(args, "use_tp_pp_dp_mapping", False)
    return Constraints(
        args=args,
        least_stages=max(least, 2) if config.layerwise_disaggregated else least,
        most_stages=most,
        num_replicas=config.data_parallel_size,
        sites=config.sites or (),
        cp=args.context_parallel_size or 1,
        ep=args.expert_model_parallel_size or 1,
        etp=args.expert_tensor_parallel_size,
        order=RankOrder.REPLICA_MAJOR if is_replica_major else RankOrder.STAGE_MAJOR,
        ends=(parts[0], parts[-1]) if config.layerwise_disaggregated and parts else None,
        layers=layers,
    )


def write_fitted(config: VtpConfig, chosen: Chosen) -> VtpConfig:
    """Return the options of a run with the fitted list.

    A list of equal sizes is used like any other: the next one may be unequal, and both must store checkpoints alike.

    Args:
        config: the options, with the list ``"auto"``.
        chosen: the fitted list.
    """
    return dataclasses.replace(
        config,
        size_list=chosen.sizes,
        stages=None,
        data_parallel_size=chosen.num_replicas,
        sites=chosen.sites if config.sites else None,
        num_layer_list=chosen.layers if config.layerwise_disaggregated else None,
        in_flight=chosen.in_flight or config.in_flight,
        force=True,
    )


_MOST_ADDED = 64


def describe(layouts: Sequence[Candidate], constraints: Constraints) -> tuple[str, ...]:
    """Say what was chosen and why, one line each.

    Args:
        layouts: the chosen layout, and behind it that of every other number of replicas.
        constraints: what they had to satisfy.
    """
    fitted, *others = layouts
    num_cards = sum(node.num_cards for node, _ in fitted.spare_cards)
    return (
        f"chosen: --vtp-size-list {format_value(fitted.sizes)}, layers {format_value(fitted.layers)}, "
        f"{_replicas(fitted.num_replicas)}; uses {fitted.num_cards} of {num_cards} devices",
        *_whole_nodes(fitted, constraints),
        *_spares(fitted, constraints),
        *_rivals(fitted, others),
        *(text for text in [about_padding(fitted.sizes, constraints)] if text),
    )


def _replicas(number: int) -> str:
    return f"{number} replica{'s'[: number > 1]}"


def _whole_nodes(fitted: Candidate, constraints: Constraints) -> Iterator[str]:
    """Say why a node is no single stage."""
    nodes = [node for node, _ in fitted.spare_cards]
    for number in sorted({node.num_cards for node in nodes if node.num_cards}, reverse=True):
        names = [node.name for node in nodes if node.num_cards == number]
        who = f"{names[0]} has {number} devices" if len(names) == 1 else f"{len(names)} nodes have {number} devices"
        size, rest = divmod(number, constraints.cp)
        if rest:
            yield f"{who}, no multiple of --context-parallel-size {constraints.cp}; {rest} of them stay idle"
        elif problems := constraints.problems_of_size(size):
            why = problems[0].replace(f"stage 0 has TP {size}, which", f"TP {size}")
            yield f"{who}, but no stage can have tensor-parallel size {size}: {why}"


def _spares(fitted: Candidate, constraints: Constraints) -> Iterator[str]:
    """Say which devices are spare, and whether more stages would use them."""
    spare = {node.name: number for node, number in fitted.spare_cards if number}
    if not spare:
        return
    shown = ", ".join(f"{number} of {name}" for name, number in [*spare.items()][:4])
    if len(spare) > 4:
        shown += f" and {sum([*spare.values()][4:])} more"
    nodes, num_stages = [node for node, _ in fitted.spare_cards], len(fitted.sizes)
    for most in range(constraints.most_stages + 1, min(constraints.most_stages + 8, constraints.num_layers) + 1):
        wider = dataclasses.replace(constraints, most_stages=most, num_replicas=fitted.num_replicas)
        better = find_best(fit_problem(nodes, wider)).best
        if better and better[0].num_cards > fitted.num_cards:
            yield (
                f"spare devices: {shown}; --vtp-stages {constraints.least_stages}:{most} would use "
                f"{better[0].num_cards} devices, as --vtp-size-list {format_value(better[0].sizes)}"
            )
            return
    number = _replicas(fitted.num_replicas)
    yield f"spare devices: {shown}; no layout of {num_stages} or more stages with {number} uses them"


def _rivals(fitted: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """Compare with other numbers of replicas, the nearest ones."""
    for one in sorted(others, key=lambda one: (one.step_s, one.num_replicas))[:2]:
        yield (
            f"{_replicas(one.num_replicas)} of {format_value(one.sizes)}, layers {format_value(one.layers)}: "
            f"{one.num_cards} devices, a simulated step takes {one.step_s / fitted.step_s:.2f} times as long"
        )


def why_nothing(nodes: Sequence[Node], constraints: Constraints) -> LayoutError:
    """Say why no layout fits, and the nearest number of devices, or the nearest model, that would.

    Args:
        nodes: the nodes that are there.
        constraints: what a layout had to satisfy.

    Returns:
        The error; a :class:`~vtp_plugin.errors.ShortageError` where more devices would do.
    """
    num_cards = sum(node.num_cards for node in nodes)
    have = f"{'+'.join(str(node.num_cards) for node in nodes) or 0} devices"
    stages = f"--vtp-stages {constraints.least_stages}:{constraints.most_stages}"
    if constraints.num_layers < constraints.least_stages - (1 if constraints.ends else 0):
        return LayoutError(
            f"--num-layers {constraints.args.num_layers} with {stages}; every stage needs a layer; use "
            f"{constraints.least_stages + sum(constraints.ends or ())} layers or fewer stages"
        )
    if problems := constraints.problems_of_size(1):
        return LayoutError(problems[0])
    number = constraints.num_replicas or 1
    if constraints.problems_of_replicas(number):
        unit, batch = int(constraints.args.micro_batch_size) * number, int(constraints.args.global_batch_size)
        choices = " or ".join(map(str, nearest_multiples(batch, unit)))
        return LayoutError(
            f"--global-batch-size {batch}; {unit} ({_replicas(number)} times --micro-batch-size "
            f"{constraints.args.micro_batch_size}) must divide it and all batches; use {choices}"
        )
    least = constraints.cp * constraints.least_stages * number
    if num_cards < least or not any(node.num_cards >= constraints.cp for node in nodes):
        return ShortageError(
            f"{have}; {_replicas(number)} of at least {constraints.least_stages} stages ({stages}) "
            f"with context-parallel size {constraints.cp} need {least}; add "
            f"{max(least - num_cards, 1)}, or lower the first number of --vtp-stages"
        )
    added = _enough(nodes, constraints)
    more = f"add {added} on {nodes[-1].name}" if added else f"even {_MOST_ADDED} more would not be enough"
    what = "the model's memory" if constraints.held_bytes is not None else "the experts or the nodes"
    kind = ShortageError if added else LayoutError
    return kind(f"{have}; no layout within {stages} fits {what}; {more}, or allow more stages, or fewer replicas")


def _enough(nodes: Sequence[Node], constraints: Constraints) -> int:
    """Count the devices that the last node needs more; 0 if no number up to a limit is enough."""
    *others, last = nodes
    for added in range(1, _MOST_ADDED + 1):
        more = dataclasses.replace(last, num_cards=last.num_cards + added)
        if find_best(fit_problem([*others, more], constraints)).best:
            return added
    return 0
