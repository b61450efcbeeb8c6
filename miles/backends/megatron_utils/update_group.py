"""The torch.distributed group that the trainer and its engines share for weights: forming it, sending, leaving it.

Rank 0 is the trainer; it also serves the store at which the members meet. The store is kept apart from the group, so
that a group that does not come about can be given up: without the store, every member that still waits for another
fails at once instead of after its own timeout.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import time
from concurrent.futures import wait
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.engine_client import EngineClient, results, spawn, tell_all
from miles.utils.network import find_available_port
from miles.utils.process_group import connect_store, destroy_process_group, init_process_group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_CONNECT_SECS = 2.0
_END_SECS = 5.0
_LEAVE_SECS = 5.0
_POLL_SECS = 0.001
_group_numbers = count()


class UpdateGroup:
    """A formed group. `leave` it once it is of no use any more; it cannot be used again."""

    def __init__(
        self,
        name: str,
        engines: Sequence[EngineClient],
        store: dist.Store,
        group: ProcessGroup,
        *,
        backend: str = "gloo",
        timeout_secs: float = 60.0,
    ) -> None:
        """`timeout_secs`: for the broadcasts of one bucket."""
        self.name = name
        self.engines = list(engines)
        self._backend = backend
        self._timeout_secs = timeout_secs
        self._store: dist.Store | None = store
        self._group: ProcessGroup | None = group
        self._broadcasts: list[Any] = []

    @staticmethod
    def form(
        engines: Sequence[EngineClient], *, backend: str, ranks_per_engine: int, timeout_secs: float
    ) -> UpdateGroup:
        """Waits until all engines have joined.

        Raises:
            WeightUpdateError: an engine refused, could not be reached, or did not join in time.
        """
        name = f"miles-weights-{os.getpid()}-{next(_group_numbers)}"
        address, port = _address_towards(engines[0].url), find_available_port()
        world_size = 1 + len(engines) * ranks_per_engine
        timeout = timedelta(seconds=timeout_secs)
        store: dist.Store | None = connect_store(address, port, rank=0, world_size=world_size, timeout=timeout)
        joins = [
            spawn(
                engine.post,
                "/init_weights_update_group",
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + index * ranks_per_engine,
                    "world_size": world_size,
                    "group_name": name,
                    "backend": backend,
                },
            )
            for index, engine in enumerate(engines)
        ]
        own = spawn(_join, address, port, world_size, name, backend, timeout_secs)
        try:
            *_, group = results([*joins, own])
        except BaseException:
            wait([*joins, own], timeout=_CONNECT_SECS)  # who has not connected yet would try to until its own timeout
            store = None  # whoever waits at it for the others gives up now
            wait([*joins, own], timeout=_CONNECT_SECS)
            tell_all(_answered(engines, joins), "/destroy_weights_update_group", {"group_name": name})
            raise
        assert store is not None
        return UpdateGroup(name, engines, store, group, backend=backend, timeout_secs=timeout_secs)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; `wait_until_sent` ends it."""
        self._broadcasts = [dist.broadcast(t, group_src=0, group=self._group, async_op=True) for t in tensors]

    def wait_until_sent(self) -> None:
        """Raises RuntimeError where a broadcast has failed, or takes longer than the timeout.

        They are asked until they are complete, and not waited for: over NCCL waiting returns at once and makes the
        GPU's stream wait, for ever where an engine has gone, and with it whoever uses the GPU next.
        """
        if not _complete_within(self._broadcasts, self._timeout_secs):
            raise RuntimeError(f"a broadcast of weights has not ended after {self._timeout_secs:g} s")
        _wait_for(self._broadcasts)

    def leave(self, engines: Sequence[EngineClient] | None = None) -> list[EngineClient]:
        """Drop the group on both sides, and any broadcast that waits in it; `engines`: those that still answer.

        What is on its way gets some seconds to arrive: behind an engine that has failed, the groups of others may be
        well. An engine that waits in a broadcast, as SGLang's scheduler does, hears nothing until our side of the group
        is gone; one that then still does not leave is of no use any more. Over NCCL that may be one that waits on its
        GPU for what another engine of the group did not pass on: nothing but itself could end that.

        Returns the engines that have not left in time; none where our own side cannot be dropped, since that says
        nothing about them. Never raises for an engine that is gone, and is bounded where one is silent. Idempotent.
        """
        if self._store is None or self._group is None:
            return []
        told = self.engines if engines is None else list(engines)
        payload = {"group_name": self.name}
        goodbyes = [
            spawn(EngineClient(e.url, _LEAVE_SECS).request, "POST", "/destroy_weights_update_group", payload)
            for e in told
        ]
        group, self._group, self._store = self._group, None, None
        dropped = _complete_within(self._broadcasts, _END_SECS)
        if not dropped and self._backend == "gloo":
            logger.warning("a broadcast still waits for an engine that is silent; its group is left behind")
            _never_free(group)
        wait([spawn(_abort_and_destroy, group)], timeout=5.0)
        del group  # with the last reference go the connections, and whoever waits at one of them gives up
        if self._backend != "gloo":
            dropped = _complete_within(self._broadcasts, _CONNECT_SECS)  # aborting has ended them
        if dropped:
            self._broadcasts.clear()
        wait(goodbyes, timeout=_LEAVE_SECS if dropped else _CONNECT_SECS)
        return [e for e, goodbye in zip(told, goodbyes, strict=True) if dropped and not _is_answered(goodbye)]


def _join(address: str, port: int, world_size: int, name: str, backend: str, timeout_secs: float) -> ProcessGroup:
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_secs))
    return init_process_group(
        backend=backend,
        init_method=f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}",
        world_size=world_size,
        rank=0,
        group_name=name,
        timeout_secs=timeout_secs,
        store=store,
    )


def _answered(engines: Sequence[EngineClient], calls: Sequence[Any]) -> list[EngineClient]:
    return [engine for engine, call in zip(engines, calls, strict=True) if call.done()]


def _abort_and_destroy(group: ProcessGroup) -> None:
    group.abort()
    destroy_process_group(group)


def _never_free(group: ProcessGroup) -> None:
    """Keep the object until the process ends: freeing a gloo group waits for its pending operations with the
    interpreter locked, and `abort` does not end them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _wait_for(works: list[Any]) -> None:
    """Empties the list, and keeps nothing of it when it raises: each of them holds on to the group's connections."""
    while works:
        works.pop(0).wait()


def _complete_within(works: list[Any], timeout_secs: float) -> bool:
    """Whether none of them is pending any more after so long; whether they have failed is of no interest."""
    deadline = time.monotonic() + timeout_secs
    while not all(work.is_completed() for work in list(works)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECS)
    return True


def _is_answered(call: Future[Any]) -> bool:
    return call.done() and call.exception() is None


def _address_towards(engine_url: str) -> str:
    """This machine's address on the route to an engine: loopback for a local one. Sends nothing."""
    parts = urlsplit(engine_url)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
