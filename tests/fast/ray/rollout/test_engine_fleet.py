"""Engines that die, hang, fail an update or do not start: who is told, in which order, and when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.rollout.engine_fleet import BLAME_SECS, EXPLAIN_SECS, EngineFleet
from miles.ray.rollout.engine_health import HealthConfig
from miles.utils.processes import ProcessDied
from tests.fast.virtual_time import settle, virtual

if TYPE_CHECKING:
    from miles.ray.rollout.engine_states import EngineRef

START_SECS = 20.0
LOOKS = HealthConfig(interval_secs=30.0, timeout_secs=30.0, first_wait_secs=10.0)


class FakeEngine:
    def __init__(self, cluster: Cluster, index: int) -> None:
        self.name = f"engine-{index}"
        self._cluster = cluster
        self._index = index
        self.life = len(cluster.engines[index])
        self.url = f"http://{self.name}/{self.life}"
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.killed = False

    async def start(self) -> str:
        await asyncio.sleep(START_SECS)
        if self._cluster.start_errors:
            raise self._cluster.start_errors.pop(0)
        return self.url

    async def watch(self) -> None:
        await asyncio.shield(self.death)

    async def stop(self) -> None:
        self._cluster.log.append(f"stop {self.url}")

    async def pids(self) -> dict[str, int]:
        return {self.name: 100 * self._index + self.life}

    def kill(self) -> None:
        self.killed = True
        self._cluster.log.append(f"kill {self.url}")

    def die(self) -> None:
        self.death.set_exception(ProcessDied(f"{self.name} (pid 7) was killed by SIGKILL; see log\n    | last words"))


class Cluster:
    """Engines, router and health, all of them fakes, and a fleet over them."""

    def __init__(self, count: int = 2, *, tolerates_faults: bool = True) -> None:
        self.log: list[str] = []
        self.engines: list[list[FakeEngine]] = [[] for _ in range(count)]
        self.start_errors: list[Exception] = []
        self.registered: set[str] = set()
        self.sick: dict[str, str] = {}
        self.refusing: dict[str, str] = {}
        self.paused: set[str] = set()
        self.full: set[str] = set()
        self.looked_at: list[tuple[float, str]] = []
        self.unregistered = asyncio.Event()
        self.registration = asyncio.Event()
        self.registration.set()
        looks = LOOKS if tolerates_faults else None
        self.fleet = EngineFleet(self._make_engine, count, self, self, looks=looks, tolerates_faults=tolerates_faults)

    def _make_engine(self, index: int) -> FakeEngine:
        engine = FakeEngine(self, index)
        self.engines[index].append(engine)
        return engine

    def engine(self, index: int) -> FakeEngine:
        return self.engines[index][-1]

    async def add_engines(self, urls: list[str]) -> None:
        await self.registration.wait()
        self.registered |= set(urls)

    async def remove_engines(self, urls: list[str]) -> None:
        self.log += [f"unregister {url}" for url in urls]
        self.registered -= set(urls)
        self.unregistered.set()

    async def fails_to_generate(self, url: str, patience_secs: float) -> str | None:
        self.looked_at.append((asyncio.get_running_loop().time(), url))
        if url in self.paused:
            await asyncio.sleep(patience_secs)
            return "has generated nothing"
        return self.sick.get(url)

    async def fails_requests(self, url: str) -> str | None:
        if url in self.full:
            await asyncio.sleep(LOOKS.timeout_secs)
            return None
        return self.refusing.get(url)

    async def fails_to_answer(self, url: str) -> str | None:
        await asyncio.sleep(1.0)
        return self.sick.get(url)

    async def serve(self) -> None:
        await self.fleet.start()
        await self.update()

    async def update(self) -> tuple[EngineRef, ...]:
        engines = self.fleet.begin_update()
        await self.fleet.finish_update(engines)
        return engines

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.fleet.stop()


@virtual
async def test_engines_get_requests_only_after_an_update_that_they_took_part_in() -> None:
    async with Cluster() as cluster:
        await cluster.fleet.start()
        assert cluster.registered == set() and len(cluster.fleet.view().waiting) == 2
        await cluster.update()
        assert cluster.registered == {"http://engine-0/0", "http://engine-1/0"}


@virtual
async def test_a_dead_engine_leaves_the_router_at_once_and_its_successor_serves_after_the_next_update() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.fleet.view()
        cluster.engine(0).die()
        await settle()
        assert cluster.log == ["unregister http://engine-0/0", "kill http://engine-0/0"]
        assert cluster.registered == {"http://engine-1/0"}
        (lost,) = cluster.fleet.view().events
        assert (lost.engine, lost.what) == (0, "lost") and "last words" not in lost.text
        assert lost.text.startswith("engine-0 (pid 7) was killed by SIGKILL; see log;")
        await asyncio.sleep(START_SECS + 1)
        view = cluster.fleet.view()
        assert cluster.registered == {"http://engine-1/0"}, "it serves without weights"
        assert [ref.url for ref in view.waiting] == ["http://engine-0/1"] and view.restarts == 1
        assert view.pids == {"engine-0": 1, "engine-1": 100}
        (up,) = view.events
        assert up.what == "up again" and up.text == "engine-0 is up again after 20 s and waits for weights"
        await cluster.update()
        assert cluster.registered == {"http://engine-0/1", "http://engine-1/0"}
        (serves,) = cluster.fleet.view().events
        assert serves.what == "serves again" and lost.time <= up.time <= serves.time
        assert serves.text == "engine-0 has the current weights and serves again"


@virtual
async def test_an_engine_that_comes_up_during_an_update_waits_for_the_next_one() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.engine(0).die()
        await settle()
        engines = cluster.fleet.begin_update()
        await asyncio.sleep(START_SECS + 1)
        await cluster.fleet.finish_update(engines)
        assert [ref.url for ref in cluster.fleet.view().waiting] == ["http://engine-0/1"]
        assert [ref.url for ref in cluster.fleet.begin_update(only_waiting=True)] == ["http://engine-0/1"]


@virtual
async def test_an_engine_that_hangs_or_fails_is_found_at_the_next_look_and_replaced() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.refusing["http://engine-1/0"] = "answers POST /generate with HTTP 500"
        started = asyncio.get_running_loop().time()
        await cluster.unregistered.wait()
        limit_secs = LOOKS.first_wait_secs + LOOKS.interval_secs + EXPLAIN_SECS
        assert asyncio.get_running_loop().time() - started <= limit_secs
        (lost,) = cluster.fleet.view().events
        assert "engine-1 (http://engine-1/0) answers POST /generate with HTTP 500" in lost.text


@virtual
async def test_an_engine_that_does_not_answer_because_it_has_died_is_lost_by_its_death() -> None:
    """On a busy machine the refused connection is seen before the end of the process."""
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.sick["http://engine-1/0"] = "gives no answer: Cannot connect"
        while not cluster.looked_at:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
        await asyncio.sleep(EXPLAIN_SECS / 2)
        cluster.engine(1).die()
        await cluster.unregistered.wait()
        (lost,) = cluster.fleet.view().events
        assert lost.text.startswith("engine-1 (pid 7) was killed by SIGKILL")


@virtual
async def test_an_engine_that_an_update_has_paused_is_not_taken_for_hung() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        await asyncio.sleep(LOOKS.first_wait_secs + LOOKS.interval_secs - 1)
        cluster.paused = {"http://engine-0/0", "http://engine-1/0"}
        await asyncio.sleep(2)
        assert len(cluster.looked_at) == 2, "the look began before the update"
        engines = cluster.fleet.begin_update()
        await asyncio.sleep(10 * LOOKS.interval_secs)
        assert len(cluster.looked_at) == 2
        cluster.paused = set()
        await cluster.fleet.finish_update(engines)
        assert len(cluster.fleet.view().serving) == 2


@virtual
async def test_an_engine_that_never_generates_is_found_though_updates_follow_each_other_fast() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.paused = {"http://engine-1/0"}
        started = asyncio.get_running_loop().time()
        while not cluster.unregistered.is_set():
            await asyncio.sleep(4.0)
            engines = cluster.fleet.begin_update()
            await asyncio.sleep(1.0)
            await cluster.fleet.finish_update(engines)
            assert asyncio.get_running_loop().time() - started < 1000, "it was never found"
        silent_secs = LOOKS.first_wait_secs + LOOKS.interval_secs + LOOKS.timeout_secs
        assert silent_secs <= asyncio.get_running_loop().time() - started <= silent_secs * 5 / 4 + 5
        assert cluster.log[0] == "unregister http://engine-1/0" and not cluster.engine(0).killed


@virtual
async def test_an_engine_with_a_full_queue_is_left_alone_though_updates_interrupt_each_look() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.full = {"http://engine-0/0", "http://engine-1/0"}
        for _ in range(200):
            await asyncio.sleep(4.0)
            await cluster.update()
        assert cluster.log == [] and len(cluster.looked_at) > 20


@virtual
async def test_an_engine_that_goes_silent_during_an_update_is_found() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.fleet.begin_update()
        cluster.sick["http://engine-0/0"] = "has not answered for 30 s"
        await asyncio.sleep(LOOKS.first_wait_secs + LOOKS.interval_secs + 2 + EXPLAIN_SECS)
        assert cluster.engines[0][0].killed and not cluster.engines[1][0].killed


@virtual
async def test_an_engine_that_gives_no_answer_to_an_update_is_taken_out_before_the_update_is_repeated() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        engines = cluster.fleet.begin_update()
        await cluster.fleet.fail_update(engines, ["http://engine-0/0"], "gave no answer", answered=False)
        assert [ref.url for ref in cluster.fleet.begin_update()] == ["http://engine-1/0"]
        await settle()
        assert cluster.engines[0][0].killed
        assert "engine-0: gave no answer" in str(cluster.fleet.view())


@virtual
async def test_all_engines_that_give_no_answer_are_taken_out_though_one_has_died_already() -> None:
    async with Cluster(3) as cluster:
        await cluster.serve()
        engines = cluster.fleet.begin_update()
        cluster.engine(0).die()
        urls = ["http://engine-0/0", "http://engine-1/0"]
        await cluster.fleet.fail_update(engines, urls, "gave no answer", answered=False)
        assert [ref.url for ref in cluster.fleet.begin_update()] == ["http://engine-2/0"]


@virtual
async def test_an_engine_that_refuses_because_another_one_died_is_not_blamed() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        engines = cluster.fleet.begin_update()
        asyncio.get_running_loop().call_later(BLAME_SECS / 2, cluster.engine(0).die)
        await cluster.fleet.fail_update(engines, ["http://engine-1/0"], "answered 400: peer is gone", answered=True)
        assert [ref.url for ref in cluster.fleet.begin_update()] == ["http://engine-1/0"]


@virtual
async def test_an_engine_that_refuses_while_all_others_live_is_blamed() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        engines = cluster.fleet.begin_update()
        await cluster.fleet.fail_update(engines, ["http://engine-1/0"], "answered 400", answered=True)
        assert [ref.url for ref in cluster.fleet.begin_update()] == ["http://engine-0/0"]


@virtual
async def test_the_loss_of_every_engine_ends_the_run_with_the_last_ones_log() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.engine(0).die()
        await settle()
        cluster.engine(1).die()
        with pytest.raises(ProcessDied, match=r"(?s)the last engine of 2 is lost: engine-1 .* last words"):
            await cluster.fleet.watch()
        with pytest.raises(ProcessDied, match="the last engine of 2 is lost"):
            cluster.fleet.begin_update()


@virtual
async def test_an_engine_that_never_comes_back_ends_the_run_after_three_deaths() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.start_errors = [ProcessDied("no GPU"), ProcessDied("no GPU"), ProcessDied("no GPU")]
        cluster.engine(0).die()
        with pytest.raises(ProcessDied, match="engine-0 has died 3 times in a row before it served: no GPU"):
            await cluster.fleet.watch()
        assert [engine.killed for engine in cluster.engines[0]] == [True, True, True, False]


@virtual
async def test_an_engine_that_comes_up_at_the_second_try_is_used() -> None:
    async with Cluster() as cluster:
        await cluster.serve()
        cluster.start_errors = [OSError("the network is down")]
        cluster.engine(0).die()
        await asyncio.sleep(2 * START_SECS + 10)
        assert [ref.url for ref in cluster.fleet.view().waiting] == ["http://engine-0/2"]


@virtual
async def test_an_engine_that_dies_while_it_is_registered_does_not_stay_in_the_router() -> None:
    async with Cluster() as cluster:
        await cluster.fleet.start()
        cluster.registration.clear()
        update = asyncio.ensure_future(cluster.update())
        await settle()
        cluster.engine(0).die()
        await settle()
        cluster.registration.set()
        await update
        assert cluster.registered == {"http://engine-1/0"}


@virtual
async def test_an_engine_that_cannot_be_looked_after_any_more_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster() as cluster:
        await cluster.serve()

        def kill() -> None:
            raise RuntimeError("no such actor")

        monkeypatch.setattr(cluster.engine(0), "kill", kill)
        cluster.engine(0).die()
        with pytest.raises(ProcessDied, match="an engine is no longer looked after: RuntimeError: no such actor"):
            await cluster.fleet.watch()


@virtual
async def test_without_fault_tolerance_the_first_death_ends_the_run_and_nothing_is_looked_at() -> None:
    async with Cluster(tolerates_faults=False) as cluster:
        await cluster.serve()
        await asyncio.sleep(1000)
        assert cluster.looked_at == []
        cluster.engine(0).die()
        with pytest.raises(ProcessDied, match=r"^engine-0 \(pid 7\) was killed by SIGKILL"):
            await cluster.fleet.watch()
        assert len(cluster.engines[0]) == 1


@virtual
async def test_a_first_start_that_fails_is_an_error_at_once() -> None:
    async with Cluster() as cluster:
        cluster.start_errors = [ProcessDied("engine-0 exited with code 2")]
        with pytest.raises(ProcessDied, match="exited with code 2"):
            await cluster.fleet.start()
