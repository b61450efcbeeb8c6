"""An event loop whose clock jumps: a test that waits for 30 s of loop time takes no time at all.

    @virtual
    async def test_warns_after_30_seconds(): ...

When nothing is ready and a timer is set, time jumps to that timer. When nothing is ready and no timer is set either,
nothing can ever happen again: a test that hangs fails at once, with the names of the tasks that wait. A test that
leaves a task behind fails, too.

Only for code that reads time from its loop and uses neither sockets nor threads. Plain user functions, which would run
on a thread of their own, are called inline.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from typing import TYPE_CHECKING, Any

from miles.utils.user_calls import InlineUserCalls, use_user_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Stuck(AssertionError):
    """Every task waits and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self.loop)))
                raise Stuck(f"nothing can happen any more; waiting: {waiting or 'no task'}")
            self.loop.advance(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


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
