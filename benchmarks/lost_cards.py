"""A campaign of seeded faults: does a run go on after each, with the right losses, and how long does that take?

    python -m benchmarks.lost_cards --out FOLDER --runs 25

A run trains ``tests/multiproc/faults/faulty_gpt.py`` on three CPU ranks over real agents of torchrun: node ``a`` with
two cards, ``b`` with one. Several faults strike it one after another: which rank, in which phase, how, and whether the
card is bad from then on is drawn from a seed. In every fifth run, where network namespaces can be made, nodes are
hosts apart, and the cable of one is pulled; once the other one goes on, it comes back. Which list must come next is
worked out before the fault. A trial is passed if a log that the script writes, not the plugin, shows the strike in its
phase, and a step was finished afterwards in that list. At the end of a run every loss and every sample is compared
with a run that nothing happened to, each attempt must have said how the one before had ended, and processes and files
that were left are looked for. Results go to ``FOLDER/results.jsonl``; a run that is there is not run again.
``--report`` prints the table, ``--soak`` one of what a long run holds. ``lost_stock.py`` times a restart by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore

from tests.multiproc.faults.elastic import Cluster, undisturbed
from tests.multiproc.faults.fault_log import read_log, require_losses, require_samples
from tests.multiproc.faults.faulty_gpt import CABLE, KINDS, LOG, PHASES
from tests.multiproc.faults.hosts_apart import Network, why_not
from tests.support.pool import Pool
from vtp_plugin.config.flag import format_value
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_layout import fit

SCRIPT = "tests/multiproc/faults/faulty_gpt.py"
_CARDS = (("a", 0), ("a", 1), ("b", 0))
FLAGS = ("--vtp-size-list", "auto", "--vtp-stages", "1:2", "--vtp-data-parallel-size", "1")
FIRST = "--vtp-size-list 2,1 --make-vocab-size-divisible-by 768 --decoder-first-pipeline-num-layers 3"
_NUM_STEPS = 200
_FAULTS_PER_RUN = 4
_EVERY_APART = 5
_LIMIT_S = 300.0
NOTICED = re.compile(r"does not answer|failed|ended or stopped|connection broke|ended, which kept the store")
_BEGUN, _ENDED, STEP = "this attempt has", r"\] the attempt with TP sizes \S+ ended ", r"iteration +\d+/"
# It keeps these of every start.
_OF_TORCHRUN = re.compile(
    r"torch\.rendezvous\.run(\.\d+/(MASTER_ADDR|MASTER_PORT|torchelastic/(role_info|assigned_ranks)/\d+))?"
)
_ALL_KINDS = (*KINDS, CABLE)
MOMENTS = ("noticing", "ending", "starting", "loading", "first step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What strikes whom, and what must follow.

    Attributes:
        id: name of the fault.
        node: node of the card.
        local_rank: local rank of the card.
        phase: phase in which it strikes; ``restart`` is the start of an attempt after a loss.
        kind: kind of the fault: a signal, or what else happens.
        bad: cards that are bad from then on.
        expected: list in which training goes on.
    """

    id: str
    node: str
    local_rank: int
    phase: str
    kind: str
    bad: tuple[tuple[str, int], ...]
    expected: str


def expected_list(bad: Sequence[tuple[str, int]]) -> tuple[str, list[tuple[str, int]]]:
    """Fit the list by the function alone; return it with the cards that work in it."""
    args = SimpleNamespace(
        num_layers=4,
        micro_batch_size=2,
        global_batch_size=8,
        num_attention_heads=12,
        group_query_attention=True,
        num_query_groups=4,
        seq_length=64,
    )
    good = [card for card in _CARDS if card not in bad]
    nodes = [Node(name=name, num_cards=sum(node == name for node, _ in good)) for name in ("a", "b")]
    best, *_ = fit(nodes, Constraints(args=args, least_stages=1, most_stages=2, num_replicas=1))
    left = {node.name: number for node, number in best.spare_cards}
    return format_value(best.sizes), [card for card in good if not left[card[0]]]


def draw(seed: int) -> list[Fault]:
    """Draw the faults of a run, with the list that must follow each."""
    chance, faults, bad = random.Random(seed), [], ()
    is_apart = _is_apart(seed)
    for number in range(_FAULTS_PER_RUN):
        _, working = expected_list(bad)
        node, local_rank = chance.choice(working)
        phases = PHASES[1:] if is_apart else PHASES if number == 0 else ("restart", *PHASES[1:])
        phase, kind = chance.choice(phases), CABLE if is_apart else chance.choice(KINDS)
        # Before the first checkpoint another list begins with other weights.
        may_fail = phase != "start-up" and not is_apart
        # A card is bad at most once in a run: one that failed twice would be left out from then on.
        is_new = not any((node, local_rank) in fault.bad for fault in faults)
        bad = ((node, local_rank),) if is_new and chance.random() < 0.3 and may_fail else ()
        gone = [card for card in _CARDS if card[0] == node] if is_apart else bad
        faults.append(
            Fault(
                id=f"{seed}-{number}",
                node=node,
                local_rank=local_rank,
                phase=phase,
                kind=kind,
                bad=bad,
                expected=expected_list(gone)[0],
            )
        )
    return faults


