"""Both drivers end a run whose data ends: after the last batch, whether one is being generated meanwhile or not."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

import train
import train_async


class FakeRun:
    """A run over `batches` batches; notes what the driver does."""

    batches = 0
    calls: list[str]
    last: FakeRun

    def __init__(self, args: Namespace) -> None:
        self.num_rollout = args.num_rollout
        self.rollout_ids = range(self.num_rollout)
        self.calls = []
        FakeRun.last = self

    async def __aenter__(self) -> FakeRun:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.calls.append("left")

    def generate(self, rollout_id: int) -> int | None:
        return rollout_id if rollout_id < self.batches else None

    async def wait_for_batch(self, ref: int | None) -> int | None:
        return ref

    async def train(self, rollout_id: int, batch: int) -> None:
        assert batch == rollout_id
        self.calls.append(f"train {rollout_id}")

    async def finish(self) -> None:
        self.calls.append("finish")

    def finish_step(self, rollout_id: int) -> None:
        self.calls.append(f"finish {rollout_id}")

    def __getattr__(self, name: str) -> Any:
        async def do(*args: int) -> None:
            self.calls.append(" ".join(map(str, (name, *args))))

        return do


@pytest.mark.parametrize(
    ("driver", "fully_async"), [(train, False), (train_async, True), (train_async, False)], ids=["sync", "full", "one"]
)
@pytest.mark.parametrize("batches", [0, 1, 2, 3])
async def test_a_driver_ends_with_the_data(
    driver: Any, fully_async: bool, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles.ray.run.Run", FakeRun)
    monkeypatch.setattr(FakeRun, "batches", batches)
    await driver.train(Namespace(num_rollout=3, fully_async=fully_async, update_weights_interval=1))
    expected = ["update_weights", "eval_before_train"]
    for i in range(batches):
        expected += [f"train {i}", f"save_if_due {i}", "update_weights", f"eval_if_due {i}", f"finish {i}"]
    assert FakeRun.last.calls == [*expected, "finish", "left"]
