"""A torch.distributed group that spans a trainer and inference engines, which share no default group.

The trainer is rank 0 and hosts the store; engine ranks follow. The rendezvous is the one that SGLang's servers use (a
`PrefixStore` named after the group), so both kinds of engine can join the same group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def init_process_group(
    *,
    backend: str,
    init_method: str,
    world_size: int,
    rank: int,
    group_name: str,
    timeout_secs: float = 60.0,
) -> ProcessGroup:
    """Join `group_name` as `rank` of `world_size` and return the group; waits until all ranks have joined.

    `init_method` is `tcp://host:port`; rank 0 listens there. The process may or may not have a default group.
    Raises `torch.distributed.DistError` subclasses (or RuntimeError) when the others do not join within `timeout_secs`.
    """
    timeout = timedelta(seconds=timeout_secs)
    store, rank, world_size = next(iter(rendezvous(init_method, rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        dist.PrefixStore(group_name, store),
        group_name=group_name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def destroy_process_group(group: ProcessGroup) -> None:
    """Leave the group; pending collectives on it are aborted."""
    dist.destroy_process_group(group)
