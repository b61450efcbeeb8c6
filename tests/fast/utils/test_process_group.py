from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from miles.utils.http_utils import find_available_port

from miles.utils.checksum import tensor_checksum
from miles.utils.process_group import destroy_process_group, init_process_group


def test_two_members_without_a_default_group_broadcast() -> None:
    address = f"tcp://127.0.0.1:{find_available_port(0)}"
    received = {}

    def member(rank: int) -> None:
        group = init_process_group(
            backend="gloo", init_method=address, world_size=2, rank=rank, group_name=f"test-{rank}"[:4], timeout_secs=20
        )
        tensor = torch.arange(4.0) if rank == 0 else torch.zeros(4)
        dist.broadcast(tensor, group_src=0, group=group)
        received[rank] = tensor
        if rank == 0:
            done.wait(20)
        destroy_process_group(group)
        done.set()

    done = threading.Event()
    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.equal(received[1], torch.arange(4.0))


def test_checksums_agree_exactly_where_values_shape_and_dtype_do() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.reshape(3, 2))
    assert tensor_checksum(tensor) != tensor_checksum(tensor.bfloat16())
    changed = tensor.clone()
    changed[0, 0] = 1e-30
    assert tensor_checksum(tensor) != tensor_checksum(changed)
    assert len(tensor_checksum(torch.ones(()))) == 16
