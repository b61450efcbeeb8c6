"""Who is told what, in which order, when steps and saves end well, badly, or are interrupted."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.steps import Steps

if TYPE_CHECKING:
    from pathlib import Path


class Remote:
    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeManager:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.acknowledge, self.give_back = Remote(self._record("acknowledge")), Remote(self._record("give_back"))
        self.save = Remote(self._save)

    def _record(self, name: str) -> Any:
        async def call(rollout_id: int) -> None:
            self._calls.append((name, rollout_id))

        return call

    async def _save(self, rollout_id: int) -> str:
        self._calls.append(("stage", rollout_id))
        return f"staged {rollout_id}"


class FakeTrainers:
    """Trains at once, or when the gate opens, or fails."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def train(self, rollout_id: int, data_ref: Any) -> dict[str, float]:
        await self.gate.wait()
        if self.error:
            raise self.error
        self._calls.append(("train", rollout_id))
        return {"train/loss": 0.5}

    async def save_model(self, rollout_id: int, staged: str) -> None:
        await self.gate.wait()
        self._calls.append(("publish", rollout_id, staged))

    async def finish_saving(self) -> None:
        await self.gate.wait()

    async def export_hf(self, directory: str) -> None:
        self._calls.append(("export", directory))


class Setup:
    def __init__(self, **flags: Any) -> None:
        self.calls: list[Any] = []
        self.trainers = FakeTrainers(self.calls)
        args = Namespace(**{"save": "checkpoints", "save_hf": None, **flags})
        self.steps = Steps(args, FakeManager(self.calls), self.trainers)  # type: ignore[arg-type]


async def interrupt(setup: Setup, coroutine: Any) -> None:
    """Stop waiting for `coroutine` while the trainer is busy with it."""
    setup.trainers.gate.clear()
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_step_is_acknowledged_before_it_is_saved() -> None:
    setup = Setup(save_hf="hf-{rollout_id}")
    assert await setup.steps.train(4, "batch") == {"train/loss": 0.5}
    await setup.steps.save(4)
    assert setup.calls == [
        ("train", 4),
        ("acknowledge", 4),
        ("stage", 4),
        ("publish", 4, "staged 4"),
        ("export", "hf-4"),
    ]


async def test_a_failed_step_gives_its_batch_back_and_raises_its_own_error() -> None:
    setup = Setup()
    setup.trainers.error = FloatingPointError("gradient norm is NaN")
    with pytest.raises(FloatingPointError):
        await setup.steps.train(4, "batch")
    assert setup.calls == [("give_back", 4)]


async def test_a_stop_during_a_step_saves_that_step_once_it_is_acknowledged() -> None:
    setup = Setup()
    await setup.steps.train(3, "batch")
    await interrupt(setup, setup.steps.train(4, "batch"))
    setup.trainers.gate.set()
    await setup.steps.finish()
    assert setup.calls[2:] == [("train", 4), ("acknowledge", 4), ("stage", 4), ("publish", 4, "staged 4")]


async def test_a_stop_during_a_save_publishes_that_set_once() -> None:
    setup = Setup()
    await setup.steps.train(4, "batch")
    await interrupt(setup, setup.steps.save(4))
    setup.trainers.gate.set()
    await setup.steps.finish()
    assert setup.calls[2:] == [("stage", 4), ("publish", 4, "staged 4")]


async def test_nothing_is_saved_twice_or_without_a_step_or_without_a_directory() -> None:
    setup = Setup()
    await setup.steps.finish()
    assert setup.calls == []
    await setup.steps.train(0, "batch")
    await setup.steps.save(0)
    await setup.steps.finish()
    assert [call[0] for call in setup.calls] == ["train", "acknowledge", "stage", "publish"]
    unsaved = Setup(save=None)
    await unsaved.steps.train(0, "batch")
    await unsaved.steps.finish()
    assert [call[0] for call in unsaved.calls] == ["train", "acknowledge"]


@pytest.mark.parametrize(("there", "exported"), [("hf-4", ["export"]), ("hf-5", [])])
async def test_an_export_that_a_kill_has_left_out_is_made_when_its_set_is_loaded(
    tmp_path: Path, there: str, exported: list[str]
) -> None:
    (tmp_path / there).mkdir()
    setup = Setup(save="sets", load="./sets", save_hf=f"{tmp_path}/hf-{{rollout_id}}")
    await setup.steps.export_left_out(5)
    assert setup.calls == [(name, f"{tmp_path}/hf-5") for name in exported]


async def test_an_export_that_each_save_replaces_is_made_again_for_the_set_that_is_loaded(tmp_path: Path) -> None:
    setup = Setup(save="sets", load="sets", save_hf=str(tmp_path))
    await setup.steps.export_left_out(5)
    assert setup.calls == [("export", str(tmp_path))]


@pytest.mark.parametrize("flags", [{"load": "others"}, {"load": None}, {"load": "checkpoints", "save_hf": None}])
async def test_a_set_of_another_directory_is_not_exported(flags: dict[str, str | None]) -> None:
    setup = Setup(**{"save_hf": "hf", **flags})
    await setup.steps.export_left_out(5)
    assert setup.calls == []


async def test_close_leaves_no_task_behind() -> None:
    setup = Setup()
    await interrupt(setup, setup.steps.train(0, "batch"))
    await setup.steps.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
