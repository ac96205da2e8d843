"""What a schedule must do, worked out from first principles and without the planner's inner loops."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from graphlib import TopologicalSorter

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, Schedule
from vtp_plugin.plan.schedule.order.placement import Placement

Node = tuple[str, int, int]  # "F", "B" (whole or the gradient of the input), or "W"; virtual stage, microbatch
COMPUTES = (Op.F, Op.B, Op.I, Op.W)


def inputs_of(node: Node, placement: Placement) -> list[Node]:
    """Return what a compute needs: the chain rule, written out."""
    kind, v, n = node
    if kind == "F":
        return [("F", before, n) for before, after in enumerate(placement.successors) if after == v]
    if kind == "W":
        return [("B", v, n)]
    return [("F", v, n)] + ([("B", placement.successors[v], n)] if v + 1 < placement.num_vstages else [])


def who(placement: Placement, vstage: int, microbatch: int) -> tuple[int, int]:
    """Return stage and replica that handle a microbatch on a virtual stage: replicas take turns."""
    stage = placement.stages[vstage]
    return stage, microbatch % placement.num_replicas[stage]


def workers(placement: Placement) -> list[tuple[int, int]]:
    """List stage and replica of every order of a schedule."""
    return [(stage, replica) for stage, num in enumerate(placement.num_replicas) for replica in range(num)]


def node_of(action: Action) -> Node:
    return "B" if action.op is Op.I else action.op.value, action.vstage, action.microbatch


def start_and_end(schedule: Schedule, costs: Costs) -> dict[Node, tuple[float, float]]:
    """Time every compute by the longest path through the graph of needs and of each worker's order.

    Links have latency only. Raises graphlib.CycleError on a deadlock, KeyError where a compute is missing.
    """
    stages = schedule.placement.stages
    before: dict[Node, list[Node]] = {}
    durations: dict[Node, float] = {}
    kinds = {Op.F: costs.forward, Op.B: costs.backward, Op.I: costs.of_input, Op.W: costs.of_weights}
    for worker, order in zip(workers(schedule.placement), schedule.orders, strict=True):
        computes = [node_of(action) for action in order if action.op in COMPUTES]
        durations |= {node_of(action): kinds[action.op][action.vstage] for action in order if action.op in COMPUTES}
        for i, node in enumerate(computes):
            assert node not in before, f"{node} comes twice"
            assert who(schedule.placement, *node[1:]) == worker, f"{node} stands on {worker}"
            before[node] = inputs_of(node, schedule.placement) + computes[max(0, i - 1) : i]
    times: dict[Node, tuple[float, float]] = {}
    for node in TopologicalSorter(before).static_order():
        start = 0.0
        for other in before[node]:
            low = min(other[1], node[1])
            far = other in inputs_of(node, schedule.placement) and stages[other[1]] != stages[node[1]]
            start = max(start, times[other][1] + (costs.latency[low] if far else 0.0))
        times[node] = (start, start + durations[node])
    return times


def makespan(schedule: Schedule, costs: Costs) -> float:
    return max(end for _, end in start_and_end(schedule, costs).values())


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Count the microbatches that have begun and not left a stage, compute by compute."""
    result: list[int] = []
    for order in schedule.orders:
        microbatches = [action.microbatch for action in order if action.op in COMPUTES]
        first = {n: microbatches.index(n) for n in microbatches}
        last = {n: len(microbatches) - 1 - microbatches[::-1].index(n) for n in microbatches}
        result.append(max(sum(first[n] <= i <= last[n] for n in first) for i in range(len(microbatches))))
    return tuple(result)


def kept(schedule: Schedule, worker: int) -> list[tuple[tuple[int, int], ...]]:
    """Look up, after every compute of a worker, what it keeps of each chunk: activations, and what waits."""
    order = [action for action in schedule.orders[worker] if action.op in COMPUTES]
    stage, _ = workers(schedule.placement)[worker]
    # Where each microbatch has its forward, its gradient of the input, and its gradients of weights.
    places: dict[int, dict[int, list[int]]] = {v: {} for v, own in enumerate(schedule.placement.stages) if own == stage}
    for i, action in enumerate(order):
        places[action.vstage].setdefault(action.microbatch, []).extend([i, i] if action.op is Op.B else [i])
    return [
        tuple(
            (sum(f <= i < b for f, b, _ in own.values()), sum(b <= i < w for _, b, w in own.values()))
            for own in places.values()
        )
        for i in range(len(order))
    ]


def most_kept(schedule: Schedule) -> tuple[int, ...]:
    """Count, by worker, the activations of all its chunks that it keeps at most, and what waits as such."""
    return tuple(max(sum(map(sum, now)) for now in kept(schedule, w)) for w in range(len(schedule.orders)))


def random_schedule(placement: Placement, num_microbatches: int, *, forward_only: bool, seed: int) -> Schedule:
    """Draw an order at random among all that respect the needs; microbatches may overtake each other."""
    rng = random.Random(seed)
    kinds = "F" if forward_only else "FB"
    nodes = [(k, v, n) for k in kinds for v in range(placement.num_vstages) for n in range(num_microbatches)]
    orders: dict[tuple[int, int], list[Action]] = {worker: [] for worker in workers(placement)}
    done: set[Node] = set()
    while len(done) < len(nodes):
        ready = [x for x in nodes if x not in done and set(inputs_of(x, placement)) <= done]
        kind, v, n = node = rng.choice(ready)
        done.add(node)
        orders[who(placement, v, n)].append(Action(op=Op(kind), vstage=v, microbatch=n))
    return Schedule(
        name="random",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(map(tuple, orders.values())),
        forward_only=forward_only,
    )


