"""mcore-bridge's export to Hugging Face: each weight goes from its stage to all ranks of a replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.host.patching import Writes, Written, replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.runtime.comm.collectives import close_groups, open_group
from vtp_plugin.session import Session

_DIST = Written(
    id="swift-bridge/sums",
    target="mcore_bridge.bridge.gpt_bridge:dist",
    when=Moment.SWIFT,
    why="it adds up what the stages know, where only one knows something; in a replica all ranks of a stage know it",
    remove_when="mcore-bridge exports stages of unequal size",
)


def _reduce(own: dist.ProcessGroup, tensor: torch.Tensor, op: Any = None, group: Any = None, **options: Any) -> Any:
    """Run `torch.distributed.all_reduce`, whose default in a replica's own group is the greatest, not the sum."""
    default = dist.ReduceOp.MAX if group is own else dist.ReduceOp.SUM
    return dist.all_reduce(tensor, default if op is None else op, group, **options)


@replaces(known_swift.BRIDGE, id="swift-bridge", when=Moment.SWIFT)
def _join(session: Session, writes: Writes, original: Callable[..., None], bridge: Any, *args: Any, **kw: Any) -> None:
    """Run `GPTBridge.__init__`; then let its pipeline group be all ranks of this replica.

    Why: it sends a weight over the pipeline group, in which not all ranks are where stages differ: they would wait.

    Remove when: mcore-bridge exports stages of unequal size.
    """
    original(bridge, *args, **kw)
    layout, platform = session.planned.layout, session.planned.platform
    if layout.is_uniform:
        return
    for dp_rank, cp_rank in itertools.product(range(layout.dp_sizes[0]), range(layout.cp_sizes[0])):
        ranks = sorted(layout.model_ranks(dp_rank, cp_rank))
        group = open_group(ranks, platform=platform, timeout_s=session.config.timeout_s, description="replica")
        if group is not None:
            bridge.pp_group, bridge.pp_rank = group, dist.get_rank(group)
            writes[_DIST].put(SimpleNamespace(**vars(dist) | {"all_reduce": partial(_reduce, group)}))
            session.start.ending.callback(close_groups, (group,))


@replaces(known_swift.WEIGHT, id="swift-bridge/vocabulary", when=Moment.SWIFT)
def _get_weight(original: Callable[..., Any], bridge: Any, weight: Any, key: Any, *args: Any, **kw: Any) -> Any:
    """Run `GPTBridge._get_weight`, and cut rows off that only pad the vocabulary.

    Why: what is exported has the rows of the model's vocabulary, without those that stages need besides.

    Remove when: mcore-bridge exports stages of unequal size.
    """
    tensor, scale = original(bridge, weight, key, *args, **kw)
    if key in ("embedding.word_embeddings.weight", "output_layer.weight") and tensor is not None:
        tensor = tensor[: bridge.config.actual_vocab_size]
    return tensor, scale
