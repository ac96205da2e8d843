"""What a collective does that spans replicas, from first principles: calls on a communicator match by their number.

It shares no code with the proof: no order of computes is looked at as a whole, workers only run their lists.
"""

from __future__ import annotations

from collections import defaultdict

from tests.expected.schedule_oracle import Machine, who
from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule

Communicator = tuple[int, int, int]  # stage, its size, its number among those of the stage


class JointMachine(Machine):
    """Executes lowered lists; a joint compute calls one collective, and returns when all members have called it."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        super().__init__(schedule, seed)
        # By communicator and member, what was called: forward or backward, and of which virtual stage.
        self.calls: dict[Communicator, dict[int, list[tuple[Op, int]]]] = defaultdict(lambda: defaultdict(list))
        self.inside: dict[Action, int] = {}

    def communicator(self, action: Action) -> Communicator:
        """Return who calls the collective of a compute; a communicator of one member needs none."""
        stage, replica = who(self.schedule.placement, action.vstage, action.microbatch)
        size = self.schedule.placement.joint[action.vstage][action.op is Op.B]
        return stage, size, replica // size

    def can(self, action: Action) -> bool:
        if action not in self.inside:
            return super().can(action)
        calls = self.calls[self.communicator(action)]
        return len(calls) == self.communicator(action)[1] and all(
            len(mine) > self.inside[action] for mine in calls.values()
        )

    def do(self, worker: int, action: Action) -> None:
        if action.op not in (Op.F, Op.B) or self.communicator(action)[1] == 1 or action in self.inside:
            self.inside.pop(action, None)
            super().do(worker, action)
            return
        calls = self.calls[self.communicator(action)]
        mine = calls[who(self.schedule.placement, action.vstage, action.microbatch)[1]]
        self.inside[action] = number = len(mine)
        mine.append((action.op, action.vstage))
        kinds = {theirs[number] for theirs in calls.values() if len(theirs) > number}
        assert len(kinds) == 1, f"deadlock: call {number} is {kinds}: neither is answered"
        self.lists[worker].appendleft(action)


def runs_to_its_end(schedule: Schedule, seed: int) -> bool:
    """Tell whether lowered lists reach their ends."""
    try:
        JointMachine(schedule, seed).run()
    except AssertionError as error:
        assert "deadlock" in str(error), error
        return False
    return True
