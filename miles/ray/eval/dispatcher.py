"""Evaluation of snapshots beside training, as the driver sees it.

    dispatch(n) --room?--> export a snapshot --> backend.evaluate (in the background) --> publish, labelled, at step n
                  |             |                      |
                  +- busy       +- export_failed       +- ckpt_missing, crashed, ...      publish eval/skipped_<reason>

    loop              consumes               waits for                                is unblocked by
    dispatch          the trainer's weights  room (backpressure), then the export     a finished evaluation; the trainer
    one task a point  a snapshot             the backend                              the evaluation, whichever way it ends
    drain             the tasks              every task                               the tasks; `abandon`

What if evaluation is slow? At most `max_in_flight` are begun; then training waits, or the evaluation is left out and
counted. What if it fails? Training goes on: every dispatched step publishes exactly one point, with a result or a reason.
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from miles.ray.eval.types import EvalOutcome, EvalPoint, Weights
from miles.ray.supervisor import RunFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from miles.ray.eval.snapshots import SnapshotStore

logger = logging.getLogger(__name__)

DRAIN_REPORT_SECS = 30.0


class EvalBackend(Protocol):
    """Evaluates snapshots, one at a time; what it is asked meanwhile waits."""

    async def start(self) -> dict[str, int]:
        """Bring up what evaluation needs; process ids by name. Raises where it cannot: a mistake in the set-up."""

    async def evaluate(self, rollout_id: int, hf_dir: str, version: str) -> EvalOutcome:
        """The outcome for the checkpoint in `hf_dir`. A failure of the evaluation is an outcome, too."""

    async def close(self) -> None:
        """End every process. Twice is fine."""


@dataclass(frozen=True)
class _Begun:
    """One evaluation that was begun."""

    rollout_id: int
    weights: Weights
    hf_dir: str
    steps_trained: int  # by the trainer in this run, when it was begun
    snapshot: Path | None = None
    export_seconds: float = 0.0


class EvalDispatcher:
    """See the module docstring. `export(directory)` writes the trainer's weights; `publish(point)` logs a point."""

    def __init__(
        self,
        backend: EvalBackend,
        *,
        export: Callable[[str], Awaitable[None]],
        publish: Callable[[EvalPoint], None],
        snapshots: SnapshotStore,
        max_in_flight: int,
        skip_when_busy: bool,
    ) -> None:
        self._backend = backend
        self._export = export
        self._publish_point = publish
        self._snapshots = snapshots
        self._max_in_flight = max_in_flight
        self._skip_when_busy = skip_when_busy
        self._weights = Weights(0)
        self._steps_trained = 0
        self._in_flight: dict[asyncio.Task[EvalOutcome], _Begun] = {}
        self._own_failure: Exception | None = None

    async def start(self) -> dict[str, int]:
        """Bring up what evaluation needs; process ids by name."""
        return await self._backend.start()

    async def close(self) -> None:
        """End every process of evaluation, at once."""
        await self._backend.close()

    @property
    def in_flight(self) -> list[int]:
        """The steps whose evaluation is begun and not finished, oldest first."""
        return [begun.rollout_id for begun in self._in_flight.values()]

    def on_trained(self) -> None:
        """The trainer has finished a step."""
        self._steps_trained += 1
        self._weights = Weights(self._weights.version, self._weights.steps_after + 1)

    def on_weights_published(self, version: int) -> None:
        """The trainer's weights of now have the name `version`."""
        self._weights = Weights(version)

    async def dispatch(self, rollout_id: int, *, hf_dir: str | None = None, force: bool = False) -> bool:
        """Begin to evaluate the trainer's weights of now, as the point of step `rollout_id`.

        `hf_dir`: a checkpoint that holds these weights already; None: they are exported first. `force`: never left out
        for being one too many. Returns when the trainer may go on, and whether it was not left out for that. Raises
        nothing that evaluation is to blame for.
        """
        self._raise_own_failure()
        try:
            if self._skip_when_busy and not force and self._is_full:
                self._skip(rollout_id, "busy", f"the evaluation of steps {self.in_flight} still runs")
                return False
            while self._is_full:
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            if hf_dir is not None:
                self._start(_Begun(rollout_id, self._weights, hf_dir, self._steps_trained))
            elif (begun := await self._export_snapshot(rollout_id)) is not None:
                self._start(begun)
            return True
        except asyncio.CancelledError:
            self._skip(rollout_id, "stopped", "the run was stopped")
            raise

    async def drain(self) -> None:
        """Until every evaluation that was begun has published its point."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while self._in_flight:
            await asyncio.wait(self._in_flight, timeout=DRAIN_REPORT_SECS)
            if self._in_flight:
                logger.warning("waiting for the evaluation of steps %s: %.0f s", self.in_flight, loop.time() - since)
        self._raise_own_failure()

    async def abandon(self) -> None:
        """Give up what is in flight, because the run ends; the point of each step says so."""
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _is_full(self) -> bool:
        return len(self._in_flight) >= self._max_in_flight

    async def _export_snapshot(self, rollout_id: int) -> _Begun | None:
        """Export the trainer's weights; None where that failed, which is then published."""
        loop = asyncio.get_running_loop()
        weights, since = self._weights, loop.time()
        snapshot = self._snapshots.begin(rollout_id, weights)
        try:
            await self._export(str(snapshot))
        except BaseException as error:
            self._snapshots.release(snapshot)
            if isinstance(error, RunFailed) or not isinstance(error, Exception):
                raise
            # A failed export costs one point, not the run: here it becomes data.
            self._skip(rollout_id, "export_failed", f"{type(error).__name__}: {error}")
            return None
        return _Begun(rollout_id, weights, str(snapshot), self._steps_trained, snapshot, loop.time() - since)

    def _start(self, begun: _Begun) -> None:
        task = asyncio.create_task(self._evaluate(begun), name=f"evaluation of step {begun.rollout_id}")
        self._in_flight[task] = begun
        task.add_done_callback(self._finish)

    async def _evaluate(self, begun: _Begun) -> EvalOutcome:
        try:
            return await self._backend.evaluate(begun.rollout_id, begun.hf_dir, begun.weights.label)
        except Exception as error:  # whatever breaks an evaluation costs one point, not the run: here it becomes data
            return EvalOutcome(skipped="crashed", message=f"{type(error).__name__}: {error}")

    def _finish(self, task: asyncio.Task[EvalOutcome]) -> None:
        """Called however the task ends."""
        begun = self._in_flight.pop(task)
        outcome = EvalOutcome(skipped="stopped", message="the run ended") if task.cancelled() else task.result()
        if begun.snapshot is not None:
            self._snapshots.release(begun.snapshot)
        timing = {
            "eval/lag_steps": self._steps_trained - begun.steps_trained,
            "eval/duration_seconds": outcome.ended - outcome.started,
            "eval/export_time_seconds": begun.export_seconds,
        }
        try:
            self._publish(begun, outcome, timing)
        except Exception as error:  # nobody waits for a callback: the next call of ours raises it
            self._own_failure = error

    def _skip(self, rollout_id: int, reason: str, message: str) -> None:
        never_begun = _Begun(rollout_id, self._weights, "", self._steps_trained)
        self._publish(never_begun, EvalOutcome(skipped=reason, message=message), {})

    def _publish(self, begun: _Begun, outcome: EvalOutcome, timing: dict[str, float]) -> None:
        rollout_id, weights = begun.rollout_id, begun.weights
        steps_trained = rollout_id + 1 if begun.steps_trained else 0
        labels = {
            "eval/weight_version": weights.version,
            "eval/steps_after_version": weights.steps_after,
            "eval/steps_trained": steps_trained,
        }
        if outcome.skipped is not None:
            logger.info("no evaluation of step %d: %s: %s", rollout_id, outcome.skipped, outcome.message)
            metrics: dict[str, float] = {f"eval/skipped_{outcome.skipped}": 1, **labels}
        else:
            metrics = {**outcome.metrics, **labels, **timing}
        self._publish_point(EvalPoint(rollout_id, weights, metrics, outcome, steps_trained))

    def _raise_own_failure(self) -> None:
        error, self._own_failure = self._own_failure, None
        if error is not None:
            raise error
