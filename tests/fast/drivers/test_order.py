"""What the asynchronous drivers do side by side: one step off, batch N+1 is generated while N is trained on, and is
complete before the weights change; fully async, a batch is asked for right before its step."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

import train_async


class NotingRun:
    """A run of three steps; notes what begins, and what is waited for."""

    calls: list[str]
    last: NotingRun

    def __init__(self, args: Namespace) -> None:
        self.num_rollout = 3
        self.rollout_ids = range(3)
        self.calls = []
        NotingRun.last = self

    async def __aenter__(self) -> NotingRun:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def generate(self, rollout_id: int) -> int:
        self.calls.append(f"generate {rollout_id}")
        return rollout_id

    async def wait_for_batch(self, batch: int) -> int:
        self.calls.append(f"wait {batch}")
        return batch

    async def train(self, rollout_id: int, batch: int) -> None:
        assert batch == rollout_id
        self.calls.append(f"train {rollout_id}")

    async def update_weights(self) -> None:
        self.calls.append("update")

    async def engine_waits_for_weights(self) -> bool:
        return False

    def finish_step(self, rollout_id: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        async def do(*args: int) -> None:
            pass

        return do


async def calls_of(monkeypatch: pytest.MonkeyPatch, **flags: Any) -> list[str]:
    monkeypatch.setattr("miles.ray.run.Run", NotingRun)
    await train_async.train(Namespace(**flags))
    return NotingRun.last.calls


async def test_one_step_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await calls_of(monkeypatch, fully_async=False, update_weights_interval=1) == [
        *("update", "generate 0", "wait 0", "generate 1", "train 0", "wait 1", "update"),
        *("wait 1", "generate 2", "train 1", "wait 2", "update"),
        *("wait 2", "train 2", "update"),
    ]


async def test_one_step_off_waits_only_where_the_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await calls_of(monkeypatch, fully_async=False, update_weights_interval=2) == [
        *("update", "generate 0", "wait 0", "generate 1", "train 0"),
        *("wait 1", "generate 2", "train 1", "wait 2", "update"),
        *("wait 2", "train 2"),
    ]


@pytest.mark.parametrize("interval", [1, 2])
async def test_fully_async(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    expected = ["update"]
    for step in range(3):
        expected += [f"generate {step}", f"wait {step}", f"train {step}"]
        expected += ["update"] * ((step + 1) % interval == 0)
    assert await calls_of(monkeypatch, fully_async=True, update_weights_interval=interval) == expected
