"""When unequal sizes win: the best layout beside the best one of stock Megatron, as predicted, over a grid of clusters.

    python -m benchmarks.when --out docs/evidence/when.json --picture docs/evidence/when.svg

Two nodes of new GPUs and two of old ones, the old ones up to eight times slower, with up to eight times less memory;
nodes of 8, 6 or 4 GPUs and mixed ones; fast links, slow ones, and two sites; a model whose layers and heads divide
well, and one whose do not. Each cluster is asked with ``search`` for its best layout, which is compared with the best
one that stock Megatron can run by itself: one size, any layers. Nothing is measured here; ``benchmarks/reality.py``
trains clusters that were chosen from this grid. What stands in the file is not asked again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import svg
from vtp_plugin.cli import search
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.search_request import SearchRequest, read_request
from vtp_plugin.tune.cluster.read_cluster import parse_cluster
from vtp_plugin.tune.search.find_best import find_best

SLOWER, SMALLER = (1, 2, 4, 8), (1, 8)
# Cards of the two new nodes, and of the two old ones.
NODES = {
    "8": ((8, 8), (8, 8)),
    "6": ((6, 6), (6, 6)),
    "4": ((4, 4), (4, 4)),
    "new 8, old 4": ((8, 8), (4, 4)),
    "new 6, old 8": ((6, 6), (8, 8)),
    "mixed": ((8, 6), (8, 4)),
}
LINKS = {"25 GB/s between nodes": (25.0, 8), "3 GB/s": (3.0, 1), "two sites": (25.0, 8)}
# Between two sites: 10 ms, 10 Gbit/s.
_LINE = {"latency_us": 10_000, "gbyte_per_s": 1.25}
# Layers, hidden size, heads, groups of keys, hidden size of the MLP, vocabulary.
MODELS = {
    "32 layers, 32 heads": (32, 4096, 32, 8, 14336, 128256),
    "60 layers, 56 heads": (60, 7168, 56, 8, 20480, 64000),
}
_SHARED = """
    --group-query-attention --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --bf16
    --use-distributed-optimizer --sequence-parallel
"""
_LIMIT_S = 10.0
# Below this a prediction is worth less than its error.
LEAST_GAIN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cluster and a model.

    Attributes:
        model: a name of ``MODELS``.
        links: a name of ``LINKS``.
        nodes: a name of ``NODES``.
        slower: how many times slower the old cards are.
        smaller: how many times less memory they have.
    """

    model: str
    links: str
    nodes: str
    slower: int
    smaller: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return " | ".join((self.model, self.links, self.nodes, f"{self.slower}x slower", f"1/{self.smaller} memory"))

    def request(self) -> SearchRequest:
        """Ask ``search`` for it."""
        layers, hidden, heads, groups, ffn, vocab = MODELS[self.model]
        words = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --num-query-groups {groups}"
        )
        words += f" --ffn-hidden-size {ffn} --vocab-size {vocab}{_SHARED}"
        parser = Parser(add_help=False)
        search.add_arguments(parser)
        args, args.unknown = parser.parse_known_args([*words.split(), "--cluster", "of the grid"])
        return read_request(args, parse_cluster(self._cluster(), Path()))

    def _cluster(self) -> dict[str, object]:
        (rate, at_once), (new, old) = LINKS[self.links], NODES[self.nodes]
        sites = ("cloud", "edge") if self.links == "two sites" else ("", "")
        nodes = [
            {"cards": kind, "cards_per_node": number, "site": site}
            for kind, each, site in zip(("new", "old"), (new, old), sites, strict=True)
            for number in each
        ]
        inside = {"latency_us": 5, "gbyte_per_s": 300}
        links: dict[str, object] = {"inside": inside}
        links["between"] = {"latency_us": 10, "gbyte_per_s": rate, "at_once": at_once}
        if self.links == "two sites":
            links["across"] = {"cloud edge": _LINE}
        return {
            "cards": {"new": _card(1, 1), "old": _card(self.slower, self.smaller)},
            "nodes": nodes,
            "links": links,
        }


def _card(slower: int, smaller: int) -> dict[str, object]:
    """Give a card of 400 Tflop/s that layers reach, and 80 GiB, or one that is slower and smaller."""
    return {
        "teraflops": 400 / slower,
        "share": 1.0,
        "memory_tbyte_per_s": 3.0 / slower,
        "memory": f"{80 // smaller}GiB",
    }


def cells() -> Iterator[Cell]:
    """Yield the grid."""
    for model, links, nodes, slower, smaller in product(MODELS, LINKS, NODES, SLOWER, SMALLER):
        yield Cell(model=model, links=links, nodes=nodes, slower=slower, smaller=smaller)


def ask(cell: Cell) -> dict[str, Any]:
    """Give the steps of the best layout, of stock Megatron's best, and of its best with equally many layers."""
    request = cell.request()
    found = find_best(request.problem, num_best=1, limit_s=_LIMIT_S)
    row: dict[str, Any] = {"is_complete": found.is_complete}
    for name, candidate in (("best", next(iter(found.best), None)), ("stock", found.stock), ("equal", found.equal)):
        row[name] = candidate and {
            "step_s": round(candidate.step_s, 4),
            "sizes": candidate.sizes,
            "layers": candidate.layers,
            "replicas": candidate.split.num_replicas,
        }
    return row


def gain_of(row: Mapping[str, Any]) -> float | None:
    """Say how many times as long stock Megatron takes; infinite where only unequal sizes fit, None if nothing does."""
    if row["best"] is None:
        return None
    return float("inf") if row["stock"] is None else row["stock"]["step_s"] / row["best"]["step_s"]


