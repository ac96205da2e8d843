"""What a stage does in one step: actions and their text form."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.text_enum import TextEnum


class Op(TextEnum):
    """Kinds of actions; :mod:`vtp_plugin.plan.schedule.order.add_communication` says what each one promises.

    A backward is whole, `B`, or split in two: `I` gives the gradient of the input, for which the stage before waits,
    and `W`, later, the gradients of the weights, for which nobody waits before the step ends. The letters are those of
    torch's pipeline schedules.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's name
    W = "W"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_RECV_B = "WAIT_RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"

    @cached_property
    def is_compute(self) -> bool:
        """Whether the action computes; all others communicate."""
        return self in (Op.F, Op.B, Op.I, Op.W)

    @cached_property
    def is_backward(self) -> bool:
        """Whether the action belongs to the backward pass, and so is about a gradient, not an activation."""
        return self in (Op.I, Op.W) or self.value.endswith("B")


_TEXT = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """One thing that a stage does for one microbatch.

    Attributes:
        op: What is done.
        vstage: Virtual stage that does it: `1SEND_F3` sends the output of virtual stage 1 to virtual stage 2, where
            `2RECV_F3` receives it; `1SEND_B3` sends the gradient of virtual stage 1's input to virtual stage 0.
        microbatch: Number of the microbatch in the step, from 0. A stage that serves k replicas in turn (unequal data
            parallelism) counts the microbatches of all replicas: number i belongs to replica i mod k.
        source: Virtual stage that the input comes from, for a message at a virtual stage with several inputs:
            `2RECV_F3:0` receives what virtual stage 0 sends, `2SEND_B3:0` sends its gradient back. -1 elsewhere.

    >>> str(Action(op=Op.SEND_F, vstage=1, microbatch=3)), str(Action(op=Op.RECV_F, vstage=2, microbatch=3, source=0))
    ('1SEND_F3', '2RECV_F3:0')
    """

    op: Op
    vstage: int
    microbatch: int
    source: int = -1

    @property
    def whole(self) -> Action:
        """What this compute is to those who wait for its result: an `I` gives them the same as a whole `B`.

        >>> str(parse_action("1I3").whole), str(parse_action("1W3").whole)
        ('1B3', '1W3')
        """
        return replace(self, op=Op.B) if self.op is Op.I else self

    def __str__(self) -> str:
        return f"{self.vstage}{self.op}{self.microbatch}" + ("" if self.source < 0 else f":{self.source}")


def parse_action(text: str) -> Action:
    """Read the text form of an action.

    Raises:
        ConfigError: The text is not of this form.

    >>> parse_action("0RECV_B2")
    Action(op=<Op.RECV_B: 'RECV_B'>, vstage=0, microbatch=2, source=-1)
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in Op.__members__:
        raise ConfigError(f"{text!r} is no action: write virtual stage, operation, microbatch, such as 2F0 or 1SEND_B3")
    source = -1 if match[4] is None else int(match[4])
    return Action(op=Op(match[2]), vstage=int(match[1]), microbatch=int(match[3]), source=source)


def format_actions(actions: tuple[Action, ...]) -> str:
    """Write actions in one line; inverse of :func:`parse_actions`.

    >>> format_actions(parse_actions("0F0 0F1 0B0"))
    '0F0 0F1 0B0'
    """
    return " ".join(str(action) for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read actions that are separated by white space."""
    return tuple(parse_action(word) for word in text.split())
