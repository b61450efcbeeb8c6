"""Is the event loop answering? How late its timers come, and what it was doing when it stood still.

    on the loop     every TICK_SECS: lag = how late this tick is ----> p99, maximum (drained by one reader)
    watchdog        no tick for longer than the limit: the loop thread's stack and task are logged, once a standstill
    thread          the tick comes at last: how long it took is logged

A blocked loop delays every request, deadline and weight update of the process, and nothing on it can tell: a thread of
its own must look. What blocks is nearly always a user function that computes or sleeps where it should await.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import selectors
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)

TICK_SECS = 0.05
MAX_TICKS_KEPT = 65536
MAX_FRAMES_SHOWN = 12
THREAD_NAME = "miles-loop-lag-watch"


@dataclass(frozen=True)
class LoopLag:
    """Seconds by which ticks came late, since the last reading. Zeros where there was no tick."""

    p99: float = 0.0
    maximum: float = 0.0
    ticks: int = 0


class LoopLagWatch:
    """Watches one loop from `start()`, called on it, to `close()`, called anywhere. Both are quick; twice is fine.

    `warn_secs`: standstills longer than this are logged. The watchdog thread is a daemon and is joined by `close`.
    """

    def __init__(self, warn_secs: float) -> None:
        if not warn_secs > 0:
            raise ValueError(f"--event-loop-lag-warn-secs must be greater than 0 for a watch, got {warn_secs}")
        self.warn_secs = warn_secs
        self.standstills = 0
        """Standstills that were logged."""
        self._lags: deque[float] = deque(maxlen=MAX_TICKS_KEPT)
        self._maximum = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._loop_thread_id = 0
        self._closing = threading.Event()
        self._watchdog: threading.Thread | None = None

    def start(self) -> None:
        if self._loop is not None or self._closing.is_set():
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        _watches[self._loop] = self
        self._arm()
        self._watchdog = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._watchdog.start()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._loop is None:
            return
        _watches.pop(self._loop, None)
        try:
            self._loop.call_soon_threadsafe(self._disarm)
        except RuntimeError:  # the loop is closed, and its timers with it
            pass
        if self._watchdog is not None and self._watchdog is not threading.current_thread():
            self._watchdog.join()

    def drain(self) -> LoopLag:
        """The lag since the last drain; a standstill that is going on counts with the tick that ends it."""
        lags, self._lags = sorted(self._lags), deque(maxlen=MAX_TICKS_KEPT)
        maximum, self._maximum = self._maximum, 0.0
        if not lags:
            return LoopLag()
        return LoopLag(p99=lags[math.ceil(0.99 * len(lags)) - 1], maximum=maximum, ticks=len(lags))

    # ---- on the loop

    def _arm(self) -> None:
        assert self._loop is not None
        self._due = self._loop.time() + TICK_SECS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        assert self._loop is not None
        if self._closing.is_set():
            return
        lag = max(0.0, self._loop.time() - self._due)
        self._lags.append(lag)
        self._maximum = max(self._maximum, lag)
        self._arm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- on the watchdog thread

    def _watch(self) -> None:
        assert self._loop is not None
        reported: float | None = None  # the due time of the tick whose lateness was logged
        while not self._closing.wait(min(self.warn_secs / 4, 0.25)):
            due = self._due
            if reported is not None and due != reported:
                logger.warning("the event loop goes on, after %.1f s", due - TICK_SECS - reported)
                reported = None
            lag = self._loop.time() - due
            if reported is None and lag > self.warn_secs and not self._loop.is_closed():
                reported = due
                self.standstills += 1
                self._report(lag)

    def _report(self, lag: float) -> None:
        frames = sys._current_frames()
        frame = frames.get(self._loop_thread_id)
        if frame is not None and frame.f_code.co_filename == selectors.__file__:
            logger.warning(
                "the event loop has stood still for %.1f s (limit %g s) while it waited for events: its thread got "
                "neither the interpreter nor a processor; other threads are in\n%s",
                lag,
                self.warn_secs,
                _innermost(frames, leave_out=(self._loop_thread_id, threading.get_ident())),
            )
            return
        logger.warning(
            "the event loop has stood still for %.1f s (limit %g s) in %s; the code that holds it:\n%s",
            lag,
            self.warn_secs,
            _current_task_name(self._loop),
            _stack(frame),
        )


def drain_loop_lag() -> LoopLag:
    """The lag of the running loop since the last call; zeros where nobody watches it."""
    watch = _watches.get(asyncio.get_running_loop())
    return LoopLag() if watch is None else watch.drain()


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLagWatch] = WeakKeyDictionary()  # this module's only state


def _current_task_name(loop: asyncio.AbstractEventLoop | None) -> str:
    task = asyncio.current_task(loop)
    return "a callback" if task is None else f"task {task.get_name()!r}"


def _stack(frame: FrameType | None) -> str:
    """The innermost frames, without those of asyncio itself."""
    if frame is None:
        return "  (the thread has ended)"
    noise = (os.path.dirname(asyncio.__file__), threading.__file__)
    frames = [f for f in traceback.extract_stack(frame) if not f.filename.startswith(noise)]
    return "".join(traceback.format_list(frames[-MAX_FRAMES_SHOWN:])).rstrip()


def _innermost(frames: dict[int, FrameType], leave_out: tuple[int, ...]) -> str:
    """One line for each thread: where it is."""
    lines = []
    for thread in threading.enumerate():
        if thread.ident in leave_out or (frame := frames.get(thread.ident or 0)) is None:
            continue
        code = frame.f_code
        lines.append(f"  {thread.name}: {code.co_filename}:{frame.f_lineno} in {code.co_name}")
    return "\n".join(lines) or "  no other thread"
