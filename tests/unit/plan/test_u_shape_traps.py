"""The table of what went wrong elsewhere names tests that exist; and those of its tests that need no process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtp_plugin.plan.schedule.cost.costs import u_costs
from vtp_plugin.plan.schedule.make.u_shape import plan_u_shape, reference_u_shape
from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule, started_by, wait_for
from vtp_plugin.plan.schedule.order.add_communication import lower

ROOT = Path(__file__).resolve().parents[3]
TABLE = (ROOT / "docs/development/u-shape-traps.md").read_text()
TRAPS = [
    f"{group}{i}"
    for group, last in {"S": 6, "A": 14, "B": 9, "C": 8, "D": 8, "K": 5}.items()
    for i in range(1, last + 1)
]
ROW = re.compile(r"^\| (\w\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
OTHER_ROW = re.compile(r"see \w\d")


def test_every_trap_has_a_row() -> None:
    assert [trap for trap, _, _ in ROW.findall(TABLE)] == TRAPS


@pytest.mark.parametrize(("trap", "shown_by"), [(trap, shown_by) for trap, _, shown_by in ROW.findall(TABLE)])
def test_rows_name_tests_that_exist(trap: str, shown_by: str) -> None:
    if OTHER_ROW.fullmatch(shown_by):
        return
    names = re.findall(r"`([^`]+)`", shown_by)
    assert names and ", ".join(f"`{name}`" for name in names) == shown_by
    for name in names:
        file, function = name.split("::")
        assert re.search(rf"^ *def {function}\(", (ROOT / file).read_text(), re.MULTILINE), f"{trap}: {name}"


def lowered_orders() -> list[Schedule]:
    """The chosen orders, the reference's, and those of evaluation."""
    schedules = []
    for num_stages in (2, 3, 4, 5):
        for num_microbatches in (1, 2, 5, 8):
            schedules.append(reference_u_shape(num_stages, num_microbatches))
            for forward_only in (False, True):
                costs = u_costs(num_stages, latency=1)
                plan = plan_u_shape(num_stages, num_microbatches, costs, forward_only=forward_only)
                schedules.append(plan.schedule)
    return [lower(schedule) for schedule in schedules]


ORDERS = [order for schedule in lowered_orders() for order in schedule.orders]


def computes_between(order: tuple[Action, ...], first: Action, second: Action) -> int:
    return sum(action.op.is_compute for action in order[order.index(first) : order.index(second)])


def test_every_receive_is_posted_before_the_work_in_front_of_it() -> None:
    num_receives = 0
    for order in ORDERS:
        first = next(i for i, action in enumerate(order) if action.op.is_compute)
        for action in order[first:]:
            if action.op in (Op.WAIT_RECV_F, Op.WAIT_RECV_B):
                num_receives += 1
                assert computes_between(order, started_by(action), action) >= 1, (str(action), order)
    assert num_receives > 500


def test_no_send_is_waited_for_before_it_is_answered() -> None:
    """Between a send and its wait something has come in that proves it arrived, or the work is done."""
    num_sends = 0
    for order in ORDERS:
        last = max(i for i, action in enumerate(order) if action.op.is_compute)
        for i, action in enumerate(order[:last]):
            if action.op in (Op.SEND_F, Op.SEND_B) and (end := order.index(wait_for(action))) < last:
                num_sends += 1
                assert any(other.op in (Op.WAIT_RECV_F, Op.WAIT_RECV_B) for other in order[i:end]), (str(action), order)
    assert num_sends > 500
