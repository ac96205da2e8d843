"""The ways to carry one tensor ``[S, B, H]`` over a boundary that the benchmark compares.

An exchange is built on every rank of both stages, in the same order, and then called by all of them: with the tensor on
upstream ranks (each has the whole one), with None downstream. It returns when the rank's part is done; downstream with
what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import TIMEOUT_S, Stages
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import Endpoint, Shape, local_slices
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel
from vtp_plugin.runtime.comm.collectives import open_group
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.step.communicator import open_channels

DTYPE = torch.float32
Exchange = Callable[[torch.Tensor | None, Shape], torch.Tensor | None]


def build_exchanges(stages: Stages) -> dict[str, Exchange]:
    """Build all of them, by name; every rank of both stages calls this."""
    src, dst = (Endpoint(ranks_by_cp=(ranks,)) for ranks in (stages.src_ranks, stages.dst_ranks))
    names = "rank0", "sliced", "divided"
    rank0, sliced, divided = (ChannelSpec(name=name, src=src, dst=dst, strategy=name) for name in names)
    exchanges: dict[str, Exchange] = {
        "rank0": PlannedExchange(_open_channel(rank0, stages)),
        "bridge pattern": BridgePatternOverGloo(stages),
        "serial slices": SerialSlices(sliced, stages),
        "sliced": PlannedExchange(_open_channel(sliced, stages)),
    }
    if stages.sizes[1] > 1:
        exchanges["sliced, sharded receiver"] = PlannedExchange(_open_channel(sliced, stages), is_sharded=True)
    if stages.sizes[0] == stages.sizes[1]:
        exchanges["divided"] = PlannedExchange(_open_channel(divided, stages))
    return exchanges


class PlannedExchange:
    """A strategy of the plugin, carried out by the plugin's runtime.

    Args:
        channel: the strategy's channel.
        is_sharded: Downstream ranks want slices of dimension 0 (sequence parallelism), not copies.
    """

    def __init__(self, channel: Channel, *, is_sharded: bool = False) -> None:
        self._channel = channel
        self._form = TensorFormat(dtype=DTYPE, dst_sharded=is_sharded, requires_grad=False)

    def __call__(self, tensor: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
        if tensor is not None:
            BoundChannel(self._channel, self._form).send(tensor).wait()
            return None
        return BoundChannel(self._channel, self._form, self._channel.local_shape(shape, self._form)).post().take()


class SerialSlices:
    """The slices of `sliced`, but a rank completes each one before it turns to the next, as FlagScale does.

    FlagScale cuts where sequence parallelism does, so downstream ranks get their slice and there is no finish.
    """

    def __init__(self, spec: ChannelSpec, stages: Stages) -> None:
        self._spec = spec
        self._rank = stages.rank
        self._group = _open_group(spec.members, "serial slices")

    def __call__(self, tensor: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
        plan = self._spec.plan(shape, dst_sharded=True)
        if tensor is not None:
            holding = plan.sent_from(self._rank)
            for transfer in plan.sends_of(self._rank):
                dist.send(tensor[local_slices(transfer.boxes[0], holding)], transfer.dst, group=self._group)
            return None
        holding = plan.lands_in(self._rank)
        received = torch.empty(holding.local_shape, dtype=DTYPE)
        for transfer in plan.receives_of(self._rank):
            dist.recv(received[local_slices(transfer.boxes[0], holding)], transfer.src, group=self._group)
        return received


def _open_channel(spec: ChannelSpec, stages: Stages) -> Channel:
    platform = CpuPlatform("benchmark")
    group = stages.own_group
    (channel,) = open_channels([spec], stage_group=group, platform=platform, monitor=None, timeout_s=TIMEOUT_S)
    assert channel is not None
    return channel


def _open_group(ranks: Sequence[int], description: str) -> dist.ProcessGroup | None:
    return open_group(ranks, platform=CpuPlatform("benchmark"), timeout_s=TIMEOUT_S, description=description)


class BridgePatternOverGloo:
    """A substitute for Megatron's ``BridgeCommunicator`` (core 0.19.2), which asks for the nccl backend by name.

    The same messages in the same order for one replica on either side, over gloo: the last rank upstream sends a shape
    header and then, blocking, the whole tensor to the first rank downstream; that one concatenates what its (single)
    sender sent, broadcasts a shape header inside its stage, then the tensor. Measured is the pattern, not the class.
    """

    def __init__(self, stages: Stages) -> None:
        self._rank = stages.rank
        self._sender = stages.src_ranks[-1]
        self._receiver = stages.dst_ranks[0]
        self._leaders = _open_group([self._sender, self._receiver], "bridge pattern, leaders")
        self._downstream = _open_group(stages.dst_ranks, "bridge pattern, downstream")

    def __call__(self, tensor: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
        if tensor is not None:
            if self._rank == self._sender:
                self._header(dist.isend, torch.tensor(shape), self._receiver)
                dist.send(tensor, self._receiver, group=self._leaders)
            return None
        header = torch.empty(len(shape), dtype=torch.int64)
        if self._rank == self._receiver:
            self._header(dist.irecv, header, self._sender)
            part = torch.empty(header.tolist(), dtype=DTYPE)
            dist.recv(part, self._sender, group=self._leaders)
            received = torch.cat([part])
            dist.broadcast(torch.tensor(received.shape), src=self._receiver, group=self._downstream)
        else:
            dist.broadcast(header, src=self._receiver, group=self._downstream)
            received = torch.empty(header.tolist(), dtype=DTYPE)
        dist.broadcast(received, src=self._receiver, group=self._downstream)
        return received

    def _header(self, operation: Callable[..., Any], header: torch.Tensor, peer: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, header, peer, self._leaders)]):
            work.wait()
