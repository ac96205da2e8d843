"""Memory of received tensors: used again when the tensors have died, never before."""

from __future__ import annotations

import torch

from vtp_plugin.runtime.comm.host_memory import HostMemory

SHAPE, TYPE = (5, 2, 3), torch.float32


def test_memory_of_a_dead_tensor_is_used_again() -> None:
    memory = HostMemory()
    places = set()
    for _ in range(5):
        tensor = memory.empty(SHAPE, TYPE)
        assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, TYPE)
        places.add(tensor.data_ptr())
        del tensor
    assert (len(places), memory.num_allocations) == (1, 1)


def test_living_tensors_never_share() -> None:
    memory = HostMemory()
    living = [memory.empty(SHAPE, TYPE) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in living}) == 4
    kept = living[1].data_ptr()
    del living[1]
    assert memory.empty(SHAPE, TYPE).data_ptr() == kept


def test_a_view_an_alias_and_a_saved_tensor_keep_the_memory() -> None:
    memory = HostMemory()
    leaf = memory.empty(SHAPE, TYPE).fill_(2.0).requires_grad_()
    output = (leaf * leaf).sum()
    alias = leaf.detach()[1:]
    del leaf
    assert memory.empty(SHAPE, TYPE).data_ptr() != alias.untyped_storage().data_ptr()
    del alias
    memory.empty(SHAPE, TYPE).fill_(-1.0)
    assert output.grad_fn is not None
    assert torch.equal(output.grad_fn.next_functions[0][0]._saved_self, torch.full(SHAPE, 2.0))  # type: ignore[union-attr]


def test_another_type_of_the_same_size_may_take_the_place() -> None:
    memory = HostMemory()
    place = memory.empty((4, 2), torch.float32).data_ptr()
    assert memory.empty((8, 2), torch.bfloat16).data_ptr() == place


def test_varying_sizes_do_not_pile_up() -> None:
    memory = HostMemory()
    for length in range(1, 20):
        memory.empty((length, 2), TYPE)
    assert len(memory._storages) == 1
