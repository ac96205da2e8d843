"""For scripts without ``megatron.training``: the weights of a U's edge are drawn from the edge's own key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vtp_plugin.api import current_session


@contextmanager
def drawing_edge_weights() -> Iterator[None]:
    """Let a script on megatron-core alone draw the edge's weights from the edge's key (``edge_seed``).

    Build the model chunks inside it, on all ranks, after ``initialize_model_parallel`` and the script's seeds. What is
    drawn meanwhile on the edge's ranks of a U of two sites follows from the key; elsewhere this does nothing. A script
    with ``megatron.training`` does not need it.

        with vtp_plugin.drawing_edge_weights():
            chunks = [build_chunk(vp_stage) for vp_stage in range(2)]
    """
    session = current_session()
    if session is None or not session.is_running:
        yield
        return
    from vtp_plugin.patches.core.tensor_parallel.layers import drawing_edge

    with drawing_edge(session):
        yield
