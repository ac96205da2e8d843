"""The page on every option, ``docs/reference/every-option.md``, which ``scripts/make_docs.py`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tests.options.grid import RAN
from tests.options.judged import GRID, MEANINGS, READ, Entry, Group, Judgement, groups, rows, rows_of
from tests.options.parsers import LISTED, Option, by_name, listed

INTRO = """\
# Every option of Megatron

Does a number of the training depend on the sizes of the stages? For every option of Megatron {versions} that a
training script can reach, this page says on which sizes, why, and what the verdict rests on.

* TP, CP, EP and PP are the numbers of ranks that share a layer, a sequence, the experts, and the pipeline.
* *read*: Megatron's source was read, of what several versions have that of the newest. *run*:
  `tests/multiproc/options/test_options_grid.py` gives each value by itself to NVIDIA's script (or, with Megatron 0.19,
  `examples/pretrain_gpt.py`), and compares the gradients of every weight on one rank and on stages `1,2`, losses and
  norms of four steps, and both with one rank without the option. Other verdicts name their test.
* Versions stand behind an option that not all have.

{ran}
A new option of Megatron, or a new value of one, fails `tests/unit/host/test_options_judged.py` until somebody has
judged it.

| verdict | meaning | options |
|---|---|---|
"""
TABLE = """
## In the plugin's table

[megatron-options.md](megatron-options.md) has the reason for each of these, and the test or the way out.

| Verdict | Depends on | Options |
|---|---|---|
"""


def render(installed: Sequence[Option], family: str) -> str:
    """Write the page.

    Args:
        installed: options of the Megatron that is here.
        family: its family of versions.
    """
    known = {**{name: by_name(listed(name)) for name in LISTED}, family: by_name(installed)}
    every = {name for options in known.values() for name in options}
    own = _own()
    counts: dict[Judgement, int] = {}
    for group in own:
        counts[group.judgement] = counts.get(group.judgement, 0) + len(group.entries)
    text = INTRO.format(versions=" and ".join((", ".join(LISTED), family)), ran=_ran())
    text += "".join(f"| {kind} | {MEANINGS[kind]} | {number} |\n" for kind, number in counts.items())
    text += TABLE + "".join(f"| {' | '.join(cells)} |\n" for cells in _of_the_table(known, every))
    for subject in dict.fromkeys(group.subject for group in own):
        text += f"\n## {subject}\n\n| Options | Verdict | Depends on | Why | Rests on |\n|---|---|---|---|---|\n"
        for members in _alike(group for group in own if group.subject == subject):
            group, entries = members[0], [entry for member in members for entry in member.entries]
            options = ", ".join(
                _show(str(entry) if _has_choices(entry, known) else entry.option, known) for entry in entries
            )
            evidence = {READ: "read", GRID: "run"}.get(group.evidence, group.evidence)
            text += f"| {options} | {group.judgement} | {_sizes(group)} | {group.why} | {evidence} |\n"
    return text


def _own() -> list[Group]:
    """Give the groups that the page shows, without what the plugin's table says as well."""
    found = []
    for group in groups():
        entries = [left for entry in group.entries if (left := _without_rows(entry))]
        found += [replace(group, entries=tuple(entries))] if entries and group.judgement is not Judgement.TABLE else []
    return found


def _without_rows(entry: Entry) -> Entry | None:
    """Leave out values that have rows, or all of an option that has one."""
    if rows_of(entry.option):
        return None
    words = tuple(word for word in entry.words if not rows_of(entry.option, word))
    return None if entry.words and not words else replace(entry, words=words)


def _ran() -> str:
    """Say what the last whole grids gave: gradients that are the same, without those in bf16."""
    found: dict[str, list[list[str]]] = {}
    for line in RAN.read_text().splitlines():
        name, _, said = line.rpartition(": ")
        found.setdefault(said.split()[0], []).append([name, *said.split()[1:]])
    lines = []
    for version, ran in sorted(found.items()):
        figures = [float(said[2]) for said in ran if said[1] == "same" and " in half" not in said[0]]
        lines.append(
            f"* Megatron {version}: {len(ran)} values were run. Where gradients are to be the same, they differ by "
        )
        lines[-1] += f"{max(figures):.0e} of the largest element of their weight at most (bf16 apart)."
    return "\n".join(lines) + "\n"


def _alike(found: Iterator[Group]) -> Iterator[list[Group]]:
    """Join groups that a reader cannot tell apart: the grid gives them other models, or other flags besides."""
    joined: dict[tuple[object, ...], list[Group]] = {}
    for group in found:
        joined.setdefault((group.judgement, group.why, group.depends, group.evidence), []).append(group)
    yield from joined.values()


def _sizes(group: Group) -> str:
    return ", ".join(group.depends) or "-"


def _has_choices(entry: Entry, known: Mapping[str, Mapping[str, Option]]) -> bool:
    return any(entry.option in options and options[entry.option].choices for options in known.values())


def _show(text: str, known: Mapping[str, Mapping[str, Option]]) -> str:
    """Write an option, and the versions that have it where others have not."""
    name = text.partition(" ")[0]
    have = [family for family, options in sorted(known.items()) if name in options]
    return f"`{text}`" + ("" if len(have) == len(known) else f" ({', '.join(have)})")


def _of_the_table(known: Mapping[str, Mapping[str, Option]], every: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield verdicts of the plugin's rows, on which sizes a number depends, and their options."""
    found: dict[str, list[str]] = {}
    for (option, value), rules in rows().items():
        if option in every:
            for rule in rules:
                found.setdefault(str(rule.verdict), []).append(_show(f"{option} {value}".strip(), known))
    for verdict, options in found.items():
        sizes = (
            "-"
            if verdict == "supported"
            else "nothing is computed"
            if verdict.startswith("not supported")
            else "see there"
        )
        yield verdict, sizes, ", ".join(dict.fromkeys(options))