def main() -> None:
    """Search what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of results, .json")
    parser.add_argument("--picture", type=Path, help="map of the gains, .svg")
    parser.add_argument("--most", type=int, default=None, help="clusters to ask for at most")
    options = parser.parse_args()
    rows: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    missing = [cell for cell in cells() if cell.key not in rows][: options.most]
    for number, cell in enumerate(missing, start=1):
        rows[cell.key] = ask(cell)
        lines = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{number} of {len(missing)}: {cell.key}: {gain_of(rows[cell.key])}", file=sys.stderr, flush=True)
    if options.picture is not None:
        options.picture.write_text(draw(rows))
    print("\n".join(_table(rows)))


def _table(rows: Mapping[str, Any]) -> Iterator[str]:
    """Count, by links and model and by nodes, where unequal sizes win."""
    yield (
        "| clusters | number | gain 5 % or more | of these, unequal sizes | median gain | largest gain | "
        "only unequal sizes fit |"
    )
    yield "|---|---|---|---|---|---|---|"
    groups: dict[str, list[tuple[float, bool]]] = {}
    for cell in cells():
        if cell.key not in rows or (gain := gain_of(rows[cell.key])) is None:
            continue
        names = ("all", cell.links, cell.model, f"nodes of {cell.nodes}", f"old GPUs {cell.slower} times slower")
        for name in (*names, f"old GPUs with 1/{cell.smaller} of the memory"):
            groups.setdefault(name, []).append((gain, len({*rows[cell.key]["best"]["sizes"]}) > 1))
    for name, gains in groups.items():
        finite = sorted(gain for gain, _ in gains if LEAST_GAIN <= gain < float("inf"))
        alone = sum(gain == float("inf") for gain, _ in gains)
        wins = len(finite) + alone
        unequal = sum(gain >= LEAST_GAIN and is_unequal for gain, is_unequal in gains)
        middle = f"{finite[len(finite) // 2]:.2f}" if finite else "-"
        most = f"{finite[-1]:.2f}" if finite else "-"
        share = f"{wins} ({100 * wins / len(gains):.0f} %)"
        yield f"| {name} | {len(gains)} | {share} | {unequal} | {middle} | {most} | {alone} |"


_SIDE, _LEFT, _TOP, _GAP = 22, 110, 92, 26


def draw(rows: Mapping[str, Any]) -> str:
    """Draw a map: a panel for each model and links, a row for nodes and memory, a column for speed."""
    title = "What the plugin gains: step of stock Megatron over the best one, as predicted"
    width, height = len(SLOWER) * _SIDE, len(NODES) * len(SMALLER) * _SIDE
    panels = [*product(MODELS, LINKS)]
    body = [svg.text(16, 26, title, "title")]
    note = "Rows: GPUs of a node. Across: old GPUs 1, 2, 4, 8 times slower. Down: with as much memory, and with 1/8."
    body.append(svg.text(16, 46, note))
    for number, (model, links) in enumerate(panels):
        left = _LEFT + number * (width + _GAP)
        if number % len(LINKS) == 0:
            body.append(svg.text(left, _TOP - 22, model, "panel"))
        body.append(svg.text(left, _TOP - 7, links.partition(" between")[0]))
        for row, (nodes, smaller) in enumerate(product(NODES, SMALLER)):
            if number == 0 and smaller == 1:
                body.append(
                    svg.text(_LEFT - 8, _TOP + row * _SIDE + 6 * (row // len(SMALLER)) + _SIDE + 4, nodes, "end")
                )
            for column, slower in enumerate(SLOWER):
                cell = Cell(model=model, links=links, nodes=nodes, slower=slower, smaller=smaller)
                top = _TOP + row * _SIDE + 6 * (row // len(SMALLER))
                body.append(_box(left + column * _SIDE, top, rows.get(cell.key)))
    bottom = _TOP + height + 6 * len(NODES) + 24
    for index, (colour, meaning) in enumerate(_LEGEND):
        left = _LEFT + index % 3 * 150
        top = bottom + index // 3 * 22
        body.append(f'<rect x="{left}" y="{top}" width="14" height="14" style="fill:{colour}"/>')
        body.append(svg.text(left + 20, top + 12, meaning))
    about = f"A map of {len(panels)} panels, for models and links. {note} Darker boxes gain more."
    return svg.document(_LEFT + len(panels) * (width + _GAP), bottom + 56, title, about, body)


_LEGEND = (
    ("#c9ced6", "below 1.05: stay"),
    ("#a9cbe8", "1.05 to 1.2"),
    ("#5b93c9", "1.2 to 1.5"),
    ("#1f4e8c", "1.5 or more"),
    ("#d9730d", "nothing else fits"),
    ("none", "nothing fits"),
)


def _box(left: int, top: int, row: Mapping[str, Any] | None) -> str:
    gain = None if row is None else gain_of(row)
    if gain is None:
        colour, text = "none", ""
    elif gain == float("inf"):
        colour, text = _LEGEND[4][0], "only with unequal sizes"
    else:
        place = sum(gain >= limit for limit in (LEAST_GAIN, 1.2, 1.5))
        colour, text = _LEGEND[place][0], f"{gain:.2f}"
    side = _SIDE - 2
    return (
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" style="fill:{colour}"><title>{text}</title></rect>'
    )


if __name__ == "__main__":
    main()
