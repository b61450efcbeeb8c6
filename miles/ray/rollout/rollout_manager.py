"""The rollout side of a run in one Ray actor: data source, rollout functions, router and engines.

    generate(n)   rollout function -> flatten, trim -> metrics -> train data -> one object-store reference per DP rank
    eval(n)       eval function (an instance of its own) -> metrics

Rollout functions run on the shared rollout event loop of this process, not on the actor's own: `generate` waits for
them in a thread, so that other calls (eval, watch, dispose) are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.backends.training_utils.flags import data_parallel_size
from miles.ray.cluster import num_engines
from miles.ray.eval.scores import evaluate
from miles.ray.eval.turns import Turns
from miles.ray.faults import tolerates_engine_faults
from miles.ray.rollout.engine import make_engine
from miles.ray.rollout.engine_fleet import EngineFleet, Registry
from miles.ray.rollout.engine_health import EngineHealth, HealthConfig
from miles.ray.rollout.metrics import rollout_metrics
from miles.ray.rollout.rollout_state import RolloutState
from miles.ray.rollout.router import make_router
from miles.ray.rollout.train_data import (
    args_of_last_batch,
    convert_samples_to_train_data,
    flatten_and_trim,
    flatten_samples,
    split_train_data_by_dp,
)
from miles.rollout._fully_async_trace import observe_rollout
from miles.rollout._submission_gate import submission_paused_from_outside
from miles.rollout.base_types import EndOfData, RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.eval_flags import eval_way
from miles.rollout.inference_rollout.compatibility import call_rollout_function, load_rollout_function
from miles.utils.arguments import resolve_rollout_function_paths
from miles.utils.async_utils import close_async_loop, get_async_loop, run
from miles.utils.heartbeat import start_heart
from miles.utils.http_utils import close_http_client, init_http_client
from miles.utils.logging_utils import redirect_output
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.ray.placement_group import Bundles
    from miles.ray.rollout.engine_states import EngineRef, FleetView
    from miles.rollout.data_source import DataSource
    from miles.utils.heartbeat import Heart
    from miles.utils.timeline import Interval
    from miles.utils.trace import GroupPhase, SampleSpan
    from miles.utils.types import Sample

logger = logging.getLogger(__name__)

_CLOSE_SECS = 5.0


@dataclass(frozen=True)
class Box:
    """Keeps Ray from fetching the object behind `ref` where only the reference is passed on."""

    ref: Any


@dataclass(frozen=True)
class GeneratedBatch:
    """What the driver gets of one rollout. The samples themselves stay in the object store."""

    data_ref: list[Box]  # one shard of train data per DP rank
    sample_indices: list[int | None]
    metrics: dict[str, float]
    generation_intervals: list[Interval]  # seconds since the epoch during which a sample was being generated
    example: dict[str, Any] = field(default_factory=dict)  # prompt, response, label, reward, weight_versions of one
    trace_notes: list[GroupPhase | SampleSpan] = field(default_factory=list)  # what ended since the last batch
    samples_cut_off: int = 0  # at its end


@dataclass(frozen=True)
class DataEnd:
    """There is no batch any more."""

    reason: str
    samples_left_out: int = 0
    """They were too few for a training step; they stay in the rollout's state."""


