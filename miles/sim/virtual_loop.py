"""An event loop whose clock jumps: what waits for 30 s of loop time takes no time at all.

When nothing is ready and a timer is set, time jumps to that timer. When nothing is ready and no timer is set either,
nothing can ever happen again: that is a deadlock, and it is raised at once with the names of the tasks that wait. Work
that goes on for ever without time passing is raised, too.

The order of everything is a function of the program alone. Ready callbacks run in the order in which they became
ready, timers in the order of their times, and the tasks of a set are met in the order in which they were made: a task's
hash is its number, not its address.

Only for code that reads time from its loop and uses neither sockets nor threads. `run_virtual` calls plain user
functions, which would run on a thread of their own, inline.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from typing import TYPE_CHECKING, Any

from miles.utils.user_calls import InlineUserCalls, use_user_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

ROUNDS_WITHOUT_TIME = 200_000
"""Rounds of the loop at one moment of virtual time, above which the program is taken to spin for ever."""

ROUNDS_A_TICK, TICK = 100, 1e-6
"""So many rounds take this long, in seconds: whoever waits for a rounding error to pass must not wait for ever."""


class Stuck(AssertionError):
    """Every task waits and no timer is set, or the loop spins and time stands still."""


class VirtualTask(asyncio.Task[Any]):
    """A task whose hash is its number in the loop, so that sets of tasks have an order that every run repeats."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **keywords: Any) -> None:
        self._number = number
        super().__init__(coro, **keywords)

    def __hash__(self) -> int:
        return self._number


class _JumpingSelector(selectors.SelectSelector):
    """Nothing ever arrives from outside; asked to wait, it moves the clock."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.round_ended(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`after_round`, where it is set, is called after each round of ready callbacks: everything waits at an await.
    `before_time_passes` is called where the next round is one that a timer starts: nothing more happens until then."""

    def __init__(self) -> None:
        self.after_round: Callable[[], None] | None = None
        self.before_time_passes: Callable[[], None] | None = None
        self._now = 0.0
        self._tasks_made = 0
        self._rounds_at_this_time = 0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self.set_task_factory(_numbered_task)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def next_task_number(self) -> int:
        self._tasks_made += 1
        return self._tasks_made

    def round_ended(self, timeout: float | None) -> None:
        """One round of ready callbacks has run; the next thing happens `timeout` seconds later, None for never."""
        if self.after_round is not None:
            self.after_round()
        if timeout is None:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
            raise Stuck(f"nothing can happen any more; waiting: {waiting or 'no task'}")
        if timeout > 0:
            if self.before_time_passes is not None:
                self.before_time_passes()
            self._rounds_at_this_time = 0
            self.advance(timeout)
            return
        self._rounds_at_this_time += 1
        if self._rounds_at_this_time % ROUNDS_A_TICK == 0:
            self.advance(TICK)
        if self._rounds_at_this_time > ROUNDS_WITHOUT_TIME:
            self._rounds_at_this_time = 0
            raise Stuck(f"the loop spins: {ROUNDS_WITHOUT_TIME} rounds at {self._now:.3f} s")


def _numbered_task(loop: asyncio.AbstractEventLoop, coro: Any, **keywords: Any) -> Any:
    assert isinstance(loop, VirtualTimeLoop)
    return VirtualTask(coro, number=loop.next_task_number(), loop=loop, **keywords)


def run_virtual(main: Coroutine[Any, Any, Any], *, debug: bool = True) -> Any:
    """Run `main` on a VirtualTimeLoop; its result. Raises AssertionError where it leaves a task behind."""

    async def run_and_check() -> Any:
        with use_user_calls(InlineUserCalls()):
            result = await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {sorted(task.get_name() for task in left)}"
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop, debug=debug) as runner:
        return runner.run(run_and_check())


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a VirtualTimeLoop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def settle(rounds: int = 20) -> None:
    """Let everything that is ready run, without letting time pass."""
    for _ in range(rounds):
        await asyncio.sleep(0)
