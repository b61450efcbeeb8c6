"""Memory that receives weights is used again, and only once nothing looks at it any more."""

from __future__ import annotations

import torch

from miles.backends.embedded_engine.receive_buffer import MemoryPool

SIZE = 1024**2


def test_memory_is_used_again_once_no_tensor_refers_to_it() -> None:
    pool = MemoryPool()
    first = pool.take(SIZE)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.data = first[:400].view(torch.float32)
    address = first.data_ptr()
    del first
    second = pool.take(SIZE)
    assert second.data_ptr() != address, "a view, deep in a model, keeps it"
    parameter.data = torch.zeros(1)
    assert pool.take(SIZE).data_ptr() == address
    assert pool.nbytes == 2 * SIZE


def test_two_generations_of_weights_take_turns() -> None:
    pool = MemoryPool()
    current: list[torch.Tensor] = []
    addresses = []
    for _ in range(6):
        staged = [pool.take(SIZE) for _ in range(3)]
        addresses.append({tensor.data_ptr() for tensor in staged})
        pool.trim()
        current = staged
    assert len(current) == 3
    assert addresses[0] == addresses[2] == addresses[4] != addresses[1] == addresses[3] == addresses[5]
    assert pool.nbytes == 6 * SIZE


def test_what_was_not_needed_is_let_go_of() -> None:
    pool = MemoryPool()
    kept = pool.take(SIZE)
    pool.take(2 * SIZE)
    pool.trim()
    pool.trim()
    assert pool.nbytes == SIZE and kept.numel() == SIZE
    pool.take(100)
    assert pool.nbytes == SIZE, "small memory is not pooled"
