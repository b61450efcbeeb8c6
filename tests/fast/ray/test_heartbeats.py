"""What is known of a process that could not be asked, or for which a firewall answers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from miles.ray import heartbeats
from miles.ray.heartbeats import Heartbeats
from miles.utils.heartbeat import CannotAsk, Heart
from miles.utils.network import find_available_port

if TYPE_CHECKING:
    import pytest

LOG = Path("trainer-0.log")
LIMIT_SECS = 0.06


async def _known(heart: Heart) -> Heart:
    return heart


async def test_a_firewall_that_refuses_is_told_instead_of_nothing_being_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hearts = Heartbeats(60.0)
    hearts.listen("trainer-0", _known(Heart(1, "other", "", "127.0.0.1", find_available_port())), LOG)
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*hearts._tasks)
    await hearts.close()
    assert "trainer-0 never answered at 127.0.0.1:" in caplog.text


async def test_time_in_which_the_driver_could_not_ask_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, asked_often = 0, asyncio.Event()

    async def hears(heart: Heart, *, timeout_secs: float) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            return True
        if looks > 20:  # far more than fit into the limit
            asked_often.set()
        raise CannotAsk(24, "Too many open files")

    monkeypatch.setattr(heartbeats, "hears", hears)
    hearts = Heartbeats(LIMIT_SECS)
    hearts.listen("trainer-0", _known(Heart(1, "other", "", "127.0.0.1", 1)), LOG)
    lost = asyncio.ensure_future(hearts.wait_lost())
    await asyncio.wait({lost, asyncio.ensure_future(asked_often.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not lost.done()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await hearts.close()