ChannelKey = tuple[tuple[int, int], tuple[int, int], str]  # worker that sends, worker that receives, "F" or "B"


class Machine:
    """Executes lowered lists with real messages: no tags, one queue per channel, sends that end with their receive."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        self.rng = random.Random(seed)
        self.lists = [deque(order) for order in schedule.orders]
        self.sent: dict[ChannelKey, list[Node]] = {}
        self.posted: dict[ChannelKey, int] = {}
        self.tickets: dict[tuple[str, Action], tuple[ChannelKey, int]] = {}
        self.tensors: list[set[Node]] = [set() for _ in self.lists]
        self.num_open: list[dict[str, int]] = [{"RECV": 0, "SEND": 0} for _ in self.lists]
        self.most_open_at_compute = [0] * len(self.lists)

    def run(self) -> None:
        """Run all lists to their end, one action of a random worker at a time."""
        while any(self.lists):
            able = [s for s, rest in enumerate(self.lists) if rest and self.can(rest[0])]
            assert able, f"deadlock before {[str(rest[0]) for rest in self.lists if rest]}"
            worker = self.rng.choice(able)
            self.do(worker, self.lists[worker].popleft())
        assert not any(sum(counts.values()) for counts in self.num_open), "something was never waited for"

    def can(self, action: Action) -> bool:
        if not action.op.startswith("WAIT"):
            return True
        channel, number = self.tickets[action.op.removeprefix("WAIT_")[:4], self.plain(action)]
        return number < len(self.sent.get(channel, [])) and number < self.posted.get(channel, 0)

    def plain(self, action: Action) -> Action:
        return Action(op=Op(action.op[-1]), vstage=action.vstage, microbatch=action.microbatch, source=action.source)

    def other(self, action: Action) -> int:
        """Return the virtual stage at the other end of a message: the next one, or one of those before."""
        placement, is_towards_end = self.schedule.placement, action.op[-1] == "F"
        if action.op.removeprefix("WAIT_").startswith("SEND") == is_towards_end:
            return placement.successors[action.vstage]
        before = [v for v, after in enumerate(placement.successors) if after == action.vstage]
        if len(before) == 1:
            assert action.source == -1, f"{action} names a source where there is one"
            return before[0]
        assert action.source in before, f"{action} comes from none of {before}"
        return action.source

    def do(self, worker: int, action: Action) -> None:
        placement = self.schedule.placement
        kind, v = action.op[-1], action.vstage
        place = who(placement, v, action.microbatch)
        assert place == workers(placement)[worker], f"{action} runs elsewhere"
        if action.op in COMPUTES:
            node = node_of(action)
            missing = set(inputs_of(node, placement)) - self.tensors[worker]
            assert not missing, f"{action} runs without {missing}"
            self.tensors[worker].add(node)
            self.most_open_at_compute[worker] = max(self.most_open_at_compute[worker], self.num_open[worker]["RECV"])
        elif action.op.startswith("SEND"):
            channel = (place, who(placement, self.other(action), action.microbatch), kind)
            self.tickets["SEND", self.plain(action)] = (channel, len(self.sent.setdefault(channel, [])))
            payload = (kind, v, action.microbatch)
            assert payload in self.tensors[worker], f"{action} before its compute"
            self.sent[channel].append(payload)
            self.num_open[worker]["SEND"] += 1
        elif action.op.startswith("RECV"):
            channel = (who(placement, self.other(action), action.microbatch), place, kind)
            self.tickets["RECV", self.plain(action)] = (channel, self.posted.get(channel, 0))
            self.posted[channel] = self.posted.get(channel, 0) + 1
            self.num_open[worker]["RECV"] += 1
        else:
            way = action.op.removeprefix("WAIT_")[:4]
            channel, number = self.tickets.pop((way, self.plain(action)))
            self.num_open[worker][way] -= 1
            if way == "RECV":
                payload = self.sent[channel][number]
                assert payload == (kind, self.other(action), action.microbatch), f"{action} got {payload}"
                self.tensors[worker].add(payload)


def reference_edge(text: str, num_stages: int) -> list[str]:
    """Translate a row of the reference's edge or cloud (`FS1 FE1 BS1 BE1`, microbatches from 1) into our text form."""
    vstage = {"FS": 0, "FE": num_stages, "BS": num_stages, "BE": 0}
    return [f"{vstage[word[:2]]}{word[0]}{int(word[2:]) - 1}" for word in text.replace("|", " ").split()]


def reference_cloud(text: str, stage: int) -> list[str]:
    return [f"{stage}{word[0]}{int(word[1:]) - 1}" for word in text.replace("|", " ").split()]


def words(order: Sequence[Action]) -> list[str]:
    return [str(action) for action in order]


def peak_posted(order: Actions) -> tuple[int, int]:
    """Return the most receives, and the most sends, that are posted and not waited for at a time."""
    peaks = {"RECV": 0, "SEND": 0}
    posted = {"RECV": 0, "SEND": 0}
    for action in order:
        if not action.op.is_compute:
            kind = action.op.removeprefix("WAIT_")[:4]
            posted[kind] += -1 if action.op.startswith("WAIT_") else 1
            peaks[kind] = max(peaks[kind], posted[kind])
    return peaks["RECV"], peaks["SEND"]
