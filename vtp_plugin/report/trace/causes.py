"""The causes that a rank's time is spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.util.text_enum import TextEnum


class Cause(TextEnum):
    """What a stretch of a rank's time is spent on; the value is the name for people and in files.

    Ranks record the first ones. The last three are found by comparing all ranks: a wait, or a finish inside the stage,
    is ``BUBBLE`` until the other stage has sent, and ``MESSAGE`` after that.
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

MEANINGS: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.FORWARD: "a forward of one microbatch, with the collectives inside the stage that the model makes",
        Cause.BACKWARD: "a backward of one microbatch, likewise; of a split one the gradient of the input",
        Cause.WEIGHTS: "the gradients of weights of one microbatch, where backwards are split",
        Cause.LOSS: "the script's loss function; it waits for other replicas where it sums over them (0.12)",
        Cause.BATCH: "reading a batch, where the script times that",
        Cause.PACK: "a tensor is made ready to cross: gathered inside the stage, cut, made dense",
        Cause.POST: "a receive gets its memory and is handed to the backend",
        Cause.SEND: "messages are handed to the backend",
        Cause.WAIT: "for a message, or until one is sent",
        Cause.FINISH: "a tensor that has come is completed inside the stage",
        Cause.GRADIENTS: "gradients are summed over replicas and tied weights, after the last backward",
        Cause.OPTIMIZER: "the optimizer's step with the norm of the gradients, for which all ranks wait, and what "
        "Megatron does around it: all from the end of the gradients to the log or the next step",
        Cause.LOG: "Megatron's line of the log, for which ranks wait, too",
        Cause.PLAN: "an order is planned, links are measured, ranks compare real times with planned ones",
        Cause.SAVE: "a checkpoint is saved",
        Cause.EVALUATE: "an evaluation",
        Cause.TRACE: "the trace itself is written",
        Cause.MESSAGE: "waits after the other stage has sent, until all is there",
        Cause.BUBBLE: "waits before the other stage has sent",
        Cause.OTHER: "what nothing was noted of",
    }
)
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
