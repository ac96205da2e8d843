"""Train the presets of tests/multiproc/cases/presets.py on all their layouts, and write docs/guides/presets.md.

python scripts/make_presets.py                     all presets; about six minutes on two idle cores
python scripts/make_presets.py --only mixtral      one of them; the other rows stay
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.multiproc.cases.presets import (  # noqa: E402
    LAYOUTS,
    NUM_SAVED,
    NUM_STEPS,
    PRESETS,
    STOCK_ERROR,
    TRAINING,
    UNIFORM,
    Layout,
    check_refused,
    go_on,
    largest_difference,
    start,
)
from tests.support.pool import Pool  # noqa: E402

COMMAND = f"""
    torchrun --nproc-per-node 3 -m vtp_plugin run examples/pretrain_gpt.py --vtp-size-list 1,2
    {PRESETS["llama-3"].flags} {TRAINING} --lr 1e-3 --log-interval 1 --eval-interval 100 --eval-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 256 --hidden-dropout 0 --attention-dropout 0
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
"""


def _shown(command: str) -> str:
    """Show a command over several lines; no flag ends one whose value begins the next."""
    words = re.sub(r" (?!--)", "\0", " ".join(command.split()))
    first, *more = textwrap.wrap(words, 106, break_on_hyphens=False, break_long_words=False)
    return " \\\n        ".join((f"    {first}", *more)).replace("\0", " ") + "\n"


INTRO = f"""\
# Models of today, as presets

Flags with which small versions of public models train on unequal stages. Llama 3 on TP sizes 1 and 2:

{_shown(COMMAND)}
Each preset was trained through `megatron.training`, with flags alone, on four layouts. Each layout resumes from the
`torch_dist` checkpoint that a uniform run wrote after {NUM_SAVED} steps, optimizer included (`{UNIFORM.sizes}`,
{UNIFORM.dp} replicas). A number is the largest relative difference from the uniform run, over the losses and gradient
norms of the next {NUM_STEPS} steps, in fp32 on CPUs. `tests/multiproc/training/test_presets.py` allows 1e-5.
"Not supported" stands where the model's heads are not divisible by the sizes, with the flag that the error names.

"""
BEHIND = f"""
Latent attention, which the DeepSeek presets have, does not run on a CPU in stock Megatron
(`test_latent_attention_needs_an_attention_of_the_tests`):

```text
{STOCK_ERROR}
```

So these presets use the attention of `tests/multiproc/hooks/gathered_attention.py`. A layer that predicts several
tokens divides the hidden size, so the hidden size of DeepSeek V3 is a multiple of 3.

Written by this command, which takes about six minutes on two idle cores:

    python scripts/make_presets.py

The same models in their real sizes, with launch lines: [recipes](../../examples/README.md#recipes).
"""


def measure(pool: Pool, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Train presets on every layout; yield what stands in their rows, by layout.

    Args:
        pool: of workers for scripts.
        names: of the presets.
    """
    for name in names:
        preset = PRESETS[name]
        cells: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            reference = start(pool, preset, Path(folder))
            for title, layout in LAYOUTS.items():
                if title in preset.not_run:
                    check_refused(pool, preset, layout, preset.not_run[title])
                    cells[title] = f"not supported: `{preset.not_run[title]}`"
                else:
                    runs = go_on(pool, preset, layout, Path(folder))
                    cells[title] = f"{largest_difference(runs, reference):.1e}"
                print(name, title, cells[title], flush=True)
        yield name, cells


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Write the page.

    Args:
        rows: by preset, what stands below every layout.
    """
    lines = ["| preset | small version of | " + " | ".join(LAYOUTS) + " |", "|---" * (2 + len(LAYOUTS)) + "|"]
    for name, cells in rows.items():
        lines.append(f"| `{name}` | {PRESETS[name].model} | " + " | ".join(cells[title] for title in LAYOUTS) + " |")
    parts = [INTRO + "\n".join(lines), BEHIND, "## Layouts\n", *map(_layout_line, LAYOUTS.items())]
    parts += ["\n## Flags of all presets\n", _fence(TRAINING), "\n## Flags of each preset\n"]
    parts += [f"`{name}`:\n\n{_fence(preset.flags)}\n" for name, preset in PRESETS.items()]
    return "\n".join(parts).rstrip() + "\n"


def _layout_line(item: tuple[str, Layout]) -> str:
    title, layout = item
    words = ["--vtp-size-list", layout.sizes, *layout.flags]
    text = f"* **{title}**: `{' '.join(words)}`"
    text += f", {layout.dp} replicas" if layout.dp > 1 else ""
    return text + f"; with experts `--sequence-parallel {' '.join(layout.expert_flags)}`"


def _fence(words: str) -> str:
    wrapped = textwrap.wrap(" ".join(words.split()), 116, break_on_hyphens=False)
    return "\n".join(["```text", *wrapped, "```"])


def known_rows(text: str) -> dict[str, dict[str, str]]:
    """Read the rows of a page as :func:`page` wrote them."""
    rows = re.findall(r"^\| `([\w.-]+)` \| [^|]+ \| (.*) \|$", text, re.MULTILINE)
    return {name: dict(zip(LAYOUTS, cells.split(" | "), strict=True)) for name, cells in rows}


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PRESETS, nargs="+", help="presets to train")
    names = parser.parse_args().only
    path = ROOT / "docs/guides/presets.md"
    rows = known_rows(path.read_text()) if names else {}
    with Pool(max_workers=8) as pool:
        rows |= dict(measure(pool, names or PRESETS))
    path.write_text(page({name: rows[name] for name in PRESETS}))


if __name__ == "__main__":
    main()
