"""The driver's waits end as soon as a process of the run dies, with a message that names it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles.ray.ray_processes import RayProcess
from miles.ray.supervisor import RunFailed, StopRequested, Supervisor
from miles.utils.processes import ProcessDied


class RemoteMethod:
    def __init__(self, result: asyncio.Future[Any]) -> None:
        self._result = result

    def remote(self) -> asyncio.Future[Any]:
        return self._result


class FakeActor:
    """An actor whose endless `watch` (or `ping`) is a future that the test resolves."""

    def __init__(self) -> None:
        self.life: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.watch = self.ping = RemoteMethod(self.life)


async def call_that_returns(value: str, gate: asyncio.Event | None = None) -> str:
    if gate is not None:
        await gate.wait()
    return value


async def call_that_fails(error: Exception) -> None:
    raise error


@pytest.fixture
async def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def supervisor(stop: asyncio.Event) -> Any:
    supervisor = Supervisor(stop)
    yield supervisor
    await supervisor.close()


async def test_the_result_of_a_call_comes_through(supervisor: Supervisor) -> None:
    supervisor.watch("trainer-0", FakeActor(), Path("t.log"), endless=True)  # type: ignore[arg-type]
    assert await supervisor.wait(call_that_returns("batch")) == "batch"


async def test_a_death_ends_a_wait_that_would_never_end(supervisor: Supervisor) -> None:
    actor = FakeActor()
    supervisor.watch("rollout_manager", actor, Path("m.log"), endless=True)  # type: ignore[arg-type]
    wait = asyncio.create_task(supervisor.wait(call_that_returns("never", asyncio.Event())))
    await asyncio.sleep(0)
    actor.life.set_exception(ProcessDied("engine-0 (pid 7) was killed by SIGKILL; see logs/engine-0.log"))
    with pytest.raises(RunFailed, match=r"engine-0 \(pid 7\) was killed by SIGKILL; see logs/engine-0.log"):
        await wait


async def test_a_failed_call_blames_the_process_whose_death_caused_it(supervisor: Supervisor) -> None:
    actor = FakeActor()
    supervisor.watch("rollout_manager", actor, Path("m.log"), endless=True)  # type: ignore[arg-type]
    wait = asyncio.create_task(supervisor.wait(call_that_fails(ConnectionError("refused"))))
    for _ in range(3):
        await asyncio.sleep(0)
    actor.life.set_exception(ProcessDied("engine-0 died"))
    with pytest.raises(RunFailed, match="engine-0 died"):
        await wait


async def test_a_failed_call_with_every_process_alive_raises_its_own_error(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles.ray.supervisor._BLAME_SECS", 0.0)
    supervisor.watch("trainer-0", FakeActor(), Path("t.log"), endless=False)  # type: ignore[arg-type]
    error = ValueError("reward is NaN")
    with pytest.raises(ValueError, match="reward is NaN") as caught:
        await supervisor.wait(call_that_fails(error))
    assert caught.value is error


async def test_a_stop_ends_a_wait_and_beats_a_result(supervisor: Supervisor, stop: asyncio.Event) -> None:
    stop.set()
    with pytest.raises(StopRequested):
        await supervisor.wait(call_that_returns("never", asyncio.Event()))
    with pytest.raises(StopRequested):
        await supervisor.wait(call_that_returns("batch"))


async def test_a_death_between_two_waits_is_seen_by_the_next(supervisor: Supervisor, tmp_path: Path) -> None:
    actor, log = FakeActor(), tmp_path / "trainer-0.log"
    supervisor.watch("trainer-0", actor, log, endless=False)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    actor.life.set_exception(RuntimeError("boom"))
    with pytest.raises(RunFailed, match=r"trainer-0 failed: RuntimeError: boom; see .*/trainer-0\.log$"):
        await supervisor.wait(call_that_returns("never", asyncio.Event()))


async def test_close_leaves_no_task_behind(stop: asyncio.Event) -> None:
    supervisor = Supervisor(stop)
    supervisor.watch("trainer-0", FakeActor(), Path("t.log"), endless=False)  # type: ignore[arg-type]
    await supervisor.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_end_of_ray_explains_every_other_death(supervisor: Supervisor) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    supervisor.watch_ray([RayProcess("raylet", "Ray's raylet, which holds the object store,", process)])
    actor = FakeActor()
    supervisor.watch("rollout_manager", actor, Path("m.log"), endless=True)  # type: ignore[arg-type]
    assert await supervisor.wait(call_that_returns("batch")) == "batch"
    wait = asyncio.create_task(supervisor.wait(call_that_returns("never", asyncio.Event())))
    await asyncio.sleep(0)
    process.kill()
    process.communicate()
    actor.life.set_exception(ProcessDied("rollout_manager died"))
    with pytest.raises(RunFailed, match=rf"^Ray's raylet, .*\(pid {process.pid}\) was killed by SIGKILL$"):
        await wait


async def test_the_end_of_ray_alone_ends_a_wait(supervisor: Supervisor) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])  # noqa: ASYNC220
    supervisor.watch_ray([RayProcess("gcs_server", "Ray's gcs_server", process)])
    with pytest.raises(RunFailed, match=r"Ray's gcs_server \(pid \d+\) exited with code 3"):
        await supervisor.wait(call_that_returns("never", asyncio.Event()))
