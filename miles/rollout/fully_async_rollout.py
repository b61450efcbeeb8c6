"""Fully asynchronous rollout: generation never waits for a training step, a training step never for a straggler.

      data source --get_samples(1)--> _submit_one_group        one prompt group at a time, while it may start:
           ^                               |                     a group's places are free, the store has room,
           |                               v                     and it would not be born too old (admission)
           |                          _run_group  (one task per group: generate_and_rm_group, then put)
           |                               |
           |                               v                   at most queue_capacity groups; full: put waits
           |                            _output  (the store: an asyncio.Queue of (prompt_group, group))
           |                               |     ^
           |                               |     +---- returned (in front)  <--- give_back, failed drains, restore
           |                               v                                         |
           +------- recycled ------- _drain (judges each group) ----> a batch, sorted by index, for the trainer
              aborted, too stale           |                                         |
                                           +--> dropped (filter, retries)            +--- acknowledge ---> trained

    loop            consumes        waits for                            is unblocked by
    worker          data source     room to submit (_room_to_submit)     whatever changes one: _wake
    group task      its prompts     the engines, then room in the store  the engines; the drain
    drain           the store       a finished group, or the worker's    a group task; the worker's death;
                                    end                                  the end of the data; close()

What if the trainer is slow? The store fills up, finished tasks wait inside `put`, and the worker submits nothing more.
What if generation is slow? The drain waits and says so with numbers, and gives up where a flag says when. What if
something fails? An exception in a group task or in the data source ends the worker, and the next drain raises that very
exception, before it uses any group that is still queued.

Guarantees, each with its mechanism
- A group has one owner (`ledger`, which checks its books after each transition): its task, the store, the drain, the
  trainer. A transition is made in the same step as what it stands for: no await lies between them.
- No task outlives its owner: the worker cancels and awaits its group tasks before it ends, `close()` does the same at
  any moment, and a wait for a group ends its `get` whichever way it ends.
- The worker ends only by an error or by `close()`. Whoever finds it ended any other way raises.
- A batch is within `--max-weight-staleness` of the newest version that the trainer has told when it is handed over:
  groups are measured again if that has changed since.
"""

from __future__ import annotations

import asyncio
import logging
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from miles.rollout._fully_async_buffer import build_store
from miles.rollout._fully_async_config import FullyAsyncConfig
from miles.rollout._fully_async_finished import FinishedGroups
from miles.rollout._fully_async_groups import (
    Group,
    _first_sample,
    _iter_samples,
    describe,
    group_oldest_weight_version,
    require_members,
    sorted_batch,
    take_stock,
)
from miles.rollout._fully_async_ledger import GroupKey, GroupLedger, GroupObserver, RecycleReason
from miles.rollout._fully_async_metrics import DrainReport
from miles.rollout._fully_async_patience import Patience
from miles.rollout._fully_async_prompts import PromptSupply
from miles.rollout._fully_async_refusals import Refusals
from miles.rollout._fully_async_slots import SampleSlots, free_one
from miles.rollout._fully_async_snapshot import KeepsState
from miles.rollout._fully_async_staleness import StalenessGauge, VersionSplit
from miles.rollout._fully_async_tasks import GroupTasks
from miles.rollout._fully_async_trainer import TrainerSide
from miles.rollout._fully_async_wait import WaitsForGroups
from miles.rollout._fully_async_window import Activity, LedgerWindow, loop_lag_metrics
from miles.rollout._submission_gate import PausableSubmission, SubmissionGate
from miles.rollout._weight_version import CachedWeightVersion, query_model_info
from miles.rollout.base_types import EndOfData, RolloutFnConstructorInput, RolloutFnInput, RolloutFnTrainOutput
from miles.rollout.filter_hub.base_types import NO_REASON, acall_dynamic_filter
from miles.rollout.filter_hub.sample_filter import apply_sample_filter
from miles.rollout.inference_rollout.engine_aborts import known_worker_urls
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState, generate_and_rm_group
from miles.utils.http_utils import get
from miles.utils.loop_lag import drain_loop_lag
from miles.utils.misc import load_function
from miles.utils.user_calls import name_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.rollout._fully_async_versions import VersionLabel
    from miles.utils.types import Sample

__all__ = [
    "EndOfData",
    "FullyAsyncRolloutFn",
    "GenerateState",
    "Group",
    "GroupObserver",
    "_CachedWeightVersion",
    "_first_sample",
    "_iter_samples",
    "generate_and_rm_group",
    "get",
    "group_oldest_weight_version",
]