def _is_apart(seed: int) -> bool:
    """Tell whether the nodes of a run are hosts apart, whose cables are pulled; one can then go on alone."""
    return seed % _EVERY_APART == _EVERY_APART - 1 and not why_not()


class Watcher:
    """Looks at the logs of a cluster, and notes when lines came."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read: dict[str, int] = {}
        self.lines: list[tuple[float, str]] = []

    def look(self) -> None:
        """Read what is new."""
        for name in self._cluster.agents:
            path = self._cluster.log(name)
            text = path.read_bytes()[self._read.get(name, 0) :] if path.is_file() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self._read[name] = self._read.get(name, 0) + len(whole)
            self.lines += [(time.time(), line) for line in whole.decode(errors="replace").splitlines()]

    def first(self, pattern: str | re.Pattern[str], after_s: float) -> float | None:
        """Return when a line first came that matches."""
        found = (at_s for at_s, line in self.lines if at_s >= after_s and re.search(pattern, line))
        return next(found, None)


def run_once(
    seed: int, folder: Path, results: Path, expected: dict[int, float], num_faults: int = _FAULTS_PER_RUN
) -> None:
    """Run a run and append its trials to the results."""
    faults, is_apart = draw(seed)[:num_faults], _is_apart(seed)
    flags = [*FLAGS, "--train-iters", str(_NUM_STEPS), "--vtp-timeout-s", "40"]
    trials: list[dict[str, Any]] = []
    with (
        Network() if is_apart else contextlib.nullcontext() as network,
        Cluster(
            folder,
            flags,
            nodes="1:2" if is_apart else "2",
            script=SCRIPT,
            max_restarts=20,
            pause_s=0.05,
            network=network,
        ) as cluster,
    ):
        if faults[0].phase == "start-up":
            _arm(folder, faults[:1])
        cluster.start("a", 2)
        cluster.start("b", 1)
        watcher = Watcher(cluster)
        for fault in faults:
            trials.append({"seed": seed, **asdict(fault), **strike(cluster, watcher, fault)})
            if trials[-1]["outcome"] != "went on":
                break
        # Each step that an earlier attempt had begun is read to its end.
        if trials[-1]["outcome"] == "went on":
            wait_until(cluster, watcher, lambda: _is_ahead(cluster))
        steps, entries = cluster.steps(), read_log(folder / "faults.jsonl")
        entries = [entry for entry in entries if steps and entry.get("step", 0) <= steps[-1].iteration]
        text = "".join(cluster.log(name).read_text(errors="replace") for name in cluster.agents)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what still lives is found below
            cluster.stop()
    problem = ""
    try:
        require_losses(steps, expected)
        require_samples(entries)
        _require_told(text)
    except AssertionError as error:
        problem = f"{error}"[:300]
    time.sleep(3.0)
    # Folders of logs are the agents', and torch keeps what it has compiled for the user's next run.
    kept = ("torchelastic_", "torchinductor_")
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(kept)]
    whole = {"seed": seed, "steps": len(steps), "problem": problem, "orphans": _orphans(folder), "files": left}
    with results.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in [*trials, {"run": whole}])


def _is_ahead(cluster: Cluster) -> bool | None:
    """Tell whether the newest attempt has come farther than all before."""
    steps = cluster.steps()
    newest = steps[-1]
    return newest.iteration > max((s.iteration for s in steps if s.attempt != newest.attempt), default=0) + 1 or None


def _require_told(text: str) -> None:
    """Every attempt but the first one says how the one before has ended."""
    attempts, told = (len(re.findall(pattern, text)) for pattern in (_BEGUN, _ENDED))
    assert told >= attempts - 1, f"{attempts} attempts, but {told} lines say how one has ended"


def _arm(folder: Path, faults: Sequence[Fault]) -> None:
    own = folder / "armed.new"
    armed = [{**asdict(fault), "phase": "start-up" if fault.phase == "restart" else fault.phase} for fault in faults]
    own.write_text(json.dumps(armed))
    own.replace(folder / "armed.json")


def strike(cluster: Cluster, watcher: Watcher, fault: Fault) -> dict[str, Any]:
    """Let a fault strike, and wait until the run goes on."""
    armed, is_start = [fault], fault.phase in ("start-up", "restart")
    bad = "".join(f"{node} {local} absent\n" for node, local in fault.bad)
    if fault.phase != "start-up" and wait_until(cluster, watcher, lambda: is_saved(cluster)) is None:
        return {"outcome": "no first step"}
    if fault.phase == "restart":
        # What it strikes is the start after this kill.
        armed.append(Fault(**{**asdict(fault), "id": f"{fault.id}-before", "phase": "forward", "kind": "SIGKILL"}))
    cluster.faults.write_text("" if is_start else bad)
    _arm(cluster.folder, armed)
    entry = wait_until(cluster, watcher, lambda: _struck(cluster, fault.id))
    if entry is None:
        return {"outcome": "never struck"}
    if fault.kind == CABLE:
        assert cluster.network is not None
        cluster.network.plug(fault.node, is_in=False)
    cluster.faults.write_text(bad)
    at_s = entry["at_s"]
    ranks = [e["pid"] for e in read_log(cluster.folder / "faults.jsonl") if e["event"] == "begin" and e["at_s"] <= at_s]
    ended: list[float] = []

    def goes_on() -> bool | None:
        if not ended and not any(Path(f"/proc/{pid}").exists() for pid in ranks):
            ended.append(time.time())
        # A step that is logged behind the list of a later attempt.
        lists = [(at, line) for at, line in watcher.lines if "chosen: --vtp-size-list" in line and at > at_s]
        step = watcher.first(STEP, lists[-1][0]) if lists else None
        return True if step is not None else None

    if wait_until(cluster, watcher, goes_on) is None:
        return {"outcome": "hangs" if any(a.poll() is None for a in cluster.agents.values()) else "ended"}
    last = cluster.steps()[-1].sizes
    started = watcher.first(_BEGUN, at_s) or at_s
    moments = {
        "noticing": watcher.first(NOTICED, at_s),
        "ending": ended[0] if ended else None,
        "starting": watcher.first("chosen: --vtp-size-list", at_s),
        "loading": watcher.first("successfully loaded checkpoint", started),
        "first step": watcher.first(STEP, started),
    }
    seconds = {name: None if at is None else round(at - at_s, 2) for name, at in moments.items()}
    outcome = "went on" if last == fault.expected else f"went on in {last}"
    if fault.kind == CABLE and not _bring_back(cluster, watcher, fault.node):
        outcome += ", and the node did not come back"
    return {"outcome": outcome, "seconds": seconds, "struck": entry["phase"]}


def _bring_back(cluster: Cluster, watcher: Watcher, node: str) -> bool:
    """Plug a cable in and start the node again; wait until all cards train."""
    assert cluster.network is not None
    cluster.lose(node)
    cluster.network.plug(node, is_in=True)
    begin_s = time.time()
    cluster.start(node, sum(name == node for name, _ in _CARDS))
    whole = expected_list(())[0]

    def is_whole() -> bool | None:
        fitted = watcher.first(rf"chosen: --vtp-size-list {whole}, ", begin_s)
        return fitted and watcher.first(STEP, fitted) and True

    return bool(wait_until(cluster, watcher, is_whole))


def is_saved(cluster: Cluster) -> bool | None:
    return (cluster.folder / "ck" / "latest_checkpointed_iteration.txt").is_file() or None


def _struck(cluster: Cluster, name: str) -> dict[str, Any] | None:
    entries = read_log(cluster.folder / "faults.jsonl")
    return next((entry for entry in entries if entry["event"] == "strike" and entry["id"] == name), None)


def wait_until(cluster: Cluster, watcher: Watcher, look: Any) -> Any:
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        watcher.look()
        if (found := look()) is not None:
            return found
        if all(agent.poll() is not None for agent in cluster.agents.values()):
            return None
        time.sleep(0.1)
    return None


def _orphans(folder: Path) -> list[int]:
    """Find processes of a run that still live."""
    mark, found = f"{LOG}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def soak(folder: Path, num_steps: int, every: int) -> str:
    """Train many steps with a kill now and then; return a table of what agents, ranks and the store hold."""
    flags = [*FLAGS, "--train-iters", str(num_steps), "--vtp-timeout-s", "40"]
    rows = ["| step | agents: MiB, descriptors, threads | ranks: MiB, descriptors, threads | keys: torchrun's, ours |"]
    rows.append("| --- | --- | --- | --- |")
    with Cluster(folder, flags, nodes="2", script=SCRIPT, max_restarts=num_steps) as cluster:
        cluster.start("a", 2)
        cluster.start("b", 1)
        store = TCPStore("127.0.0.1", cluster.port, is_master=False, wait_for_workers=False)
        watcher, chance = Watcher(cluster), random.Random(0)
        for due in range(every, num_steps, every):

            def has_come(due: int = due) -> bool | None:
                return any(step.iteration >= due for step in cluster.steps()) or None

            if wait_until(cluster, watcher, has_come) is None:
                break
            ranks = [cluster.rank(node, local_rank) for node, local_rank in _CARDS]
            keys = store.list_keys()
            num_own = sum(bool(_OF_TORCHRUN.fullmatch(key)) for key in keys)
            agents = [agent.pid for agent in cluster.agents.values()]
            held = (_held(agents), _held(ranks), f"{num_own}, {len(keys) - num_own}")
            rows.append(f"| {due} | {' | '.join(held)} |")
            os.kill(chance.choice(ranks), signal.SIGKILL)
        ends = [cluster.finish(name) for name in cluster.agents]
        rows += ["", f"The agents ended with {ends}; the last step was {max(s.iteration for s in cluster.steps())}."]
    return "\n".join(rows)


def _held(pids: Sequence[int]) -> str:
    """Sum up what processes hold: memory, descriptors, threads."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    kib, threads = (
        sum(int(found[1]) for text in texts if (found := re.search(rf"{name}:\s+(\d+)", text)))
        for name in ("VmRSS", "Threads")
    )
    return f"{kib // 1024}, {sum(len(os.listdir(f'/proc/{pid}/fd')) for pid in pids)}, {threads}"


