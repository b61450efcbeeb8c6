"""An evaluation actor that dies or stops costs one evaluation, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from miles.ray.eval import client as client_module
from miles.ray.eval.client import EvalClient
from miles.ray.eval.types import EvalOutcome
from miles.utils.heartbeat import Heart
from tests.fast.virtual_time import virtual

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOTHING: Any = None


class Method:
    def __init__(self, function: Any) -> None:
        self.remote = function


class FakeActor:
    """An evaluation takes `secs`; then it ends, or the actor has died."""

    def __init__(self, secs: float = 1.0, *, dies: bool = False) -> None:
        self.killed = False
        self._secs, self._dies = secs, dies
        self.evaluate, self.heart = Method(self._evaluate), Method(self._heart)
        self.start, self.dispose = Method(self._start), Method(self._start)

    async def _start(self) -> dict[str, int]:
        return {"eval_manager": 7}

    async def _heart(self) -> Heart:
        return Heart(7, "host-a", "", "10.0.0.1", 1)

    async def _evaluate(self, *_: Any) -> EvalOutcome:
        await asyncio.sleep(self._secs)
        if self._dies:
            raise RayActorError
        return EvalOutcome({"eval/x": 1.0})


class World:
    """The actors that the client gets, one after the other, and whether their processes answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *actors: FakeActor) -> None:
        self.stopped = False
        self.left = list(actors)
        monkeypatch.setattr("miles.ray.heartbeats.hears", self._hears)
        monkeypatch.setattr(client_module.ray, "remote", lambda _: self)
        monkeypatch.setattr(client_module.ray, "kill", lambda actor: setattr(actor, "killed", True))

    def options(self, **_: Any) -> World:
        return self

    def remote(self, *_: Any) -> FakeActor:
        return self.left.pop(0)

    async def _hears(self, heart: Heart, *, timeout_secs: float) -> bool:
        if self.stopped:
            await asyncio.sleep(timeout_secs)
        return not self.stopped


def make_client(tmp_path: Path) -> EvalClient:
    return EvalClient(Namespace(run_dir=str(tmp_path), heartbeat_timeout_secs=60.0), NOTHING)


@virtual
async def test_one_that_stops_is_killed_and_skipped_and_the_next_evaluation_gets_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = FakeActor(secs=1e9)
    world, client = World(monkeypatch, first, FakeActor()), make_client(tmp_path)
    await client.start()
    asyncio.get_running_loop().call_later(100.0, lambda: setattr(world, "stopped", True))
    outcome = await client.evaluate(0, "dir", "1")
    assert outcome.skipped == "crashed"
    assert "eval_manager (pid 7 on host-a) has not answered for 60 s" in outcome.message
    assert first.killed and 150.0 <= asyncio.get_running_loop().time() <= 170.0
    world.stopped = False
    assert (await client.evaluate(1, "dir", "2")).metrics == {"eval/x": 1.0}
    await client.close()


@virtual
async def test_one_that_dies_is_skipped_and_a_long_evaluation_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    World(monkeypatch, FakeActor(dies=True), FakeActor(secs=10_000.0))
    client = make_client(tmp_path)
    assert (await client.evaluate(0, "dir", "1")).message.startswith("the evaluation actor died; see ")
    assert (await client.evaluate(1, "dir", "2")).metrics == {"eval/x": 1.0}
    await client.close()