logger = logging.getLogger(__name__)

# Read when they are used, so that a test can replace them.
OUTPUT_QUEUE_MAX_GROUPS = 1000
NO_PROGRESS_WARN_SECS = 30.0
WEIGHT_VERSION_QUERY_TIMEOUT_SECS = 2.0
CLOSE_GRACE_SECS = 5.0

_group_oldest_weight_version = group_oldest_weight_version
_GROUPS_A_TURN = 16  # between two turns of worker or drain, the other tasks of the loop get theirs


class FullyAsyncRolloutFn(PausableSubmission, WaitsForGroups, KeepsState):
    """The rollout function of `train_async.py --fully-async`: one training batch per call.

        generate(n) -> training step -> acknowledge(n), or give_back(n) where it failed -> on_weight_version(v)

    The first call starts the worker, a task of the event loop that the call runs on; it lives until `close()`. Every
    call and every method belongs on that loop. A caller that never acknowledges has each batch closed at its next
    call. Evaluation is refused: it has a rollout function of its own, which shares no state with this one.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = args = input.args
        self.data_source = input.data_source
        self.config = config = FullyAsyncConfig.from_args(args)
        self.state = GenerateState(args)
        self.ledger = GroupLedger()
        self.observers = self.ledger.observers
        self.submission_gate = SubmissionGate()
        self._dynamic_filter = load_function(args.dynamic_sampling_filter_path)
        self._sample_filter = load_function(args.rollout_sample_filter_path)
        self._weight_version = _CachedWeightVersion(ttl=1.0)
        self._prompts = PromptSupply(input.data_source)
        self._trainer = TrainerSide(config, self.ledger)
        self._gauge = StalenessGauge(
            self._trainer.versions, limit=config.max_weight_staleness, strict=config.strict_weight_versions
        )
        if hasattr(self.state, "still_usable"):  # whether a group's finished samples may wait for one that is retried
            self.state.still_usable = self._still_usable  # type: ignore[method-assign]
        self._refusals = Refusals(config, self.ledger, self._prompts, on_change=self._look_again)
        self._most_groups, self._by_sample = config.most_groups_in_flight, config.by_sample
        self._wake = asyncio.Event()  # something changed that `_room_to_submit` looks at
        self._activity = Activity()
        samples, a_group = config.max_in_flight_samples, config.n_samples_per_prompt
        self._slots = SampleSlots(samples, a_group, self._wake.set, self._activity.generation, clock=self._now)
        self._group_tasks = GroupTasks(on_failure=self._leave)
        self._worker: asyncio.Future[Any] | None = None
        store = build_store(args, self._refusals, self.queue_capacity)
        self._finished = FinishedGroups(store, self.ledger, self._activity.blocked, self.queue_capacity)
        self._end_waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._unreported = DrainReport()
        self._window = LedgerWindow(self.ledger)

    @property
    def max_in_flight_groups(self) -> int:
        """`rollout_batch_size`, or `max(1, async_max_concurrent_samples // n_samples_per_prompt)` where that is set."""
        return self.config.max_in_flight_groups

    @property
    def max_in_flight_samples(self) -> int:
        """By group: `max_in_flight_groups * n_samples_per_prompt`. By sample: `async_max_concurrent_samples`."""
        return self.config.max_in_flight_samples

    @property
    def queue_capacity(self) -> int:
        """`OUTPUT_QUEUE_MAX_GROUPS`, or `max(1, int(async_data_buffer_capacity_factor * rollout_batch_size))`."""
        return self.config.queue_capacity(OUTPUT_QUEUE_MAX_GROUPS)

    @property
    def staleness_bound_in_flight(self) -> int:
        """Versions that a group may lag behind when it is trained, if none overtakes it: `ceil((F + Q) / (B * k))`, and
        at most `--max-weight-staleness`; derived in docs/user-guide/fully-async.md."""
        return self.config.staleness_bound(self.queue_capacity)

    def _now(self) -> float:
        return self.ledger.clock()

    @property
    def queue_size(self) -> int:
        """Finished groups that wait for the trainer."""
        return self._finished.size

    @property
    def _output(self) -> asyncio.Queue[Any] | None:
        """The built-in store's queue of `(prompt_group, group)`; None before the first call."""
        return self._finished.queue

    @_output.setter
    def _output(self, queue: asyncio.Queue[Any]) -> None:
        self._finished.queue = queue

    # ---- the caller's side

    async def __call__(self, input: RolloutFnInput) -> RolloutFnTrainOutput:
        """Wait until `rollout_batch_size` groups are finished and accepted, and hand them over.

        Raises ValueError for an eval input; the original exception where the worker has failed, in this call or before;
        ValueError where a plug-in breaks the shape of the batch; NoProgress and NothingGetsThrough where their flags
        say; RuntimeError after `close()`. Where the data ends, the last batch is what is left; EndOfData after that.
        """
        if input.evaluation:
            raise ValueError(
                "FullyAsyncRolloutFn does not serve evaluation, which would share its engines' abort flag and its "
                "queue: set --eval-function-path to another rollout function (without that flag, --fully-async keeps "
                "the standard one for evaluation)."
            )
        return await self._drain(input)

    def acknowledge(self, rollout_id: int) -> int:
        """The trainer has finished the step on this rollout's batch. The number of groups that are trained now; 0 where
        there is no such batch, or not any more."""
        return self._trainer.acknowledge(rollout_id)

    def give_back(self, rollout_id: int) -> int:
        """The step on this rollout's batch failed or was cancelled: its groups come first in the next drain. Their
        number; 0 where there is no such batch, or it was acknowledged or given back before."""
        keys = self._trainer.give_back(rollout_id)
        self._finished.put_back(keys)
        return len(keys)

    def on_weight_version(self, version: VersionLabel) -> None:
        """The trainer has published weights of this version to the engines. Labels are ordered by these calls."""
        self._trainer.publish(version)
        self._look_again()

    def announce_weight_version(self, version: VersionLabel) -> bool:
        """As `on_weight_version`, but before the engines have the weights, and only where no batch is between its
        hand-over and its step: it was measured against the version before. Whether that is so."""
        if self._trainer.has_batch:
            return False
        self.on_weight_version(version)
        return True

    def resume_submission(self) -> None:
        super().resume_submission()
        self._look_again()

    async def close(self) -> None:
        """End the worker and every group task, at any moment; a call that waits for a batch raises. Twice is fine.

        Takes at most CLOSE_GRACE_SECS: what has not ended by then, because user code holds on to its cancellation, is
        logged and left behind. Finished groups stay in the queue.
        """
        self._closed = True
        worker = self._worker
        if worker is not None and worker.done() and not worker.cancelled() and (error := worker.exception()):
            logger.warning("closing a fully-async rollout whose worker had failed: %r", error)
        await self._group_tasks.stop(CLOSE_GRACE_SECS, *([] if worker is None else [worker]))

    # ---- the worker: data source -> in flight -> store

    def _ensure_started(self) -> None:
        if self._closed:
            raise RuntimeError("this FullyAsyncRolloutFn is closed")
        self._finished.open()
        self._activity.start(self._now())
        if self._worker is None:
            self.ledger.clock = asyncio.get_running_loop().time
            self._worker = asyncio.create_task(self._run_worker(), name="fully-async-worker")

    async def _run_worker(self) -> NoReturn:
        """Submit whatever may be submitted until a group task fails."""
        tasks = self._group_tasks
        try:
            while tasks.failure is None:
                self._wake.clear()  # whatever changes from here on is looked at in the next round
                room = self._room_to_submit()
                for _ in range(min(room, _GROUPS_A_TURN)):
                    if not self._submit_one_group():
                        break
                if room > _GROUPS_A_TURN:
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
            raise tasks.failure
        finally:
            if not self._closed:  # else close() is already at it
                await tasks.stop(CLOSE_GRACE_SECS)

    def _room_to_submit(self) -> int:
        """How many groups may be submitted now."""
        if self._prompts.ended or not self.submission_gate.is_open:
            return 0
        if self._by_sample and self._finished.waiting_puts:  # by group, those that wait still hold their places
            return 0
        # By sample, groups that are being rewarded hold no place any more.
        room = min(self._slots.groups_that_fit, self._most_groups - self.ledger.in_flight)
        return self._trainer.admits(room)

    def _submit_one_group(self) -> bool:
        """Take one prompt group from the data source and start its task: the only place that does either. No await
        between the two, so the group is never without an owner. False where the data has ended."""
        prompt_group = self._prompts.next_group()
        if prompt_group is None:
            self._look_again()
            return False
        key = self.ledger.pull(prompt_group)
        self._slots.take(key)
        self._group_tasks.start(key, self._run_group(key))
        return True

    async def _run_group(self, key: GroupKey) -> None:
        """The task of a group: generation, then the store."""
        tasks = self._group_tasks
        try:
            # Generation gets a list of its own: the prompt group stays flat whatever is done to the list.
            own, params = list(key.prompt_group), self.state.sampling_params
            if self._by_sample:
                done = MethodType(free_one, key)  # what partial(free_one, key) does, but quicker to call
                group: Any = await generate_and_rm_group(
                    self.state, own, sampling_params=params, evaluation=False, sample_done_callback=done
                )
            else:
                group = await generate_and_rm_group(self.state, own, sampling_params=params, evaluation=False)
            if not isinstance(group, list):
                raise TypeError(
                    f"generating {describe(key.prompt_group)} returned {group!r}, expected a list of its samples"
                )
            if tasks.stopping:
                return  # user code has outlived its cancellation, and nobody may be left to make room in the queue
            take_stock(key, group)
            key.finished_version = self._trainer.versions.current
            finished_at = self.ledger.finish(key)
            if key.slots:
                self._slots.finish(key, finished_at)
            if not self._finished.put_at_once(key):
                await self._finished.put(key)
            self._leave(key)
        except BaseException as error:  # the one place where that becomes data: the worker raises it
            if tasks.note_failure(key, error):
                raise
        finally:
            tasks.running.pop(key, None)

    def _leave(self, key: GroupKey) -> None:
        """The group is no longer in generation, well or badly."""
        if key.slots:
            self._slots.free_all(key)
        self._look_again()

    def _look_again(self) -> None:
        """Something has changed that the worker, or a call that waits while the data ends, should look at."""
        self._wake.set()
        if self._prompts.ended and not self.ledger.in_flight and not self.ledger.queued:
            for waiter in self._end_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # ---- the drain: store -> a batch for the trainer

    async def _drain(self, input: RolloutFnInput | None = None) -> RolloutFnTrainOutput:
        """Collect one batch. Where that fails or is cancelled, every group it had taken is given back."""
        self._ensure_started()
        rollout_id: int = getattr(input, "rollout_id", -1)
        self._finished.put_back(self._trainer.begin_call(rollout_id, getattr(input, "weight_version", None)))
        self._prompts.ended = False  # ask again
        self._look_again()
        report, self._unreported = self._unreported, DrainReport()
        mine: list[GroupKey] = []  # the accepted groups and, last, the one being judged
        try:
            batch = await self._collect(rollout_id, mine, report)
        except BaseException:
            self._finished.put_back(mine)
            report.forget_ages()
            self._unreported = report
            raise
        self._trainer.hand_over(rollout_id, mine)
        report.add_trained(mine, VersionSplit(self._trainer.versions, self._trainer.version), self._now())
        report.warn_about_unknown_versions(self.config.max_weight_staleness)
        return RolloutFnTrainOutput(batch, self._metrics(report), is_last=len(mine) < self.config.rollout_batch_size)

    async def _collect(self, rollout_id: int, mine: list[GroupKey], report: DrainReport) -> list[list[Any]]:
        """Fill `mine` and return its batch. From the last look at the groups' age to the return there is no await."""
        config, trainer, looked_at = self.config, self._trainer, 0
        while True:
            while len(mine) < config.rollout_batch_size:
                if looked_at % _GROUPS_A_TURN == 0:
                    await asyncio.sleep(0)
                    self._raise_if_worker_ended()
                looked_at += 1
                key = self._finished.ready() or await self._next_group(kept=len(mine))
                if key is None:
                    break
                self.ledger.drain(key, rollout_id)
                mine.append(key)
                version = trainer.version
                if version is None and config.max_weight_staleness is not None:
                    version = await self._weight_version.get(self.args)  # the engines' own
                if self._is_usable(key, version, report) and (
                    self._dynamic_filter is None or await self._passes_filter(key, report)
                ):
                    require_members(key.prompt_group, key.group or [], config.n_samples_per_prompt)
                    self._refusals.one_was_kept()
                else:
                    mine.pop()
                    self._refusals.require_budget()
                    self._refusals.warn_where_nothing_is_kept(self._now(), NO_PROGRESS_WARN_SECS)
            if not mine:
                raise EndOfData(f"{self._prompts.end_message}: no group is in flight or queued any more")
            batch = await self._to_batch(mine)
            if not self._remove_outdated(mine, report):
                return batch

    def _is_usable(self, key: GroupKey, version: VersionLabel | None, report: DrainReport) -> bool:
        """Whether the group is whole and, measured against `version`, within the limit; if not, it has been recycled or
        dropped, and counted. Its age is not measured where neither a version nor a limit is known."""
        if key.aborted:
            reason = RecycleReason.ABORTED
        elif version is None and self.config.max_weight_staleness is None:
            return True
        else:
            if group_oldest_weight_version is not _group_oldest_weight_version:  # somebody has an idea of their own
                oldest = group_oldest_weight_version(key.group or [])
                key.versions, key.unversioned = (() if oldest is None else (oldest,)), 0
            if self._gauge.is_fresh(key, version, report):
                return True
            reason = RecycleReason.STALE
        report.count_recycled(reason, self._refusals.unused(key, reason))
        return False

    async def _passes_filter(self, key: GroupKey, report: DrainReport) -> bool:
        """Whether the dynamic filter wants the group; if not, it has been dropped, and counted."""
        self._raise_if_worker_ended()  # during the last one
        judging = acall_dynamic_filter(self._dynamic_filter, self.args, key.group)
        if self.config.no_progress_timeout is None:
            verdict = await judging
        else:
            what = f"dynamic filter {name_of(self._dynamic_filter)}, called for {describe(key.prompt_group)},"
            verdict = await self._in_time(what, judging)
        if not verdict.keep:
            report.drops.on_dynamic_filter_drop(verdict.reason or NO_REASON)
            self._refusals.filtered(key, verdict.reason)
        return verdict.keep

    def _still_usable(self, samples: Sequence[Sample]) -> bool:
        labels = {label for sample in samples for label in sample.weight_versions}
        return self._gauge.is_within_limit(tuple(labels), self._trainer.version)

    def _remove_outdated(self, mine: list[GroupKey], report: DrainReport) -> bool:
        """Measure again what was measured against an older version than the trainer's; whether some had to go."""
        if not self._trainer.version_known:
            return False
        before = len(mine)
        for key in self._gauge.outdated(mine):
            if not self._is_usable(key, self._trainer.version, report):
                mine.remove(key)
        return len(mine) < before

    async def _to_batch(self, keys: list[GroupKey]) -> list[list[Any]]:
        """The groups, sorted, after the sample filter; it marks samples in place and must not change the shape."""
        batch = sorted_batch([key.group for key in keys if key.group is not None])
        if self._sample_filter is not None:
            what = f"sample filter {name_of(self._sample_filter)}"
            await self._in_time(what, apply_sample_filter(self._sample_filter, self.args, batch))
        return batch

    def _metrics(self, report: DrainReport) -> dict[str, Any]:
        queue_size = self.queue_size
        return {
            **self._finished.store.get_metrics(),
            **self._window.metrics(
                in_flight_samples=self._slots.used,
                in_flight_bound=self.max_in_flight_samples,
                queue_size=queue_size,
                queue_bytes=self._finished.size_bytes,
                sample_retries=getattr(self.state, "sample_retries", 0),
                data_ended=self._prompts.ended,
            ),
            **self._activity.metrics(self._now()),
            **loop_lag_metrics(drain_loop_lag()),
            **report.metrics(queue_size=queue_size),
        }

    async def _engine_urls(self) -> list[str]:
        return await known_worker_urls(self.args, get, WEIGHT_VERSION_QUERY_TIMEOUT_SECS)

    def _new_patience(self, now: float) -> Patience:
        return Patience(now, warn_every=NO_PROGRESS_WARN_SECS, limit=self.config.no_progress_timeout)


class _CachedWeightVersion(CachedWeightVersion):
    """The engines' version through the router, at most one query in `ttl` seconds, whatever the router does."""

    def __init__(self, ttl: float = 1.0) -> None:
        super().__init__(ttl)

    async def get(self, args: Namespace) -> int | None:
        """The version, None as long as none was ever known. A query takes WEIGHT_VERSION_QUERY_TIMEOUT_SECS at most."""
        router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"

        async def query() -> Any:
            async with asyncio.timeout(WEIGHT_VERSION_QUERY_TIMEOUT_SECS):
                return await query_model_info(get, router)

        return await self.read(query, source=f"the router at {router}")
