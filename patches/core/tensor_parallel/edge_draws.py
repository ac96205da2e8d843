"""What a U's edge at a site of its own draws from its own key: weights, and the masks of dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from vtp_plugin.runtime.step.keyed_draws import keyed_seed
from vtp_plugin.session import Session


@contextmanager
def drawing_edge(session: Session) -> Iterator[None]:
    """Let what this rank draws meanwhile follow from the edge's key; do nothing outside such an edge.

    The first time also Megatron's random states get seeds that follow from it, as many and as different as they were:
    masks of dropout are drawn from them.
    """
    with session.edge_seed.drawing() as is_first:
        if is_first:
            assert session.edge_seed.root is not None
            _key_states(session.edge_seed.root)
        yield


def _key_states(root: bytes) -> None:
    # Its names stand in Megatron's code for any accelerator.
    device: Any = torch.cuda
    tracker: Any = get_cuda_rng_tracker()
    keyed = {}
    seed = device.initial_seed()
    for name, state in tracker.get_states().items():
        if isinstance(state, torch.Generator):  # of CUDA graphs, which keep the object
            state.manual_seed(keyed_seed(root, _label(state.get_state())))
            keyed[name] = state
        else:
            device.manual_seed(keyed_seed(root, _label(state)))
            keyed[name] = device.get_rng_state()
    if keyed:
        tracker.set_states(keyed)
    # By its seed: how far it has moved since depends on the size of a stage.
    device.manual_seed(keyed_seed(root, str(seed).encode()))


def _label(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().tolist())
