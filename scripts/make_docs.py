"""Write the generated files of docs/, or with --check only say which of them are stale (exit code 1)."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Written by scripts/make_docs.py; change the source and run it again. -->"
COLUMNS = ("Id", "Target", "Why there", "Versions", "Remove when")

OPTIONS_INTRO = """\
# Megatron's options with stages of unequal size

Options that meet the stages' sizes: supported, with the test that shows it, or refused at start-up, with the reason and
the way out. `python -m vtp_plugin doctor` prints the same table. Options that are not listed are not known to depend on
the sizes.
"""
SITES_INTRO = """\
# Arguments that may differ

At start-up every rank states its arguments, and a run in which two differ ends before it begins. These are left out of
the statement (`vtp_plugin/options/sites.py`), and so are the plugin's own `--vtp-audit` and `--vtp-site`.
"""
PATCHES_INTRO = """\
# Patches

What `vtp_plugin.apply()` replaces in Megatron and torch, in the order of application. A set is applied whole or not at
all, and `vtp_plugin.revert()` puts the identical originals back. The patches of `megatron.core.x` are in
`patches/core/x.py`, those of `megatron.training.x` in `patches/training/x.py`. `python -m vtp_plugin doctor` tries all
of them on the installed versions. Versions are those of megatron-core where the target is Megatron's, else of torch.
"""


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
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
    """Return the text of every generated file by its name."""
    from vtp_plugin.boundary.draw import draw_pipeline
    from vtp_plugin.layout.pipeline import PipelineLayout
    from vtp_plugin.options import format_markdown

    return {
        "megatron-options.md": f"{OPTIONS_INTRO}\n{NOTE}\n\n{format_markdown()}\n",
        "site-arguments.md": f"{SITES_INTRO}\n{NOTE}\n{_sites()}",
        "patches.md": f"{PATCHES_INTRO}\n{NOTE}\n{_patches()}",
        "pipeline-1-4-4.svg": draw_pipeline(PipelineLayout.from_sizes((1, 4, 4), world_size=9)),
    }


def _sites() -> str:
    """Return the arguments that may differ, as flags, one section for each reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        from vtp_plugin.options import EDGE_ARGUMENTS, LOCAL_ARGUMENTS

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.dest: f"`{action.option_strings[0]}`" for action in parser._actions if action.option_strings}
    sections = {
        "Between any two ranks": LOCAL_ARGUMENTS,
        "Between the edge and the cloud of a U-shaped pipeline, as well": EDGE_ARGUMENTS,
    }
    return "".join(
        f"\n## {title}\n\n"
        + "".join(
            f"* {what}: {', '.join(flags.get(name, f'`{name}`') for name in names)}\n" for what, names in group.items()
        )
        for title, group in sections.items()
    )


def _patches() -> str:
    """Return one section for each moment at which records apply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about packages that it can do without
        from vtp_plugin.config import VtpConfig
        from vtp_plugin.patches import registry
        from vtp_plugin.platform.cpu import CpuPlatform
        from vtp_plugin.platform.cuda import CudaPlatform
        from vtp_plugin.session import Session

        def session(platform: CpuPlatform | CudaPlatform) -> Session:
            """Return a session on a platform that is not installed: records alone change nothing."""
            made = Session(VtpConfig(size_list=(1, 2)))
            made.platform = platform
            return made

        on_cpu, on_cuda = session(CpuPlatform("for the table")), session(CudaPlatform("for the table"))
        everywhere = registry.platform_records(on_cuda)
        ids = {record.id for record in everywhere}
        sections = {
            "Always: the command line, and a name that scripts import": registry.argument_records(on_cpu, lambda: None),
            "With a list of sizes, or on the CPU platform": everywhere,
            "On the CPU platform": [record for record in registry.platform_records(on_cpu) if record.id not in ids],
            "With a list of sizes": registry.training_records(on_cpu),
            "With `--layerwise-disaggregated-training`": registry.u_shape_records(on_cpu),
        }
    tables = (
        _table([(r.id, f"`{r.target}`", r.why, r.versions, r.remove_when) for r in rs]) for rs in sections.values()
    )
    return "".join(f"\n## {title}\n\n{table}\n" for title, table in zip(sections, tables, strict=True))


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
