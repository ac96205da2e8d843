"""All rows, and how a run is checked against them.

The table: which Megatron options work with stages of different sizes, which are refused, and why.

The rows of each subject are in a file of their own, ``rows_*.py``. What works changes no run and is data,
``supported.json``: why, what it is shown by, and before which row's option the document has it, or else at its end.
Here they are joined.

Each row was decided by reading Megatron (0.19.2), and a supported one by a test as well:

* An option that derives everything from this rank's groups is supported, and names the test that shows it.
* An option that no test here can run, because it needs CUDA or a package that is not installed, is supported only if it
  touches no group, or only groups inside a stage or of the whole world. Its evidence is ``not run: ...``.
* Everything else is refused: a refusal is better than a run that may hang, or be wrong without an error.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from vtp_plugin.host.rules.rule import (
    VERSION_RULES,
    OptionContext,
    OptionRule,
    Verdict,
    case,
    on,
    refused_planned,
    refused_unequal,
)
from vtp_plugin.host.rules.table.rows_adapters import ADAPTER_RULES
from vtp_plugin.host.rules.table.rows_architecture import ARCHITECTURE_RULES, MODEL_RULES, OLDER_RULES
from vtp_plugin.host.rules.table.rows_kernels import KERNEL_RULES, MINDSPEED_RULES
from vtp_plugin.host.rules.table.rows_parallelism import (
    DATA_PARALLEL_RULES,
    MOE_RULES,
    ORDER_RULES,
    PARALLELISM_RULES,
    SPLIT_CONFIG_RULES,
    SPLIT_RULES,
)
from vtp_plugin.host.rules.table.rows_training import CHECKPOINT_RULES, DATA_RULES, TRAINING_RULES
from vtp_plugin.host.versions.known_versions import between
from vtp_plugin.util.typed_json import read_json

RULES: tuple[OptionRule, ...] = (
    *PARALLELISM_RULES,
    *MODEL_RULES,
    *MOE_RULES,
    *ARCHITECTURE_RULES,
    *KERNEL_RULES,
    *DATA_PARALLEL_RULES,
    *TRAINING_RULES,
    *CHECKPOINT_RULES,
    *DATA_RULES,
    *ORDER_RULES,
    *SPLIT_RULES,
    *ADAPTER_RULES,
)
"""The table, by subject. Attributes name Megatron's parsed arguments. The first row that refuses an option counts."""

CONFIG_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "its gradients are summed over the pipeline group, which hangs between stages of different sizes",
        case("config.has_cond_embedder", on, "has_cond_embedder"),
        case("config.flextron", on, "flextron"),
        way_out="switch it off or give every stage the same size",
    ),
    *refused_planned(
        "only Megatron's schedules do this, the plugin's executor does not",
        "config.num_microbatches_with_partial_activation_checkpoints",
        "config.overlap_moe_expert_parallel_comm",
        "config.moe_paged_stash",
        "config.defer_embedding_wgrad_compute",
        "config.fine_grained_activation_offloading",
        "config.hybrid_context_parallel",
        "config.cuda_graph_impl local",
    ),
    *SPLIT_CONFIG_RULES,
)
"""Fields of the model's configuration: some have no flag, others are set by a script without a command line."""

STEP_RULES: tuple[OptionRule, ...] = refused_planned(
    "the plugin's executor uses the plugin's channels and shapes", "p2p_communicator", "adjust_tensor_shapes_fn"
)
"""Arguments of Megatron's function that runs a step."""


MEGATRON_RULES: tuple[OptionRule, ...] = (*RULES, *OLDER_RULES, *MINDSPEED_RULES)
"""Options of the command line: Megatron's, those of older ones, and MindSpeed's."""


