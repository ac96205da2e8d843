"""Split backwards: the gradients of weights, for which nobody waits, are computed where a worker would wait.

The idea is that of zero bubble (ZB-H1, arXiv 2401.10241). There it is a rule for equal stages. Here any order of
forwards and backwards is taken, under any costs, and the places of the gradients of weights are chosen by walking
through the step as it would happen. Each worker keeps its order of forwards and of gradients of inputs, or takes what
is there first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Actions,
    Op,
    Schedule,
    channel_of,
    crossing_output,
    inputs_of,
    joint_with,
    peer_of,
    receives_for,
    sends_after,
)
from vtp_plugin.plan.schedule.order.placement import Placement


def fill_waits(
    schedule: Schedule, costs: Costs, kept: Sequence[int], *, patience: float, keeps_order: bool = True
) -> tuple[Schedule, float]:
    """Compute the gradients of weights where a worker waits, or where it may keep no more microbatches.

    Args:
        schedule: Compute only, with whole backwards, and free of deadlocks.
        costs: Costs of its placement.
        kept: Most microbatches on each worker from the first forward to the last gradient of weights. A worker that
            may keep no more than the schedule keeps without a split computes each such gradient before the next
            forward.
        patience: Share of such a gradient's time by which it may end after the next compute could begin, from 0 (it
            is computed only if the wait is long enough) to 1 (whenever there is a wait).
        keeps_order: Whether each worker keeps its order of forwards and gradients of inputs. If not, it takes what is
            there first, gradients before forwards; then its stage must hold one virtual stage.

    Returns:
        The order, and the time of a step, at least that of :func:`~vtp_plugin.plan.schedule.cost.simulator.simulate`.

    Raises:
        PlanError: The workers wait for each other: the schedule breaks the limits, or replicas that wait for each other
            do not find together if no order is kept.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> schedule = one_f_one_b(2, 3)
    >>> filled, time = fill_waits(schedule, uniform_costs(schedule.placement), (2, 2), patience=1.0)
    >>> print(filled.describe())
    stage 0: 0F0 0F1 0B0 0F2 0B1 0B2
    stage 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    >>> time
    10.0
    """
    walk = _Walk(schedule, costs, kept, patience, keeps_order=keeps_order)
    orders = tuple(_join(schedule.placement, order) for order in walk.orders())
    return replace(schedule, name=f"{schedule.name}-filled", orders=orders), walk.makespan


def time_of_whole(schedule: Schedule, costs: Costs) -> float:
    """Return the time of a step with whole backwards, as :func:`fill_waits` does, without proving anything.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> time_of_whole(one_f_one_b(2, 3), uniform_costs(one_f_one_b(2, 3).placement))
    12.0
    """
    unlimited = (schedule.num_microbatches,) * len(schedule.orders)
    walk = _Walk(schedule, costs, unlimited, 0.0, keeps_order=True, is_split=False)
    walk.orders()
    return walk.makespan


def _join(placement: Placement, order: Actions) -> Actions:
    """Make those backwards whole again whose gradients of weights come before anything that another worker waits for.

    This delays only gradients of the input of the first layers, for which nobody waits. By the costs the step takes no
    longer, but a split backward keeps more, and takes a little more time than a whole one.
    """
    joined: list[Action] = []
    num_unawaited = 0  # of the last computes
    for action in order:
        if action.op is Op.W:
            of_input = replace(action, op=Op.I)
            if of_input in joined[len(joined) - num_unawaited :]:
                joined[joined.index(of_input)] = of_input.whole
                continue
        joined.append(action)
        is_unawaited = action.op is Op.I and not sends_after(placement, action) and not joint_with(placement, action)
        num_unawaited = num_unawaited + 1 if is_unawaited else 0
    return tuple(joined)


def _parts(backward: Action) -> tuple[Action, Action]:
    return replace(backward, op=Op.I), replace(backward, op=Op.W)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What a worker has done and still has to do.

    Attributes:
        queues: forwards and backwards that are not done; the first of each queue can be next, the most urgent one is
            that of the first queue.
        done: what it has done.
        waiting: gradients of weights that could be computed.
        live: how many computes each of its microbatches still has, for those that have begun.
        parked_at: since when it waits for something that may come at any time; None if it does not.
    """

    queues: list[deque[Action]]
    done: list[Action]
    waiting: deque[Action]
    live: Counter[int]
    parked_at: float | None = None


def _queues(order: Actions, *, keeps_order: bool) -> list[deque[Action]]:
    """Queue an order as it is, or backwards and forwards by themselves."""
    if keeps_order:
        return [deque(order)]
    return [deque(action for action in order if action.op is op) for op in (Op.B, Op.F)]


