"""The control store of a cluster that a run has joined: gone for a moment, gone for good."""

from __future__ import annotations

import asyncio

import pytest

from miles.ray.ray_processes import GCS_SILENT_SECS, gcs_lost
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