class RolloutManager:
    """See the module docstring. Built by the driver; `start` brings up router and engines."""

    def __init__(self, args: Namespace, engine_bundles: Bundles) -> None:
        redirect_output(Path(args.run_dir) / "logs" / "rollout_manager.log")
        self._router = make_router(args)
        self._args = copy.copy(args)
        self._weight_version: int | None = None
        self._turns = Turns()
        self._dp_size = data_parallel_size(args)
        self._fleet = make_fleet(args, engine_bundles, self._router)

    async def start(self) -> None:
        """Start router and engines, build data source and rollout functions."""
        await asyncio.gather(self._start_router_and_functions(), self._fleet.start())

    async def _start_router_and_functions(self) -> None:
        await self._router.start()  # which tells where it listens; its second passes while the engines start
        self._args.sglang_router_ip, self._args.sglang_router_port = self._router.ip, self._router.port
        await asyncio.to_thread(self._build_rollout_functions)

    def _build_rollout_functions(self) -> None:
        args = self._args
        init_http_client(args)
        get_async_loop().watch_lag(args.event_loop_lag_warn_secs)
        self._data_source = load_function(args.data_source_path)(args)
        self._rollout_fn, self._eval_fn = load_rollout_functions(args, self._data_source)
        self._state = RolloutState(self._rollout_fn, self._data_source, saves=args.save is not None)
        self._trace = observe_rollout((self._rollout_fn, self._eval_fn), args.trace_max_events)
        self._log_rollout = load_function(args.custom_rollout_log_function_path)
        self._log_eval = load_function(args.custom_eval_rollout_log_function_path)

    async def get_router_address(self) -> tuple[str, int]:
        return self._router.ip, self._router.port

    async def get_num_rollout_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts."""
        return int(len(self._data_source.dataset) // self._args.rollout_batch_size)

    async def get_num_rollout(self, num_epoch: int) -> int:
        """So many times the whole batches in one pass; where a pass has fewer prompts than a batch, the whole batches
        in all of them, and at least one."""
        prompts, batch = len(self._data_source.dataset), self._args.rollout_batch_size
        return int(prompts // batch * num_epoch or max(1, prompts * num_epoch // batch))

    async def engines(self) -> FleetView:
        """The engines as they are now, and what has happened since the last view."""
        return self._fleet.view()

    async def begin_update(self, only_waiting: bool = False) -> tuple[EngineRef, ...]:
        """The engines that weights are to be sent to now; see `EngineFleet`."""
        return self._fleet.begin_update(only_waiting=only_waiting)

    async def fail_update(self, engines: Sequence[EngineRef], urls: Sequence[str], reason: str, answered: bool) -> None:
        """The update failed at the engines with these URLs; returns once those at fault are out of the fleet."""
        await self._fleet.fail_update(engines, urls, reason, answered=answered)

    async def finish_update(self, engines: Sequence[EngineRef], version: int) -> FleetView:
        """These engines have the weights that the trainer calls `version`; all of them serve when this returns."""
        if version != self._weight_version:
            self._weight_version = version
            await asyncio.to_thread(self._state.on_weight_version, version)
        await self._fleet.finish_update(engines)
        return self._fleet.view()

    async def announce_weight_version(self, version: int) -> bool:
        """While a batch is asked for: what is handed over from now on is trained by the weights of this version, which
        the engines get next. False, and nothing changes, where the batch has been handed over."""
        return await asyncio.to_thread(self._state.announce_weight_version, version)

    async def acknowledge(self, rollout_id: int) -> None:
        """The trainer has finished its step on this batch: its groups are trained."""
        await asyncio.to_thread(self._state.acknowledge, rollout_id)

    async def give_back(self, rollout_id: int) -> None:
        """The trainer's step on this batch has failed: its groups are not trained."""
        await asyncio.to_thread(self._state.give_back, rollout_id)

    async def generate(self, rollout_id: int) -> GeneratedBatch | DataEnd:
        """One training batch, if the data has not ended. Raises what the rollout function raised."""
        async with self._turns.of(self._rollout_fn):
            return await asyncio.to_thread(self._generate, rollout_id)

    def _generate(self, rollout_id: int) -> GeneratedBatch | DataEnd:
        start = time.monotonic()
        self._state.before_generate(rollout_id)
        rollout_input = RolloutFnTrainInput(rollout_id, weight_version=self._weight_version)
        try:
            output = call_rollout_function(self._rollout_fn, rollout_input)
        except EndOfData as end:
            return DataEnd(str(end))
        rollout_time = time.monotonic() - start
        args = self._args
        if output.is_last:
            num_samples = sum(1 for _ in flatten_samples(output.samples))
            of_last_batch = args_of_last_batch(args, num_samples, self._dp_size)
            if of_last_batch is None:
                return self._leave_out(rollout_id, num_samples)
            args = of_last_batch
        samples, num_trimmed = flatten_and_trim(args, output.samples, dp_size=self._dp_size)
        data = convert_samples_to_train_data(self._args, samples)
        metrics = {**(output.metrics or {}), "perf/rollout_time": rollout_time}
        if not (self._log_rollout and self._log_rollout(rollout_id, self._args, samples, metrics, rollout_time)):
            metrics |= rollout_metrics(
                self._args,
                samples,
                raw_rewards=data["raw_reward"],
                rollout_time=rollout_time,
                num_trimmed=num_trimmed,
            )
        shards = split_train_data_by_dp(args, data, self._dp_size)
        return GeneratedBatch(
            data_ref=[Box(ray.put(shard)) for shard in shards],
            sample_indices=[sample.index for sample in samples],
            metrics=metrics,
            generation_intervals=self._drain_generation_intervals(),
            example=_example(samples),
            trace_notes=[] if self._trace is None else self._trace.take(),
            samples_cut_off=num_trimmed,
        )

    def _leave_out(self, rollout_id: int, num_samples: int) -> DataEnd:
        """The data has ended, and what is left of it makes no step: it stays where it is saved."""
        self._state.give_back(rollout_id)
        return DataEnd(
            f"the last {num_samples} samples are fewer than the {self._dp_size} trainer ranks, and are left out",
            samples_left_out=num_samples,
        )

    async def end_trace(self) -> list[GroupPhase | SampleSpan]:
        """What has ended since the last batch, and what goes on while the run ends."""
        return [] if self._trace is None else self._trace.end()

    async def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the engines' current weights; returns metrics. Nothing new is generated for training meanwhile."""
        async with self._turns.of(self._rollout_fn):
            return await asyncio.to_thread(self._eval, rollout_id)

    def _eval(self, rollout_id: int) -> dict[str, float]:
        version = self._weight_version
        eval_input = RolloutFnEvalInput(rollout_id, weight_version=None if version is None else str(version))
        with submission_paused_from_outside(self._rollout_fn):
            metrics = evaluate(self._args, self._eval_fn, self._log_eval, eval_input)
        return metrics if version is None else {**metrics, "eval/weight_version": version, "eval/lag_steps": 0}

    async def save(self, rollout_id: int) -> str:
        """Stage the rollout side's part of the set after `rollout_id` under `--save`; returns its path."""
        return await asyncio.to_thread(self._state.save, self._args.save, rollout_id)

    async def load(self, rollout_id: int, checkpoint: str | None) -> None:
        """Go on after `rollout_id`, from this set; None: from what the data source itself has kept."""
        if checkpoint is not None:
            await asyncio.to_thread(self._state.load, Path(checkpoint))
        else:
            await asyncio.to_thread(self._state.load_data_source, rollout_id)

    async def heart(self) -> Heart:
        """Begin to answer, beside whatever call there is, whether this process runs; returns where."""
        return start_heart()

    async def pids(self) -> dict[str, int]:
        """Process ids of the manager, the router, and each engine's actor and server."""
        return {"rollout_manager": os.getpid(), "router": self._router.pid, **await self._fleet.pids()}

    async def watch(self) -> None:
        """Never returns; raises when the router dies, or engines in a way that the run does not survive."""
        watchers = [asyncio.ensure_future(self._router.watch()), asyncio.ensure_future(self._fleet.watch())]
        done, pending = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await done.pop()

    async def dispose(self) -> None:
        """End the rollout functions, the data source, the router and the engines. Bounded in time."""
        await asyncio.to_thread(self._close_rollout_functions)
        await asyncio.gather(self._router.stop(), self._fleet.stop())

    def _close_rollout_functions(self) -> None:
        for part in (getattr(self, "_rollout_fn", None), getattr(self, "_eval_fn", None)):
            close = getattr(part, "close", None)
            if close is not None:
                result = close()
                if asyncio.iscoroutine(result):
                    run(result)
        close_data_source = getattr(getattr(self, "_data_source", None), "close", None)
        if close_data_source is not None:
            close_data_source()
        run(close_http_client())
        close_async_loop()

    def _drain_generation_intervals(self) -> list[Interval]:
        busy = getattr(getattr(self._rollout_fn, "state", None), "busy", None)
        return busy.drain() if busy is not None else []


