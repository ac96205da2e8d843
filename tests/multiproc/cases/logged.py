"""What a run of a script logs, in print and in TensorBoard, and how each of its numbers is compared with another run's.

``RULES`` is the list. A number that no rule knows is an error: say how it is compared, or why it cannot be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.multiproc.cases.script_cases import ScriptRun

LOGGED: Final = (
    *("--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput", "--log-energy", "--log-progress"),
    *("--log-timers-to-tensorboard", "--timing-log-level", "2", "--log-memory-to-tensorboard"),
    *("--log-validation-ppl-to-tensorboard", "--log-world-size-to-tensorboard"),
)
"""Every option of Megatron that logs a number here; the loss scale is logged by itself."""

TOLERANCE: Final = 1e-5
# Megatron's schedules time their calls that send and receive, each its own; a planned order makes no such calls.
_MESSAGES = re.compile(r"(?:forward|backward)-.*(?:send|recv)(?:-time)?")
_TIMER = re.compile(r"^ +(\S+) \.+: \(([0-9.]+), ([0-9.]+)\)$", re.MULTILINE)
_EVALUATION = re.compile(r"^ validation loss at (.*?) \| (.*) \|", re.MULTILINE)
_PARAMETERS = re.compile(r"^ > number of parameters on .* rank \(.*\): (\d+)$", re.MULTILINE)
_MEMORY = re.compile(r"^\[Rank \d+\] \(.*\) memory \(MB\) \| (.*)$", re.MULTILINE)
_PROGRESS = re.compile(r"# GPUs: (?P<gpus>\d+)|Floating-point operations: (?P<operations>\S+)|in billions\): (\S+)")


@dataclass(frozen=True, slots=True)
class Logged:
    """What a run logged.

    Attributes:
        num_ranks: of the run.
        num_small: see :func:`num_small`.
        scalars: of TensorBoard, by their names: pairs of a step, or of the samples so far, and a value.
        lines: the fields of every iteration's line and every evaluation's, by their names, as they were printed.
        timers: of every table of timers, shortest and longest time in ms by the timer's name.
        memory: numbers of every line on memory, by their names.
        parameters: numbers of parameters that ranks of the first replicas hold.
        progress: lines of ``progress.txt``: ranks, floating-point operations and tokens; the times left out.
    """

    num_ranks: int
    num_small: int
    scalars: Mapping[str, list[tuple[int, float]]]
    lines: Sequence[Mapping[str, str]]
    timers: Sequence[Mapping[str, tuple[float, float]]]
    memory: Sequence[Mapping[str, float]]
    parameters: Sequence[int]
    progress: Sequence[tuple[str, ...]]


def read(runs: Sequence[ScriptRun], events: Path, progress: Path | None = None) -> Logged:
    """Read what the ranks of a run have printed, and its folder of events. One rank must have logged everything."""
    from tensorboard.backend.event_processing import event_accumulator

    (path,) = events.iterdir()
    found = event_accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    found.Reload()
    (output,) = [run.output for run in runs if re.search(r"^ .*\biteration +\d+/", run.output, re.MULTILINE)]
    silent = [rank for rank, run in enumerate(runs) if run.output is not output and _TIMER.search(run.output)]
    assert not silent, f"ranks {silent} print timers, and another one prints the iterations"
    evaluations = [{"at": at, **_fields(rest)} for at, rest in _EVALUATION.findall(output)]
    return Logged(
        num_ranks=len(runs),
        num_small=num_small(runs),
        scalars={name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]},
        lines=[_fields(line) for line in re.findall(r"^ .*\biteration +\d+/.*$", output, re.MULTILINE)] + evaluations,
        timers=[
            {name: (float(low), float(high)) for name, low, high in _TIMER.findall(table)}
            for table in re.split(r"time across ranks \(ms\):\n", output)[1:]
        ],
        memory=[{k: float(v) for k, v in _fields(line).items()} for r in runs for line in _MEMORY.findall(r.output)],
        parameters=[int(number) for run in runs for number in _PARAMETERS.findall(run.output)],
        progress=[] if progress is None else _PROGRESS.findall(progress.read_text()),
    )


def num_small(runs: Sequence[ScriptRun]) -> int:
    """Give the most gradients, over all ranks, that were 0 within rounding in a step, but not 0."""
    return max(map(sum, zip(*(run.facts["small"] for run in runs), strict=True)))


def _fields(line: str) -> dict[str, str]:
    """Give the fields of a line.

    >>> _fields(" [12:00] iteration 1/ 4 | consumed samples:    8 | lm loss: 4.1E+00 | lm loss value: 3 | ")
    {'iteration': '1/ 4', 'consumed samples': '8', 'lm loss': '4.1E+00', 'lm loss value': '3'}
    """
    fields = re.sub(r"^.*?\biteration +(\d+/)", r"iteration: \1", line).split("|")
    return {name.strip(): value.strip() for name, colon, value in (field.rpartition(": ") for field in fields) if colon}


def assert_same_log(ours: Logged, theirs: Logged) -> None:
    """Compare every number of a run with those of the uniform run, by ``RULES``."""
    names, others = ({name for name in log.scalars if not _MESSAGES.fullmatch(name)} for log in (ours, theirs))
    assert names == others, names ^ others
    for name in sorted(names):
        values, wanted = ours.scalars[name], theirs.scalars[name]
        assert [step for step, _ in values] == [step for step, _ in wanted], (name, values, wanted)
        rule = rule_of(name.removesuffix(" vs samples"))
        if rule.agree is None:
            continue
        for step, ((_, value), (_, other)) in enumerate(zip(values, wanted, strict=True)):
            assert rule.agree(_Pair(value, other, ours, theirs, step)), (name, step, value, other, rule.how)
    assert len(ours.lines) == len(theirs.lines)
    for line, reference in zip(ours.lines, theirs.lines, strict=True):
        assert line.keys() == reference.keys(), (line, reference)
        for name, text in line.items():
            _compare_printed(name, text, reference[name], ours, theirs)
    _check_resources(ours, theirs)


def _compare_printed(name: str, text: str, other: str, ours: Logged, theirs: Logged) -> None:
    rule = rule_of(name)
    if not re.fullmatch(r"[-+.\dE]+", text):
        assert text == other, (name, text, other)
    elif rule.agree is not None:
        value, wanted = float(text), float(other)
        mantissa, _, exponent = other.partition("E")
        last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if rule.how is NEAR and abs(value - wanted) <= 1.01 * last_digit:
            return
        assert rule.agree(_Pair(value, wanted, ours, theirs, None)), (name, text, other, rule.how)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A number, that of the uniform run, both runs, and where it stands among TensorBoard's values."""

    value: float
    other: float
    ours: Logged
    theirs: Logged
    position: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """How numbers are compared.

    Attributes:
        names: a regular expression for their names, of scalars and of printed fields.
        how: what is asked of them, or why they cannot be compared.
        agree: tells whether two numbers agree; None where nothing can be asked.
    """

    names: str
    how: str
    agree: Callable[[_Pair], bool] | None


