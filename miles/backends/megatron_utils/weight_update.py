"""Pushes the trainer's weights into the inference engines: HTTP says what comes, a broadcast carries it.

    pause -> flush caches -> begin -> bucket, bucket, ... -> end -> continue
                                       |
              POST /update_weights_from_distributed (names, dtypes, shapes) to every engine, side by side, and while
              they are being answered: broadcast from rank 0 of a group that only trainer and engines share

What if an engine refuses? A bucket is broadcast while its HTTP calls are still open, so a refusal arrives while the
broadcast waits for a receiver that will never come. The calls are watched: the first one that fails ends the update
with an error that names the engine, and the engines are told to leave the group. Their connections close, which ends
the broadcast on every side. Nothing is retried.

What is left behind by a failure: before the first bucket the weights are untouched, so the bracket is closed and the
engines are continued. After it an engine may hold a mixture, so all of them stay paused: better silent than wrong.
Leaving the group makes an engine that stages its weights drop the update. In both cases connecting again and another
update bring them back.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import time
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.engine_client import (
    CacheFlushTimeoutError,
    EngineClient,
    WeightUpdateError,
    on_all,
    results,
    spawn,
    tell_all,
)
from miles.utils.network import find_available_port
from miles.utils.process_group import destroy_process_group, init_process_group

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]
PAUSE_MODES = ("abort", "retract", "in_place")
_group_numbers = count()


@dataclass(frozen=True)
class WeightUpdateConfig:
    """How weights reach the engines."""

    pause_mode: str
    """abort: running requests end; retract: they resume with a recomputed cache; in_place: they keep their cache."""
    buffer_bytes: int
    """Upper bound of one bucket; a larger tensor travels alone."""
    flattened: bool
    """One broadcast of raw bytes per bucket (three times faster for small tensors) instead of one per tensor."""
    ranks_per_engine: int
    """Processes of one engine that join the group (its tensor-parallel size)."""
    backend: str
    timeout_secs: float
    """For one HTTP call, one broadcast, and for all engines to join the group."""
    flush_timeout_secs: float

    @staticmethod
    def from_args(args: Namespace) -> WeightUpdateConfig:
        mode = getattr(args, "pause_generation_mode", "retract")
        if mode not in PAUSE_MODES:
            raise ValueError(f"--pause-generation-mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        buffer_bytes = getattr(args, "update_weight_buffer_size", 512 * 1024**2)
        if buffer_bytes < 1:
            raise ValueError(f"--update-weight-buffer-size must be at least 1 byte, got {buffer_bytes}")
        return WeightUpdateConfig(
            pause_mode=mode,
            buffer_bytes=buffer_bytes,
            flattened=True,
            ranks_per_engine=getattr(args, "rollout_num_gpus_per_engine", None) or 1,
            backend="nccl" if torch.cuda.is_available() else "gloo",
            timeout_secs=60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10),
            flush_timeout_secs=60.0,
        )


class WeightUpdater:
    """Owns the group that trainer and engines share. Used by trainer rank 0 only, from one thread."""

    def __init__(self, config: WeightUpdateConfig) -> None:
        self._config = config
        self._engines: list[EngineClient] = []
        self._group: ProcessGroup | None = None
        self._group_name = ""
        self._broadcasts: list[Any] = []

    @property
    def engines(self) -> list[EngineClient]:
        return list(self._engines)

    def connect(self, engine_urls: list[str]) -> None:
        """Form a group with these engines, replacing any former one. Waits until all have joined.

        Raises:
            WeightUpdateError: an engine refused or could not be reached.
        """
        if not engine_urls:
            raise ValueError("there are no engines to connect to")
        self.close()
        self._engines = [EngineClient(url.rstrip("/"), self._config.timeout_secs) for url in engine_urls]
        self._group_name = f"miles-weights-{os.getpid()}-{next(_group_numbers)}"
        address = _address_towards(engine_urls[0])
        port = find_available_port()
        world_size = 1 + len(engine_urls) * self._config.ranks_per_engine
        joins = [
            spawn(engine.post, "/init_weights_update_group", self._join_payload(address, port, world_size, i))
            for i, engine in enumerate(self._engines)
        ]
        group = spawn(self._join, _init_method(address, port), world_size)
        *_, self._group = results([*joins, group])

    def update(self, tensors: Iterable[NamedTensor], version: int) -> dict[str, float]:
        """Push all `tensors` as weight version `version`; returns timings in seconds.

        Raises:
            WeightUpdateError: an engine refused or did not answer; see the module docstring for what is left behind.
        """
        if self._group is None:
            raise RuntimeError("connect() to the engines before updating their weights")
        start = time.perf_counter()
        bracket = _Bracket(self._engines, self._config)
        sent_bytes = 0
        logger.info("sending weight version %d to %d engine(s)", version, len(self._engines))
        try:
            bracket.open()
            for bucket in buckets(tensors, self._config.buffer_bytes):
                bracket.weights_touched = True
                self._send(bucket, version)
                sent_bytes += sum(t.nbytes for _, t in bucket)
            bracket.close()
        except BaseException:
            bracket.abandon()
            if bracket.weights_touched:
                self._leave_group()
            raise
        seconds = time.perf_counter() - start
        logger.info("the engines have weight version %d after %.3f s", version, seconds)
        return {
            "perf/update_weights_time": seconds,
            "perf/weight_update_pause_seconds": bracket.paused_seconds,
            "perf/update_weights_bytes": float(sent_bytes),
        }

    def checksums(self) -> list[dict[str, str]]:
        """Per engine: Hugging Face name -> checksum of the weights that it serves now."""
        answers = on_all(self._engines, lambda e: e.post("/weights_checker", {"action": "checksum"}))
        return [answer["ranks"][0]["checksums"] for answer in answers]

    def close(self) -> None:
        """Leave the group and tell the engines to; never raises for an engine that is gone. Idempotent."""
        if self._group is None:
            return
        self._leave_group()

    def _join_payload(self, address: str, port: int, world_size: int, index: int) -> dict[str, Any]:
        return {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1 + index * self._config.ranks_per_engine,
            "world_size": world_size,
            "group_name": self._group_name,
            "backend": self._config.backend,
        }

    def _join(self, init_method: str, world_size: int) -> ProcessGroup:
        return init_process_group(
            backend=self._config.backend,
            init_method=init_method,
            world_size=world_size,
            rank=0,
            group_name=self._group_name,
            timeout_secs=self._config.timeout_secs,
        )

    def _send(self, bucket: list[NamedTensor], version: int) -> None:
        """Announce one bucket to every engine and broadcast it; returns when all have taken it in."""
        payload = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
            "shapes": [list(t.shape) for _, t in bucket],
            "group_name": self._group_name,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": str(version),
            "load_format": "flattened_bucket" if self._config.flattened else None,
        }
        calls = [spawn(engine.post, "/update_weights_from_distributed", payload) for engine in self._engines]
        self._broadcasts = [
            dist.broadcast(t, group_src=0, group=self._group, async_op=True) for t in self._wire(bucket)
        ]
        results(calls)
        results([spawn(_wait_for, self._broadcasts)])
        self._broadcasts = []

    def _wire(self, bucket: list[NamedTensor]) -> list[torch.Tensor]:
        tensors = [t.detach().contiguous() for _, t in bucket]
        if not self._config.flattened:
            return tensors
        return [torch.cat([t.view(-1).view(torch.uint8) for t in tensors])]

    def _leave_group(self) -> None:
        """Drop the group on both sides, and any broadcast that waits in it; bounded also where an engine is silent."""
        group, self._group = self._group, None
        broadcasts, self._broadcasts = self._broadcasts, []
        if group is None:
            return
        tell_all(self._engines, "/destroy_weights_update_group", {"group_name": self._group_name})
        ended = spawn(_wait_for, broadcasts)
        wait([ended], timeout=2.0)
        if not ended.done():
            logger.warning("a broadcast still waits for an engine that is silent; its group is left behind")
            _never_free(group)
        wait([spawn(_abort_and_destroy, group)], timeout=5.0)


def _abort_and_destroy(group: ProcessGroup) -> None:
    group.abort()
    destroy_process_group(group)


def _never_free(group: ProcessGroup) -> None:
    """Keep the object until the process ends: freeing a gloo group waits for its pending operations with the
    interpreter locked, and `abort` does not end them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


