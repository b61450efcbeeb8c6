"""What a run still does when the data has ended before its last step."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.rollout.rollout_manager import DataEnd, GeneratedBatch
from miles.ray.run import Run
from miles.ray.supervisor import RunFailed
from miles.utils.save_lock import SaveLock

if TYPE_CHECKING:
    from pathlib import Path


class Log:
    """Stands for the supervisor, the steps, the evaluations, the tracker and the console, and notes what each does."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def wait(self, awaitable: Any) -> Any:
        return await awaitable

    async def finish(self) -> None:
        self.calls.append("save")

    async def dispatch(self, rollout_id: int, *, force: bool) -> bool:
        self.calls.append(("evaluate", rollout_id, force))
        return force

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.calls.append((metrics, step))

    def note(self, text: str) -> None:
        self.calls.append(text)


def ended_run(*, left_out: int = 0, last: int | None = 6, start: int = 0, **more: Any) -> tuple[Run, list[Any]]:
    """A run whose data has ended after step `last`."""
    log = Log()
    run = object.__new__(Run)
    run.args = Namespace(eval_interval=more.get("eval_interval"))
    run.num_rollout, run.start_rollout_id = 100, start
    run._supervisor = run._weights = run._steps = run._evals = run._tracker = run._console = log  # type: ignore[assignment]
    run._data_end = DataEnd("no prompts left", left_out)
    run._last_finished, run._last_evaluated = last, more.get("evaluated")
    run._samples_cut_off, run._metrics = more.get("cut_off", 0), {"perf/train_wait_time": 1.0}
    return run, log.calls


async def test_the_end_of_the_data_is_saved_and_told() -> None:
    run, calls = ended_run(cut_off=3)
    await run.finish()
    assert calls == [
        "save",
        ({"end/samples_left_out": 3}, 6),
        "the data ended after 7 steps (no prompts left; 3 samples were cut off the last batch)",
    ]


async def test_samples_that_make_no_step_are_counted() -> None:
    run, calls = ended_run(left_out=2, cut_off=1)
    await run.finish()
    assert ({"end/samples_left_out": 3}, 6) in calls


async def test_the_last_step_is_evaluated_unless_it_has_been() -> None:
    run, calls = ended_run(eval_interval=5, evaluated=4)
    await run.finish()
    assert calls[:2] == ["save", ("evaluate", 6, True)]
    assert run._last_evaluated == 6
    run, calls = ended_run(eval_interval=7, evaluated=6)
    await run.finish()
    assert not any(call[0] == "evaluate" for call in calls)


async def test_a_resumed_run_without_any_data_left_has_nothing_to_do() -> None:
    run, calls = ended_run(last=None, start=7)
    await run.finish()
    assert calls == ["nothing left to do: the data ended after 7 steps (no prompts left)"]


async def test_data_that_ends_before_the_first_step_is_an_error() -> None:
    run, calls = ended_run(last=None)
    with pytest.raises(RunFailed, match="before the first step: no prompts left"):
        await run.finish()
    assert calls == []


async def test_a_run_that_has_reached_its_last_step_is_left_as_it_is() -> None:
    run, calls = ended_run()
    run._data_end = None
    await run.finish()
    assert calls == []


async def test_the_end_of_the_data_is_no_batch() -> None:
    run, _ = ended_run()
    run._data_end = None
    run._record = lambda *_: None  # type: ignore[method-assign]
    batch = GeneratedBatch([], [], {}, [])
    assert await run.wait_for_batch(asyncio.sleep(0, batch)) is batch  # type: ignore[arg-type]
    assert run._data_end is None
    assert await run.wait_for_batch(asyncio.sleep(0, DataEnd("over"))) is None  # type: ignore[arg-type]
    assert run._data_end == DataEnd("over")


async def test_a_run_starts_nothing_where_another_one_writes(tmp_path: Path) -> None:
    run = object.__new__(Run)
    run.run_dir = tmp_path / "second"
    run.args = Namespace(save=str(tmp_path / "sets"), update_weight_disk_dir=str(tmp_path / "weights"))
    for flag, directory in (("--save", "sets"), ("--update-weight-disk-dir", "weights")):
        first = SaveLock(flag, tmp_path / directory, "runs/first")
        with pytest.raises(ValueError, match=rf"{flag} .*{directory}: another run writes there \(runs/first\)"):
            await run.__aenter__()
        assert not run.run_dir.exists()
        first.release()