class _Walk:
    """A step as it happens: the worker whose time is the earliest goes on."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        kept: Sequence[int],
        patience: float,
        *,
        keeps_order: bool,
        is_split: bool = True,
    ) -> None:
        self.placement = schedule.placement
        self.costs = costs
        self.kept = kept
        self.patience = patience
        self.workers = [
            _Worker(queues=_queues(order, keeps_order=keeps_order), done=[], waiting=deque(), live=Counter())
            for order in schedule.orders
        ]
        # How many computes a microbatch has on a worker; a backward that is split counts as two.
        self.num_computes = [
            Counter(action.microbatch for action in order for _ in range(1 + (is_split and action.op is Op.B)))
            for order in schedule.orders
        ]
        self.is_split = is_split
        self.durations = {Op.F: costs.forward, Op.B: costs.backward, Op.I: costs.of_input, Op.W: costs.of_weights}
        self.makespan = 0.0
        # When a compute ends; when a message arrives, by its receive.
        self.ends: dict[Action, float] = {}
        self.arrivals: dict[Action, float] = {}
        self.channel_free_at: dict[ChannelId, float] = {}
        self.comings: dict[Action, float] = {}
        self.heap: list[tuple[float, int]] = [(0.0, worker) for worker in range(len(self.workers))]

    def orders(self) -> tuple[Actions, ...]:
        """Walk to the end, and return what every worker has done, in its order."""
        while self.heap:
            now, number = heappop(self.heap)
            self.go_on(now, number)
        if any(any(worker.queues) or worker.waiting for worker in self.workers):
            raise PlanError("deadlock: the orders wait for each other")
        return tuple(tuple(worker.done) for worker in self.workers)

    def go_on(self, now: float, number: int) -> None:
        """Let a worker begin its next compute, or wait."""
        worker = self.workers[number]
        worker.parked_at = None
        heads = [queue[0] for queue in worker.queues if queue]
        is_full = len(worker.live) >= self.kept[number]
        allowed = [head for head in heads if not is_full or head.microbatch in worker.live]
        times = [(self.ready_at(head), head) for head in allowed]
        for ready, head in times:
            if ready is not None and ready <= now:
                self.begin(now, head)
                return
        ready = min((time for time, _ in times if time is not None), default=None)
        if worker.waiting and (len(allowed) < len(heads) or self.is_worth_it(now, ready, worker.waiting[0])):
            self.note(now, number, worker.waiting.popleft())
        elif ready is None:
            worker.parked_at = now
        else:
            heappush(self.heap, (ready, number))

    def is_worth_it(self, now: float, ready: float | None, gradient: Action) -> bool:
        """Tell whether a gradient of weights is to be computed before what is ready only later."""
        duration = self.costs.of_weights[gradient.vstage]
        return ready is None or now + (1 - self.patience) * duration <= ready

    def ready_at(self, action: Action) -> float | None:
        """Return when all that a compute takes is there; None if that is not known yet."""
        stages = self.placement.stages
        near = (one for one in inputs_of(self.placement, action) if stages[one.vstage] == stages[action.vstage])
        times = [
            *map(self.ends.get, near),
            *map(self.arrivals.get, receives_for(self.placement, action)),
        ]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def begin(self, now: float, action: Action) -> None:
        """Begin a worker's next compute; of a joint one, all workers' once the last of them has come."""
        together = (action, *joint_with(self.placement, action))
        self.comings[action] = now
        if all(one in self.comings for one in together):
            for one in together:
                self.compute(now, one)

    def compute(self, now: float, action: Action) -> None:
        """Run a forward or the gradient of an input, and send its result."""
        number = self.placement.worker_of(action.vstage, action.microbatch)
        worker = self.workers[number]
        next(queue for queue in worker.queues if queue and queue[0] == action).popleft()
        if action.op is Op.B and self.is_split:
            action, gradient = _parts(action)
            worker.waiting.append(gradient)
        end = self.note(now, number, action)
        self.ends[action.whole] = end
        for send in sends_after(self.placement, action):
            link, channel = crossing_output(self.placement, send), channel_of(self.placement, send)
            begin = max(end, self.channel_free_at.get(channel, 0.0))
            self.channel_free_at[channel] = left = begin + self.costs.transfer_time(link)
            receive = peer_of(self.placement, send)
            self.arrivals[receive] = left + self.costs.latency[link]
            self.wake(self.placement.worker_of(receive.vstage, receive.microbatch))

    def note(self, now: float, number: int, action: Action) -> float:
        """Note a compute that begins, and return when it ends."""
        worker = self.workers[number]
        worker.done.append(action)
        if action.microbatch not in worker.live:
            worker.live[action.microbatch] = self.num_computes[number][action.microbatch]
        worker.live[action.microbatch] -= 1
        if not worker.live[action.microbatch]:
            del worker.live[action.microbatch]
        end = now + self.durations[action.op][action.vstage]
        self.makespan = max(self.makespan, end)
        heappush(self.heap, (end, number))
        return end

    def wake(self, number: int) -> None:
        """Let a parked worker look again at what it waits for."""
        worker = self.workers[number]
        if worker.parked_at is not None:
            times = [self.ready_at(queue[0]) for queue in worker.queues if queue]
            ready = min((time for time in times if time is not None), default=None)
            if ready is not None:
                heappush(self.heap, (max(ready, worker.parked_at), number))
                worker.parked_at = None
