from __future__ import annotations

import asyncio

import pytest

from miles.sim import virtual_loop
from miles.sim.virtual_loop import Stuck, VirtualTimeLoop, run_virtual


def test_time_jumps_to_the_next_timer():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        return loop.time()

    assert run_virtual(main()) == pytest.approx(3600)


def test_timers_fire_in_the_order_of_their_times():
    fired = []

    async def wait(seconds):
        await asyncio.sleep(seconds)
        fired.append(seconds)

    async def main():
        await asyncio.gather(*(wait(seconds) for seconds in (3, 1, 2)))

    run_virtual(main())
    assert fired == [1, 2, 3]


def test_a_deadlock_names_who_waits():
    async def main():
        await asyncio.create_task(asyncio.Event().wait(), name="waits for ever")

    with pytest.raises(Stuck, match="waits for ever"):
        run_virtual(main())


def test_spinning_without_time_is_noticed(monkeypatch):
    monkeypatch.setattr(virtual_loop, "ROUNDS_WITHOUT_TIME", 1000)

    async def main():
        while True:  # noqa: ASYNC110 - spinning is the point
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="spins"):
        run_virtual(main())


def test_a_task_left_behind_is_noticed():
    async def main():
        tasks.append(asyncio.create_task(asyncio.sleep(1), name="forgotten"))

    tasks: list[asyncio.Task] = []
    with pytest.raises(AssertionError, match="forgotten"):
        run_virtual(main())


def test_sets_of_tasks_have_the_order_in_which_they_were_made():
    async def main():
        tasks = [asyncio.create_task(asyncio.sleep(0), name=str(i)) for i in range(50)]
        order = [int(task.get_name()) for task in set(tasks)]
        await asyncio.gather(*tasks)
        return order

    assert run_virtual(main()) == run_virtual(main())


def test_rounds_are_seen_where_everything_waits():
    rounds = []

    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.after_round = lambda: rounds.append(loop.time())
        await asyncio.sleep(1)
        await asyncio.sleep(1)
        loop.after_round = None

    run_virtual(main())
    assert rounds[0] == 0.0
    assert pytest.approx(1.0) in rounds
