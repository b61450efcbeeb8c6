"""The driver's waits end as soon as a process of the run dies, with a message that names it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from miles.ray.ray_processes import RayProcess
from miles.ray.supervisor import RunFailed, StopRequested, Supervisor, how_it_died
from miles.utils.heartbeat import Heart, own_pid_space
from miles.utils.processes import ProcessDied
from tests.fast.virtual_time import virtual
from tests.kernel import TELLS_SIGNALS


class RemoteMethod:
    def __init__(self, result: asyncio.Future[Any]) -> None:
        self._result = result

    def remote(self) -> asyncio.Future[Any]:
        return self._result


class FakeActor:
    """An actor whose endless `watch` (or `ping`) is a future that the test resolves."""

    def __init__(self, heart: Heart | None = None) -> None:
        self.life: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.watch = self.ping = RemoteMethod(self.life)
        if heart is not None:
            there: asyncio.Future[Heart] = asyncio.get_running_loop().create_future()
            there.set_result(heart)
            self.heart = RemoteMethod(there)


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


async def test_a_process_that_dies_is_told_with_the_signal_that_killed_it(supervisor: Supervisor) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    actor = FakeActor(Heart(process.pid, "host-a", own_pid_space(), "127.0.0.1", 1))
    supervisor.listen("trainer-0", actor, Path("t.log"))  # type: ignore[arg-type]
    supervisor.watch("trainer-0", actor, Path("t.log"), endless=True)  # type: ignore[arg-type]
    assert await supervisor.wait(call_that_returns("batch")) == "batch"
    process.send_signal(signal.SIGSEGV)
    process.communicate()
    actor.life.set_exception(RayActorError())
    how = "was killed by SIGSEGV" if TELLS_SIGNALS else "died"
    with pytest.raises(RunFailed, match=rf"^trainer-0 \(pid {process.pid} on host-a\) {how}; see t.log$"):
        await supervisor.wait(call_that_returns("never", asyncio.Event()))


class Hearts:
    """Which of the processes answer; asked instead of a socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stopped: set[int] = set()
        self.gone: set[int] = set()
        monkeypatch.setattr("miles.ray.heartbeats.hears", self._hears)

    async def _hears(self, heart: Heart, *, timeout_secs: float) -> bool:
        if heart.pid in self.gone:
            raise ConnectionRefusedError
        if heart.pid in self.stopped:
            await asyncio.sleep(timeout_secs)
        return heart.pid not in self.stopped

    def supervise(self, ranks: int, **options: Any) -> tuple[Supervisor, list[FakeActor]]:
        supervisor = Supervisor(asyncio.Event(), **options)
        actors = [FakeActor(Heart(100 + rank, f"host-{rank}", "", "10.0.0.1", 1)) for rank in range(ranks)]
        for rank, actor in enumerate(actors):
            supervisor.listen(f"trainer-{rank}", actor, Path(f"trainer-{rank}.log"))  # type: ignore[arg-type]
            supervisor.watch(f"trainer-{rank}", actor, Path(f"t-{rank}.log"), endless=True)  # type: ignore[arg-type]
        return supervisor, actors


@virtual
async def test_a_rank_that_stops_ends_the_wait_of_all_and_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for it in a collective, and go on answering."""
    hearts = Hearts(monkeypatch)
    supervisor, _ = hearts.supervise(3, silent_secs=60.0)
    await supervisor.wait(asyncio.sleep(100.0))
    hearts.stopped.add(101)
    stopped_at = asyncio.get_running_loop().time()
    with pytest.raises(RunFailed, match=r"^trainer-1 \(pid 101 on host-1\) has not answered for 60 s") as caught:
        await supervisor.wait(call_that_returns("never", asyncio.Event()))
    assert "see trainer-1.log" in str(caught.value) and "trainer-0" not in str(caught.value)
    assert 60.0 <= asyncio.get_running_loop().time() - stopped_at <= 70.0
    await supervisor.close()


@virtual
async def test_a_call_that_fails_while_a_rank_is_silent_waits_for_what_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the collective's timeout is over first: the other rank's error names nobody."""
    hearts = Hearts(monkeypatch)
    supervisor, _ = hearts.supervise(2, silent_secs=60.0)
    await supervisor.wait(asyncio.sleep(10.0))
    hearts.stopped.add(101)

    async def time_out() -> None:
        await asyncio.sleep(20.0)
        raise RuntimeError("gloo: timed out")

    with pytest.raises(RunFailed, match=r"^trainer-1 "):
        await supervisor.wait(time_out())
    await supervisor.close()


