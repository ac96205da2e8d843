"""What backends promise about order, as data. Sources: ProcessGroupGloo, ProcessGroupNCCL (torch), ProcessGroupHCCL
(torch_npu) and the HCCL guide.

All device models are on the strict side: a wait blocks the host (it does as soon as somebody reads a number), a message
is never buffered, and every communicator is created at its first use. So what passes here passes there, also with
eager initialisation, but not the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.ordering.trace import Event

# Which one carries an operation; its operations run one after another, in the order of issue.
Communicator = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One set of rules.

    Attributes:
        name: shown in front of a problem.
        buffers_sends: a send is complete when it is posted; otherwise only together with its receive.
        communicators: "none": operations of a group do not hold each other up. "pair": messages of two ranks of a group
            run on a communicator of their own, both directions in one queue; collectives, and messages that are given
            in one call, run on the communicator of the whole group. "group": all run on that one. A communicator is
            created by its first operation, which blocks the host until each of its ranks has come to its own first one.
        has_one_queue: a device runs the operations of all its communicators one after another, in the order of issue.
        has_unique_peers: a batch has at most one send to, and one receive from, each rank.
    """

    name: str
    buffers_sends: bool = False
    communicators: Literal["none", "pair", "group"] = "none"
    has_one_queue: bool = False
    has_unique_peers: bool = False

    @property
    def has_communicators(self) -> bool:
        """Whether operations queue up."""
        return self.communicators != "none"

    def communicator(self, event: Event) -> Communicator:
        """Name the communicator of an operation, with its ranks.

        >>> from tests.ordering.trace import Group, Kind
        >>> pipeline = Group(name="pp", ranks=(0, 2, 4))
        >>> send = Event(rank=4, position=0, kind=Kind.SEND, peer=2, group=pipeline)
        >>> NCCL.communicator(send), HCCL_SHARED.communicator(send)
        (('pp (pair)', (2, 4)), ('pp', (0, 2, 4)))
        """
        assert event.group is not None
        if self.communicators == "pair" and event.is_message and event.batch is None:
            # The mark tells a pair's communicator from the main one of a group that has only this pair.
            source, destination = sorted(event.ends)
            return f"{event.group.name} {_PAIR}", (source, destination)
        return event.group.name, event.group.ranks


_PAIR = "(pair)"

# What torch.distributed promises: a send needs nobody. The weakest demand.
BUFFERED = Model(name="buffered", buffers_sends=True)
# gloo as measured: waiting for a send returns when the receive is there.
RENDEZVOUS = Model(name="rendezvous")
# Lazy initialisation, which is what Megatron uses.
NCCL = Model(name="NCCL", communicators="pair")
# P2P_HCCL_BUFFSIZE > 0, the default of torch_npu from 7.1 on. Lists of HcclBatchSendRecv are limited.
HCCL = Model(name="HCCL", communicators="pair", has_unique_peers=True)
# P2P_HCCL_BUFFSIZE = 0, the default before. NCCL with eager initialisation has the same queues.
HCCL_SHARED = Model(name="HCCL (P2P_HCCL_BUFFSIZE=0)", communicators="group", has_unique_peers=True)
# Communicators that cannot run at the same time: HCCL's rule that a device issues serially, at its strictest; NCCL
# on a device without room for two kernels, where its guide asks for one order of communicators on all ranks.
ONE_QUEUE = Model(name="one queue per device", communicators="pair", has_one_queue=True, has_unique_peers=True)
# What every run must pass; ONE_QUEUE is a wish.
MODELS = (BUFFERED, RENDEZVOUS, NCCL, HCCL, HCCL_SHARED)
