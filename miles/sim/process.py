"""One simulated training process, from its start to its end, its crash or its kill.

update weights, then for each step: drain -> train -> acknowledge -> save -> update weights -> evaluate
                                      ^       |
                                      +-------+ a failed step gives its batch back and is done again
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import miles.rollout.fully_async_rollout as heart
from miles.rollout._fully_async_errors import NoProgress, NothingGetsThrough
from miles.rollout.base_types import EndOfData, RolloutFnConstructorInput, RolloutFnTrainInput
from miles.sim.evaluation import SharedEngineEvaluation
from miles.sim.faults import FaultBook, Misbehaved
from miles.sim.plugins import FilterFailed
from miles.sim.schedule import Fault, FaultKind, Schedule
from miles.sim.source import MemoryDataset, SimulatedDataSource
from miles.sim.trace import Trace, Violation
from miles.sim.transitions import Transitions
from miles.sim.waits import Waits

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout._fully_async_snapshot import Moment
    from miles.rollout.base_types import RolloutFnTrainOutput
    from miles.sim.engines import EnginePool
    from miles.sim.observer import Books, Observer

DRAIN_SECONDS = 2000.0
"""No batch may take longer, whatever goes wrong."""

WEATHER = "weather"
"""The name of the one task that outlives a process."""


class Ending(Enum):
    FINISHED = "finished"
    CRASHED = "crashed"
    KILLED = "killed"


@dataclass(frozen=True)
class Save:
    """What a process leaves behind: the trainer's step and version, the rollout's state, and the books.

    The state becomes text as late as possible, when the next process starts: nothing that happens in between may show.
    """

    step: int
    version: int
    rollout: Moment | None
    books: Books


@dataclass(frozen=True)
class Surroundings:
    """What outlives a process."""

    schedule: Schedule
    args: Namespace
    engines: EnginePool
    faults: FaultBook
    observer: Observer
    trace: Trace


class Crash(Exception):
    """A drain has raised the error of user code, or has given up where a flag says so, as it must."""


class DataEnded(Exception):
    """A drain has said so, and it is true."""


class TrainingProcess:
    """A rollout function with its data source, and the trainer's loop around it."""

    def __init__(self, around: Surroundings, save: Save) -> None:
        self.schedule, self.engines, self.observer = around.schedule, around.engines, around.observer
        self.args = around.args
        self.faults, self.trace = around.faults, around.trace
        self.save = save
        self.step = save.step
        self._timers: list[asyncio.TimerHandle] = []
        self._early: asyncio.Task[list[list[Any]]] | None = None
        self._batch_version = 0  # the version at which the last batch was handed over
        dataset = MemoryDataset(self.schedule.prompts, self.schedule.seed)
        self.source = SimulatedDataSource(
            around.args, dataset, around.faults, around.observer, self.schedule.data_groups
        )
        self.fn = heart.FullyAsyncRolloutFn(RolloutFnConstructorInput(around.args, self.source))
        self.fn.observers.append(Transitions(self, around.observer, around.trace))
        self.evaluation = SharedEngineEvaluation(around.args, around.engines, around.observer, around.trace)
        self._waits: Waits | None = None
        self.engines.hang(False)
        self.observer.go_back_to(save.books)
        self.engines.versions.current = save.version
        if save.rollout is not None:
            self.fn.restore(json.loads(json.dumps(save.rollout.encode())))
        self.trace.add("process starts", "step", self.step)

    # ---- the life of the process

    async def run(self) -> None:
        """All steps of the run, or as many as there is data for. Raises Crash."""
        loop = asyncio.get_running_loop()
        for fault in self.faults.timed:
            if fault.kind is FaultKind.SAVE_ANY_TIME and fault.at > loop.time() and self.schedule.acknowledges:
                self._timers.append(loop.call_at(fault.at, self._save_any_time, fault))
        await self._update_weights()
        try:
            while self.step < self.schedule.steps:
                await self._one_step()
        except DataEnded:
            self.trace.add("run ends with its data", self.step)

    async def finish(self) -> None:
        """Without any more faults: train until every outstanding group is settled and a new one has come, or to the end
        of the data."""
        self.faults.quiet = True
        self.engines.hurry()
        books = self.observer.books
        waiting, first_new = {*books.outstanding, *books.given_back}, books.next_fresh
        self.trace.add("quiet", len(waiting))
        steps_left = 20 + 4 * len(waiting) // self.schedule.rollout_batch_size
        if self.schedule.data_groups is not None:
            steps_left += self.schedule.data_groups - first_new
        while (
            (left := waiting - books.trained.keys() - books.dropped.keys())
            or books.next_fresh == first_new
            or self.schedule.data_groups is not None
        ):
            if steps_left == 0:
                self.trace.violate(f"lost: groups {sorted(left)} are never trained; {books.next_fresh - first_new} new")
            steps_left -= 1
            try:
                batch = await self._drain(self.step)
            except DataEnded:
                return
            await self._train(batch, self.step)
            self._acknowledge(self.step, batch)
            self.step += 1

    async def end(self, ending: Ending) -> None:
        """Close the rollout function; a killed process is no longer observed."""
        self.trace.add(f"process {ending.value}")
        for timer in self._timers:
            timer.cancel()
        if ending is not Ending.FINISHED:
            self.source.observer = None
            if self._early is not None:
                self._early.cancel()
                await asyncio.gather(self._early, return_exceptions=True)
            self.fn.observers.clear()
        await self.fn.close()
        left = [
            t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task() and t.get_name() != WEATHER
        ]
        if left:
            self.trace.violate(f"tasks are left behind by close(): {sorted(left)}")
        await self.fn.close()
        if self.engines.running:
            self.trace.violate(f"{self.engines.running} samples are still being generated after close()")

    async def _one_step(self) -> None:
        step = self.step
        batch = await self._early_batch(step)
        batch = await self._drain(step) if batch is None else batch
        if not await self._train(batch, step):
            return
        self._acknowledge(step, batch)
        self.step += 1
        if self.schedule.acknowledges and self.step % self.schedule.save_interval == 0:
            self._save()
        if self.step % self.schedule.update_interval == 0:
            if self.schedule.drains_early and self.schedule.acknowledges and self.step < self.schedule.steps:
                self._early = asyncio.create_task(self._drain(self.step), name="early drain")
                await asyncio.sleep(0.05)
            await self._update_weights()
        await self._evaluate_if_due(step)

    async def _early_batch(self, step: int) -> list[list[Any]] | None:
        """The batch of the drain that was begun before the weights were updated, unless it was ready before that: then
        it goes back, because nobody has measured it against the new version."""
        if self._early is None:
            return None
        task, self._early = self._early, None
        batch = await task
        if self._batch_version == self.engines.versions.current:
            return batch
        self.trace.add("early batch back", step, self.fn.give_back(step))
        return None

    # ---- its parts

    async def _drain(self, step: int) -> list[list[Any]]:
        self.trace.add("drain start", step)
        fault = self.faults.at_step(step, FaultKind.DRAIN_CANCELLED)
        if fault is not None:
            try:
                async with asyncio.timeout(fault.seconds / 4):
                    return await self._call(step)
            except TimeoutError:
                self.trace.add("drain cancelled", step)
                await asyncio.sleep(fault.seconds / 8)
        return await self._call(step)

    async def _call(self, step: int) -> list[list[Any]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit_of_waits = self.schedule.no_progress_timeout
        self._waits = waits = Waits(limit_of_waits, began, self.evaluation.paused_since, self.observer, self.trace)
        errors_before = [error for at, error in self.observer.errors if at < began]
        version = self.engines.versions.current_label if self.schedule.passes_version else None
        input = RolloutFnTrainInput(step, version)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(DRAIN_SECONDS) as limit:
                output = await self.fn(input)
        except FilterFailed:
            self.trace.add("filter failed", step)
            return await self._call(step)
        except Violation:
            raise
        except EndOfData as error:
            self.observer.data_ended()
            raise DataEnded from error
        except NothingGetsThrough as error:
            self.observer.nothing_gets_through(str(error))
            self._raise_budget_where_that_was_all()
            raise Crash from error
        except NoProgress as error:
            waits.gave_up(str(error), loop.time(), sorted(+self.engines.in_generation))
            raise Crash from error
        except Exception as error:  # the one place where the error that must surface is told from any other
            if limit.expired():
                self.trace.violate(f"no progress: the drain of step {step} takes over {DRAIN_SECONDS:g} s")
            self._require_expected(error)
            raise Crash from error
        if errors_before:
            self.trace.violate(
                f"the drain of step {step} hands over a batch, though before it began {errors_before[0]!r}"
            )
        waits.group_came(loop.time())
        self.observer.require_no_end()
        self._require_last_is_said(output)
        self.trace.add("batch", step)
        self._batch_version = self.engines.versions.current
        return output.samples

    def _require_last_is_said(self, output: RolloutFnTrainOutput) -> None:
        short = len(output.samples) < self.schedule.rollout_batch_size
        if output.is_last != short:
            self.trace.violate(f"a batch of {len(output.samples)} groups has is_last {output.is_last}")

    def group_came(self, index: int) -> None:
        """The call has taken a group."""
        self.observer.drained(index)
        if self._waits is not None:
            self._waits.group_came(asyncio.get_running_loop().time())

    def _raise_budget_where_that_was_all(self) -> None:
        """A second process in a row that starts from this save has found nothing among what it generated itself: the
        budget is too small for this run (one late group can use it up), and whoever restarts it grants more."""
        if self.observer.gave_up_after is self.save:
            self.args.max_empty_batches *= 2
            self.observer.empty_batches = self.args.max_empty_batches
        self.observer.gave_up_after = self.save

    def _require_expected(self, error: BaseException) -> None:
        """Raise Violation unless this is the error of user code, or says what came of its misbehaviour."""
        self.trace.add("error", type(error).__name__, str(error)[:100])
        expected = [fatal for _, fatal in self.observer.errors]
        chain: BaseException | None = error
        while chain is not None:
            if any(chain is fatal for fatal in expected):
                return
            chain = chain.__cause__ or chain.__context__
        if not any(isinstance(fatal, Misbehaved) for fatal in expected):
            self.trace.violate(f"a drain raises {error!r}, expected {expected or 'no error'}")

    async def _train(self, batch: list[list[Any]], step: int) -> bool:
        """Whether the step went well; if not, its batch has been given back."""
        self.observer.step_starts(step, batch)
        if self.faults.at_step(step, FaultKind.SAVE_MID_STEP) and self.schedule.acknowledges:
            self._save()
        await asyncio.sleep(self.schedule.train_seconds)
        if self.schedule.acknowledges and self.faults.at_step(step, FaultKind.TRAIN_FAILS):
            given_back = self.fn.give_back(step)
            self.trace.add("give back", step, given_back)
            if given_back != len(batch) or self.fn.give_back(step) != 0:
                self.trace.violate(f"give_back({step}) gave {given_back} groups back, the batch has {len(batch)}")
            return False
        self.observer.step_done(step, batch)
        return True

    def _acknowledge(self, step: int, batch: list[list[Any]]) -> None:
        if not self.schedule.acknowledges:
            return
        trained = self.fn.acknowledge(step)
        if trained != len(batch) or self.fn.acknowledge(step) != 0:
            self.trace.violate(f"acknowledge({step}) says {trained} groups")
        if self.fn.give_back(step) != 0:
            self.trace.violate(f"the batch of step {step} can be given back after it was acknowledged")

    def _save(self) -> None:
        self.save = Save(self.step, self.engines.versions.current, self.fn.take_moment(), self.observer.copy())
        self.trace.add("save", self.step)

    def _save_any_time(self, fault: Fault) -> None:
        if not self.faults.quiet:
            self.faults.fire(fault)
            self._save()

    async def _update_weights(self) -> None:
        await self.engines.update_weights()
        self.fn.on_weight_version(self.engines.versions.current_label)

    async def _evaluate_if_due(self, step: int) -> None:
        for kind in (FaultKind.EVAL, FaultKind.EVAL_FAILS, FaultKind.EVAL_CANCELLED):
            if (fault := self.faults.at_step(step, kind)) is not None:
                await self.evaluation.run(self.fn, step, fault)
