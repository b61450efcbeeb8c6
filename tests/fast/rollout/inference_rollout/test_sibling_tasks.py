from __future__ import annotations

import asyncio

import pytest

from miles.rollout.inference_rollout.sibling_tasks import cancel_and_settle, gather_or_cancel


async def test_results_keep_the_order_of_the_coroutines():
    gate = asyncio.Event()

    async def late():
        await gate.wait()
        return "late"

    async def early():
        gate.set()
        return "early"

    assert await gather_or_cancel([late(), early()]) == ["late", "early"]
    assert await gather_or_cancel([]) == []


async def test_a_failure_is_raised_itself_after_every_sibling_has_ended():
    started, settled = asyncio.Event(), []
    error = LookupError("from the plug-in")

    async def sibling():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            settled.append("sibling")

    async def failing():
        await started.wait()
        raise error

    with pytest.raises(LookupError) as raised:
        await gather_or_cancel([sibling(), failing()])
    assert raised.value is error
    assert settled == ["sibling"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_the_caller_settles_the_children_and_stays_a_cancellation():
    started, settled = asyncio.Event(), []

    async def child():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            settled.append("child")

    parent = asyncio.ensure_future(gather_or_cancel([child()]))
    await started.wait()
    parent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parent
    assert settled == ["child"]


async def test_a_child_that_cancels_itself_is_a_failure_not_a_cancellation():
    settled = []

    async def child():
        raise asyncio.CancelledError

    async def sibling():
        try:
            await asyncio.Event().wait()
        finally:
            settled.append(True)

    with pytest.raises(RuntimeError, match=r"child was cancelled from within"):
        await gather_or_cancel([sibling(), child()])
    assert settled == [True]


async def test_a_child_that_never_began_leaves_no_warning():
    async def never_begins():
        raise AssertionError

    parent = asyncio.ensure_future(gather_or_cancel([never_begins()]))
    asyncio.get_running_loop().call_soon(parent.cancel)
    with pytest.raises(asyncio.CancelledError):
        await parent


async def test_settling_goes_on_when_the_caller_is_cancelled_meanwhile():
    cleaning, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def slow_to_end():
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_end.wait()
            ended.append(True)

    task = asyncio.ensure_future(slow_to_end())
    await asyncio.sleep(0)
    settling = asyncio.ensure_future(cancel_and_settle([task]))
    await cleaning.wait()
    settling.cancel()
    await asyncio.sleep(0)
    assert not settling.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await settling
    assert ended == [True]
