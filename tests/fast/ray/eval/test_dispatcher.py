"""Every dispatched step gets exactly one point: a labelled result at its own step, or the reason why there is none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.eval import dispatcher as module
from miles.ray.eval.dispatcher import EvalDispatcher
from miles.ray.eval.snapshots import SnapshotStore
from miles.ray.eval.types import EvalOutcome, EvalPoint, Weights
from miles.ray.supervisor import RunFailed
from tests.fast.virtual_time import run_virtual, settle

if TYPE_CHECKING:
    from pathlib import Path


class FakeBackend:
    """Evaluates for `seconds` of loop time, one after the other; `raises` is what it fails with."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.raises: Exception | None = None
        self.calls: list[tuple[int, str, str]] = []
        self._turn = asyncio.Lock()

    async def start(self) -> dict[str, int]:
        return {}

    async def evaluate(self, rollout_id: int, hf_dir: str, version: str) -> EvalOutcome:
        async with self._turn:
            self.calls.append((rollout_id, hf_dir, version))
            await asyncio.sleep(self.seconds)
            if self.raises is not None:
                raise self.raises
            return EvalOutcome({"eval/set": rollout_id / 10}, started=100.0, ended=100.0 + self.seconds)

    async def close(self) -> None: ...


class Bench:
    """A dispatcher on fakes, and what it did."""

    def __init__(self, root: Path, *, max_in_flight: int = 2, skip_when_busy: bool = False, keep: int = 2) -> None:
        self.backend = FakeBackend()
        self.points: list[EvalPoint] = []
        self.exported: list[str] = []
        self.export_raises: BaseException | None = None
        self.root = root
        self.dispatcher = EvalDispatcher(
            self.backend,
            export=self._export,
            publish=self.points.append,
            snapshots=SnapshotStore(root, keep),
            max_in_flight=max_in_flight,
            skip_when_busy=skip_when_busy,
        )
        self.dispatcher.on_weights_published(1)

    async def _export(self, directory: str) -> None:
        await asyncio.sleep(0.5)
        if self.export_raises is not None:
            raise self.export_raises
        self.exported.append(directory)
        (self.root / directory).mkdir()

    async def step(self, rollout_id: int, *, update: bool = True, **flags: Any) -> None:
        """Train, publish and evaluate, as the driver does."""
        await asyncio.sleep(1)
        self.dispatcher.on_trained()
        if update:
            self.dispatcher.on_weights_published(rollout_id + 2)
        await self.dispatcher.dispatch(rollout_id, **flags)

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())

    def metrics(self) -> dict[int, dict[str, float]]:
        return {point.rollout_id: point.metrics for point in self.points}


def run(root: Path, scenario: Any, **flags: Any) -> None:
    """Run `scenario(bench)` in virtual time."""

    async def test() -> None:
        await scenario(Bench(root, **flags))

    run_virtual(test())


