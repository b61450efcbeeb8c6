"""The thread that owns the scheduler: steps while there is work, runs commands between steps.

Consumes: commands from any thread (`post`, `call`). Waits for: commands, when there is nothing to step; woken by the
next one or by `close`. Produces: batches of events, handed to `deliver` from this thread. If `deliver` or a step
raises, the thread ends, `failure` is set, `on_exit` is called, and later calls raise.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from miles.backends.embedded_engine.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.backends.embedded_engine.scheduler import Event, Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Start it once; close it once or more."""

    def __init__(
        self,
        load: Callable[[], Scheduler],
        deliver: Callable[[list[Event]], None],
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._load = load
        self._deliver = deliver
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._changed = threading.Condition()
        self._inbox: list[Callable[[Scheduler], None]] = []
        self._unanswered: set[Future[Any]] = set()
        self._closing = False
        self._ended = False
        self.ready = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="miles-embedded-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Loaded, and able to run commands."""
        return self.ready and not self._ended

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[Scheduler], None]) -> None:
        """Run `command(scheduler)` between two steps. It must not raise. Raises Unavailable once the thread ended."""
        with self._changed:
            if self._ended or self._closing:
                raise Unavailable("The engine has ended.")
            self._inbox.append(command)
            self._changed.notify()

    def call(self, command: Callable[[Scheduler], T]) -> Future[T]:
        """Like `post`, with the result (or the exception) of the command in a future."""
        future: Future[T] = Future()

        def run(scheduler: Scheduler) -> None:
            self._unanswered.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command(scheduler)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._unanswered.add(future)
        try:
            self.post(run)
        except Unavailable:
            self._unanswered.discard(future)
            raise
        return future

    def close(self, timeout: float = 2.0) -> bool:
        """End after the current step; returns whether the thread has ended within `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            scheduler = self._load()
            self.ready = True
            self._on_ready()
            self._loop(scheduler)
        except Exception as error:
            # A failed step cannot be continued: its requests may have lost their state. The owner ends the process.
            self.failure = error
            logger.exception("The engine thread failed")
        finally:
            with self._changed:
                self._ended = True
                unanswered, self._unanswered = self._unanswered, set()
            for future in unanswered:
                if future.set_running_or_notify_cancel():
                    future.set_exception(Unavailable("The engine has ended."))
            self._on_exit()

    def _loop(self, scheduler: Scheduler) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._closing or scheduler.can_step):
                    self._changed.wait()
                if self._closing:
                    return
                commands, self._inbox = self._inbox, []
            for command in commands:
                command(scheduler)
            if scheduler.can_step:
                scheduler.step()
            events = scheduler.take_events()
            if events:
                self._deliver(events)
