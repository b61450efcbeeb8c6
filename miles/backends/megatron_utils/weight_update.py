"""Pushes the trainer's weights into the inference engines: HTTP says what comes, a broadcast carries it.

    gather (all trainer ranks) -> pack bucket 1 | pack bucket 2 | pack bucket 3 | ...
                                     pause, begin | send bucket 1 | send bucket 2 | ... | end, continue
                                                       |
              POST /update_weights_from_distributed (names, dtypes, shapes) to every engine, side by side, and while
              they are being answered: broadcast from rank 0 of a group that only trainer and engines share

The next bucket is gathered and packed while the last one is sent. The engines are paused only once the first bucket is
ready, and continue when the last one has arrived.

What if an engine refuses, dies or hangs? A bucket is broadcast while its HTTP calls are still open, so a refusal
arrives while the broadcast waits for a receiver that will never come. The calls are watched: the first one that fails,
or is not answered in time, ends the update. Then every engine is asked for a sign of life: those that give none are
named as the culprits (behind a dead engine, a healthy one may fail to receive too). The others are told to leave the
group. Their connections close, and so do the trainer's, which ends the broadcast on every side. Who does not leave then
is a culprit as well: of an SGLang whose scheduler hangs, the process that answers HTTP may be in good health. If there
is none of these it was the engine that refused. Nothing is retried.

The thread that sends does all this, and not the one that packs: that one may use the GPU, which over NCCL may wait for
the very broadcast that has to be given up.

What is left behind by a failure: before the first bucket the weights are untouched, so the bracket is closed and the
engines are continued. After it an engine may hold a mixture, so all of them stay paused: better silent than wrong.
Leaving the group makes an engine that stages its weights drop the update. In both cases connecting again, to those
that are left, and another update under the same version bring them back.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.megatron_utils.engine_client import (
    EngineClient,
    on_all,
    raise_blamed_on,
    results,
    silent_engines,
    spawn,
)
from miles.backends.megatron_utils.update_group import UpdateGroup
from miles.backends.megatron_utils.weight_bracket import PAUSE_MODES, Bracket
from miles.backends.megatron_utils.wire import LARGE_BYTES, WirePacker

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Sequence

    from miles.backends.megatron_utils.wire import Piece, WireBucket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightUpdateConfig:
    """How weights reach the engines."""

    pause_mode: str
    """One of PAUSE_MODES."""
    buffer_bytes: int
    """Upper bound of one bucket; a larger tensor travels alone."""
    flattened: bool
    """One broadcast of raw bytes for the tensors that are packed (three times faster for small ones), or one each."""
    ranks_per_engine: int
    """Processes of one engine that join the group (its tensor-parallel size)."""
    backend: str
    timeout_secs: float
    """For one HTTP call, one broadcast, and for all engines to join the group: how long an engine may hang."""
    flush_timeout_secs: float
    shares_group: bool = False
    """Whether all engines are in one group, or each in its own: see `WeightUpdater._parts`."""
    dtype: torch.dtype | None = None
    """The engines' number format, to which weights are cast; None: they keep the trainer's."""
    loose_from_bytes: int | None = None
    """Tensors of this size or more are sent from where they are; None: all are packed, as is best on a GPU."""
    disk_directory: str | None = None
    """Where weights are written for engines to read, instead of being sent; None: they are sent."""
    source: str = ""
    """The checkpoint whose config and tokenizer lie beside weights on disk."""

    @staticmethod
    def from_args(args: Namespace) -> WeightUpdateConfig:
        mode = getattr(args, "pause_generation_mode", "retract")
        if mode not in PAUSE_MODES:
            raise ValueError(f"--pause-generation-mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        buffer_bytes = getattr(args, "update_weight_buffer_size", 512 * 1024**2)
        if buffer_bytes < 1:
            raise ValueError(f"--update-weight-buffer-size must be at least 1 byte, got {buffer_bytes}")
        backend = _backend(args)
        return WeightUpdateConfig(
            pause_mode=mode,
            buffer_bytes=buffer_bytes,
            flattened=True,
            ranks_per_engine=getattr(args, "rollout_num_gpus_per_engine", None) or 1,
            backend=backend,
            timeout_secs=getattr(args, "update_weight_timeout_secs", 120.0),
            flush_timeout_secs=60.0,
            shares_group=_shares_group(args, backend),
            dtype=_engine_dtype(args),
            loose_from_bytes=None if torch.cuda.is_available() else LARGE_BYTES,
            disk_directory=_disk_directory(args),
            source=getattr(args, "hf_checkpoint", None) or "",
        )

    @property
    def piece_bytes(self) -> int:
        """How much the gather yields at a time."""
        return WirePacker.piece_bytes(self.buffer_bytes)

    def packer(self) -> WirePacker:
        return WirePacker(self.buffer_bytes, dtype=self.dtype, loose_from_bytes=self.loose_from_bytes)


def _backend(args: Namespace) -> str:
    """nccl between GPUs. It refuses two ranks on one, which meet in host memory, as with engines on the CPU."""
    embedded = getattr(args, "rollout_engine", None) == "embedded"
    on_cpu = embedded and getattr(args, "embedded_device", None) == "cpu"
    apart = not on_cpu and not getattr(args, "share_one_gpu", False)
    return "nccl" if torch.cuda.is_available() and apart else "gloo"


def _shares_group(args: Namespace, backend: str) -> bool:
    """As --update-weight-group says. None is for a run that the first engine which fails ends anyway: there one group
    of all loses nothing, and is faster over NCCL."""
    group = getattr(args, "update_weight_group", None)
    return bool(group == "shared" or (group is None and backend == "nccl"))


def _engine_dtype(args: Namespace) -> torch.dtype:
    if getattr(args, "rollout_engine", None) == "embedded":
        dtype: torch.dtype = getattr(torch, getattr(args, "embedded_dtype", None) or "float32")
        return dtype
    return torch.bfloat16 if getattr(args, "bf16", False) else torch.float32


def _disk_directory(args: Namespace) -> str | None:
    if getattr(args, "update_weight_transfer_mode", "broadcast") != "disk-delta":
        return None
    directory: str | None = getattr(args, "update_weight_disk_dir", None)
    if not directory:
        raise ValueError("--update-weight-transfer-mode disk-delta needs --update-weight-disk-dir")
    return directory


class WeightUpdater:
    """Owns the groups that trainer and engines share. Used by trainer rank 0 only, from one thread."""

    def __init__(self, config: WeightUpdateConfig) -> None:
        self._config = config
        self._engines: list[EngineClient] = []
        self._groups: list[UpdateGroup] = []
        self._breaking_off = threading.Lock()
        self._blame: _Blame | None = None

    @property
    def engines(self) -> list[EngineClient]:
        return list(self._engines)

    def connect(self, engine_urls: list[str]) -> None:
        """Form a group with these engines, replacing any former one, which may be broken. Waits until all have joined.

        Engines that were restarted, and engines that a failed update left paused, may be among them.

        Raises:
            WeightUpdateError: an engine refused, or does not answer; the others are left as they were.
        """
        if not engine_urls:
            raise ValueError("there are no engines to connect to")
        self.close()
        config = self._config
        self._engines = [EngineClient(url.rstrip("/"), config.timeout_secs) for url in engine_urls]
        if silent := silent_engines(
            self._engines
        ):  # else the others would wait in the group for an engine that never comes
            raise_blamed_on(silent)
        try:
            for engines in self._parts():
                self._groups.append(
                    UpdateGroup.form(
                        engines,
                        backend=config.backend,
                        ranks_per_engine=config.ranks_per_engine,
                        timeout_secs=config.timeout_secs,
                    )
                )
        except RuntimeError as error:
            self.close()
            if silent := silent_engines(self._engines):
                raise_blamed_on(silent, error)
            raise

    def update(self, pieces: Iterable[Piece], version: int) -> dict[str, float]:
        """Push all weights, which `pieces` yields, as weight version `version`; returns timings in seconds.

        Raises:
            WeightUpdateError: an engine refused or did not answer; see the module docstring for what is left behind.
        """
        if not self._groups:
            raise RuntimeError("connect() to the engines before updating their weights")
        start = time.perf_counter()
        config = self._config
        bracket = Bracket(self._engines, pause_mode=config.pause_mode, flush_timeout_secs=config.flush_timeout_secs)
        logger.info("sending weight version %d to %d engine(s)", version, len(self._engines))
        sending: Future[None] | None = None
        self._blame = None
        sent_bytes, transfer_seconds = 0, 0.0
        try:
            buckets = config.packer().buckets(pieces)
            bucket = _next(buckets)
            bracket.open()
            transfer_start = time.perf_counter()
            while bucket is not None:
                bracket.weights_touched = True
                sent_bytes += bucket.nbytes
                sending = spawn(self._send_or_break_off, bucket, version, bracket)
                bucket = _next(buckets)
                sending.result()
            transfer_seconds = time.perf_counter() - transfer_start
            bracket.close()
        except BaseException as error:
            blame = self._break_off(bracket)
            if sending is not None:
                wait([sending], timeout=2.0)  # leaving the group has ended it
            if isinstance(error, RuntimeError):  # refusals, and failures of the broadcast itself
                if blame.silent:
                    raise_blamed_on(blame.silent, error)
                if blame.hung:
                    question, what = "/destroy_weights_update_group", self._what_hung(blame)
                    raise_blamed_on(blame.hung, error, question=question, what=what)
            raise
        seconds = time.perf_counter() - start
        logger.info("the engines have weight version %d after %.3f s", version, seconds)
        return {
            "perf/update_weights_time": seconds,
            "perf/weight_update_pause_seconds": bracket.paused_seconds,
            "perf/weight_update_transfer_seconds": transfer_seconds,
            "perf/update_weights_bytes": float(sent_bytes),
        }

    def checksums(self) -> list[dict[str, str]]:
        """Per engine: Hugging Face name -> checksum of the weights that it serves now."""
        return engine_checksums(self._engines)

    def close(self) -> None:
        """Leave the group and tell the engines to; never raises for an engine that is gone. Idempotent."""
        self._leave(self._engines)

    def _send_or_break_off(self, bucket: WireBucket, version: int, bracket: Bracket) -> None:
        try:
            self._send(bucket, version)
        except BaseException:
            self._break_off(bracket)
            raise

    def _break_off(self, bracket: Bracket) -> _Blame:
        """End the update on every side, once, and say who is at fault."""
        with self._breaking_off:
            if self._blame is None:
                silent = silent_engines(self._engines)
                answering = [engine for engine in self._engines if engine not in silent]
                bracket.abandon(answering)
                self._blame = _Blame(silent, self._leave(answering) if bracket.weights_touched else [])
            return self._blame

    def _what_hung(self, blame: _Blame) -> str:
        what = "no sign of life of what receives weights: it does not leave the group"
        if self._config.shares_group and len(blame.hung) > 1:
            what += ", and others that wait in it are lost with it; --update-weight-group own keeps them out of it"
        return what

    def _send(self, bucket: WireBucket, version: int) -> None:
        """Announce one bucket to every engine and broadcast it; returns when all have taken it in."""
        flattened = self._config.flattened and bucket.data is not None
        payload = {
            "names": bucket.names,
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in bucket.places],
            "shapes": [list(place.shape) for place in bucket.places],
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": str(version),
            "load_format": "flattened_bucket" if flattened else None,
        }
        tensors = [bucket.data] if flattened and bucket.data is not None else bucket.tensors()
        if self._config.backend == "gloo":
            tensors = [tensor.cpu() for tensor in tensors]  # itself where it is there already
        calls = []
        for group in self._groups:
            named = payload | {"group_name": group.name}
            calls += [spawn(engine.post, "/update_weights_from_distributed", named) for engine in group.engines]
            if self._config.backend == "gloo":
                group.broadcast(tensors)
            else:
                # NCCL makes its communicator in the first broadcast, which waits for every engine, here and not on the
                # GPU: one that refuses must be heard all the same.
                calls.append(spawn(_on_device, bucket.device, group.broadcast, tensors))
        results(calls)
        for group in self._groups:
            group.wait_until_sent()

    def _parts(self) -> list[list[EngineClient]]:
        """The engines that share a group.

        Where each has its own, what becomes of one does not reach the others. In a shared one the weights are sent once
        for all of them over NCCL, but behind an engine that dies or hangs within a bucket the others wait. Over gloo
        they come back when the connections close, unless half a message is left in them. Over NCCL they wait on their
        GPUs, and an unmodified SGLang has no way to give that up: they are lost as well.
        """
        return [self._engines] if self._config.shares_group else [[engine] for engine in self._engines]

    def _leave(self, answering: Sequence[EngineClient]) -> list[EngineClient]:
        """Leave all groups at once; returns the engines that answer HTTP and do not leave."""
        groups, self._groups = self._groups, []
        left = [spawn(group.leave, [e for e in group.engines if e in answering]) for group in groups]
        return [engine for future in left for engine in future.result()]


@dataclass(frozen=True)
class _Blame:
    """Who is at fault for an update that broke off."""

    silent: list[EngineClient]
    """They give no sign of life."""
    hung: list[EngineClient]
    """They answer HTTP and do not leave their group."""


def _next(buckets: Any) -> WireBucket | None:
    """The next bucket, with its bytes in place: another thread may send it."""
    bucket: WireBucket | None = next(buckets, None)
    if bucket is not None and bucket.device.type == "cuda":
        torch.cuda.current_stream(bucket.device).synchronize()
    return bucket


def _on_device(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """On a thread of its own, which begins with the first GPU as its current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return function(*args)


def engine_checksums(engines: Sequence[EngineClient]) -> list[dict[str, str]]:
    """Per engine: Hugging Face name -> checksum of the weights that it serves now."""
    answers = on_all(engines, lambda e: e.post("/weights_checker", {"action": "checksum"}))
    return [answer["ranks"][0]["checksums"] for answer in answers]


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
