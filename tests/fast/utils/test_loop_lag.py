from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time

import pytest

from miles.utils.async_utils import AsyncLoopThread
from miles.utils.loop_lag import THREAD_NAME, TICK_SECS, LoopLag, LoopLagWatch, drain_loop_lag


def reward_that_blocks(seen: threading.Event) -> None:
    assert seen.wait(20)  # returns when the watch has logged


class Seen(logging.Handler):
    """Sets `event` at the first warning that contains `text`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.event, self.messages = text, threading.Event(), []

    def emit(self, record):
        self.messages.append(record.getMessage())
        if self.text in record.getMessage():
            self.event.set()


@pytest.fixture
def seen():
    handler = Seen("stood still")
    logger = logging.getLogger("miles.utils.loop_lag")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_a_standstill_is_reported_while_it_lasts_with_stack_and_task(seen):
    watch = LoopLagWatch(0.1)
    watch.start()

    async def work():
        reward_that_blocks(seen.event)

    await asyncio.create_task(work(), name="sample 3 of group 1")
    watch.close()
    [message] = [m for m in seen.messages if "stood still" in m]
    assert "limit 0.1 s) in task 'sample 3 of group 1'" in message
    assert "in reward_that_blocks" in message
    assert watch.standstills == 1


async def test_lag_is_drained_once_and_zero_where_nobody_watches():
    assert drain_loop_lag() == LoopLag()
    watch = LoopLagWatch(60.0)
    watch.start()
    watch.start()
    await asyncio.sleep(4 * TICK_SECS)
    time.sleep(0.2)  # noqa: ASYNC251 - the standstill that is measured
    await asyncio.sleep(0.01)
    lag = drain_loop_lag()
    assert lag.ticks >= 2
    assert 0.1 < lag.maximum == lag.p99
    assert drain_loop_lag().maximum < lag.maximum
    assert watch.standstills == 0
    watch.close()
    watch.close()
    assert drain_loop_lag() == LoopLag()


def test_p99_is_below_a_single_peak_among_many_ticks():
    watch = LoopLagWatch(1.0)
    watch._lags.extend([0.001] * 199 + [5.0])
    watch._maximum = 5.0
    assert watch.drain() == LoopLag(p99=0.001, maximum=5.0, ticks=200)
    assert watch.drain() == LoopLag()


def test_a_loop_thread_owns_its_watch(seen):
    thread = AsyncLoopThread("watched")
    thread.watch_lag(0.1)
    thread.watch_lag(0.1)

    async def block():
        reward_that_blocks(seen.event)

    thread.run(block())
    thread.close()
    assert THREAD_NAME not in [t.name for t in threading.enumerate()]
    assert "in reward_that_blocks" in "".join(seen.messages)


def test_zero_switches_it_off_and_less_is_refused():
    thread = AsyncLoopThread("unwatched")
    thread.watch_lag(0)
    assert thread._lag_watch is None
    thread.close()
    thread.watch_lag(1.0)  # closed: nothing to watch
    with pytest.raises(ValueError, match="--event-loop-lag-warn-secs must be greater than 0"):
        LoopLagWatch(0)


def test_a_starved_loop_is_told_from_a_blocked_one(caplog):
    """The loop's thread waits in `select`, and its ticks are late all the same."""
    thread = AsyncLoopThread("starved")
    watch = LoopLagWatch(1.0)
    watch._loop, watch._loop_thread_id = thread.loop, thread._thread.ident

    async def nothing():
        await asyncio.sleep(0)

    thread.run(nothing())
    while sys._current_frames()[thread._thread.ident].f_code.co_filename != selectors.__file__:
        time.sleep(0.001)
    release = threading.Event()
    bystander = threading.Thread(target=release.wait, name="bystander")
    bystander.start()
    watch._report(1.5)
    release.set()
    bystander.join()
    assert "while it waited for events" in caplog.text
    assert "bystander: " in caplog.text
    thread.close()
