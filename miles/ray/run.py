"""One training run as the drivers see it: everything that is started, waited for, measured and stopped again.

    async with Run(args) as run:                 Ray, placement, rollout manager, trainers, tracking
        await run.update_weights()               every wait ends at once when a process dies or the user stops the run
        batch = await run.wait_for_batch(run.generate(0))     None where the data has ended
        await run.train(0, batch)
        run.finish_step(0)                       one line on the console, one record in every tracker
        await run.finish()                       what the last step owes where nobody knew that it was the last

Leaving the block ends every process within seconds, whatever the reason. Where the user stopped the run, a checkpoint
is saved first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.ray.cluster import RayCluster, num_engines
from miles.ray.engine_metrics import EngineMetrics
from miles.ray.eval import make_eval_dispatcher
from miles.ray.faults import tolerates_engine_faults
from miles.ray.placement_group import create_placement
from miles.ray.process_list import ProcessList
from miles.ray.ray_processes import joined_gcs_address, own_ray_processes
from miles.ray.resume import choose_checkpoint, rollout_part
from miles.ray.rollout.rollout_manager import GeneratedBatch, RolloutManager
from miles.ray.step_metrics import fully_async_driver_metrics
from miles.ray.steps import Steps
from miles.ray.supervisor import RunFailed, StopRequested, Supervisor
from miles.ray.train_group import TrainGroup
from miles.ray.waits import result_of
from miles.ray.weight_publisher import WeightPublisher
from miles.utils.console import StepConsole, print_note
from miles.utils.file_errors import named_errors
from miles.utils.misc import should_run_periodic_action
from miles.utils.save_lock import SaveLock, written_directories
from miles.utils.trace import TRACE_FILE, TraceWriter
from miles.utils.tracking import Tracker, write_run_config

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator
    from types import TracebackType

    from ray import ObjectRef

    from miles.ray.eval.dispatcher import EvalDispatcher
    from miles.ray.eval.types import EvalPoint
    from miles.ray.rollout.engine_states import FleetView
    from miles.ray.rollout.rollout_manager import DataEnd

logger = logging.getLogger(__name__)

# Together they keep the promise that a stopped run is gone within 15 s.
_SAVE_SECS = 8.0
_DISPOSE_SECS = 4.0


class Run:
    """See the module docstring."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.run_dir = Path(args.run_dir)
        self._stop = asyncio.Event()
        self._supervisor = Supervisor(self._stop, silent_secs=args.heartbeat_timeout_secs)
        self._cluster = RayCluster(args)
        self._evals: EvalDispatcher | None = None
        self._metrics: dict[str, float] = {}
        self._example: dict[str, Any] = {}
        self._engine_metrics = EngineMetrics(tolerates_faults=tolerates_engine_faults(args))
        self._processes = ProcessList(self.run_dir)
        self._step_start = time.monotonic()
        self._data_end: DataEnd | None = None
        self._last_finished: int | None = None
        self._last_evaluated: int | None = None
        self._samples_cut_off = 0

    # -- start and end --

    async def __aenter__(self) -> Run:
        self._locks = self._lock_directories()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_run_config(self.args, self.run_dir)
        self._timeline = (self.run_dir / "timeline.jsonl").open("a", buffering=1)
        self._trace = TraceWriter(
            self.run_dir / TRACE_FILE, self.args.trace_max_events, num_engines=num_engines(self.args)
        )
        self._listen_for_stop()
        print_note(f"run directory {self.run_dir}; starting Ray, engines and trainers ...")
        try:
            self._tracker = Tracker(self.args, self.run_dir)
            self._cluster.connect()
            self._listen_for_stop()  # again: Ray has put a handler before ours that prints a stack at each SIGTERM
            self._supervisor.watch_ray(own_ray_processes(), joined_gcs_address())
            await self._start_actors()
        except BaseException:
            await self._shut_down()
            raise
        self._console = StepConsole(self.num_rollout, start=self.start_rollout_id)
        return self

    def _lock_directories(self) -> ExitStack:
        """Raises ValueError where another run writes into one of them."""
        with ExitStack() as locks:
            for flag, directory in written_directories(self.args):
                locks.callback(SaveLock(flag, directory, str(self.run_dir)).release)
            return locks.pop_all()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._learn_of_engines(await self._supervisor.wait(self.manager.engines.remote()))
                self._trace.notes(await self._supervisor.wait(self.manager.end_trace.remote()))
            if isinstance(exc, StopRequested):
                await self._save_after_stop()
            if self._evals is not None and exc is None:
                await self._supervisor.wait(self._evals.drain())
        finally:
            if self._evals is not None:
                await self._evals.abandon()
            self._console.close()
            await self._shut_down()

    def _listen_for_stop(self) -> None:
        # A signal that comes while Ray starts, which blocks the loop, is delivered by the next wait.
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._stop.set)

    async def _start_actors(self) -> None:
        args = self.args
        placement = create_placement(args)
        manager_class = ray.remote(RolloutManager)
        self.manager = manager_class.options(num_cpus=1, max_concurrency=64).remote(args, placement.engines)
        self._supervisor.listen("rollout_manager", self.manager, self._log("rollout_manager"))
        manager_started = self.manager.start.remote()
        if args.num_rollout is None:
            await self._supervisor.wait(manager_started)
            num_rollout = await self._supervisor.wait(self.manager.get_num_rollout.remote(args.num_epoch))
            args = type(args)(**{**vars(args), "num_rollout": num_rollout})
        self.num_rollout: int = args.num_rollout
        self.trainers = TrainGroup(args, placement.trainers)
        self.trainers.watch(self._supervisor)
        checkpoint = await self._supervisor.wait(choose_checkpoint(args.load))
        self._evals = make_eval_dispatcher(args, placement.eval_engines, self._export_hf, self._publish_eval)
        evals_started = self._evals.start() if self._evals is not None else _nothing()
        _, resumed_at, eval_pids = await self._supervisor.wait(
            asyncio.gather(result_of(manager_started), self.trainers.init(checkpoint), evals_started)
        )
        self._supervisor.watch("rollout_manager", self.manager, self._log("rollout_manager"), endless=True)
        self.start_rollout_id: int = resumed_at if args.start_rollout_id is None else args.start_rollout_id
        if (start := self.start_rollout_id) > 0:
            checkpoint = rollout_part(checkpoint, start=start, resumed_at=resumed_at)
            await self._supervisor.wait(self.manager.load.remote(start - 1, checkpoint))
        self._steps = Steps(args, self.manager, self.trainers)
        if resumed_at > 0:
            await self._supervisor.wait(self._steps.export_left_out(resumed_at - 1))
        self._weights = WeightPublisher(
            self.manager,
            self.trainers,
            tolerates_faults=tolerates_engine_faults(args),
            on_published=self._weights_published,
            on_view=self._learn_of_engines,
            on_paused=lambda start, end: self._record("pause", start, end, None),
        )
        await self._write_processes(eval_pids or {})

    async def _write_processes(self, eval_pids: dict[str, int]) -> None:
        rollout = await self._supervisor.wait(self.manager.pids.remote())
        trainers = await self._supervisor.wait(self.trainers.pids())
        ray_itself = {process.name: process.pid for process in own_ray_processes()}
        self._processes.learn({**rollout, **trainers, **eval_pids, **ray_itself})

    def _learn_of_engines(self, view: FleetView) -> None:
        """What has happened to engines goes to the console, the trace, and the metrics of the step."""
        for event in view.events:
            self._console.note(event.text)
        self._trace.engine_events(view.events)
        if view.pids:
            self._processes.learn(view.pids)
        self._engine_metrics.learn(view)
        self._trace.learn_engines({engine.url: engine.index for engine in (*view.serving, *view.waiting)})

    def _weights_published(self, version: int) -> None:
        if self._evals is not None:
            self._evals.on_weights_published(version)

    async def _shut_down(self) -> None:
        await self._supervisor.close()
        if hasattr(self, "_steps"):
            await self._steps.close()
        manager, trainers = getattr(self, "manager", None), getattr(self, "trainers", None)
        ends = [result_of(manager.dispose.remote())] if manager else []
        ends += [trainers.close()] if trainers else []
        ends += [self._evals.close()] if self._evals is not None else []
        try:
            async with asyncio.timeout(_DISPOSE_SECS):
                await asyncio.gather(*ends, return_exceptions=True)
        except TimeoutError:
            logger.warning("actors did not end within %.0f s and are killed", _DISPOSE_SECS)
        self._cluster.disconnect()
        self._timeline.close()
        self._trace.close()
        if hasattr(self, "_tracker"):
            self._tracker.close()
        self._locks.close()

    async def _save_after_stop(self) -> None:
        """Finish the training step that is under way and save, within a few seconds."""
        try:
            async with asyncio.timeout(_SAVE_SECS):
                await self._steps.finish()
        except TimeoutError:
            logger.error("the checkpoint was not complete after %.0f s: the previous one is the newest", _SAVE_SECS)

    # -- the steps of the drivers

    @property
    def rollout_ids(self) -> range:
        return range(self.start_rollout_id, self.num_rollout)

    def generate(self, rollout_id: int) -> ObjectRef[GeneratedBatch | DataEnd]:
        """Start to collect one batch."""
        ref: ObjectRef[GeneratedBatch | DataEnd] = self.manager.generate.remote(rollout_id)
        return ref

    async def wait_for_batch(self, ref: ObjectRef[GeneratedBatch | DataEnd]) -> GeneratedBatch | None:
        """The batch, once it is collected, or None where the data has ended; the time waited counts as the trainer's
        idle time."""
        async with self._span("wait", "perf/train_wait_time"):
            batch: GeneratedBatch | DataEnd = await self._supervisor.wait(self._weights.wait(ref))
        if isinstance(batch, GeneratedBatch):
            return batch
        self._data_end = batch
        return None

    async def train(self, rollout_id: int, batch: GeneratedBatch) -> None:
        """One training step on `batch`."""
        for start, end in batch.generation_intervals:
            self._record("generation", start, end, rollout_id)
        self._trace.notes(batch.trace_notes)
        self._metrics |= batch.metrics
        self._example = batch.example
        async with self._span("training", "perf/train_time", rollout_id):
            self._metrics |= await self._supervisor.wait(self._steps.train(rollout_id, batch.data_ref))
        self._samples_cut_off = batch.samples_cut_off
        self._weights.on_trained()
        if self._evals is not None:
            self._evals.on_trained()

    async def update_weights(self) -> None:
        """Bring every engine to the trainer's weights."""
        async with self._span("weight_update", "perf/update_weights_time"):
            metrics = await self._supervisor.wait(self._weights.publish())
        self._metrics |= metrics

    async def engine_waits_for_weights(self) -> bool:
        """Whether an engine was lost and has come back: it gets requests again only after an update."""
        return bool(await self._supervisor.wait(self._weights.engine_waits()))

    async def eval_before_train(self) -> None:
        """Evaluate the weights that training starts from, unless it is resumed or the user skips it.

        The first step begins when this returns.
        """
        if self.args.eval_interval is not None and self.start_rollout_id == 0 and not self.args.skip_eval_before_train:
            if self._evals is not None:  # a checkpoint that was loaded is not the model in --hf-checkpoint
                hf_dir = None if self.args.load else self.args.hf_checkpoint
                await self._supervisor.wait(self._evals.dispatch(0, hf_dir=hf_dir))
            else:
                await self._eval(rollout_id=0)
                self._metrics["eval/steps_trained"] = 0
                self._tracker.log(self._metrics, step=0)
                self._console.eval(self._metrics)
        self._metrics = {}
        self._step_start = time.monotonic()

    async def eval_if_due(self, rollout_id: int) -> None:
        if should_run_periodic_action(rollout_id, self.args.eval_interval, num_rollout=self.num_rollout):
            await self._eval(rollout_id, is_last=rollout_id == self.num_rollout - 1)

    async def _eval(self, rollout_id: int, *, is_last: bool = False) -> None:
        if self._evals is not None:
            start = time.monotonic()
            if await self._supervisor.wait(self._evals.dispatch(rollout_id, force=is_last)):
                self._last_evaluated = rollout_id
            self._metrics["perf/eval_time"] = time.monotonic() - start  # as far as training waited for it
            return
        async with self._span("eval", "perf/eval_time", rollout_id):
            self._metrics |= await self._supervisor.wait(self._weights.wait(self.manager.eval.remote(rollout_id)))
        self._metrics["eval/steps_trained"] = rollout_id + 1
        self._last_evaluated = rollout_id

    async def _export_hf(self, directory: str) -> None:
        await self._supervisor.wait(self.trainers.export_hf(directory))

    def _publish_eval(self, point: EvalPoint) -> None:
        """Log a point at the step that it belongs to, whichever step it is now."""
        outcome = point.outcome
        if outcome.ended:
            self._record("eval", outcome.started, outcome.ended, point.rollout_id)
        self._tracker.log(point.metrics, step=point.rollout_id)
        step = point.rollout_id if point.steps_trained else None
        self._console.eval(point.metrics, step=step, skipped=outcome.skipped, message=outcome.message)

    async def save_if_due(self, rollout_id: int) -> None:
        args = self.args
        sentinel = Path(args.save_trigger_sentinel) if args.save_trigger_sentinel else None
        asked = sentinel is not None and sentinel.exists()
        is_last = rollout_id == self.num_rollout - 1
        if args.save and (asked or is_last or should_run_periodic_action(rollout_id, args.save_interval)):
            async with self._span("save", "perf/save_time", rollout_id):
                await self._supervisor.wait(self._steps.save(rollout_id))
            if asked and sentinel is not None:
                sentinel.unlink(missing_ok=True)

    def finish_step(self, rollout_id: int) -> None:
        """Publish the metrics of the step that ends here."""
        now = time.monotonic()
        step_time, self._step_start = now - self._step_start, now
        self._metrics["perf/step_time"] = step_time
        self._metrics["perf/wait_time_ratio"] = self._metrics.get("perf/train_wait_time", 0.0) / step_time
        if self.args.fully_async:
            self._metrics |= fully_async_driver_metrics(self._metrics, step_time)
        self._metrics |= self._engine_metrics.take()
        self._tracker.log(self._metrics, step=rollout_id)
        self._console.step(rollout_id, self._metrics)
        self._last_finished = rollout_id
        interval = self.args.log_sample_interval
        if interval and rollout_id % interval == 0:
            self._console.sample(self._example)
        self._metrics = {}

    async def finish(self) -> None:
        """Where the data has ended before --num-rollout: save and evaluate, as after the last step, and say so.

        Raises RunFailed where there was nothing to train on at all.
        """
        end, self._metrics = self._data_end, {}
        if end is None:
            return
        last = self._last_finished
        if last is None:
            if self.start_rollout_id == 0:
                raise RunFailed(f"the data ended before the first step: {end.reason}")
            self._console.note(f"nothing left to do: the data ended after {self.start_rollout_id} steps ({end.reason})")
            return
        await self._supervisor.wait(self._steps.finish())
        if self.args.eval_interval is not None and self._last_evaluated != last:
            await self._eval(last, is_last=True)
            if self._evals is None:
                self._tracker.log(self._metrics, step=last)
                self._console.eval(self._metrics, step=last)
        self._tracker.log({"end/samples_left_out": end.samples_left_out + self._samples_cut_off}, step=last)
        cut_off = f"; {self._samples_cut_off} samples were cut off the last batch" if self._samples_cut_off else ""
        self._console.note(f"the data ended after {last + 1} steps ({end.reason}{cut_off})")

    # -- measuring

    @asynccontextmanager
    async def _span(self, lane: str, metric: str, step: int | None = None) -> AsyncIterator[None]:
        start, clock = time.time(), time.monotonic()
        yield
        elapsed = time.monotonic() - clock
        self._metrics[metric] = self._metrics.get(metric, 0.0) + elapsed  # a step may wait for two batches
        self._record(lane, start, start + elapsed, step)

    def _record(self, lane: str, start: float, end: float, step: int | None) -> None:
        with named_errors(self._timeline.name):
            self._timeline.write(json.dumps({"lane": lane, "start": start, "end": end, "step": step}) + "\n")
        self._trace.span(lane, start, end, step)

    def _log(self, process: str) -> Path:
        return self.run_dir / "logs" / f"{process}.log"


async def _nothing() -> None: ...


__all__ = ["Run", "RunFailed", "StopRequested"]
