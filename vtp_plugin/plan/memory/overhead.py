"""Bytes on a device that are no tensors of the model: 8-bit copies of weights, buffers of communicators, workspaces.

An estimate: none of it was measured. Not counted are the driver's context, and holes between blocks. Sources:

* Transformer Engine 2.9, ``pytorch/module/base.py``: a weight's 8-bit copies, by rows and by columns, stay over the
  microbatches; its workspace is 32 MiB on Hopper, and that of grouped products four more.
* NCCL, ``src/init.cc`` and ``src/include/device.h``: a connection has buffers for three protocols. ``connect.cc`` makes
  a ring in each of many channels, here 24 as on nodes with NVSwitch (an assumption; there are fewer elsewhere);
  ``graph/paths.cc`` 2 channels to a peer of a pipeline.
* HCCL: twice ``HCCL_BUFFSIZE``, 200 MB by default, for a communicator; the plugin's channels ask for one message.
* torch, ``c10/cuda/CUDACachingAllocator.cpp``: small tensors come out of blocks of 2 MiB, those below 10 MiB out of
  blocks of 20 MiB, others are rounded up to 2 MiB; ``aten/src/ATen/cuda/CublasHandlePool.cpp``: 32 MiB on Hopper.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.plan.layout.chunks import Chunk
from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.memory.layer_sizes import Sizes
from vtp_plugin.plan.memory.parameters import Parameter

_MIB = 2**20
# Low latency: 8 lines of 16 bytes for 512 threads in 8 steps; with 128 bytes: 120 times 8 bytes for 640; simple: 4 MiB.
_NCCL_CONNECTION = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * _MIB
_RING_CHANNELS, _PEER_CHANNELS = 24, 2
_HCCL_COMMUNICATOR = 2 * 200 * _MIB
_WORKSPACE, _GROUPED_WORKSPACES = 32 * _MIB, 4
# What may be left of one block of each kind, and of the last one of weights, gradients and optimizer.
_ALLOCATOR = (2 + 20 + 3 * 2) * _MIB


def overhead_bytes(
    backend: str,
    sizes: Sizes | None,
    held: Sequence[Parameter],
    chunks: Sequence[Chunk],
    grid: StageGrid,
    experts: ExpertGrid | None,
) -> int:
    """Return the bytes that a rank holds besides weights, gradients, optimizer and activations.

    Args:
        backend: backend of the collectives: nccl, hccl, or gloo, which is for CPUs, where the overhead is 0.
        sizes: sizes of a microbatch; None if they are not known.
        held: parameters of the rank.
        chunks: chunks of the rank's stage.
        grid: sizes of the stage.
        experts: how the stage shares its experts; None without experts.

    Two ranks of one stage, with a tensor-parallel group and one of the world: 2 * 24 * 9.1875 MiB. On an NPU 2 * 400.

    >>> chunk = Chunk(layers=(0,), is_first=True, is_last=True, is_whole=True)
    >>> two = [overhead_bytes(backend, None, [], [chunk], StageGrid(2), None) for backend in ("nccl", "hccl")]
    >>> [(size - _ALLOCATOR - _WORKSPACE) / 2**20 for size in two]
    [441.0, 800.0]
    """
    if backend == "gloo":
        return 0
    copies, num_workspaces, message = 0, 1, 0
    if sizes is not None:
        linear = sum(
            p.numel for p in held if p.name.endswith("weight") and (".linear_" in p.name or "eh_proj" in p.name)
        )
        copies = 2 * sizes.inputs(linear) if sizes.batch.eight_bits else 0
        num_workspaces += (1 + (_GROUPED_WORKSPACES if experts else 0)) * sizes.batch.is_engine
        message = sizes.numbers(sizes.positions * sizes.model.hidden)
    parts = [grid.tp, grid.cp, grid.dp * grid.cp, *([experts.tp, experts.ep, experts.dp] if experts else [])]
    is_cut = any(not chunk.is_whole for chunk in chunks)
    num_groups = sum(size > 1 for size in parts) + (is_cut or grid.size > 1) + any(p.is_shared for p in held)
    num_peers = any(not chunk.is_first for chunk in chunks) + any(not chunk.is_last for chunk in chunks)
    if backend == "hccl":
        buffers = num_groups * _HCCL_COMMUNICATOR + num_peers * 2 * message
    else:
        buffers = (num_groups * _RING_CHANNELS + num_peers * _PEER_CHANNELS) * _NCCL_CONNECTION
    return copies + buffers + num_workspaces * _WORKSPACE + _ALLOCATOR
