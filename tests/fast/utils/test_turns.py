"""Turns: a few tasks a round of the loop, in the order of asking."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from miles.utils.turns import Turns


async def _take(turns: Turns, done: list[int], i: int) -> None:
    if not turns.take():
        await turns.wait()
    done.append(i)


async def test_a_few_go_on_in_each_round_in_their_order() -> None:
    turns, done = Turns(a_round=3), []
    tasks = [asyncio.create_task(_take(turns, done, i)) for i in range(10)]
    progress = [0]
    while len(done) < 10:
        await asyncio.sleep(0)
        progress.append(len(done))
    await asyncio.gather(*tasks)
    assert done == list(range(10))
    assert all(after - before <= 3 for before, after in pairwise(progress)), progress


async def test_who_comes_alone_never_waits() -> None:
    turns = Turns(a_round=1)
    for _ in range(5):
        assert turns.take()
        await asyncio.sleep(0)


async def test_a_cancelled_waiter_costs_nobody_a_turn() -> None:
    turns, done = Turns(a_round=1), []
    tasks = [asyncio.create_task(_take(turns, done, i)) for i in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 2, 3]
    assert tasks[1].cancelled()


async def test_newcomers_line_up_behind_those_who_wait() -> None:
    turns, done = Turns(a_round=1), []
    first = [asyncio.create_task(_take(turns, done, i)) for i in range(3)]
    await asyncio.sleep(0)
    last = asyncio.create_task(_take(turns, done, 3))
    await asyncio.gather(*first, last)
    assert done == [0, 1, 2, 3]
