from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from miles.utils import process_group
from miles.utils.checksum import tensor_checksum
from miles.utils.http_utils import find_available_port
from miles.utils.process_group import init_process_group

if TYPE_CHECKING:
    from datetime import timedelta

MEMBER = """
import sys, torch, torch.distributed as dist
from miles.utils.process_group import destroy_process_group, init_process_group
rank = int(sys.argv[1])
for port in PORTS:
    group = init_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=rank, group_name="weights",
        timeout_secs=20,
    )
    tensor = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    dist.broadcast(tensor, group_src=0, group=group)
    destroy_process_group(group)
    print(tensor.tolist())
"""


def test_members_without_a_default_group_meet_broadcast_and_meet_again() -> None:
    ports = find_available_port(0), find_available_port(0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMBER.replace("PORTS", repr(ports))]
    members = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    outputs = [member.communicate(timeout=50)[0] for member in members]
    assert outputs == ["[0.0, 1.0, 2.0, 3.0]\n" * 2] * 2


def test_checksums_agree_exactly_where_values_shape_and_dtype_do() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.reshape(3, 2))
    assert tensor_checksum(tensor) != tensor_checksum(tensor.bfloat16())
    changed = tensor.clone()
    changed[0, 0] = 1e-30
    assert tensor_checksum(tensor) != tensor_checksum(changed)
    assert len(tensor_checksum(torch.ones(()))) == 16


@pytest.mark.parametrize(("backend", "seconds"), [("gloo", 7.0), ("nccl", 3600.0)])
def test_nccl_leaves_it_to_the_caller_to_give_up(backend: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process of whoever waits longer, and who waits for an engine can blame it and go on."""
    asked: list[float] = []

    def make(*_: object, timeout: timedelta, **__: object) -> tuple[object, None]:
        asked.append(timeout.total_seconds())
        return object(), None

    monkeypatch.setattr(process_group.c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(process_group.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    init_process_group(
        backend=backend,
        init_method="tcp://127.0.0.1:1",
        world_size=2,
        rank=0,
        group_name="weights",
        timeout_secs=7.0,
        store=dist.HashStore(),
    )
    assert asked == [seconds]


@pytest.mark.parametrize("before", [None, "3"])
def test_an_error_of_nccl_ends_no_process_of_this_group(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog would, as soon as a member dies; the process's other groups keep it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    seen: list[str | None] = []

    def make(*_: object, **__: object) -> tuple[object, None]:
        seen.append(os.environ.get(name))
        return object(), None

    monkeypatch.setattr(process_group.c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(process_group.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    init_process_group(
        backend="nccl",
        init_method="tcp://127.0.0.1:1",
        world_size=2,
        rank=0,
        group_name="weights",
        store=dist.HashStore(),
    )
    assert seen == ["0"] and os.environ.get(name) == before