@virtual
async def test_a_call_that_fails_while_a_rank_is_silent_for_a_moment_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hearts = Hearts(monkeypatch)
    supervisor, _ = hearts.supervise(1, silent_secs=60.0)
    await supervisor.wait(asyncio.sleep(10.0))
    hearts.stopped.add(100)
    asyncio.get_running_loop().call_later(40.0, hearts.stopped.clear)

    async def fail() -> None:
        await asyncio.sleep(20.0)
        raise ValueError("reward is NaN")

    with pytest.raises(ValueError, match="reward is NaN"):
        await supervisor.wait(fail())
    await supervisor.close()


async def test_a_raylet_that_is_stopped_explains_the_death_of_every_actor(supervisor: Supervisor) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    try:
        supervisor.watch_ray([RayProcess("raylet", "Ray's raylet, which holds the object store,", process)])
        actor = FakeActor()
        supervisor.watch("rollout_manager", actor, Path("m.log"), endless=True)  # type: ignore[arg-type]
        stop_and_wait(process)
        actor.life.set_exception(RayActorError())
        with pytest.raises(RunFailed, match=r"^Ray's raylet, .* does not run: it is stopped \(SIGSTOP\)$"):
            await supervisor.wait(call_that_returns("never", asyncio.Event()))
    finally:
        process.kill()
        process.communicate()


async def test_a_raylet_that_stays_stopped_ends_a_wait_though_ray_notices_nothing(stop: asyncio.Event) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    supervisor = Supervisor(stop, silent_secs=0.2)
    try:
        supervisor.watch_ray([RayProcess("gcs_server", "Ray's gcs_server", process)])
        assert await supervisor.wait(call_that_returns("batch")) == "batch"
        stop_and_wait(process)
        with pytest.raises(RunFailed, match=rf"^Ray's gcs_server \(pid {process.pid}\) does not run: it is stopped"):
            await supervisor.wait(call_that_returns("never", asyncio.Event()))
    finally:
        process.kill()
        process.communicate()
        await supervisor.close()


def stop_and_wait(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("ray_says", "killed_by", "how"),
    [
        ("Common causes include: (1) the process was killed by the OOM killer", None, "died"),
        ("Common causes include: (1) the process was killed by the OOM killer", "SIGKILL", "was killed by SIGKILL"),
        ("Worker exit type: NODE_OUT_OF_MEMORY", "SIGKILL", "was killed by Ray, for its node ran low on memory"),
        ("The actor died because its node has died. Node Id: 1", None, "died with its node"),
    ],
)
def test_what_ray_has_done_to_an_actor_explains_more_than_the_signal(
    ray_says: str, killed_by: str | None, how: str
) -> None:
    assert how_it_died(ray_says, killed_by) == how


@virtual
async def test_a_call_that_fails_because_its_process_is_gone_waits_for_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the rollout manager dies while it starts, when nobody watches it yet."""
    hearts = Hearts(monkeypatch)
    supervisor, _ = hearts.supervise(1, silent_secs=60.0)
    await supervisor.wait(asyncio.sleep(10.0))
    hearts.gone.add(100)

    async def fail() -> None:
        await asyncio.sleep(9.0)  # a look has found out meanwhile
        raise ConnectionError("it has gone")

    with pytest.raises(ConnectionError, match="it has gone"):
        await supervisor.wait(fail())
    assert asyncio.get_running_loop().time() < 30.0
    await supervisor.close()
