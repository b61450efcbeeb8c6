"""A torch.distributed group that spans a trainer and inference engines, which share no default group.

The trainer is rank 0 and hosts the store; engine ranks follow. The rendezvous is the one that SGLang's servers use (a
`PrefixStore` named after the group), so both kinds of engine can join the same group.
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup


_NCCL_TIMEOUT = timedelta(hours=1)
"""NCCL ends the whole process when an operation takes longer than this. So it is out of the way: who waits for one of
these groups has a timeout of its own, and can blame an engine and go on."""
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_IGNORED = "0"


def init_process_group(
    *,
    backend: str,
    init_method: str,
    world_size: int,
    rank: int,
    group_name: str,
    timeout_secs: float = 60.0,
    store: dist.Store | None = None,
) -> ProcessGroup:
    """Join `group_name` as `rank` of `world_size` and return the group; waits until all ranks have joined.

    With nccl only the store is waited for: its communicator is made by the first operation.

    `init_method` is `tcp://host:port`; rank 0 listens there, unless it brings a `store` that is served elsewhere. The
    process may or may not have a default group.
    Raises `torch.distributed.DistError` subclasses (or RuntimeError) when the others do not join within `timeout_secs`.
    """
    timeout = timedelta(seconds=timeout_secs)
    address = urlsplit(init_method)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        raise ValueError(f"init_method must be tcp://host:port, got {init_method!r}")
    if store is None:
        store = connect_store(address.hostname, address.port, rank=rank, world_size=world_size, timeout=timeout)
    with _nccl_errors_left_to_the_caller():
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            backend,
            dist.PrefixStore(group_name, store),
            group_name=group_name,  # type: ignore[arg-type]
            timeout=_NCCL_TIMEOUT if backend == "nccl" else timeout,
        )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


@contextmanager
def _nccl_errors_left_to_the_caller() -> Iterator[None]:
    """torch's watchdog ends the process when NCCL reports an error, such as a member that died, too. A group made in
    here reports it to whoever waits for its operations instead. A group looks at the environment when it is made."""
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = _IGNORED
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


def connect_store(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store at which a group's members meet; rank 0 serves it, on `host` alone.

    Left to itself torch's store would listen on every interface of the machine.
    """
    if rank != 0:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    # The store owns the descriptor from here on.
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def destroy_process_group(group: ProcessGroup) -> None:
    """Leave the group; pending collectives on it are aborted."""
    dist.destroy_process_group(group)
