import asyncio
import os

from miles.utils.async_utils import AsyncLoopThread
from miles.utils.loop_bound import LoopBound


class Resource:
    made = 0

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.closed = False

    async def close(self):
        assert asyncio.get_running_loop() is self.loop
        self.closed = True


def test_a_loop_has_one_and_its_end_closes_it():
    bound = LoopBound(Resource, Resource.close)

    async def use():
        first, second = await asyncio.gather(bound.get(), bound.get())
        assert first is second is bound.peek()
        assert not first.closed
        return first

    assert asyncio.run(use()).closed
    assert not bound._resources
    assert not bound._lifetimes


def test_two_loops_have_two():
    bound = LoopBound(Resource, Resource.close)
    threads = [AsyncLoopThread("one"), AsyncLoopThread("two")]
    resources = [thread.run(bound.get()) for thread in threads]
    assert resources[0] is not resources[1]
    threads[0].close()
    assert [resource.closed for resource in resources] == [True, False]
    threads[1].close()
    assert resources[1].closed


async def test_it_can_be_closed_and_opened_again():
    bound = LoopBound(Resource, Resource.close)
    assert bound.peek() is None
    first = await bound.get()
    await bound.close()
    await bound.close()
    assert first.closed
    assert bound.peek() is None
    assert await bound.get() is not first


def test_a_loop_that_was_never_shut_down_is_forgotten():
    bound = LoopBound(Resource, Resource.close)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(bound.get())
    loop.close()
    asyncio.run(bound.get())
    assert not bound._resources


async def test_a_forked_child_leaves_the_parents_alone(monkeypatch):
    bound = LoopBound(Resource, Resource.close)
    parents = await bound.get()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert await bound.get() is not parents
    assert not parents.closed