def test_a_result_lands_late_at_its_own_step_with_its_own_version(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        await bench.step(0)
        assert loop.time() == 1.5  # training and the export: not the ten seconds of the evaluation
        for _ in range(3):
            await asyncio.sleep(1)
            bench.dispatcher.on_trained()
        assert bench.points == [] and bench.dispatcher.in_flight == [0]
        await bench.dispatcher.drain()
        (point,) = bench.points
        assert (point.rollout_id, point.weights) == (0, Weights(2))
        assert point.metrics == {
            "eval/set": 0.0,
            "eval/weight_version": 2,
            "eval/steps_after_version": 0,
            "eval/steps_trained": 1,
            "eval/lag_steps": 3,
            "eval/duration_seconds": 10.0,
            "eval/export_time_seconds": 0.5,
        }
        assert bench.backend.calls == [(0, str(tmp_path / "step_0_version_2"), "2")]

    run(tmp_path, scenario)


def test_a_checkpoint_that_exists_is_not_exported(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.dispatcher.dispatch(0, hf_dir="model")
        await bench.dispatcher.drain()
        assert bench.exported == [] and bench.backend.calls == [(0, "model", "1")]
        assert bench.metrics()[0]["eval/export_time_seconds"] == 0
        assert bench.metrics()[0]["eval/steps_trained"] == 0

    run(tmp_path, scenario)


def test_weights_that_no_version_names_are_told_apart(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.step(0, update=False)
        await bench.step(1, update=False)
        await bench.dispatcher.drain()
        assert [version for _, _, version in bench.backend.calls] == ["1+1", "1+2"]
        assert [bench.metrics()[i]["eval/steps_after_version"] for i in (0, 1)] == [1, 2]
        assert [bench.metrics()[i]["eval/weight_version"] for i in (0, 1)] == [1, 1]

    run(tmp_path, scenario)


def test_backpressure_makes_training_wait_for_room(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        await bench.step(0)
        await bench.step(1)
        assert loop.time() == 3.0
        await bench.step(2)  # waits until the evaluation of step 0 ends at 11.5
        assert loop.time() == 12.0
        await bench.dispatcher.drain()
        assert sorted(bench.metrics()) == [0, 1, 2]

    run(tmp_path, scenario)


def test_skip_leaves_out_what_is_one_too_many_but_never_the_last(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.step(0)
        await bench.step(1)  # one too many
        assert bench.exported == [str(tmp_path / "step_0_version_2")]
        assert bench.metrics()[1] == {
            "eval/skipped_busy": 1,
            "eval/weight_version": 3,
            "eval/steps_after_version": 0,
            "eval/steps_trained": 2,
        }
        await bench.step(2, force=True)  # the last one waits instead
        await bench.dispatcher.drain()
        assert bench.metrics()[2]["eval/set"] == 0.2

    run(tmp_path, scenario, max_in_flight=1, skip_when_busy=True)


def test_a_failed_export_costs_its_point_alone(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.export_raises = OSError("no space left on device")
        await bench.step(0)
        assert bench.metrics()[0]["eval/skipped_export_failed"] == 1
        assert "no space left" in bench.points[0].outcome.message
        bench.export_raises = None
        await bench.step(1)
        await bench.dispatcher.drain()
        assert bench.metrics()[1]["eval/set"] == 0.1

    run(tmp_path, scenario)


def test_the_death_of_a_process_of_the_run_is_no_failed_export(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.export_raises = RunFailed("trainer-0 died")
        with pytest.raises(RunFailed):
            await bench.step(0)

    run(tmp_path, scenario)


def test_a_crash_costs_its_point_alone(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.backend.raises = KeyError("reward")
        await bench.step(0)
        await bench.dispatcher.drain()
        bench.backend.raises = None
        await bench.step(1)
        await bench.dispatcher.drain()
        assert bench.metrics()[0]["eval/skipped_crashed"] == 1 and "eval/set" not in bench.metrics()[0]
        assert bench.metrics()[1]["eval/set"] == 0.1

    run(tmp_path, scenario)


def test_abandoned_evaluations_say_that_the_run_was_stopped(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.step(0)
        await settle()
        await bench.step(1)
        await bench.dispatcher.abandon()  # the second has not even begun to run
        assert [bench.metrics()[i]["eval/skipped_stopped"] for i in (0, 1)] == [1, 1]
        assert bench.dispatcher.in_flight == []

    run(tmp_path, scenario)


@pytest.mark.parametrize("seconds", [0.2, 5.0])
def test_a_stop_during_the_export_or_while_waiting_for_room_is_published(tmp_path: Path, seconds: float) -> None:
    async def scenario(bench: Bench) -> None:
        if seconds > 1:
            await bench.dispatcher.dispatch(9, hf_dir="model")
        task = asyncio.create_task(bench.dispatcher.dispatch(0))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and bench.metrics()[0]["eval/skipped_stopped"] == 1
        await bench.dispatcher.abandon()

    run(tmp_path, scenario, max_in_flight=1)


def test_old_snapshots_go_and_one_in_use_stays(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for i in range(3):
            await bench.step(i)
        # Kept: 1. In use: 0 (being evaluated), 1 and 2 (in line).
        assert bench.snapshots() == ["step_0_version_2", "step_1_version_3", "step_2_version_4"]
        await bench.dispatcher.drain()
        assert bench.snapshots() == ["step_2_version_4"]

    run(tmp_path, scenario, keep=1, max_in_flight=3)


def test_none_is_kept_where_none_is_asked_for(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.step(0)
        await bench.dispatcher.drain()
        assert bench.snapshots() == []

    run(tmp_path, scenario, keep=0)


def test_a_tracker_that_fails_is_not_lost_in_the_background(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        def publish(point: EvalPoint) -> None:
            raise OSError("disk full")

        bench.dispatcher._publish_point = publish
        await bench.step(0)
        with pytest.raises(OSError, match="disk full"):
            await bench.dispatcher.drain()

    run(tmp_path, scenario)


def test_a_long_drain_says_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Bench) -> None:
        bench.backend.seconds = module.DRAIN_REPORT_SECS + 15
        await bench.step(4)
        await bench.dispatcher.drain()
        assert "waiting for the evaluation of steps [4]: 30 s" in caplog.text

    run(tmp_path, scenario)