def check_options(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the options that do not work with the stage sizes of a run.

    Args:
        args: Megatron's arguments as parsed, before ``validate_args``. An attribute that is missing counts as unused.
        context: The run.

    Returns:
        One line for every refused option, ``value; rule; way out``, in the order of the table. Empty if there is none,
        as always with a uniform list that leaves Megatron untouched.

    >>> from types import SimpleNamespace
    >>> print(*check_options(SimpleNamespace(use_sharp=True), OptionContext(tp_sizes=(1, 4))))
    --use-sharp with --vtp-size-list 1,4; the plugin's group builder does not set up SHARP; leave it out
    >>> check_options(SimpleNamespace(use_sharp=True), OptionContext(tp_sizes=(4, 4)))
    ()
    """
    return refusals(MEGATRON_RULES, args, context)


def option_warnings(args: object, context: OptionContext) -> tuple[str, ...]:
    """Find the options that work, but of which a user should know something before the run.

    Args:
        args: Megatron's arguments, or a model's configuration, whose fields have the same names.
        context: The run.

    Returns:
        One line for each reason, ``values; rule; way out``, in the order of the table.

    >>> from types import SimpleNamespace
    >>> (line,) = option_warnings(SimpleNamespace(hidden_dropout=0.1), OptionContext(tp_sizes=(1, 4)))
    >>> line.split("; ")[0]
    '--hidden-dropout 0.1 with --vtp-size-list 1,4'
    """
    found = [rule for rule in (*RULES, *OLDER_RULES) if rule.warns(args, context)]
    lines = []
    for _, group in itertools.groupby(found, key=lambda rule: rule.reason):
        *others, last = group
        lines.append(", ".join([*(rule.as_given(args) for rule in others), last.say(args, context)]))
    return tuple(lines)


def check_config(config: object, context: OptionContext) -> tuple[str, ...]:
    """Find what a script has switched on in the model's configuration and what does not work there.

    Args:
        config: Megatron's ``TransformerConfig``.
        context: The run.

    Returns:
        Lines as of :func:`check_options`.
    """
    return refusals(CONFIG_RULES, config, context)


def check_step(arguments: object, context: OptionContext) -> tuple[str, ...]:
    """Find arguments of a step that would have no effect.

    Args:
        arguments: What the script gives to Megatron's function that runs a step, as attributes.
        context: The run.

    Returns:
        Lines as of :func:`check_options`.
    """
    return refusals(STEP_RULES, arguments, context)


def refusals(rules: tuple[OptionRule, ...], args: object, context: OptionContext) -> tuple[str, ...]:
    """Return one line for every option that some rows refuse, from the first row that refuses it.

    Args:
        rules: Rows, in their order.
        args: What has their attributes.
        context: The run.
    """
    refused: dict[str, OptionRule] = {}
    for rule in rules:
        if rule.refuses(args, context):
            refused.setdefault(rule.option, rule)
    return tuple(rule.say(args, context) for rule in refused.values())


_COLUMNS = 100
_WORKS: Final = Path(__file__).with_name("supported.json")
_TABLES: Final[Mapping[str, tuple[OptionRule, ...]]] = {
    "megatron": (*RULES, *OLDER_RULES, *CONFIG_RULES, *STEP_RULES, *VERSION_RULES),
    "mindspeed": MINDSPEED_RULES,
}
_LEGEND = (
    "Where all stages have one TP size the plugin leaves Megatron as it is, and every option works as in Megatron. "
    'An option accepted "with a warning" is named when a run starts, with the reason. '
    'A run with an option that is "not supported" stops at start-up; that holds also for one TP size with '
    "`--vtp-force`."
)


@functools.cache
def documented(table: str = "megatron") -> tuple[OptionRule, ...]:
    """List the rows of Megatron's options, or MindSpeed's, as the documents do: what works before what does not.

    >>> {rule.verdict.value for rule in documented("mindspeed")} >= {"supported", "not supported"}
    True
    """
    works: dict[str, list[OptionRule]] = {}
    for row in read_json(_WORKS)[table]:
        same = {"reason": row["why"], "evidence": row["shown_by"], "versions": tuple(row.get("versions", ()))}
        rules = [replace(case(option), verdict=Verdict.SUPPORTED, **same) for option in row["options"]]
        works.setdefault(row.get("before", ""), []).extend(rules)
    rows = [each for rule in _TABLES[table] for each in (*works.pop(rule.option, ()), rule)]
    return (*rows, *works.pop("", ()))


def format_table() -> str:
    """Write the table for a terminal of 100 columns, with options of one verdict and reason together.

    Returns:
        Lines without a final newline, in the order of the table: a verdict, its options, the reason, and then the test
        that shows it or the way out.
    """
    blocks = [textwrap.fill(_LEGEND, _COLUMNS)]
    for (verdict, versions, reason, next_step), rules in itertools.groupby(
        documented(), key=lambda rule: (rule.verdict, _versions(rule), rule.reason, _next_step(rule))
    ):
        options = "\n".join(f"    {rule.option}" for rule in rules)
        title = f"{verdict} (Megatron: {versions})" if versions else verdict
        blocks.append(f"{title}:\n{options}\n{_indented(reason)}\n{_indented(next_step)}")
    return "\n\n".join(blocks)


def format_markdown(table: str = "megatron") -> str:
    """Write the rows of :func:`documented` for the documentation.

    Returns:
        A sentence and a Markdown table without a final newline, in the order of the rows.
    """
    rules = documented(table)
    titles = ("Option", "Verdict", "Megatron", "Why", "Shown by, or way out")
    cells = [(f"`{r.option}`", r.verdict.value, _versions(r) or "all", r.reason, _next_step(r)) for r in rules]
    if not any(rule.versions for rule in rules):
        titles, cells = (*titles[:2], *titles[3:]), [(*row[:2], *row[3:]) for row in cells]
    lines = [_LEGEND, "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]
    return "\n".join(lines)


def _versions(rule: OptionRule) -> str:
    """Show the versions that a row is about; of several ranges, which end with the newest, what lies between them."""
    if len(rule.versions) < 2:
        return "".join(rule.versions)
    return f"all but {' and '.join(between(rule.versions))}"


def _next_step(rule: OptionRule) -> str:
    if not rule.evidence:
        return f"way out: {rule.way_out}"
    return f"{rule.evidence}. Way out: {rule.way_out}" if rule.way_out else rule.evidence


def _indented(text: str) -> str:
    indent = " " * 8
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
