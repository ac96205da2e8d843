"""Write the generated files of docs/, or with --check only say which of them are stale (exit code 1)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtp_plugin.config.flag import Flag
    from vtp_plugin.host.patching import Record
    from vtp_plugin.host.versions import Capability, MegatronFamily

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Written by scripts/make_docs.py; change the source and run it again. -->"
COLUMNS = ("Id", "Target", "Why there", "Versions", "Remove when", "Was")

OPTIONS_INTRO = """\
# Megatron's options with stages of unequal size

Options that depend on the stages' sizes: supported, with the test that shows it, or not supported, with the reason and
the way out. A run with one that is not supported stops at start-up. `vtp doctor --verbose` prints the
same table. [every-option.md](every-option.md) has a verdict for all others.
"""
ASCEND_INTRO = """\
# MindSpeed's options with stages of unequal size

What MindSpeed and MindSpeed-LLM add to [Megatron's options](megatron-options.md): supported, or not supported, with the
reason and the way out. Options that are not listed stay inside a rank or a stage, as far as their code says.
"""
SITES_INTRO = """\
# Arguments that may differ

At start-up every rank states its arguments, and a run in which two differ ends before it begins. These are not compared
(`vtp_plugin/host/rules/checks/batch.py`), and neither are these of the plugin's own (`vtp_plugin/config`):
"""
VERSIONS_INTRO = """\
# Supported Megatron versions

What was run with which family of versions, on CPUs and over gloo (`vtp_plugin/host/versions/known_versions.py`). 0.15
belongs to 0.16. With 0.19 it was torch 2.14.1, before that 2.15, with 0.18 and 0.17 torch 2.15 (CUDA builds without a
driver), with 0.16 torch 2.6, with 0.12 torch 2.7.1. `apply()` warns of what was not run. What is not supported stops
the run at start-up, with the way out.
"""
PATCHES_INTRO = """\
# Patches

What `vtp_plugin.apply()` replaces in Megatron and torch, in the order of application. A set is applied whole or not at
all, and `vtp_plugin.revert()` puts the identical originals back. The patches of `megatron.core.x` are in
`patches/core/x.py`, those of `megatron.training.x` in `patches/training/x.py`. `vtp doctor` tries all
of them on the installed versions. Versions are those of megatron-core. *Was*: the id that logs of older runs show.

A *write* is a name, or a dictionary, that patches assign to during a run. It must exist when the set is applied,
`vtp_plugin.status()` says whether it is written, and `revert()` puts back what was there; Megatron's
`destroy_model_parallel()` does so for those with `parallel-state`. Nothing else in Megatron or torch is written to
(`tests/house/test_writes.py`), except `torch.cuda` on the CPU platform: `vtp_plugin/platform/cpu.py` maps it onto the
CPU, and `revert()` undoes that too.
"""


FLAGS_INTRO = """\
# Flags

The plugin's flags stand among Megatron's. `vtp run --help-all` prints them too. `vtp run --brief` alone stands before
the script: a quiet run ([logging.md](../guides/logging.md)). A script without a command line gives the others as
keywords of `vtp_plugin.apply()`. A *stage* is a pipeline stage, a *replica* a copy of a
stage that works on other samples, a *microbatch* the share of a batch that goes through the pipeline at a time. U: the
U-shaped pipeline of [u-shape.md](../guides/u-shape.md).
"""
COSTS_INTRO = """\
Words of the form `name=number` or `name=number,number,...`, such as
`--vtp-costs forward_ms=40,80,40 latency_ms=20`. A run that measured its costs prints them in this form.
"""
QUERIES = """\
## In code

During a run, `vtp_plugin` answers:

| function | answer |
| --- | --- |
| `is_vtp_enabled()` | whether the plugin's groups and channels are in use |
| `get_vtp_size_list()` | TP size of every stage |
| `get_vtp_stage_ranks()` | global ranks of every stage, in this rank's replica |
| `get_vtp_my_stage_idx()` | index of this rank's stage |
| `is_vtp_stage_rank0()` | whether this rank is its stage's leader |
| `get_vtp_intra_stage_group()` | the tensor-parallel group of this rank's stage |
| `status()` | what every patch replaced |

`revert()` takes `apply()` back: every replaced object of Megatron and torch is the original again.

In a U of two sites a script without `megatron.training` builds its model inside `drawing_edge_weights()`, so that
the edge's layers are drawn from [the edge's key](../guides/edge-cloud.md#the-edges-key). In other runs it does nothing.
"""


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
    sys.path.insert(0, str(DOCS.parent))  # for the rules in tests/
    texts = render()
    if options.check:
        names = stale(texts, DOCS)
        for name in names:
            print(f"docs/{name} is stale; run: python scripts/make_docs.py", file=sys.stderr)
        return 1 if names else 0
    DOCS.mkdir(exist_ok=True)
    for name, text in texts.items():
        (DOCS / name).write_text(text, encoding="ascii")
    return 0


def stale(texts: Mapping[str, str], folder: Path) -> list[str]:
    """Return the names of the files that are missing or hold another text."""
    paths = {name: folder / name for name in texts}
    return [name for name, path in paths.items() if not path.is_file() or path.read_bytes() != texts[name].encode()]


def render() -> dict[str, str]:
    """Return the text of every file that is generated, or has generated parts, by its name."""
    from vtp_plugin.host.rules.table.rows import format_markdown

    return {
        "reference/flags.md": f"{FLAGS_INTRO}\n{NOTE}\n{_flags()}",
        "reference/megatron-options.md": f"{OPTIONS_INTRO}\n{NOTE}\n\n{format_markdown()}\n",
        "reference/every-option.md": f"{NOTE}\n\n{_every_option()}",
        "reference/ascend-options.md": f"{ASCEND_INTRO}\n{NOTE}\n\n{format_markdown('mindspeed')}\n",
        "reference/site-arguments.md": f"{SITES_INTRO}\n{NOTE}\n{_sites()}",
        "how/patches.md": f"{PATCHES_INTRO}\n{NOTE}\n{_patches()}",
        "reference/versions.md": f"{VERSIONS_INTRO}\n{NOTE}\n\n{_hosts()}\n",
        "how/architecture.md": _filled("how/architecture.md", {"layers": _layers()}),
        "guides/core-only.md": _filled("guides/core-only.md", {"examples/core_only.py": _core_only()}),
        "guides/edge-cloud.md": _filled("guides/edge-cloud.md", _crossing()),
        "reference/hugging-face-fields.md": _filled("reference/hugging-face-fields.md", {"fields": _fields()}),
        "reference/kept-activations.md": _filled(
            "reference/kept-activations.md", {"rows": _kept(), "waiting": _kept(is_waiting=True)}
        ),
        "how/transports.md": _filled("how/transports.md", {"sliced over rank0": _sliced_over_rank0()}),
        **_pictures(),
    }


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a file of docs/ with new text between the markers of each part."""
    return fill((DOCS / name).read_text(encoding="ascii"), parts)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Put new text between markers.

    >>> fill("a\\n<!-- generated: x -->\\nold\\n<!-- end -->\\nb", {"x": "new"})
    'a\\n<!-- generated: x -->\\n\\nnew\\n\\n<!-- end -->\\nb'

    Raises:
        ValueError: a part has no markers.
    """
    for part, content in parts.items():
        begin, end = f"<!-- generated: {part} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, is_closed, after = rest.partition(end)
        if not (found and is_closed):
            raise ValueError(f"no markers {begin.strip()} and {end} for the generated part {part!r}")
        text = f"{before}{begin}\n{content}\n\n{end}{after}"
    return text


def _layers() -> str:
    """Return the layers of the import rules, the highest first; packages of a package in braces, the highest first."""
    from tests.rules.import_rules import INNER_LAYERS, LAYERS, PURE_PARTS

    def show(name: str, package: str = "") -> str:
        whole = f"{package}.{name}" if package else name
        folder = DOCS.parent.joinpath("vtp_plugin", *whole.split("."))
        packages = [[one for one in sorted(layer) if (folder / one).is_dir()] for layer in INNER_LAYERS.get(whole, ())]
        inside = " > ".join(", ".join(show(one, whole) for one in layer) for layer in reversed(packages) if layer)
        return f"{name}{'*' if whole in PURE_PARTS else ''}" + (f" {{{inside}}}" if inside else "")

    lines = ["   ".join(map(show, sorted(layer))) for layer in reversed(LAYERS)]
    return "\n".join(["```text", *lines, "```"])


def _hosts() -> str:
    """Return what was run with which family of Megatron versions, the newest family first."""
    from vtp_plugin.host.versions import HOSTS
    from vtp_plugin.host.versions.known_versions import CAPABILITIES

    newest_first = HOSTS[::-1]
    rows = [(row.what, *(_ran(row, host) for host in newest_first), f"`{row.shown_by}`") for row in CAPABILITIES]
    return _table(("", *(f"**{host.name}**" for host in newest_first), "shown by"), rows)


def _ran(row: Capability, host: MegatronFamily) -> str:
    """Say whether a family ran something, and what else there is to say of it."""
    from vtp_plugin.host.versions.known_versions import is_run_with, lacking

    if not is_run_with(row, host):
        return row.said_of(host.first)
    parts = ("run", *(f"not with {version}" for version in lacking(row, host)), row.note(host.first))
    return "; ".join(part for part in parts if part)


def _value(flag: Flag) -> str:
    """Show the value of a flag: in brackets where it may be left out."""
    if flag.metavar is None:
        return ""
    return f" [{flag.metavar}]" if flag.nargs == "?" else f" {flag.metavar}"


def _flags() -> str:
    """Return a table of flags for each of their groups, and one of the keys of ``--vtp-costs``."""
    from vtp_plugin.config.flag import FlagGroup
    from vtp_plugin.config.resolve import VTP_FLAGS
    from vtp_plugin.plan.schedule.cost.costs import COST_KEYS

    texts = []
    for group in FlagGroup:
        rows = [
            (
                f"`{flag.name}{_value(flag)}`",
                "-" if flag.keyword is None else f"`{flag.keyword}`",
                flag.help.partition(" Keys:\n")[0],
            )
            for flag in VTP_FLAGS
            if flag.group is group
        ]
        title = group.value.removeprefix("vtp_plugin: ").capitalize()
        texts.append(f"\n## {title}\n\n{_table(('Flag', 'Keyword of `apply()`', 'What it does'), rows)}\n")
    keys = [(f"`{name}`", key.unit, key.meaning) for name, key in COST_KEYS.items()]
    texts.append(
        f"\n## Keys of `--vtp-costs`\n\n{COSTS_INTRO}\n{_table(('Key', 'Unit', 'Meaning'), keys)}\n\n{QUERIES}"
    )
    return "".join(texts)


def _core_only() -> str:
    code = (DOCS.parent / "examples" / "core_only.py").read_text(encoding="ascii")
    return f"```python\n{code}```"


def _crossing() -> dict[str, str]:
    """Return the closed lists of what crosses between sites."""
    from vtp_plugin.plan.boundary.message_kind import MessageKind
    from vtp_plugin.runtime.health.redaction import SHARED_NAMES
    from vtp_plugin.runtime.health.store import Topic
    from vtp_plugin.util.text import said_of_attributes

    return {
        "what crosses": _table(
            ("kind", "form"),
            [(MessageKind[name].value, text) for name, text in said_of_attributes(MessageKind).items()],
        ),
        "what the store holds": _table(
            ("key", "content"), [(f"`{Topic[name].key}`", text) for name, text in said_of_attributes(Topic).items()]
        ),
        "what is compared by value": ", ".join(sorted(SHARED_NAMES)) + ".",
    }


def _sliced_over_rank0() -> str:
    """Return a table of the ratios of two medians in docs/evidence/boundary.json."""
    records = json.loads((DOCS / "evidence/boundary.json").read_text())["boundaries"]
    medians_s = {
        (r["network"], tuple(r["sizes"]), r["name"], r["num_bytes"]): statistics.median(r["times_s"]) for r in records
    }

    def ratio(network: str, sizes: tuple[int, int], name: str, mib: int) -> str:
        return f"{medians_s[network, sizes, name, mib << 20] / medians_s[network, sizes, 'rank0', mib << 20]:.2f}"

    sliced, sharded = "sliced", "sliced, sharded receiver"
    notes = {sliced: "", "divided": ", divided", sharded: ", sliced with sequence parallelism"}
    lines = [(sizes, sliced) for sizes in ((1, 4), (4, 1), (2, 3), (2, 4))] + [((4, 4), name) for name in notes]
    columns = [("limited", 1), ("limited", 16), ("loopback", 1), ("loopback", 16)]
    rows = [
        (
            f"{sizes[0]} -> {sizes[1]}{notes[name]}",
            *(ratio(network, sizes, name, mib) for network, mib in columns),
        )
        for sizes, name in lines
    ]
    titles = {"limited": "links of 200 Mbit/s", "loopback": "loopback, no limit"}
    heads = [f"{titles[network]}, {mib} MiB" for network, mib in columns]
    return _table(("sizes", *heads), rows)


def _pictures() -> dict[str, str]:
    """Return the pictures that need no measurement."""
    from scripts.draw_architecture import draw_architecture
    from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
    from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
    from vtp_plugin.plan.schedule.cost.costs import in_flight_needed, u_costs, uniform_costs
    from vtp_plugin.plan.schedule.cost.simulator import simulate
    from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
    from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape
    from vtp_plugin.plan.schedule.order.placement import plain_placement, u_placement
    from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
    from vtp_plugin.report.pictures.draw_simulated_step import draw_svg

    unequal = PipelineLayout.from_sizes((2, 3), world_size=5)
    costs = u_costs(3, cloud=2.0, latency=1.0)
    limit = in_flight_needed(u_placement(3), costs) + 2
    step = simulate(plan_u_shape(3, 8, costs, limits=(limit,) * 3).schedule, costs)
    title = "One step of a U-shaped pipeline: 8 microbatches, latency 1 between edge and cloud"
    equal = ScheduleRequest(placement=plain_placement(4), num_microbatches=8)
    without, split = (
        simulate(make_schedule(replace(equal, split_backward=is_split))[0], uniform_costs(equal.placement))
        for is_split in (False, True)
    )
    return {
        "pictures/architecture.svg": draw_architecture(),
        "pictures/pipeline-1-4-4.svg": draw_pipeline(PipelineLayout.from_sizes((1, 4, 4), world_size=9)),
        "pictures/transport-rank0.svg": draw_pipeline(unequal, rules=TransportRules(transport="rank0")),
        "pictures/transport-sliced.svg": draw_pipeline(unequal, rules=TransportRules(transport="sliced")),
        "pictures/split-backward.svg": draw_svg(split, title="Split backwards: gradients of weights fill the waits"),
        "pictures/split-backward-without.svg": draw_svg(without, title="1F1B without the split"),
        "pictures/u-shape-timeline.svg": draw_svg(step, title=title),
    }


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the Megatron that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _every_option() -> str:
    """Return the verdicts on all options of Megatron."""
    from tests.options.page import render
    from tests.options.parsers import options_of
    from vtp_plugin.host.versions import find_host

    return render(options_of(_parser()), find_host()[0].name)


def _sites() -> str:
    """Return the arguments that may differ, as flags, one section for each reason."""
    from vtp_plugin.config.resolve import VTP_FLAGS
    from vtp_plugin.host.rules.checks.batch import EDGE_ARGUMENTS, LOCAL_ARGUMENTS

    flags = {action.dest: f"`{action.option_strings[0]}`" for action in _parser()._actions if action.option_strings}
    sections = {
        "Between any two ranks": LOCAL_ARGUMENTS,
        "Between the edge and the cloud of a U-shaped pipeline, as well": EDGE_ARGUMENTS,
    }
    local = {flag.name: flag.compared.reason for flag in VTP_FLAGS if flag.compared and flag.compared.name is None}
    own = {**local, "--vtp-site": "it says where a machine is"}
    return (
        "\n"
        + "".join(f"* `{name}`: {reason}\n" for name, reason in own.items())
        + "".join(
            f"\n## {title}\n\n"
            + "".join(
                f"* {what}: {', '.join(flags.get(name, f'`{name}`') for name in names)}\n"
                for what, names in group.items()
            )
            for title, group in sections.items()
        )
    )


def record_sections() -> dict[str, Sequence[Record]]:
    """Return all records, by the moment at which they apply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about packages that it can do without
        from vtp_plugin.host.versions import HOSTS, capability
        from vtp_plugin.patches.hosts import load_host
        from vtp_plugin.patches.patch_set import Moment
        from vtp_plugin.patches.registry import declared_at

        # The family that the records are written for, and those before it.
        last = max(index for index, host in enumerate(HOSTS) if capability("named_aliases").has(host.first))
        *older_families, newest = HOSTS[: last + 1]
        host = load_host(newest.name)
        sections = {str(moment): host.placed(declared_at(moment, host)) for moment in Moment}
        known = {_identity(record) for records in sections.values() for record in records}
        for family in reversed(older_families):
            older = load_host(family.name)
            moments = [moment for moment in Moment if moment not in (Moment.CPU, Moment.BRIDGES)]
            records = older.placed(record for moment in moments for record in declared_at(moment, older))
            sections[f"Besides, with Megatron {family.name}"] = tuple(
                record for record in records if _identity(record) not in known
            )
        return sections


def former_ids() -> dict[str, str]:
    """Return the ids that records had before they said what they are, by their ids now."""
    from vtp_plugin.util.typed_json import read_toml

    moves = read_toml(DOCS.parent / "scripts" / "moves.toml")
    return {new: old for old, new in moves["records"].items()}


def _identity(record: Record) -> tuple[str, ...]:
    """Tell records apart, also those of one id that a family has written for itself."""
    return (record.id, *(record.targets.values() or (record.target,)))


def _fields() -> str:
    """Return what becomes of every field of a published config, and in which families."""
    from vtp_plugin.checkpoint.hf.all_families import FAMILIES
    from vtp_plugin.checkpoint.hf.read_config import known_fields

    found: dict[tuple[str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        for field, meaning in known_fields(family).items():
            found.setdefault((field, meaning), []).append(f"`{name}`")
    alike: dict[tuple[str, str], list[str]] = {}
    for (field, meaning), names in sorted(found.items()):
        families = "all" if len(names) == len(FAMILIES) else ", ".join(names)
        alike.setdefault((meaning, families), []).append(f"`{field}`")
    rows = [(", ".join(fields), meaning, families) for (meaning, families), fields in alike.items()]
    return _table(("fields", "what becomes of them", "families"), rows)


def _kept(*, is_waiting: bool = False) -> str:
    """Return what modules keep, in a model that has each of them; or what waits for the gradients of weights."""
    from vtp_plugin.cli.boundaries import format_bytes
    from vtp_plugin.plan.memory.activation_rows import ROWS, WAITING, KeptRow, Microbatch, Recompute, Routing, Sizes
    from vtp_plugin.plan.model.gpt_model import Experts, GPTModel, Latent
    from vtp_plugin.plan.model.lora import Lora

    model = GPTModel(
        num_layers=2, num_predicting=1, hidden=4096, heads=32, groups=8, kv_channels=128, ffn=14336, vocab=128256,
        num_positions=0, is_gated=True, has_bias=False, has_qkv_bias=False, has_norm_bias=False, has_query_norm=True,
        is_tied=False, experts=Experts(number=8, ffn=14336, shared_ffn=14336, layers=(False, True)),
    )  # fmt: skip
    batch = Microbatch(
        length=4096, size=1, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True, has_hidden_dropout=True,
        has_attention_dropout=True, routing=Routing(topk=2),
    )  # fmt: skip
    latent = Latent(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    again = replace(batch, recompute=Recompute(core_attention=True))
    lora = Lora(rank=16, alpha=32, targets=("q_proj", "v_proj"), dropout=0.05)

    def kept(row: KeptRow, batch: Microbatch) -> str:
        dense = Sizes(model=model, batch=batch, tp=2)
        kinds = (dense, replace(dense, has_experts=True), replace(dense, num_again=1, num_layers=1))
        kinds += (Sizes(model=replace(model, latent=latent), batch=batch, tp=2),)
        if not batch.is_engine:  # adapters are not supported on its layers
            kinds += (replace(dense, lora=lora, has_adapters=True),)
        found = next((size for size in map(row.size_bytes, kinds) if size), 0)
        return format_bytes(found) if found else "-"

    def cells(row: KeptRow) -> tuple[str, str]:
        for one in (batch, again):
            local = kept(row, one)
            engine = kept(row, replace(one, is_engine=True, has_fused_rope=True))
            if (local, engine) != ("-", "-"):
                return local, engine
        raise ValueError(f"no example has {row.module}: {row.kept}")

    # Backwards of Transformer Engine's layers are not split.
    engines = ("local",) if is_waiting else ("local", "Transformer Engine")
    found = (row for place in (WAITING if is_waiting else ROWS).values() for row in place)
    rows = [(f"`{row.module}`", row.kept, *cells(row)[: len(engines)], row.source) for row in found]
    return _table(("module", "what it keeps", *engines, "source"), rows)


def _patches() -> str:
    """Return one section for each moment at which records apply."""
    sections, former = record_sections(), former_ids()

    def cells(record: Record) -> tuple[str, ...]:
        last = (_versions(record), record.remove_when, former.get(record.id, "-"))
        return (f"`{record.id}`", _target(record), record.why, *last)

    tables = (_table(COLUMNS, [*map(cells, records)]) for records in sections.values())
    return "".join(f"\n## {title}\n\n{table}\n" for title, table in zip(sections, tables, strict=True))


def _versions(record: Record) -> str:
    """Return the versions that a record is made for: all that the plugin runs with, where it says nothing else."""
    from vtp_plugin.host.versions import SUPPORTED

    return "all" if record.versions == SUPPORTED else record.versions


def _target(record: Record) -> str:
    """Return where a record lies, and which versions do not need it."""
    from vtp_plugin.host.patching import PatchRecord, Replacement

    mark = "" if isinstance(record, Replacement | PatchRecord) else " (write)"
    lines = [f"{versions}: `{target}`" for versions, target in record.targets.items()] or [f"`{record.target}`{mark}"]
    lines += [f"{versions}: none, {why}" for versions, why in record.unneeded.items()]
    return "<br>".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
