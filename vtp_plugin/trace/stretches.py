"""What ranks record of a step: causes, stretches of time, and the files that hold them.

The files of a trace: one for each rank, one JSON object a line, as a run writes them and ``trace`` reads them.

The first line says whose file it is. Others hold a reading of the clocks, a plan (in the file of rank 0), or a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.cost.costs import Costs, format_costs, parse_costs
from vtp_plugin.plan.schedule.order.actions import Schedule, format_actions, parse_actions
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.util.text import TextEnum, said_of_attributes
from vtp_plugin.util.typed_json import MAX_INDEX_BYTES, parse_json, read_text


class Cause(TextEnum):
    """What a stretch of a rank's time is spent on; the value is the name for people and in files.

    Ranks record the first ones. The last three are found by comparing all ranks: a wait, or a finish inside the stage,
    is ``BUBBLE`` until the other stage has sent, and ``MESSAGE`` after that.

    Attributes:
        FORWARD: a forward of one microbatch, with the collectives inside the stage that the model makes
        BACKWARD: a backward of one microbatch, likewise; of a split one the gradient of the input
        WEIGHTS: the gradients of weights of one microbatch, where backwards are split
        LOSS: the script's loss function; it waits for other replicas where it sums over them (0.12)
        BATCH: reading a batch, where the script times that
        PACK: a tensor is made ready to cross: gathered inside the stage, cut, made dense
        POST: a receive gets its memory and is handed to the backend
        SEND: messages are handed to the backend
        WAIT: for a message, or until one is sent
        FINISH: a tensor that has come is completed inside the stage
        GRADIENTS: gradients are summed over replicas and tied weights, after the last backward
        OPTIMIZER: the optimizer's step with the norm of the gradients, for which all ranks wait, and what Megatron does
            around it: all from the end of the gradients to the log or the next step
        LOG: Megatron's line of the log, for which ranks wait, too
        PLAN: an order is planned, links are measured, ranks compare real times with planned ones
        SAVE: a checkpoint is saved
        EVALUATE: an evaluation
        TRACE: the trace itself is written
        MESSAGE: waits after the other stage has sent, until all is there
        BUBBLE: waits before the other stage has sent
        OTHER: what nothing was noted of
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    LOSS = "loss"
    BATCH = "batch"
    PACK = "pack"
    POST = "post"
    SEND = "send"
    WAIT = "wait"
    FINISH = "finish"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    LOG = "log"
    PLAN = "plan"
    SAVE = "save"
    EVALUATE = "evaluate"
    TRACE = "trace"
    MESSAGE = "message"
    BUBBLE = "bubble"
    OTHER = "other"


COMPUTES = (Cause.FORWARD, Cause.BACKWARD, Cause.WEIGHTS)
"""What an order of computes is made of."""

MEANINGS: Mapping[Cause, str] = {Cause[name]: text for name, text in said_of_attributes(Cause).items()}
"""What each cause means, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A piece of a rank's time with one cause.

    Stretches may be nested: the time of the inner one does not count for the outer one.

    Attributes:
        cause: what the time is spent on.
        name: action of a forward or backward, where the rank knows it; boundary, direction and microbatch of what
            crosses, in the same words on both sides.
        start_s: second at which it begins.
        end_s: second at which it ends.
        num_bytes: in a run of several sites, bytes of the messages that a send or a post hands to the backend; else 0.
    """

    cause: Cause
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0

    @property
    def length_s(self) -> float:
        """Seconds that it takes."""
        return self.end_s - self.start_s


