"""How long this rank computes and how fast its links are: the costs that an order is planned for."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.plan.layout.channel_id import Direction
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.recorder import Noted, Stopwatch
from vtp_plugin.runtime.health.store import Topic, open_round, part_of
from vtp_plugin.runtime.health.store_posts import PostError, parse_post, read_post
from vtp_plugin.runtime.health.waiting import STORE_KEEPER, until_store_ends
from vtp_plugin.runtime.step.links import LinkId
from vtp_plugin.util.printable import one_line
from vtp_plugin.util.typed_json import MOST_BYTES

Report = dict[str, dict[str, float]]
Posted = TypeVar("Posted")
"""What a rank posts: JSON, of a shape that all ranks know."""
_Kind = TypeVar("_Kind")
_NUM_PINGS = 5


@until_store_ends(STORE_KEEPER, "exchange of reports")
def share_reports(
    store: dist.Store,
    own: Posted,
    combine: Callable[[Sequence[Posted]], str],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    kind: Any = Report,
) -> str:
    """Combine the reports of all ranks into one text on rank 0, and return it on all: two keys of the store per rank.

    Args:
        store: reaches all ranks.
        own: report of this rank.
        combine: makes the text of the reports, which are in rank order.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the others.
        kind: shape of a report, see :func:`~vtp_plugin.util.typed_json.read_typed`.

    Raises:
        PeerError: a rank posted no report, or rank 0 no text, within the timeout; or one has another shape.
    """
    exchange = open_round(part_of(store, Topic.REPORTS), rank)
    posts = exchange.posts
    posts.set(str(rank), json.dumps(own))
    limit = timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            keys = [str(i) for i in range(world_size)]
            posts.wait(keys, limit)
            posts.set("text", _combined(combine, [read_post(kind, posts, key, Topic.REPORTS.key) for key in keys]))
            exchange.clear_last([*keys, "text"])
        posts.wait(["text"], limit)
    except dist.DistStoreError as error:
        raise PeerError(
            f"exchange of reports: waited {timeout_s:g} s for {'another rank' if rank == 0 else 'rank 0'}: no answer"
        ) from error
    return posts.get("text")[:MOST_BYTES].decode(errors="backslashreplace")


def read_shared(kind: type[_Kind], text: str) -> _Kind:
    """Read a text of :func:`share_reports` that is JSON.

    Raises:
        PeerError: the text has another shape.
    """
    return parse_post(kind, text, Topic.REPORTS.key, "text")


def _combined(combine: Callable[[Sequence[Posted]], str], reports: Sequence[Posted]) -> str:
    """Combine reports of the right shape; one may still lack figures that the others have."""
    try:
        return combine(reports)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"of a rank lacks what ranks report ({type(error).__name__}: {error})"
        raise PostError(Topic.REPORTS.key, "RANK", one_line(problem)) from error


def report_computes(noted: Sequence[Noted], watch: Stopwatch) -> Report:
    """Return the median duration of forwards, whole backwards and, where they are apart, gradients of weights.

    Each by virtual stage. A backward in two parts counts with the sum of theirs, also beside some that are whole.

    Args:
        noted: spans that the recorder has noted in one or more steps.
        watch: stopwatch that made their marks.
    """
    durations: defaultdict[int, defaultdict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in noted:
        if isinstance(one.name, Action) and one.name.op.is_compute:
            durations[one.name.vstage][one.name.op].append(watch.between_ms(one.start, one.end))
    report: Report = {"forward_ms": {}, "backward_ms": {}}
    for vstage, each in durations.items():
        medians = {op: statistics.median(times) for op, times in each.items()}
        if Op.I in medians:
            medians[Op.B] = medians[Op.I] + medians[Op.W]
        for name, op in (("forward_ms", Op.F), ("backward_ms", Op.B), ("weights_ms", Op.W)):
            if op in medians:
                report.setdefault(name, {})[str(vstage)] = medians[op]
    return report


def measure_links(
    links: Mapping[LinkId, ChannelLink], outputs: Mapping[int, tuple[int, ...]], platform: Platform
) -> Report:
    """Send messages back and forth on every link of this rank; a collective call, while nothing else is under way.

    The links take turns, in one order on all ranks. The upstream rank sends a small tensor and gets one back, a few
    times; then it does the same with a tensor of the run's size (in a U with two rings, of each ring's). Each crosses
    as in the run, with the collectives inside the stages. The fastest small round trip is twice the latency. The
    additional time of a large one is twice the transfer time: both directions are assumed to be equally fast.

    Args:
        links: links of this rank.
        outputs: local shape of an output, by virtual stage of this rank.
        platform: where the tensors are.

    Returns:
        Latency, transfer time and message size of each link on which this rank is upstream.
    """
    report: Report = {"latency_ms": {}, "transfer_ms": {}, "message_bytes": {}}
    for name in sorted({name for name, _ in links if name.direction is Direction.FORWARD}):
        vstages = sorted(vstage for one, vstage in links if one == name)
        # No headers: they would add the same time to both sizes.
        small = [_small(links[one, vstages[0]]) for one in (name, name.opposite)]
        if dist.get_rank() not in small[0].channel.spec.src.ranks:
            for there, back in (small, *((links[name, v], links[name.opposite, v]) for v in vstages)):
                for _ in range(_NUM_PINGS):
                    answer(there, back)
            continue
        device = platform.device()
        small_tensor = torch.zeros(small[0].shape or (), dtype=small[0].form.dtype, device=device)
        small_ms = min(ask_ms(small[0], small[1], small_tensor, platform) for _ in range(_NUM_PINGS))
        for vstage in vstages:
            there, back = links[name, vstage], links[name.opposite, vstage]
            tensor = torch.zeros(outputs[vstage], dtype=there.form.dtype, device=device)
            tensor_ms = min(ask_ms(there, back, tensor, platform) for _ in range(_NUM_PINGS))
            whole = there.channel.whole_shape(tensor.shape, there.form)
            report["latency_ms"][str(vstage)] = small_ms / 2
            report["transfer_ms"][str(vstage)] = max(0.0, tensor_ms - small_ms) / 2
            report["message_bytes"][str(vstage)] = torch.Size(whole).numel() * there.form.dtype.itemsize
    return report


def _small(link: ChannelLink) -> ChannelLink:
    """Bind the channel of a link to a small tensor that divides evenly."""
    channel, form = link.channel, dataclasses.replace(link.form, has_variable_shapes=False)
    return ChannelLink(channel, form, channel.local_shape(channel.spec.probe.src.shape, form))


def ask_ms(there: ChannelLink, back: ChannelLink, tensor: torch.Tensor, platform: Platform) -> float:
    """Send a tensor, get one back, and return the round trip in ms; the other stage calls :func:`answer`."""
    start = time.perf_counter()
    sent = there.send(tensor)
    back.post().take()
    sent.wait()
    if not platform.host_blocking_wait:
        platform.module().synchronize()
    return 1e3 * (time.perf_counter() - start)


def answer(there: ChannelLink, back: ChannelLink) -> None:
    """Send back the tensor that the asking stage sends."""
    back.send(there.post().take()).wait()
