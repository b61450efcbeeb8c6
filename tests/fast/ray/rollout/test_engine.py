"""Engines as a whole: over several machines, by address, and how their ends are told."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from ray.exceptions import RayActorError

from miles.ray.rollout import engine as engine_module
from miles.ray.rollout.engine import ExternalEngine, RayEngine, make_engine
from miles.ray.rollout.engine_size import EngineSize
from miles.utils.http_utils import close_http_client
from miles.utils.network import find_available_port
from miles.utils.processes import ProcessDied

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def flags(tmp_path: Path, **changes: Any) -> Namespace:
    values = {
        "run_dir": str(tmp_path),
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 4,
        "num_gpus_per_node": 2,
        "rollout_external": False,
        "rollout_external_engine_addrs": None,
    }
    return Namespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("gpus", "per_engine", "per_node", "size"),
    [
        (8, 1, 8, EngineSize(8, 1, 1)),
        (8, 4, 8, EngineSize(2, 1, 4)),
        (32, 16, 8, EngineSize(2, 2, 8)),
        (0, 4, 8, EngineSize(0, 1, 4)),
    ],
)
def test_the_size_of_engines(gpus: int, per_engine: int, per_node: int, size: EngineSize) -> None:
    assert EngineSize.of(gpus, per_engine, per_node) == size


class FakeActor:
    """What `ray.remote(EngineActor)` makes; `remote` of a method gives something to await."""

    def __init__(self, node_rank: int) -> None:
        self.node_rank = node_rank
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.healthy: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *args: getattr(self, f"_{name}")(*args))

    async def _meeting_point(self) -> str:
        return "10.0.0.1:25000"

    async def _start(self, *args: Any) -> str:
        self.calls.append(("start", args))
        return await asyncio.shield(self.healthy) if self.node_rank == 0 else "http://10.0.0.2:1"

    async def _watch(self) -> None:
        await asyncio.shield(self.death)

    async def _pids(self) -> dict[str, int]:
        return {"actor": 10 + self.node_rank, "server": 20 + self.node_rank}


class FakeBundles:
    def actor_options(self, index: int, *, gpu_share: float | None = None) -> dict[str, Any]:
        assert gpu_share is None, "an engine has all GPUs of its bundle"
        return {"bundle": index}


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch) -> FakeBundles:
    class FakeActorClass:
        def options(self, bundle: int) -> Any:
            return Namespace(remote=lambda args, index, kind, node: made(FakeActor(node), bundle))

    def made(actor: FakeActor, bundle: int) -> FakeActor:
        actor.calls.append(("bundle", (bundle,)))
        return actor

    monkeypatch.setattr(engine_module.ray, "remote", lambda cls: FakeActorClass())
    return FakeBundles()


async def test_an_engine_over_two_machines_starts_its_servers_side_by_side_at_one_address(
    bundles: FakeBundles, tmp_path: Path
) -> None:
    engine = RayEngine(flags(tmp_path), 1, bundles)  # type: ignore[arg-type]
    head, other = engine.actors
    assert (head.calls, other.calls) == ([("bundle", (2,))], [("bundle", (3,))])
    starting = asyncio.create_task(engine.start())
    while len(other.calls) < 2 or len(head.calls) < 2:  # noqa: ASYNC110 - both have been told before one is healthy
        await asyncio.sleep(0)
    assert head.calls[1] == other.calls[1] == ("start", ("10.0.0.1:25000",))
    head.healthy.set_result("http://10.0.0.1:30000")
    assert await starting == "http://10.0.0.1:30000"
    assert await engine.pids() == {
        "engine-1-actor": 10,
        "engine-1": 20,
        "engine-1-node-1-actor": 11,
        "engine-1-node-1": 21,
    }


async def test_the_start_fails_when_another_machine_loses_its_server(bundles: FakeBundles, tmp_path: Path) -> None:
    engine = RayEngine(flags(tmp_path), 0, bundles)  # type: ignore[arg-type]
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    engine.actors[1].death.set_exception(ProcessDied("engine-0-node-1 exited with code 1"))
    with pytest.raises(ProcessDied, match="engine-0-node-1 exited"):
        await starting


async def test_the_death_of_any_machine_is_the_engines(bundles: FakeBundles, tmp_path: Path) -> None:
    engine = RayEngine(flags(tmp_path), 0, bundles)  # type: ignore[arg-type]
    watching = asyncio.create_task(engine.watch())
    await asyncio.sleep(0)
    engine.actors[1].death.set_exception(RayActorError())
    with pytest.raises(ProcessDied, match="the actor that owns engine-0-node-1 died"):
        await watching


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """Serves paths with fixed answers: `await serve({path: (status, body)})` gives host:port."""
    runners: list[web.AppRunner] = []

    async def start(answers: dict[str, tuple[int, Any]]) -> str:
        async def answer(request: web.Request) -> web.Response:
            status, body = answers.get(request.path, (404, {}))
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        port = find_available_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()
    await close_http_client()


async def test_an_external_engine_is_used_as_it_is(serve: Callable[..., Any], tmp_path: Path) -> None:
    address = await serve({"/health": (200, {}), "/server_info": (200, {"tp_size": 4})})
    args = flags(tmp_path, rollout_external=True, rollout_external_engine_addrs=["a:1", address])
    engine = make_engine(args, 1, bundles=None)  # type: ignore[arg-type]
    assert isinstance(engine, ExternalEngine)
    assert await engine.start() == f"http://{address}"
    assert await engine.pids() == {}
    await engine.stop()
    engine.kill()


async def test_an_external_engine_of_another_size_is_refused(serve: Callable[..., Any], tmp_path: Path) -> None:
    address = await serve({"/health": (200, {}), "/server_info": (200, {"tp_size": 2})})
    engine = ExternalEngine(flags(tmp_path), "engine-0", f"http://{address}")
    with pytest.raises(ValueError, match=r"--rollout-num-gpus-per-engine is 4, and the external engine .* has 2 ranks"):
        await engine.start()


async def test_an_external_engine_that_is_silent_for_long_is_dead(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROBE_INTERVAL_SECS", 0.01)
    answers: dict[str, tuple[int, Any]] = {"/model_info": (200, {})}
    engine = ExternalEngine(flags(tmp_path), "engine-0", f"http://{await serve(answers)}")
    watching = asyncio.create_task(engine.watch())
    await asyncio.sleep(0.1)
    assert not watching.done()
    answers["/model_info"] = (404, {})
    with pytest.raises(ProcessDied, match="has not answered 3 times in a row"):
        await watching
