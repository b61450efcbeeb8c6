"""What of Ray a run stands on: gone for a moment, gone for good, stopped without dying."""

from __future__ import annotations

import asyncio

import pytest

from miles.ray.ray_processes import GCS_SILENT_SECS, RayProcess, gcs_lost, ray_lost
from miles.utils.network import find_available_port
from tests.fast.virtual_time import virtual

SILENT_SECS, LOOK_SECS = 0.2, 0.02


async def serve(port: int) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def test_a_control_store_that_is_not_reached_for_long_is_lost() -> None:
    port = find_available_port(0)
    server = await serve(port)
    lost = asyncio.ensure_future(gcs_lost(f"127.0.0.1:{port}", silent_secs=SILENT_SECS, look_secs=LOOK_SECS))
    await asyncio.sleep(2 * SILENT_SECS)
    assert not lost.done()
    server.close()
    await server.wait_closed()
    assert await lost == f"Ray's gcs_server at 127.0.0.1:{port} has not been reached for {SILENT_SECS:g} s"


@virtual
async def test_one_that_comes_back_in_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    down = [False] * (int(GCS_SILENT_SECS // 5.0) - 1)
    answers = [*down, True, *down, True]

    async def listens(address: str, *, timeout_secs: float) -> bool:
        return answers.pop(0) if answers else False

    monkeypatch.setattr("miles.ray.ray_processes._listens", listens)
    await gcs_lost("host:1", look_secs=5.0)
    assert not answers
    assert asyncio.get_running_loop().time() == pytest.approx(10 * (len(down) + 1) + GCS_SILENT_SECS)


class FakeRayProcess(RayProcess):
    """A process that the test stops and kills."""

    stopped, killed = False, False

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Ray's {name}", None)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def death(self) -> str | None:
        return f"{self.role} was killed" if self.killed else None

    def stop(self) -> str | None:
        return f"{self.role} does not run" if self.stopped else None


@virtual
async def test_a_process_of_ray_that_stays_stopped_is_lost_before_ray_gives_up() -> None:
    """However long the others may be silent: at 60 s Ray would have ended the driver, or every actor."""
    raylet, gcs_server = FakeRayProcess("raylet"), FakeRayProcess("gcs_server")
    lost = asyncio.ensure_future(ray_lost([raylet, gcs_server], limit_secs=600.0))
    await asyncio.sleep(1000.0)
    gcs_server.stopped = True
    await asyncio.sleep(GCS_SILENT_SECS - 1.0)
    gcs_server.stopped = False
    await asyncio.sleep(1.0)
    gcs_server.stopped = True
    await asyncio.sleep(GCS_SILENT_SECS - 1.0)
    assert not lost.done()
    await asyncio.sleep(2.0)
    assert await lost == f"Ray's gcs_server does not run, for {GCS_SILENT_SECS:g} s by now"


@virtual
async def test_the_death_of_a_process_of_ray_is_told_at_once() -> None:
    raylet = FakeRayProcess("raylet")
    lost = asyncio.ensure_future(ray_lost([raylet], limit_secs=60.0))
    await asyncio.sleep(10.0)
    raylet.stopped = raylet.killed = True
    await asyncio.sleep(0.2)
    assert lost.done() and lost.result() == "Ray's raylet was killed"


class ContinuedAfterLook(FakeRayProcess):
    """Goes on at the very moment at which it is taken for lost."""

    def stop(self) -> str | None:
        loop = asyncio.get_running_loop()
        was_seen_before = getattr(self, "seen_at", None) == loop.time()
        self.seen_at = loop.time()
        return None if was_seen_before else super().stop()


@virtual
async def test_one_that_goes_on_while_its_loss_is_told_is_told_as_it_was_seen() -> None:
    raylet = ContinuedAfterLook("raylet")
    lost = asyncio.ensure_future(ray_lost([raylet], limit_secs=10.0))
    await asyncio.sleep(1.0)
    raylet.stopped = True
    assert await lost == "Ray's raylet does not run, for 10 s by now"
