from __future__ import annotations

import asyncio
import functools
import json
import threading

import pytest

from miles.utils.user_calls import (
    THREAD_NAME,
    InlineUserCalls,
    UserCalls,
    UserCode,
    UserFunctionError,
    call_user,
    is_async,
    name_of,
    on_the_loop,
    use_user_calls,
)
from tests.fast.virtual_time import virtual


def thread_name() -> str:
    return threading.current_thread().name


async def test_a_plain_function_runs_on_the_one_named_thread_and_an_async_one_on_the_loop():
    async def on_loop():
        return thread_name()

    class Callable:
        async def __call__(self):
            return thread_name()

    here = thread_name()
    assert await call_user(thread_name) == THREAD_NAME
    assert await call_user(on_loop) == here
    assert await call_user(functools.partial(on_loop)) == here
    assert await call_user(Callable()) == here
    assert await call_user(lambda: on_loop()) == here  # called off the loop, awaited on it


async def test_arguments_and_results_pass_through():
    assert await call_user(lambda *args, **kwargs: (args, kwargs), 1, key=2) == ((1,), {"key": 2})


async def test_the_loop_goes_on_while_a_plain_function_blocks():
    release = threading.Event()
    call = asyncio.ensure_future(call_user(release.wait, 30))
    for _ in range(5):
        await asyncio.sleep(0)
    release.set()  # from the loop, which therefore is not blocked
    assert await call is True


async def test_calls_are_serial_and_in_order():
    running, order = [], []

    def work(i):
        running.append(i)
        assert running == [i]
        order.append(i)
        running.remove(i)
        return i

    assert await asyncio.gather(*(call_user(work, i) for i in range(50))) == list(range(50))
    assert order == list(range(50))


async def test_what_it_raises_is_raised_as_the_same_object():
    error = LookupError("mine")

    def fail():
        raise error

    with pytest.raises(LookupError) as raised:
        await call_user(fail)
    assert raised.value is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")])
async def test_the_thread_outlives_whatever_is_raised_on_it(error):
    def fail():
        raise error

    calls = UserCalls()
    with pytest.raises(type(error)):
        await calls.run_sync(fail)
    assert await calls.run_sync(thread_name) == THREAD_NAME
    await calls.close()


async def test_a_call_that_is_cancelled_before_its_turn_is_left_out():
    started, release, ran = threading.Event(), threading.Event(), []

    def block():
        started.set()
        release.wait(30)

    calls = UserCalls()
    first = asyncio.ensure_future(calls.run_sync(block))
    await asyncio.to_thread(started.wait, 30)
    second = asyncio.ensure_future(calls.run_sync(ran.append, 2))
    third = asyncio.ensure_future(calls.run_sync(ran.append, 3))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()  # it runs: its result is dropped
    await asyncio.wait({first, second})
    assert first.cancelled() and second.cancelled()
    release.set()
    await third
    assert ran == [3]
    await calls.close()


async def test_closing_ends_the_thread_and_refuses_further_calls():
    calls = UserCalls()
    await calls.close()  # never started
    calls = UserCalls()
    await calls.run_sync(len, [])
    thread = calls._thread
    await calls.close()
    await calls.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match=r"builtins\.len was called after .* closed"):
        await calls.run_sync(len, [])


async def test_closing_does_not_wait_for_ever_for_a_function_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr("miles.utils.user_calls.CLOSE_GRACE_SECS", 0.01)
    release = threading.Event()
    calls = UserCalls()
    call = asyncio.ensure_future(calls.run_sync(release.wait, 30))
    await asyncio.sleep(0)
    await calls.close()
    assert "a user function still runs" in caplog.text
    release.set()
    await call
    calls._thread.join()


def test_the_thread_ends_with_its_loop_and_each_loop_has_its_own():
    async def thread():
        return await call_user(threading.current_thread)

    first, second = asyncio.run(thread()), asyncio.run(thread())
    assert first is not second
    assert not first.is_alive() and not second.is_alive()


@virtual
async def test_simulation_calls_inline_in_every_task_it_starts():
    here = thread_name()
    assert await call_user(thread_name) == here
    assert await asyncio.ensure_future(call_user(thread_name)) == here


async def test_calls_are_replaced_within_a_block():
    with use_user_calls(InlineUserCalls()):
        assert await call_user(thread_name) != THREAD_NAME
    assert await call_user(thread_name) == THREAD_NAME


async def test_a_function_marked_as_quick_runs_on_the_loop():
    @on_the_loop
    def quick():
        return thread_name()

    assert await call_user(quick) == thread_name()


def test_names_and_kinds():
    assert name_of(thread_name).endswith("test_user_calls.thread_name")
    assert name_of(UserCalls()) == "miles.utils.user_calls.UserCalls"
    assert not is_async(thread_name)


# UserCode


async def user_code(error: BaseException) -> None:
    with UserCode("reward function", thread_name, "sample 3"):
        raise error


async def test_an_error_keeps_its_identity_and_gets_a_note():
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        await user_code(error)
    assert raised.value is error
    assert len(error.__notes__) == 1
    assert "reward function" in error.__notes__[0]
    assert "test_user_calls.thread_name, called for sample 3, raised this" in error.__notes__[0]


async def test_the_note_names_the_line_of_the_users_own_file():
    def broken(text: str) -> float:
        return json.loads(text)  # raises in another file

    with pytest.raises(ValueError) as raised, UserCode("reward function", broken, "sample 3"):
        await call_user(broken, "{")
    line = broken.__code__.co_firstlineno + 1
    assert raised.value.__notes__[0].endswith(f"raised this at tests/fast/utils/test_user_calls.py:{line}")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopIteration(1), SystemExit(0)])
async def test_what_an_event_loop_would_misread_becomes_an_error_that_names_its_origin(error):
    with pytest.raises(UserFunctionError, match=r"^reward function .*thread_name, called for sample 3,") as raised:
        await user_code(error)
    assert raised.value.__cause__ is error


async def test_a_real_cancellation_stays_one():
    started = asyncio.Event()

    async def work():
        with UserCode("reward function", thread_name, "sample 3"):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await started.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await work()


async def test_a_plain_function_that_leaks_a_cancellation_is_named():
    def leak():
        raise asyncio.CancelledError

    with pytest.raises(UserFunctionError, match="let a cancellation escape"), UserCode("f", leak, "sample 3"):
        await call_user(leak)