_FORMAT = 1
_DIGITS = 7  # of seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The rank and the run that a file belongs to.

    Attributes:
        run: name of the run, the same in all its files.
        rank: rank that wrote the file.
        world_size: number of ranks of the run.
        stage: stage of the rank.
        worker: worker of the rank in the schedules.
        site: site of the rank; empty where all ranks are at one.
        network: digest that tells network namespaces apart; empty where all ranks are at one site.
    """

    run: str
    rank: int
    world_size: int
    stage: int
    worker: int
    site: str = ""
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank: from the start of its first forward to the start of the next step's.

    Attributes:
        number: number of the training step, from 1 on in the process.
        plan: digest of the step's schedule with its costs.
        start_s: second at which it begins.
        end_s: second at which it ends.
        stretches: stretches that were recorded, in the order of their ends.
        num_resent: TCP segments that the rank's network namespace sent again in the step; None where nobody counts.
    """

    number: int
    plan: str
    start_s: float
    end_s: float
    stretches: tuple[Stretch, ...]
    num_resent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a step.

    Attributes:
        schedule: the lowered schedule.
        costs: costs that it was planned for, in ms; None where it was planned without any.
    """

    schedule: Schedule
    costs: Costs | None


@dataclass(kw_only=True)
class RankFile:
    """The contents of one rank's file.

    Attributes:
        owner: the rank and the run that it belongs to.
        clocks: first and last reading of the clock: the time by the rank's clock, what is to be added, and its error.
        plans: the plans by their digests.
        steps: the steps in order.
    """

    owner: Owner
    clocks: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    steps: list[RankStep] = field(default_factory=list[RankStep])


def trace_path(folder: str | Path, rank: int) -> Path:
    """Return the path of one rank's file.

    >>> str(trace_path("logs/trace", 3))
    'logs/trace/rank3.jsonl'
    """
    return Path(folder) / f"rank{rank}.jsonl"


def owner_line(owner: Owner) -> dict[str, object]:
    """Make the line that says which rank and run the file belongs to."""
    return {"vtp_trace": _FORMAT, **{name: value for name, value in asdict(owner).items() if value != ""}}


def plan_line(digest: str, plan: Plan) -> dict[str, object]:
    """Make the line of a plan."""
    schedule, placement = plan.schedule, plan.schedule.placement
    return {
        "plan": digest,
        "name": schedule.name,
        "stages": placement.stages,
        "num_replicas": placement.num_replicas,
        "successors": placement.successors,
        "joint": placement.joint,
        "num_microbatches": schedule.num_microbatches,
        "orders": [format_actions(order) for order in schedule.orders],
        "costs": None if plan.costs is None else format_costs(plan.costs),
    }


def step_line(step: RankStep) -> dict[str, object]:
    """Make the line of what a rank did in a step."""
    return {
        "step": step.number,
        "plan": step.plan,
        "start_s": round(step.start_s, _DIGITS),
        "end_s": round(step.end_s, _DIGITS),
        "done": [_done(stretch) for stretch in step.stretches],
        **({} if step.num_resent is None else {"num_resent": step.num_resent}),
    }


def _done(one: Stretch) -> tuple[object, ...]:
    counted = (one.num_bytes,) if one.num_bytes else ()
    return (one.cause, one.name, round(one.start_s, _DIGITS), round(one.end_s, _DIGITS), *counted)


def read_step(entry: Mapping[str, Any]) -> RankStep:
    """Read a line of :func:`step_line`."""
    return RankStep(
        number=int(entry["step"]),
        plan=entry["plan"],
        start_s=float(entry["start_s"]),
        end_s=float(entry["end_s"]),
        stretches=tuple(_stretch(one) for one in entry["done"]),
        num_resent=None if entry.get("num_resent") is None else int(entry["num_resent"]),
    )


def clock_line(at_s: float, offset_s: float, error_s: float) -> dict[str, object]:
    """Make the line that says how far the rank's clock is behind that of rank 0."""
    return {"clock": [round(value, _DIGITS) for value in (at_s, offset_s, error_s)]}


def read_files(folder: Path) -> list[RankFile]:
    """Read the files of all ranks of a run, in the order of the ranks.

    Raises:
        ConfigError: a file is missing, broken, of another format or of another run.
    """
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder} holds no trace (rank0.jsonl, ...); give the folder of --vtp-trace")
    files = {file.owner.rank: file for file in map(_read, paths)}
    first = files.get(0, next(iter(files.values()))).owner
    for rank, file in files.items():
        if file.owner.run != first.run:
            raise ConfigError(
                f"{trace_path(folder, rank)} is of another run than {trace_path(folder, first.rank).name}; trace each "
                "run into a folder of its own"
            )
    missing = [rank for rank in range(first.world_size) if rank not in files]
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise ConfigError(
            f"{folder} lacks the files of rank {shown} of {first.world_size}; copy those of all machines into one "
            "folder"
        )
    return [files[rank] for rank in range(first.world_size)]


def _read(path: Path) -> RankFile:
    try:
        entries = _entries(path)
        _, head = next(entries, (1, None))
        if head is None:
            raise ConfigError(
                f"{path} is empty: the run did not reach the first step of --vtp-trace-steps; name another"
            )
        if head.pop("vtp_trace", None) != _FORMAT:
            raise ConfigError(f"{path}:1: this is no trace of format {_FORMAT}; use the vtp_plugin that wrote it")
        file = RankFile(owner=Owner(**head))
        for number, entry in entries:
            try:
                _take(file, entry)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{number}: {error}: this line is no part of a trace; remove it") from None
        return file
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; make it readable") from None
    except TypeError as error:
        raise ConfigError(f"{path}:1: {error}: this is no first line of a trace; trace the run again") from None


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every line with its number; the last one of a run that was killed may be cut off, and is left out."""
    lines = read_text(path, MAX_INDEX_BYTES).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
        except json.JSONDecodeError as error:
            if number == len(lines) > 1 and not line.endswith("\n"):
                return
            raise ConfigError(f"{path}:{number}:{error.colno}: {error.msg}; remove the line") from None
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}; remove the line") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}:{number}: this line is no JSON object; remove it")
        yield number, entry


def _take(file: RankFile, entry: Mapping[str, Any]) -> None:
    """Add a line's entry to the file's contents."""
    if "clock" in entry:
        at_s, offset_s, error_s = map(float, entry["clock"])
        file.clocks.append((at_s, offset_s, error_s))
    elif "step" in entry:
        file.steps.append(read_step(entry))
    else:
        file.plans[entry["plan"]] = _plan(entry)


def _stretch(values: Sequence[Any]) -> Stretch:
    cause, name, start_s, end_s, *counted = values
    num_bytes = int(counted[0]) if counted else 0
    return Stretch(cause=Cause(cause), name=name, start_s=float(start_s), end_s=float(end_s), num_bytes=num_bytes)


def _plan(entry: Mapping[str, Any]) -> Plan:
    placement = Placement(
        stages=tuple(entry["stages"]),
        num_replicas=tuple(entry["num_replicas"]),
        successors=tuple(entry["successors"]),
        joint=tuple((forward, backward) for forward, backward in entry["joint"]),
    )
    schedule = Schedule(
        name=entry["name"],
        placement=placement,
        num_microbatches=entry["num_microbatches"],
        orders=tuple(map(parse_actions, entry["orders"])),
    )
    words = entry["costs"]
    return Plan(schedule=schedule, costs=None if words is None else parse_costs(words.split(), placement))
