"""Memory of received tensors: used again when the tensors have died, never before."""

from __future__ import annotations

import torch

from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.comm.collectives import HostMemory

SHAPE, TYPE = (5, 2, 3), torch.float32


def test_memory_of_a_dead_tensor_is_used_again() -> None:
    memory = HostMemory(detect("cpu"))
    places = set()
    for _ in range(5):
        tensor = memory.empty(SHAPE, TYPE)
        assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, TYPE)
        places.add(tensor.data_ptr())
        del tensor
    assert (len(places), memory.num_allocations) == (1, 1)


def test_living_tensors_never_share() -> None:
    memory = HostMemory(detect("cpu"))
    living = [memory.empty(SHAPE, TYPE) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in living}) == 4
    kept = living[1].data_ptr()
    del living[1]
    assert memory.empty(SHAPE, TYPE).data_ptr() == kept


def test_a_view_an_alias_and_a_saved_tensor_keep_the_memory() -> None:
    memory = HostMemory(detect("cpu"))
    leaf = memory.empty(SHAPE, TYPE).fill_(2.0).requires_grad_()
    output = (leaf * leaf).sum()
    alias = leaf.detach()[1:]
    del leaf
    assert memory.empty(SHAPE, TYPE).data_ptr() != alias.untyped_storage().data_ptr()
    del alias
    memory.empty(SHAPE, TYPE).fill_(-1.0)
    assert output.grad_fn is not None
    assert torch.equal(output.grad_fn.next_functions[0][0]._saved_self, torch.full(SHAPE, 2.0))  # type: ignore[union-attr]


def test_varying_sizes_do_not_pile_up() -> None:
    memory = HostMemory(detect("cpu"))
    for length in range(1, 20):
        memory.empty((length, 2), TYPE)
    assert len(memory._blocks) == 1