def report(results: Path) -> str:
    """Write the table of what was found."""
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    trials, runs = [e for e in entries if "run" not in e], [e["run"] for e in entries if "run" in e]
    lines = [
        f"{len(trials)} faults in {len(runs)} runs: {sum(t['outcome'] == 'went on' for t in trials)} went on in the "
        f"list that was worked out before. Wrong losses or samples: {sum(bool(r['problem']) for r in runs)} runs. "
        f"Processes left: {sum(len(r['orphans']) for r in runs)}; files left in the folder for temporary files: "
        f"{sum(len(r['files']) for r in runs)}.",
        "",
        f"| phase | {' | '.join(_ALL_KINDS)} |",
        f"| --- |{' --- |' * len(_ALL_KINDS)}",
    ]
    for phase in ("start-up", "restart", *PHASES[1:]):
        cells = []
        for kind in _ALL_KINDS:
            found = Counter(t["outcome"] == "went on" for t in trials if (t["phase"], t["kind"]) == (phase, kind))
            cells.append(f"{found[True]} of {found.total()}" if found else "-")
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    times = {kind: [t["seconds"] for t in trials if t["kind"] == kind and "seconds" in t] for kind in _ALL_KINDS}
    lines += ["", *table_of_seconds(times)]
    bad = [t for t in trials if t["outcome"] != "went on"]
    lines += ["", *(f"* {t['id']}, {t['phase']}, {t['kind']}: {t['outcome']}" for t in bad)]
    lines += [f"* run {r['seed']}: {r['problem']}" for r in runs if r["problem"]]
    return "\n".join(lines)


