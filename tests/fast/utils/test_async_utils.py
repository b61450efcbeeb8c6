import asyncio
import concurrent.futures
import contextvars
import os
import signal
import threading

import pytest

from miles.utils.async_utils import (
    LOOP_THREAD_NAME,
    AsyncLoopThread,
    close_async_loop,
    eager_create_task,
    get_async_loop,
    run,
    use_async_loop,
)


@pytest.fixture(autouse=True)
def no_loop_is_left():
    yield
    close_async_loop()
    assert LOOP_THREAD_NAME not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def loop_thread():
    thread = AsyncLoopThread("test-loop")
    yield thread
    thread.close()


@pytest.fixture
def sigint_interrupts():
    """A shell gives what it starts in the background a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def thread_name() -> str:
    return threading.current_thread().name


async def forever(started: threading.Event | None = None, ended: list[str] | None = None) -> None:
    try:
        if started is not None:
            started.set()
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            await asyncio.sleep(0)  # cleanup that itself waits
            ended.append("cleaned up")


class TestRun:
    def test_runs_on_the_named_thread_and_returns_the_result(self):
        assert run(thread_name()) == LOOP_THREAD_NAME

    def test_raises_the_coroutines_own_exception(self):
        error = KeyError("mine")

        async def fail():
            raise error

        with pytest.raises(KeyError) as caught:
            run(fail())
        assert caught.value is error

    @pytest.mark.parametrize("error_type", [SystemExit, KeyboardInterrupt])
    def test_an_exit_inside_the_coroutine_reaches_the_caller_and_the_loop_lives_on(self, loop_thread, error_type):
        async def leave():
            raise error_type(3)

        with pytest.raises(error_type):
            loop_thread.run(leave())
        assert loop_thread.run(thread_name()) == "test-loop"

    def test_from_the_loops_own_thread_it_is_an_error_instead_of_a_deadlock(self):
        coro = thread_name()

        async def call_run():
            run(coro)

        with pytest.raises(RuntimeError, match="would wait for itself: await it"):
            run(call_run())
        with pytest.raises(RuntimeError, match="cannot reuse"):
            coro.send(None)  # closed unstarted

    def test_takes_coroutines_only(self, loop_thread):
        with pytest.raises(TypeError, match="takes a coroutine, got function"):
            loop_thread.run(thread_name)

    def test_carries_the_callers_context_variables(self, loop_thread):
        variable = contextvars.ContextVar("variable", default="none")
        variable.set("the caller's")

        async def read():
            return variable.get()

        assert loop_thread.run(read()) == "the caller's"

    @pytest.mark.usefixtures("sigint_interrupts")
    def test_keyboard_interrupt_cancels_the_coroutine_and_waits_for_its_cleanup(self, loop_thread):
        ended: list[str] = []
        main_thread = threading.main_thread().ident

        async def interrupted():
            signal.pthread_kill(main_thread, signal.SIGINT)
            await forever(ended=ended)

        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(interrupted())
        assert ended == ["cleaned up"]

    def test_a_coroutine_that_is_cancelled_by_others_raises_cancelled_error(self, loop_thread):
        async def cancel_myself():
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

        with pytest.raises(concurrent.futures.CancelledError):
            loop_thread.run(cancel_myself())

    def test_many_threads_can_wait_at_once(self, loop_thread):
        async def rendezvous():
            return await barrier.wait()

        async def make_barrier():
            return asyncio.Barrier(8)

        barrier = loop_thread.run(make_barrier())
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            places = list(pool.map(lambda _: loop_thread.run(rendezvous()), range(8)))
        assert sorted(places) == list(range(8))


class TestClose:
    def test_cancels_awaits_and_reports_what_is_left(self, loop_thread, caplog):
        ended: list[str] = []
        started = threading.Event()
        tasks = []

        async def start():
            tasks.append(asyncio.create_task(forever(started, ended), name="left behind"))

        loop_thread.run(start())
        assert started.wait(10)
        assert loop_thread.close() == ["left behind"]
        assert ended == ["cleaned up"]
        assert tasks[0].cancelled()
        assert "1 task(s) left: left behind" in caplog.text

    def test_a_task_started_by_cleanup_is_cancelled_too(self, loop_thread):
        tasks = []

        async def restless():
            try:
                await forever()
            finally:
                tasks.append(asyncio.create_task(forever(), name="second"))

        async def start():
            tasks.append(asyncio.create_task(restless(), name="first"))
            await asyncio.sleep(0)

        loop_thread.run(start())
        assert loop_thread.close() == ["first", "second"]
        assert [task.done() for task in tasks] == [True, True]

    def test_an_exception_during_cleanup_is_logged(self, loop_thread, caplog):
        tasks = []

        async def fail_to_clean_up():
            try:
                await forever()
            finally:
                raise ValueError("cleanup failed")

        async def start():
            tasks.append(asyncio.create_task(fail_to_clean_up(), name="clumsy"))
            await asyncio.sleep(0)

        loop_thread.run(start())
        loop_thread.close()
        assert "task clumsy failed" in caplog.text
        assert "cleanup failed" in caplog.text

    def test_a_waiting_caller_gets_an_error(self, loop_thread):
        started = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(loop_thread.run, forever(started))
            assert started.wait(10)
            assert len(loop_thread.close()) == 1
            with pytest.raises(RuntimeError, match="'test-loop' was closed while forever was running"):
                waiting.result(10)

    def test_twice_is_once(self, loop_thread):
        assert loop_thread.close() == []
        assert loop_thread.close() == []
        assert loop_thread.closed

    def test_afterwards_nothing_is_accepted(self, loop_thread):
        loop_thread.close()
        with pytest.raises(RuntimeError, match="is closed"):
            loop_thread.run(thread_name())

    def test_from_its_own_thread_it_is_an_error(self, loop_thread):
        async def close():
            loop_thread.close()

        with pytest.raises(RuntimeError, match="cannot be closed from its own thread"):
            loop_thread.run(close())

    def test_closes_async_generators(self, loop_thread):
        closed = []

        async def generate():
            try:
                yield 1
            finally:
                closed.append(threading.current_thread().name)

        generator = generate()

        async def start():
            await anext(generator)

        loop_thread.run(start())
        loop_thread.close()
        assert closed == ["test-loop"]

    def test_joins_the_worker_threads(self, loop_thread):
        async def use_a_worker():
            return await asyncio.to_thread(lambda: threading.current_thread())

        worker = loop_thread.run(use_a_worker())
        loop_thread.close()
        assert worker.name.startswith("test-loop-worker")
        assert not worker.is_alive()

    def test_a_blocked_loop_is_an_error_after_a_bounded_time(self):
        thread = AsyncLoopThread("blocked-loop")
        blocked, release = threading.Event(), threading.Event()

        async def block():
            blocked.set()
            release.wait()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(thread.run, block())
            assert blocked.wait(10)
            with pytest.raises(RuntimeError, match=r"did not end in 0\.05 s: it is blocked"):
                thread.close(timeout=0.05)
            release.set()
            waiting.result(10)
        thread._thread.join(10)
        assert not thread._thread.is_alive()


class TestSharedLoop:
    def test_starts_lazily_once_and_again_after_it_was_closed(self):
        first = get_async_loop()
        assert get_async_loop() is first
        close_async_loop()
        assert first.closed
        second = get_async_loop()
        assert second is not first
        assert run(thread_name()) == LOOP_THREAD_NAME

    def test_closes_when_its_last_holder_leaves(self):
        with use_async_loop() as outer:
            with use_async_loop() as inner:
                assert inner is outer
            assert not outer.closed
            assert run(thread_name()) == LOOP_THREAD_NAME
        assert outer.closed

    def test_a_holder_of_a_loop_that_was_closed_leaves_its_successor_alone(self):
        with use_async_loop() as first:
            close_async_loop()
            second = get_async_loop()
        assert first.closed
        assert not second.closed

    def test_closing_without_a_loop_does_nothing(self):
        assert close_async_loop() == []

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
    def test_a_forked_child_starts_its_own(self):
        parent = get_async_loop()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write_end, b"own" if get_async_loop() is not parent and run(thread_name()) else b"shared")
                close_async_loop()
            finally:
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            assert pipe.read() == b"own"
        os.waitpid(pid, 0)
        assert run(thread_name()) == LOOP_THREAD_NAME


class TestEagerCreateTask:
    async def test_the_task_has_run_to_its_first_wait(self):
        seen = []

        async def work():
            seen.append("started")
            await asyncio.sleep(0)
            return 1

        task = await eager_create_task(work(), name="eager")
        assert seen == ["started"]
        assert task.get_name() == "eager"
        assert await task == 1

    async def test_a_failure_stays_in_the_task(self):
        async def fail():
            raise ValueError("mine")

        task = await eager_create_task(fail())
        with pytest.raises(ValueError, match="mine"):
            await task