def make_fleet(args: Namespace, bundles: Bundles, router: Registry) -> EngineFleet:
    """The engines of the run, not yet started."""
    tolerates_faults = tolerates_engine_faults(args)
    return EngineFleet(
        lambda index: make_engine(args, index, bundles),
        num_engines(args),
        router,
        EngineHealth(args.rollout_health_check_timeout),
        looks=HealthConfig.from_args(args) if tolerates_faults else None,
        tolerates_faults=tolerates_faults,
    )


def load_rollout_functions(args: Namespace, data_source: DataSource) -> tuple[Any, Any]:
    """The functions for training and for evaluation; the latter is None where snapshots are evaluated, elsewhere.

    Two instances even where their paths are equal: nothing that evaluation does may touch the state of training.
    """
    constructor_input = RolloutFnConstructorInput(args=args, data_source=data_source)
    rollout_path, eval_path = resolve_rollout_function_paths(args)
    rollout_fn = load_rollout_function(constructor_input, rollout_path)
    if eval_way(args).uses_snapshots:
        return rollout_fn, None
    return rollout_fn, load_rollout_function(constructor_input, eval_path)


def _example(samples: list[Sample]) -> dict[str, Any]:
    """One sample for the console: the batch's first."""
    if not samples:
        return {}
    sample = samples[0]
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "weight_versions": list(sample.weight_versions),
    }