EQUAL: Final = "the same number"
NEAR: Final = f"the same to {TOLERANCE}, and in print to the last digit"


def _is_equal(pair: _Pair) -> bool:
    return pair.value == pair.other


def _is_near(pair: _Pair) -> bool:
    return math.isclose(pair.value, pair.other, rel_tol=TOLERANCE)


def _is_near_zeros(pair: _Pair) -> bool:
    return abs(pair.value - pair.other) <= max(pair.ours.num_small, pair.theirs.num_small)


def _is_world(pair: _Pair) -> bool:
    return (pair.value, pair.other) == (pair.ours.num_ranks, pair.theirs.num_ranks)


def _is_time(pair: _Pair) -> bool:
    return 0.0 < pair.value < 300.0


def _is_printed_time(pair: _Pair) -> bool:
    return 0.0 < pair.value < 300e3


def _operations(log: Logged, value: float, position: int) -> float:
    """Give the floating-point operations of a step, of all ranks; TensorBoard has no time of the first step."""
    times_s = dict(log.scalars["iteration-time"])
    return value * times_s[log.scalars["throughput"][position][0]] * log.num_ranks


def _is_throughput(pair: _Pair) -> bool:
    if pair.position is None:
        return pair.value >= 0.0  # printed with one digit
    if pair.position == 0:
        return pair.value > 0.0
    found, wanted = (
        _operations(pair.ours, pair.value, pair.position),
        _operations(pair.theirs, pair.other, pair.position),
    )
    return math.isclose(found, wanted, rel_tol=TOLERANCE)


