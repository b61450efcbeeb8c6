"""One simulated run: `simulate(schedule)` builds the world around the real rollout classes and runs it to its end.

    FullyAsyncRolloutFn, GenerateState, generate_and_rm(_group), RolloutDataSourceWithBuffer    the real ones
    eval_rollout, SubmissionGate                                                               the real ones, too
    event loop, engines, reward, filter, custom store, data set, trainer                       simulated

Invariants are checked after each round of the event loop in which something happened, and by the observer at each event
that it sees.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import miles.rollout.fully_async_rollout as heart
from miles.sim.engines import EnginePool, WeightVersions
from miles.sim.faults import FaultBook
from miles.sim.invariants import Invariants
from miles.sim.observer import Books, Observer
from miles.sim.plugins import Plugins
from miles.sim.process import WEATHER, Crash, Ending, Save, Surroundings, TrainingProcess
from miles.sim.schedule import FaultKind, Schedule
from miles.sim.store import SimulatedStore
from miles.sim.trace import Trace, Violation
from miles.sim.virtual_loop import VirtualTimeLoop
from miles.utils.misc import function_registry
from miles.utils.user_calls import InlineUserCalls, use_user_calls

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from typing import Any

    from miles.rollout._fully_async_buffer import DataBufferConstructorInput

QUEUE_GROUPS = 12
"""What `--async-data-buffer-capacity-factor` unset means here: small enough to be reached."""


@dataclass(frozen=True)
class Report:
    """A simulated run in which every promise was kept."""

    schedule: Schedule
    trace: Trace
    fired: Counter[FaultKind]
    seconds: float
    """Virtual time."""


class SimulationFailed(AssertionError):
    """A promise was broken; `schedule` does it again, `trace` tells how."""

    def __init__(self, schedule: Schedule, trace: Trace, error: BaseException) -> None:
        self.schedule = schedule
        self.trace = trace
        self.error = error
        super().__init__(f"seed {schedule.seed}: {error}")


def simulate(schedule: Schedule) -> Report:
    """Run the schedule. Raises SimulationFailed where anything goes otherwise than promised."""
    trace = Trace()
    simulation = Simulation(schedule, trace)
    with ExitStack() as stack:
        stack.enter_context(_seams(simulation))
        loop = VirtualTimeLoop()
        loop.set_exception_handler(simulation.on_lost_error)
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(simulation.run())
            return Report(schedule, trace, simulation.faults.fired, loop.time())
        # The one place where a failure of whatever kind becomes a failed simulation: a violation, a deadlock, a bug.
        except Exception as error:
            raise SimulationFailed(schedule, trace, error) from error
        finally:
            _discard(loop)


def _discard(loop: VirtualTimeLoop) -> None:
    """End what a failed run has left, so that nothing of it reaches the next one."""
    loop.after_round = loop.before_time_passes = None
    for task in asyncio.all_tasks(loop):
        task.cancel()
    try:
        loop.run_until_complete(asyncio.sleep(1))
    except Exception:  # a run that has failed may fail again while it ends
        pass
    asyncio.set_event_loop(None)
    loop.close()


@contextmanager
def _seams(simulation: Simulation) -> Iterator[None]:
    """Put the simulated parts into the places that the rollout offers."""
    plugins, get, capacity = simulation.plugins, heart.get, heart.OUTPUT_QUEUE_MAX_GROUPS
    reward = plugins.reward_now if simulation.schedule.sync_reward else plugins.reward
    with ExitStack() as stack:
        for name, function in (
            ("simulated_generate", simulation.engines.generate),
            ("simulated_reward", reward),
            ("simulated_filter", plugins.filter),
            ("simulated_store", simulation.make_store),
        ):
            stack.enter_context(function_registry.temporary(name, function))
        stack.enter_context(use_user_calls(InlineUserCalls()))
        heart.get, heart.OUTPUT_QUEUE_MAX_GROUPS = simulation.engines.answer_router, QUEUE_GROUPS
        try:
            yield
        finally:
            heart.get, heart.OUTPUT_QUEUE_MAX_GROUPS = get, capacity


class Simulation:
    """One run over all its processes: a crash or a kill starts the next one from the last save."""

    def __init__(self, schedule: Schedule, trace: Trace) -> None:
        self.schedule = schedule
        self.trace = trace
        self.faults = FaultBook(schedule.faults, trace)
        self.versions = WeightVersions(schedule)
        self.engines = EnginePool(schedule, self.versions, self.faults, trace)
        self.observer = Observer(schedule, self.engines, trace)
        self.engines.report_fatal = self.observer.fatal
        self.engines.report_begin = self.observer.generation_begins
        self.plugins = Plugins(schedule, self.faults, self.observer)
        self.around = Surroundings(schedule, rollout_args(schedule), self.engines, self.faults, self.observer, trace)

    def make_store(self, input: DataBufferConstructorInput) -> SimulatedStore:
        return SimulatedStore(input, self.schedule, self.faults, self.observer, self.trace)

    def on_lost_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody awaits. In a callback it is lost; that of a task ends with the run that has failed."""
        error = context.get("exception")
        if "handle" in context and error is not None and self.trace.violation is None:
            self.trace.violation = Violation(f"an error in a callback: {error!r}")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        weather = asyncio.create_task(self.engines.suffer(), name=WEATHER)
        save, ending = Save(0, 0, None, Books()), Ending.KILLED
        kills = sorted(f.at for f in self.faults.timed if f.kind is FaultKind.KILL)
        while ending is not Ending.FINISHED:
            process = TrainingProcess(self.around, save)
            invariants = Invariants(process)
            loop.after_round = invariants.check_if_something_happened
            loop.before_time_passes = invariants.check_where_all_waits
            ending = await self._live(process, kills)
            loop.after_round = loop.before_time_passes = None
            await process.end(ending)
            if self.trace.violation is not None:
                raise self.trace.violation
            save = process.save
        weather.cancel()
        await asyncio.wait({weather})
        self._require_no_task_left()

    async def _live(self, process: TrainingProcess, kills: list[float]) -> Ending:
        """Run the process until it ends by itself or its time to be killed comes."""
        task = asyncio.create_task(self._whole_life(process), name="trainer")
        now = asyncio.get_running_loop().time()
        await asyncio.wait({task}, timeout=max(0.0, kills[0] - now) if kills else None)
        if not task.done() and not self.faults.quiet:
            kills.pop(0)
            self.faults.fire(next(f for f in self.faults.timed if f.kind is FaultKind.KILL))
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Crash):
                raise error
            return Ending.KILLED
        await asyncio.wait({task})
        try:
            task.result()
        except Crash:
            return Ending.CRASHED
        return Ending.FINISHED

    async def _whole_life(self, process: TrainingProcess) -> None:
        await process.run()
        await process.finish()

    def _require_no_task_left(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self.trace.violate(f"tasks are left behind: {sorted(task.get_name() for task in left)}")


def rollout_args(schedule: Schedule) -> Namespace:
    """The flags of the run."""
    return Namespace(
        rollout_global_dataset=True,
        rollout_batch_size=schedule.rollout_batch_size,
        n_samples_per_prompt=schedule.n_samples_per_prompt,
        max_weight_staleness=schedule.max_weight_staleness,
        async_max_concurrent_samples=schedule.async_max_concurrent_samples,
        async_data_buffer_capacity_factor=schedule.capacity_factor,
        async_data_buffer_max_bytes=schedule.max_bytes,
        custom_async_data_buffer_path=None if schedule.store == "builtin" else "simulated_store",
        no_progress_timeout=schedule.no_progress_timeout,
        max_empty_batches=schedule.max_empty_batches,
        rollout_submission_granularity=schedule.granularity,
        async_unused_samples_handler=schedule.unused_handler,
        async_max_group_retries=schedule.max_group_retries,
        sample_max_retries=schedule.sample_max_retries,
        sample_timeout_secs=schedule.sample_timeout,
        group_timeout_secs=schedule.group_timeout,
        missing_reward=schedule.missing_reward,
        group_rm=schedule.group_rm,
        update_weights_interval=schedule.update_interval,
        rollout_shuffle=schedule.shuffle,
        rollout_seed=schedule.seed,
        custom_generate_function_path="simulated_generate",
        custom_rm_path="simulated_reward",
        dynamic_sampling_filter_path="simulated_filter",
        rollout_sample_filter_path=None,
        sglang_router_ip="simulated",
        sglang_router_port=1,
    )