def table_of_seconds(times: Mapping[str, Sequence[Mapping[str, float | None]]]) -> Iterator[str]:
    """Write how long after a strike each moment came, one column for each name."""
    yield f"| seconds after the strike, median (most) | {' | '.join(times)} |"
    yield f"| --- |{' --- |' * len(times)}"
    for moment in MOMENTS:
        found = [[s for seconds in own if (s := seconds[moment]) is not None] for own in times.values()]
        cells = (f"{statistics.median(own):.1f} ({max(own):.1f})" if own else "-" for own in found)
        yield f"| {moment} | {' | '.join(cells)} |"


def main() -> None:
    """Run what is not there yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--runs", type=int, default=25, metavar="N", help=f"each has {_FAULTS_PER_RUN} faults")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="instead: so many steps, with a kill every 50")
    parser.add_argument("--report", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    out = options.out.resolve()
    results = out / "results.jsonl"
    if options.report:
        print(report(results))
        return
    out.mkdir(parents=True, exist_ok=True)
    if options.soak:
        folder = out / f"soak-{int(time.time())}"
        folder.mkdir()
        print(soak(folder, options.soak, 50))
        return
    entries = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    done = {entry["run"]["seed"] for entry in entries if "run" in entry}
    kept = out / "undisturbed.json"
    if not kept.is_file():
        with Pool(len(_CARDS)) as pool:
            kept.write_text(json.dumps(undisturbed(pool, FIRST, _NUM_STEPS)))
    expected = {int(step): loss for step, loss in json.loads(kept.read_text()).items()}
    for seed in range(options.seed, options.seed + options.runs):
        if seed not in done:
            folder = out / f"run-{seed}-{int(time.time())}"
            folder.mkdir()
            run_once(seed, folder, results, expected)
            print(report(results).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