def _is_none(pair: _Pair) -> bool:
    return pair.value == pair.other == 0.0


RULES: Final = (
    Rule("at|iteration|consumed samples|skipped samples|skipped-train-samples", EQUAL, _is_equal),
    Rule("batch-size|global batch size", EQUAL, _is_equal),
    Rule("number of (skipped|nan) iterations|loss-scale|loss scale|(decoupled-)?learning[- ]rate", EQUAL, _is_equal),
    Rule("num-zeros|num zeros", "sums that cancel are 0 by chance, and as many may differ", _is_near_zeros),
    Rule(r"lm loss( validation| value)?|lm loss (validation ppl|PPL)|grad[- ]norm|params[- ]norm", NEAR, _is_near),
    Rule(r"(load_balancing|seq_load_balancing|global_load_balancing|z)_loss|moe/\w+_layer_\d+", NEAR, _is_near),
    Rule(r"mtp_\d+( loss|(_cumulative)?_acceptance_rate)", NEAR, _is_near),
    Rule("world-size", "the ranks of this run", _is_world),
    Rule("throughput", "times ranks and iteration time: the same operations", _is_throughput),
    Rule(r"throughput per GPU \(TFLOP/s/GPU\)", "depends on the machine; TensorBoard's is compared", _is_throughput),
    Rule(r"[\w-]+-time", "depends on the machine; the same timers run, and are above 0", _is_time),
    Rule(r"elapsed time per iteration \(ms\)", "depends on the machine", _is_printed_time),
    Rule("mem-.*", "torch counts no memory of CPUs", _is_none),
    Rule(r"iter-energy/gpu|power/gpu|(energy|power) per GPU .*", "NVML measures GPUs", _is_none),
)  # fmt: skip


def rule_of(name: str) -> Rule:
    """Give the first rule for a name."""
    rule = next((rule for rule in RULES if re.fullmatch(rule.names, name)), None)
    assert rule is not None, f"{name!r} is logged, and no rule says how it is compared"
    return rule


def _check_resources(ours: Logged, theirs: Logged) -> None:
    """Check what depends on the machine or on how the model is cut."""
    tables = (
        [{name for name in table if not _MESSAGES.fullmatch(name)} for table in log.timers] for log in (ours, theirs)
    )
    assert len({str([sorted(names) for names in table]) for table in tables}) == 1
    for table in ours.timers:
        assert all(0.0 <= low <= high < 300e3 for low, high in table.values()), table
    for line in ours.memory:
        assert line["allocated"] <= line["max allocated"] <= line["reserved"], line
    # Every weight of a layer is on some rank; norms and some biases are on each rank of their stage. Experts may be on
    # ranks of other replicas, which print nothing.
    has_experts = any(name.startswith("moe/") for name in ours.scalars)
    assert has_experts or sum(theirs.parameters) <= sum(ours.parameters) <= 1.1 * sum(theirs.parameters)
    assert ours.progress == [(gpus and str(ours.num_ranks), *rest) for gpus, *rest in theirs.progress]
