"""The option table as text for a terminal and as Markdown for the documentation."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from vtp_plugin.host.rules.table.rows import CONFIG_RULES, RULES, STEP_RULES
from vtp_plugin.host.rules.table.rows_before_0_19 import OLDER_RULES
from vtp_plugin.host.rules.table.rule import OptionRule
from vtp_plugin.host.rules.table.versions import VERSION_RULES
from vtp_plugin.host.versions.ranges import between

_COLUMNS = 100
_ROWS = (*RULES, *OLDER_RULES, *CONFIG_RULES, *STEP_RULES, *VERSION_RULES)
_LEGEND = (
    "Where all stages have one TP size the plugin leaves Megatron as it is, and every option works as in Megatron. "
    'An option accepted "with a warning" is named when a run starts, with the reason. '
    'A run with an option that is "not supported" stops at start-up; that holds also for one TP size with '
    "`--vtp-force`."
)


def format_table() -> str:
    """Write the table for a terminal of 100 columns, with options of one verdict and reason together.

    Returns:
        Lines without a final newline, in the order of the table: a verdict, its options, the reason, and then the test
        that shows it or the way out.
    """
    blocks = [textwrap.fill(_LEGEND, _COLUMNS)]
    for (verdict, versions, reason, next_step), rules in itertools.groupby(
        _ROWS, key=lambda rule: (rule.verdict, _versions(rule), rule.reason, _next_step(rule))
    ):
        options = "\n".join(f"    {rule.option}" for rule in rules)
        title = f"{verdict} (Megatron: {versions})" if versions else verdict
        blocks.append(f"{title}:\n{options}\n{_indented(reason)}\n{_indented(next_step)}")
    return "\n\n".join(blocks)


def format_markdown(rules: Sequence[OptionRule] = _ROWS) -> str:
    """Write rows for the documentation.

    Returns:
        A sentence and a Markdown table without a final newline, in the order of the rows.
    """
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