class _Bracket:
    """pause, flush, begin ... end, continue: on all engines, in this order, with what is open remembered."""

    def __init__(self, engines: list[EngineClient], config: WeightUpdateConfig) -> None:
        self._engines = engines
        self._config = config
        self._paused = False
        self._begun = False
        self._pause_start = 0.0
        self.weights_touched = False
        self.paused_seconds = 0.0

    def open(self) -> None:
        self._pause_start = time.perf_counter()
        self._paused = True
        on_all(self._engines, lambda e: e.post("/pause_generation", {"mode": self._config.pause_mode}))
        if self._config.pause_mode != "in_place":
            on_all(self._engines, self._flush)
        self._begun = True
        on_all(self._engines, lambda e: e.post_if_known("/begin_weight_update", {"selector": "all"}))

    def close(self) -> None:
        on_all(self._engines, lambda e: e.post_if_known("/end_weight_update", {}))
        self._begun = False
        on_all(self._engines, lambda e: e.post("/continue_generation", {}))
        self._paused = False
        self.paused_seconds = time.perf_counter() - self._pause_start

    def abandon(self) -> None:
        """After a failure: undo what can be undone, as far as the engines still answer. Never raises."""
        if self.weights_touched:
            logger.error("weight update failed after its first bucket: the engines stay paused with mixed weights")
            return
        if self._begun:
            tell_all(self._engines, "/end_weight_update", {})
        if self._paused:
            tell_all(self._engines, "/continue_generation", {})

    def _flush(self, engine: EngineClient) -> None:
        """Flush the prefix cache, which would serve old weights; an engine refuses while requests still wind down."""
        deadline = time.monotonic() + self._config.flush_timeout_secs
        pause = 0.02
        while True:
            status, text = engine.request("GET", "/flush_cache")
            if status == 200:
                return
            if status != 400 or time.monotonic() + pause > deadline:
                timed_out = status == 400
                kind = CacheFlushTimeoutError if timed_out else WeightUpdateError
                limit = f"no flush within {self._config.flush_timeout_secs:g} s; " if timed_out else ""
                raise kind(engine.url, "/flush_cache", status, limit + text.strip())
            time.sleep(pause)
            pause = min(1.0, pause * 2)


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors grouped up to `max_bytes`; a larger tensor goes alone. Holds one bucket at a time."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def compare_checksums(trainer: dict[str, str], engine: dict[str, str], engine_url: str) -> None:
    """Raise ValueError naming the first parameter whose checksums differ, or that one side lacks."""
    for name, expected in trainer.items():
        if name not in engine:
            raise ValueError(f"--check-weight-update-equal: engine {engine_url} has no parameter {name!r}")
        if engine[name] != expected:
            raise ValueError(
                f"--check-weight-update-equal: parameter {name!r} differs after the update: "
                f"trainer {expected}, engine {engine_url} {engine[name]}"
            )
    extra = [name for name in engine if name not in trainer]
    if extra:
        raise ValueError(
            f"--check-weight-update-equal: engine {engine_url} has {extra[0]!r}, which the trainer has not"
        )


def _init_method(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _address_towards(engine_url: str) -> str:
    """This machine's address on the route to an engine: loopback for a local one. Sends nothing."""
    parts = urlsplit(engine_url)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
