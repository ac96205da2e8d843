"""The grid of options: each value on one rank and on stages ``1,2``, gradients of every weight compared.

The cases are the groups of ``tests/options/verdicts`` whose evidence is the grid. ``tests/options/ran.txt`` says what
came of them the last time that all were run; a case that is not there as it is now is run by every change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.multiproc.cases.script_cases import EXAMPLE, ScriptRun, arguments, grad_norms, losses
from tests.options.judged import GRID, Entry, Judgement, groups, rows_of
from tests.options.parsers import FOLDER, LISTED, Option, by_name, listed
from tests.support.hosts import ROOT, TREE, host_name, is_older
from vtp_plugin.host.rules.rule import Verdict
from vtp_plugin.host.versions import family_of, find_megatron

RAN = FOLDER / "ran.txt"
SIZES: Final = "1,2"
GRADIENTS, NUMBERS, IDLE = 1e-4, 1e-4, 1e-5
"""How far apart the same numbers may be: of gradients, of losses and norms; and of runs with and without an option."""
_ROUTERS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "96", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--sequence-parallel", "--untie-embeddings-and-output-weights"),
)
BASES: Final[Mapping[str, tuple[str, ...]]] = {
    "dense": (),
    "routers": (*_ROUTERS, "--moe-router-load-balancing-type", "none"),
    "experts": (*_ROUTERS, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.05"),
    "prediction": (
        *("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
        *("--position-embedding-type", "rope", "--no-rope-fusion"),
    ),
    "latent": (
        *("--multi-latent-attention", "--kv-lora-rank", "20", "--qk-head-dim", "2", "--qk-pos-emb-head-dim", "4"),
        *("--v-head-dim", "8", "--rope-type", "rope", "--no-rope-fusion", "--position-embedding-type", "rope"),
    ),
    "half": ("--bf16",),
    "replicas": ("--untie-embeddings-and-output-weights",),  # Megatron 0.12 cannot place every tied one in buckets
}
"""Models that options are given to."""
_REPLICAS = {"replicas": 2}
# Megatron 0.16 averages the losses of prediction in a way that gloo lacks.
_HOOKS = {"latent": ("latent_attention",), "prediction": ("own_predictions",) if is_older() else ()}
# NVIDIA's own script does not hand it on, which the plugin refuses.
_NOT_HANDED_ON = ("--rope-scaling-factor",)
SCRIPT = f"{TREE}/pretrain_gpt.py" if TREE else EXAMPLE
"""NVIDIA's script where there is a tree of Megatron, else the example that stands for it."""
# In bf16 every activation is rounded, and other sizes round other sums.
_COARSE = {"half": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCase:
    """One option with one value, in one model."""

    entry: Entry
    judgement: Judgement
    base: str
    companions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.entry} in {self.base}"

    @property
    def name(self) -> str:
        """All that tells it apart from others."""
        return " ".join((str(self), *self.companions))

    @property
    def dp(self) -> int:
        """How many replicas the runs have."""
        return _REPLICAS.get(self.base, 1)

    @property
    def hooks(self) -> list[str]:
        """What is done in each rank before the script."""
        return ["note_gradients", *_HOOKS.get(self.base, ())]

    @property
    def without(self) -> GridCase:
        """The same run, without the option."""
        return replace(self, entry=Entry(option=""))

    def command(self, sizes: str, folder: str) -> list[str]:
        """Give the command line of a run. The option comes last, so its value counts; all pad the vocabulary alike."""
        option = (self.entry.option, *self.entry.words) if self.entry.option else ()
        flags = [folder if word == "{folder}" else word for word in (*BASES[self.base], *self.companions, *option)]
        words = arguments(sizes, dp=self.dp, extra=flags)
        words[words.index("--make-vocab-size-divisible-by") + 1] = str(12 // max(map(int, sizes.split(","))))
        return words

    @property
    def expected(self) -> str:
        """What is to come of it: ``same``, ``differs``, ``refused`` or ``ends``."""
        (value,) = self.entry.words or ("",)
        rules = [rule for rule in rows_of(self.entry.option, value) if rule.is_about(version())]
        verdicts = {str(rule.verdict) for rule in rules if rule.verdict is not Verdict.REFUSED_UNEQUAL_DP}
        if verdicts & {str(Verdict.REFUSED), str(Verdict.REFUSED_UNEQUAL)}:
            return "refused"
        if verdicts:
            return "differs" if "accepted, with a warning" in verdicts else "same"
        judgement = self.judgement
        if judgement in (Judgement.SAID, Judgement.DEPENDS):
            return "differs"
        return "ends" if judgement is Judgement.ENDS else "same"

    @property
    def is_idle(self) -> bool:
        """Whether it is said to change nothing at all."""
        return self.judgement in (Judgement.NONE, Judgement.IGNORED)


_host = cache(host_name)


@cache
def version() -> str:
    """Give the version of Megatron that is here; empty where there is none."""
    megatron = find_megatron()
    return "" if megatron is None else megatron.version


def cases() -> list[GridCase]:
    """Give all cases, each value of an option one; on an older Megatron, those that its command line knows."""
    known = by_name(listed(_host())) if _host() in LISTED else None
    return [
        GridCase(entry=entry, judgement=group.judgement, base=group.base, companions=group.companions)
        for group in groups()
        if group.evidence == GRID
        for given in group.entries
        for entry in ([Entry(option=given.option, words=(word,)) for word in given.words] or [given])
        if (known is None or _is_in(entry, known)) and not (TREE and given.option in _NOT_HANDED_ON)
    ]


def _is_in(entry: Entry, known: Mapping[str, Option]) -> bool:
    choices = known[entry.option].choices if entry.option in known else ()
    return entry.option in known and (not choices or entry.words[0] in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a case.

    Attributes:
        outcome: ``same``, ``differs``, ``refused`` or ``ends``.
        gradient: the largest difference of a gradient, over the largest element of its weight's.
        where: the weight whose gradient that is.
        number: the largest difference of losses and norms, relative.
        effect: the largest difference of losses and norms to one rank without the option; None where that run ended.
        said: the end of what the run printed, where it ended.
    """

    outcome: str
    gradient: float = 0.0
    where: str = ""
    number: float = 0.0
    effect: float | None = None
    said: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether the option changed nothing on one rank, but for the order of sums."""
        return self.effect is not None and self.effect <= IDLE


Runs = Sequence[ScriptRun]


def compare(case: GridCase, run: Runs, reference: Runs, without: Runs) -> Found:
    """Compare the run of a list with that of one rank, and this with one rank without the option."""
    ours, theirs = (next((rank for rank in ranks if rank.exit_code != 0), None) for ranks in (run, reference))
    if ours or theirs:
        is_refused = ours is not None and f" with --vtp-size-list {SIZES}; " in ours.output
        outcome = "refused" if is_refused else "ends" if ours and theirs else "ends in one of both"
        return Found(outcome=outcome, said=" | ".join(rank.output[-1500:] for rank in (ours, theirs) if rank))
    coarse = _COARSE.get(case.base, 0.0)
    gradient, where = _largest(run, reference)
    number = _numbers(run, reference)
    effect = _numbers(reference, without) if without[0].exit_code == 0 else None
    is_same = gradient <= max(GRADIENTS, coarse) and number <= max(NUMBERS, coarse)
    outcome = "same" if is_same else "differs"
    return Found(outcome=outcome, gradient=gradient, where=where, number=number, effect=effect)


def _numbers(run: Runs, reference: Runs) -> float:
    """Find the largest difference of losses and norms; infinite where there are not as many."""
    pairs = []
    for values in (losses, grad_norms):
        ours, theirs = values(run), values(reference)
        if len(ours) != len(theirs):
            return np.inf
        pairs += [*zip(ours, theirs, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


def _largest(run: Runs, reference: Runs) -> tuple[float, str]:
    """Find the largest difference of a gradient, among all copies that ranks hold, and its weight."""
    wanted = dict(_wholes(reference))
    scale = max((float(np.abs(values).max()) for values in wanted.values()), default=0.0)
    found = [(0.0, "")]
    for name, values in _wholes(run):
        other = wanted[name]
        if values.shape != other.shape:
            found.append((np.inf, f"{name}, of another shape"))
            continue
        limit = max(float(np.abs(other).max()), 1e-2 * scale, 1e-12)
        found.append((float(np.abs(values - other).max()) / limit, name))
    return max(found)


def _wholes(run: Runs) -> Iterator[tuple[str, Any]]:
    """Yield every gradient, put together from the ranks of a stage; where each rank has all of it, of every rank."""
    parts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for rank in run:
        for part in rank.facts["gradients"]:
            parts.setdefault((part["name"], part["stage"]), []).append(part)
    for (name, _), held in parts.items():
        axis = held[0]["axis"]
        if axis is None:
            yield from ((name, part["values"]) for part in held)
            continue
        size = held[0]["tp"][1]
        for start in range(0, len(held), size):
            local = [part["values"] for part in sorted(held[start : start + size], key=lambda part: part["tp"][0])]
            halves = [np.split(part, 1 + held[0]["is_gated"], axis) for part in local]
            yield name, np.concatenate([half for side in zip(*halves, strict=True) for half in side], axis)


def digest(case: GridCase, version: str) -> str:
    """Tell cases apart, and one run of a case from one with other sources of the plugin or another Megatron."""
    hashed = hashlib.sha256(f"{case.name} {version}".encode())
    for path in sorted(
        path for folder in ("vtp_plugin", "patches", "tests/options") for path in (ROOT / folder).rglob("*.py")
    ):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:20]


def line_of(case: GridCase, found: Found, version: str) -> str:
    """Write what came of a case, for the list of what was run."""
    figures = f" {found.gradient:.1e} {found.number:.1e}" if found.outcome in ("same", "differs") else ""
    figures += " idle" if found.is_idle else ""
    return f"{case.name}: {version} {found.outcome}{figures}"


@cache
def recorded() -> dict[tuple[str, str], str]:
    """Give what the list says: the outcome, by the name of a case and the family of Megatron."""
    return {key: said.split()[1] for key, said in _said(RAN.read_text().splitlines())}


def _said(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Cut lines of the list: the name of a case and the family of Megatron, then version, outcome and figures."""
    for name, _, said in (line.rpartition(": ") for line in lines):
        family = family_of(said.split()[0])
        yield (name, "" if family is None else family.name), said


def is_recorded(case: GridCase) -> bool:
    """Tell whether the list says of a case, as it is now, that it was run with this family of Megatron, as expected."""
    return recorded().get((case.name, _host())) == case.expected


def keep(folder: Path, name: str, case: GridCase, found: Found, version: str) -> None:
    """Keep what came of a case, so that a grid that was cut off goes on."""
    text = json.dumps({"line": line_of(case, found, version), **asdict(found)})
    (folder / f"{name}.json").write_text(text)


def kept(folder: Path, name: str) -> Found | None:
    """Give what was kept, if something was."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    return Found(**{key: value for key, value in json.loads(path.read_text()).items() if key != "line"})


def main(folder: str) -> None:
    """Write into the list what a folder has of this Megatron, where it is as expected; what is said of others stays."""
    wanted = {case.name: case.expected for case in cases()}
    found = {key: said for key, said in _said(RAN.read_text().splitlines()) if key[1] != _host() or key[0] in wanted}
    paths = sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime)
    for key, said in _said(json.loads(path.read_text())["line"] for path in paths):
        if key[1] == _host() and said.split()[1] == wanted.get(key[0]):
            found[key] = said
    RAN.write_text("".join(sorted(f"{name}: {said}\n" for (name, _), said in found.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
