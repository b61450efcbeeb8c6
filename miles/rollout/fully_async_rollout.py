"""Fully asynchronous rollout: generation never waits for a training step, a training step never for a straggler.

      data source --get_samples(1)--> _submit_one_group        one prompt group at a time, while it may start:
           ^                               |                     a group's places are free, the store has room,
           |                               v                     and it would not be born too old (admission)
           |                          _run_group  (one task per group: generate_and_rm_group, then put)
           |                               |
           |                               v                   at most queue_capacity groups; full: put waits
           |                            _output  (the store: an asyncio.Queue of (prompt_group, group))
           |                               |     ^
           |                               |     +---- _returned (in front) <--- give_back, failed drains, restore
           |                               v                                         |
           +------- recycled ------- _drain (judges each group) ----> a batch, sorted by index, for the trainer
              aborted, too stale           |                                         |
                                           +--> dropped (filter, retries)            +--- acknowledge ---> trained

    loop            consumes        waits for                            is unblocked by
    worker          data source     a reason to submit (_may_submit)     whatever changes one: _wake
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
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NoReturn

from miles.rollout._fully_async_admission import Admission
from miles.rollout._fully_async_batches import Batch, HandedBatches
from miles.rollout._fully_async_buffer import DataBuffer, DataBufferConstructorInput, DataBufferInput, DefaultDataBuffer
from miles.rollout._fully_async_config import FullyAsyncConfig
from miles.rollout._fully_async_errors import EndOfData, no_progress, nothing_gets_through
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
from miles.rollout._fully_async_ledger import DropReason, GroupKey, GroupLedger, GroupObserver, Owner, RecycleReason
from miles.rollout._fully_async_metrics import DrainReport, LedgerWindow
from miles.rollout._fully_async_prompts import PromptSupply, retries_of
from miles.rollout._fully_async_slots import SampleSlots
from miles.rollout._fully_async_snapshot import restore_state, take_snapshot
from miles.rollout._fully_async_staleness import require_known, staleness_of, unknown_samples
from miles.rollout._fully_async_tasks import GroupTasks
from miles.rollout._fully_async_versions import VersionLabel, WeightVersions
from miles.rollout._weight_version import CachedWeightVersion, query_model_info
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnInput, RolloutFnTrainOutput
from miles.rollout.filter_hub.base_types import call_dynamic_filter
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState, generate_and_rm_group
from miles.utils.http_utils import get
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout._fully_async_groups import PromptGroup

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

_TURN = 2  # submissions between two turns that the other tasks of the loop get


class FullyAsyncRolloutFn:
    """The rollout function of `train_async.py --fully-async`: one training batch per call.

        generate(n) -> training step -> acknowledge(n), or give_back(n) where it failed -> on_weight_version(v)

    The first call starts the worker, a task of the event loop that the call runs on; it lives until `close()`. Every
    call and every method belongs on that loop. A caller that never acknowledges has each batch closed at its next
    call. Evaluation is refused: it has a rollout function of its own, which shares no state with this one.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.config = FullyAsyncConfig.from_args(input.args)
        self.state = GenerateState(input.args)
        self.ledger = GroupLedger()
        self.observers = self.ledger.observers
        self.versions = WeightVersions()
        self._dynamic_filter = load_function(input.args.dynamic_sampling_filter_path)
        self._sample_filter = load_function(input.args.rollout_sample_filter_path)
        self._weight_version = _CachedWeightVersion(ttl=1.0)
        self._worker: asyncio.Future[Any] | None = None
        self._store = self._build_store()
        self._returned: deque[Any] = deque()
        self._prompts = PromptSupply(input.data_source)
        self._slots = SampleSlots(self.max_in_flight_samples, self.config.n_samples_per_prompt)
        self._admission = Admission(
            limit=self.config.max_weight_staleness,
            update_interval=self.config.update_weights_interval,
            batch_size=self.config.rollout_batch_size,
        )
        self._group_tasks = GroupTasks(self._on_task_end)
        self._handed = HandedBatches()
        self._wake = asyncio.Event()  # something changed that `_may_submit` looks at
        self._putting = 0  # finished groups that wait for room in the store
        self._pauses = 0
        self._end_waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._version_told = False
        self._acknowledges = False
        self._turned_down: Counter[str] = Counter()  # since a group was kept last, by reason
        self._unreported = DrainReport()
        self._window = LedgerWindow(self.ledger)

    def _build_store(self) -> DataBuffer:
        path = getattr(self.args, "custom_async_data_buffer_path", None)
        store: Any = load_function(path) or DefaultDataBuffer
        return store(
            DataBufferConstructorInput(
                args=self.args,
                unused_handler_fn=self._unused_by_store,
                drop_fn=self._dropped_by_store,
                capacity_groups=self.queue_capacity,
                capacity_bytes=self.config.async_data_buffer_max_bytes,
            )
        )

    # ---- bounds and sizes

    @property
    def max_in_flight_groups(self) -> int:
        """`rollout_batch_size`, or `max(1, async_max_concurrent_samples // n_samples_per_prompt)` where that is set."""
        return self.config.max_in_flight_groups

    @property
    def max_in_flight_samples(self) -> int:
        """By group: `max_in_flight_groups * n_samples_per_prompt`. By sample: `async_max_concurrent_samples`."""
        return self.config.max_in_flight_samples

    @property
    def in_flight_samples(self) -> int:
        """Places in generation that are taken."""
        return self._slots.used

    @property
    def queue_capacity(self) -> int:
        """`OUTPUT_QUEUE_MAX_GROUPS`, or `max(1, int(async_data_buffer_capacity_factor * rollout_batch_size))`."""
        return self.config.queue_capacity(OUTPUT_QUEUE_MAX_GROUPS)

    @property
    def staleness_bound_in_flight(self) -> int:
        """Versions that a group may lag behind when it is trained, if none overtakes it: `ceil((F + Q) / (B * k))`, and
        at most `--max-weight-staleness`; derived in docs/user-guide/fully-async.md."""
        return self.config.staleness_bound(self.queue_capacity)

    @property
    def queue_size(self) -> int:
        """Finished groups that wait for the trainer."""
        if isinstance(self._store, DefaultDataBuffer):
            return len(self._returned) + self._store.qsize()
        return self.ledger.queued

    @property
    def queue_bytes(self) -> int:
        """Estimated bytes of the groups in the built-in store."""
        return getattr(self._store, "size_bytes", 0)

    @property
    def _output(self) -> asyncio.Queue[Any] | None:
        """The built-in store's queue of `(prompt_group, group)`; None before the first call."""
        return getattr(self._store, "queue", None)

    @_output.setter
    def _output(self, queue: asyncio.Queue[Any]) -> None:
        self._store.queue = queue  # type: ignore[attr-defined]

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
        self._acknowledges = True
        return self._close_batch(rollout_id)

    def give_back(self, rollout_id: int) -> int:
        """The step on this rollout's batch failed or was cancelled: its groups come first in the next drain. Their
        number; 0 where there is no such batch, or it was acknowledged or given back before."""
        self._acknowledges = True
        batch = self._handed.take(rollout_id)
        if batch is None:
            return 0
        if batch.version_serial == self.versions.serial:
            self._admission.takes_back(len(batch.items))
        self._put_back(batch.items)
        return len(batch.items)

    def on_weight_version(self, version: VersionLabel) -> None:
        """The trainer has published weights of this version to the engines. Labels are ordered by these calls."""
        self._version_told = self._admission.version_known = True
        self._publish(version)

    def pause_submission(self) -> None:
        """Start no new group until `resume_submission`; what is in flight goes on. Pauses add up."""
        self._pauses += 1

    def resume_submission(self) -> None:
        if self._pauses == 0:
            raise RuntimeError("resume_submission without pause_submission")
        self._pauses -= 1
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """Every group that is pulled and not trained, counters, versions and the data source's state, JSON-ready and of
        one moment. Raises SampleCodecError naming the field that cannot be saved."""
        return take_snapshot(self.ledger, self.versions, self._prompts)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `snapshot`; before the first call. Raises ValueError where it cannot be understood."""
        if self._worker is not None:
            raise RuntimeError("restore comes before the first call")
        self._returned.extend(restore_state(state, self.ledger, self.versions, self._prompts))
        self._window = LedgerWindow(self.ledger)

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
        if isinstance(self._store, DefaultDataBuffer):
            self._store.open()
        if self._worker is None:
            self._worker = asyncio.create_task(self._run_worker(), name="fully-async-worker")

    async def _run_worker(self) -> NoReturn:
        """Submit whatever may be submitted until a group task fails."""
        tasks = self._group_tasks
        try:
            while tasks.failure is None:
                turn = 0
                while turn < _TURN and self._may_submit():
                    self._submit_one_group()
                    turn += 1
                if turn:
                    await asyncio.sleep(0)  # thousands of submissions in a row must not stall the loop
                else:
                    self._wake.clear()
                    await self._wake.wait()
            raise tasks.failure
        finally:
            if not self._closed:  # else close() is already at it
                await tasks.stop(CLOSE_GRACE_SECS)

    def _may_submit(self) -> bool:
        ledger = self.ledger
        return (
            self._slots.one_group_fits
            and not (self._putting and self.config.by_sample)  # by group, those that wait still hold their places
            and not self._pauses
            and not self._prompts.ended
            and self._admission.admits(ledger.in_flight + ledger.queued + ledger.drained - self._handed.size)
        )

    def _submit_one_group(self) -> None:
        """Take one prompt group from the data source and start its task: the only place that does either.

        No await between the two, so the group is never without an owner.
        """
        prompt_group = self._prompts.next_group()
        if prompt_group is None:
            self._notice_end_of_data()
            return
        key = self.ledger.pull(prompt_group)
        self._slots.take(key)
        self._group_tasks.start(key, self._run_group(key))

    async def _run_group(self, key: GroupKey) -> None:
        prompt_group = key.prompt_group
        keywords: dict[str, Any] = {}
        if self.config.by_sample:
            keywords["sample_done_callback"] = lambda: self._on_sample_done(key)
        # Generation gets a list of its own: the prompt group stays flat whatever a generate function does to the list.
        group: Any = await generate_and_rm_group(
            self.state, list(prompt_group), sampling_params=self.state.sampling_params, evaluation=False, **keywords
        )
        if not isinstance(group, list):
            raise TypeError(f"generating {describe(prompt_group)} returned {group!r}, expected a list of its samples")
        if self._group_tasks.stopping:
            return  # user code has outlived its cancellation, and nobody may be left to make room in the queue
        take_stock(key, group)
        self.ledger.finish(key)
        self._putting += 1
        try:
            await self._store.put(DataBufferInput(prompt_group, group, key))
        finally:
            self._putting -= 1
        if key.owner is Owner.IN_FLIGHT:  # else a custom store has refused it, or has handed it out already
            self.ledger.queue(key)
        self._leave(key)

    def _on_sample_done(self, key: GroupKey) -> None:
        self._slots.free_one(key)
        if self._slots.one_group_fits:
            self._wake.set()

    def _on_task_end(self, key: GroupKey) -> None:
        if key.slots or self._group_tasks.failure is not None:
            self._leave(key)

    def _leave(self, key: GroupKey) -> None:
        self._slots.free_all(key)
        self._wake.set()
        if self._prompts.ended:
            self._notice_end_of_data()

    # ---- the drain: store -> a batch for the trainer

    async def _drain(self, input: RolloutFnInput | None = None) -> RolloutFnTrainOutput:
        """Collect one batch. Where that fails or is cancelled, every group it had taken is given back."""
        self._ensure_started()
        rollout_id: int = getattr(input, "rollout_id", -1)
        self._begin_call(rollout_id, getattr(input, "weight_version", None))
        report, self._unreported = self._unreported, DrainReport()
        mine: list[DataBufferInput] = []  # the accepted groups and, last, the one being judged
        try:
            samples = await self._collect(rollout_id, mine, report)
        except BaseException:
            self._put_back(mine)
            report.forget_ages()
            self._unreported = report
            raise
        self._handed.add(rollout_id, Batch(mine, self.versions.serial))
        self._admission.handed += len(mine)
        report.add_trained(item.key for item in mine)
        report.warn_about_unknown_versions(self.config.max_weight_staleness)
        return RolloutFnTrainOutput(samples=samples, metrics=self._metrics(report))

    def _begin_call(self, rollout_id: int, weight_version: VersionLabel | None) -> None:
        if not self._acknowledges:
            for earlier in self._handed.rollout_ids():
                self._close_batch(earlier)
        else:
            self.give_back(rollout_id)  # it is asked for again: what was handed over for it was not trained on
        self._admission.call_begins()
        if weight_version is not None and (not self._version_told or self.versions.is_newer(weight_version)):
            self._publish(weight_version)
        self._admission.version_known = self._version_told or weight_version is not None
        self._prompts.ended = False  # ask again
        self._wake.set()

    async def _collect(self, rollout_id: int, mine: list[DataBufferInput], report: DrainReport) -> list[list[Any]]:
        """Fill `mine` and return the batch. From the last look at its staleness to the return there is no await."""
        while True:
            while len(mine) < self.config.rollout_batch_size:
                await asyncio.sleep(0)  # judging is synchronous: between two groups the others get their turn
                item = await self._next_group(kept=len(mine))
                if item is None:
                    break
                self.ledger.drain(item.key, rollout_id)
                mine.append(item)
                if await self._accept(item, report):
                    self._turned_down.clear()
                else:
                    mine.pop()
                    self._count_refusals()
            if not mine:
                raise EndOfData(
                    f"{self._prompts.end_message}: the data has ended, and no group is in flight or queued any more"
                )
            batch = self._to_batch(mine)
            if self._remove_outdated(mine, report) == 0:
                return batch

    async def _next_group(self, kept: int = 0) -> DataBufferInput | None:
        """The oldest finished group; waits for one, and returns None where none will come because the data has ended.
        Raises as soon as the worker has ended, queued groups or not."""
        self._raise_if_worker_ended()
        if self._returned:
            return self._entered(self._returned.popleft())
        store = self._store
        if isinstance(store, DefaultDataBuffer) and store.qsize():
            return self._entered(store.get_nowait())
        get_group: asyncio.Task[Any] = asyncio.create_task(
            store.get(current_version=self.versions.current),  # type: ignore[arg-type]
            name="fully-async next group",
        )
        item = None
        try:
            if await self._wait_for(get_group, kept):
                item = get_group.result()
        finally:
            if item is None:
                await self._abandon(get_group)
        return None if item is None else self._entered(item)

    def _entered(self, item: Any) -> DataBufferInput:
        """The item with its entry in the books, which a pair from somebody else's hand gets now."""
        key = getattr(item, "key", None)
        if key is None:
            prompt_group, group = item
            item = DataBufferInput(prompt_group, group, self._find_key(prompt_group) or self.ledger.enter(prompt_group))
            take_stock(item.key, group)
        elif key.owner is Owner.IN_FLIGHT:  # a custom store's `put` has not returned yet
            self.ledger.queue(key)
        return item

    async def _abandon(self, get_group: asyncio.Task[Any]) -> None:
        """End a wait for a group; one that it has got already must not go down with it."""
        if get_group.cancel():  # a cancelled get leaves its group in the queue
            await asyncio.wait({get_group})
        if not get_group.cancelled() and get_group.exception() is None:
            self._returned.append(get_group.result())

    async def _wait_for(self, get_group: asyncio.Task[Any], kept: int) -> bool:
        """Until the group is there: true. False where the data has ended before."""
        assert self._worker is not None
        loop = asyncio.get_running_loop()
        end_of_data: asyncio.Future[None] = loop.create_future()
        self._end_waiters.add(end_of_data)
        self._notice_end_of_data()
        since = warned = loop.time()
        try:
            while True:
                now = loop.time()
                await asyncio.wait(
                    {get_group, self._worker, end_of_data},
                    timeout=self._until_next_look(now - since, now - warned),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._raise_if_worker_ended()
                if get_group.done():
                    return True
                if end_of_data.done():
                    return False
                now = loop.time()
                since = now if self._pauses else since  # nothing is expected while submission is paused
                limit = self.config.no_progress_timeout
                if limit is not None and now - since >= limit:
                    raise no_progress(now - since, self._in_flight(), now)
                if now - warned >= NO_PROGRESS_WARN_SECS:
                    warned = now
                    self._warn_no_progress(kept, waited=now - since)
        finally:
            self._end_waiters.discard(end_of_data)

    def _until_next_look(self, waited: float, since_warning: float) -> float:
        """Seconds until the next warning or, where that is nearer, the end of patience."""
        seconds = NO_PROGRESS_WARN_SECS - since_warning
        if self.config.no_progress_timeout is not None:
            seconds = min(seconds, self.config.no_progress_timeout - waited)
        return max(0.0, seconds)

    def _notice_end_of_data(self) -> None:
        """Wake the calls that wait for a group where none can come any more."""
        ledger = self.ledger
        if self._prompts.ended and not ledger.in_flight and not ledger.queued:
            for waiter in self._end_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _raise_if_worker_ended(self) -> None:
        assert self._worker is not None
        if self._group_tasks.failure is not None:  # even while the worker is still settling the other tasks
            raise self._group_tasks.failure
        if self._closed:
            raise RuntimeError("this FullyAsyncRolloutFn was closed while a batch was being collected")
        if not self._worker.done():
            return
        if self._worker.cancelled():
            raise RuntimeError("the fully-async worker was cancelled, though nobody closed the rollout function")
        raise self._worker.exception() or RuntimeError("the fully-async worker returned, though it must never end")

    def _in_flight(self) -> list[GroupKey]:
        """Oldest first. Looks at every open group: for messages."""
        return [key for key in self.ledger.open.values() if key.owner is Owner.IN_FLIGHT]

    def _warn_no_progress(self, kept: int, waited: float) -> None:
        oldest = next(iter(self._in_flight()), None)
        now = asyncio.get_running_loop().time()
        logger.warning(
            "no finished group for %.0f s: %d of %d groups kept, %d queued, %d of %d in flight%s",
            waited,
            kept,
            self.config.rollout_batch_size,
            self.queue_size,
            self.ledger.in_flight,
            self.config.most_groups_in_flight,
            f", the oldest for {now - oldest.pulled_at:.0f} s: {describe(oldest.prompt_group)}" if oldest else "",
        )

    # ---- judging

    async def _accept(self, item: DataBufferInput, report: DrainReport) -> bool:
        """Whether the group belongs in the batch; if not, it has been recycled or dropped, and counted."""
        key = item.key
        if key.aborted:
            self._unused(key, RecycleReason.ABORTED, report)
            return False
        if not self._is_fresh(key, await self._current_version(), report):
            self._unused(key, RecycleReason.STALE, report)
            return False
        verdict = call_dynamic_filter(self._dynamic_filter, self.args, item.group)
        if not verdict.keep:  # not recycled: the worker has long replaced it
            report.drops.on_dynamic_filter_drop(verdict.reason)
            self._turned_down[verdict.reason or "filtered"] += 1
            self._drop(key, DropReason.FILTERED)
            return False
        require_members(item, self.config.n_samples_per_prompt)
        return True

    async def _current_version(self) -> VersionLabel | None:
        """The trainer's own, where it is known. The engines are asked only where it is missing and a limit needs it."""
        if self._admission.version_known:
            return self.versions.current
        if self.config.max_weight_staleness is None:
            return None
        return await self._weight_version.get(self.args)

    def _is_fresh(self, key: GroupKey, current: VersionLabel | None, report: DrainReport) -> bool:
        """Measure the group; whether it is within the limit. Where its age cannot be told it is, and is counted."""
        limit = self.config.max_weight_staleness
        if current is None and limit is None:
            return True
        assert key.group is not None
        if self.config.strict_weight_versions:
            require_known(key, self.versions, current)
        key.staleness = staleness_of(key, group_oldest_weight_version(key.group), self.versions, current)
        key.measured_serial = self.versions.serial
        report.add_measured(key.staleness, unknown_samples(key, self.versions, current))
        return limit is None or key.staleness is None or key.staleness <= limit

    def _remove_outdated(self, mine: list[DataBufferInput], report: DrainReport) -> int:
        """Measure again what was measured against an older version, and recycle what has become too old meanwhile."""
        serial = self.versions.serial
        if not self._admission.version_known or all(item.key.measured_serial == serial for item in mine):
            return 0
        kept = [
            item
            for item in mine
            if item.key.measured_serial == serial or self._is_fresh(item.key, self.versions.current, report)
        ]
        outdated = [item for item in mine if item not in kept]
        for item in outdated:
            self._unused(item.key, RecycleReason.STALE, report)
            mine.remove(item)
        return len(outdated)

    def _count_refusals(self) -> None:
        batches = self.config.max_empty_batches
        if batches is not None and self._turned_down.total() >= batches * self.config.rollout_batch_size:
            raise nothing_gets_through(batches, self._turned_down)

    def _to_batch(self, finished: list[DataBufferInput]) -> list[list[Any]]:
        """The groups, sorted, after the sample filter; it marks samples in place and must not change the shape."""
        batch = sorted_batch(finished)
        if self._sample_filter is not None:
            shape = [len(group) for group in batch]
            self._sample_filter(self.args, batch)
            if [len(group) for group in batch] != shape:
                raise ValueError(
                    f"--rollout-sample-filter-path: the filter changed the batch from {len(shape)} groups to "
                    f"{len(batch)}, or the number of samples in a group; it must mark samples "
                    "(sample.remove_sample = True) and leave the lists as they are"
                )
        return batch

    def _metrics(self, report: DrainReport) -> dict[str, Any]:
        return {
            **self._store.get_metrics(),
            **self._window.metrics(
                in_flight_samples=self.in_flight_samples,
                in_flight_bound=self.max_in_flight_samples,
                queue_bytes=self.queue_bytes,
            ),
            **report.metrics(queue_size=self.queue_size),
        }

    # ---- transitions

    def _unused(self, key: GroupKey, reason: RecycleReason, report: DrainReport | None = None) -> None:
        """The group starts over, or is dropped: by the flag, or because it has started over often enough."""
        self._turned_down[reason.value] += 1
        if self.config.async_unused_samples_handler == "drop":
            self._drop(key, DropReason(reason.value))
        elif retries_of(key.prompt_group) >= self.config.async_max_group_retries:
            self._drop(key, DropReason.MAX_RETRIES)
        else:
            self._prompts.take_back(key.prompt_group)
            self.ledger.recycle(key, reason)
            if report is not None:
                report.recycled[reason] += 1
            self._wake.set()

    def _drop(self, key: GroupKey, reason: DropReason) -> None:
        self.ledger.drop(key, reason)
        self._wake.set()
        self._notice_end_of_data()

    def _unused_by_store(self, prompt_group: PromptGroup) -> None:
        key = self._find_key(prompt_group)
        if key is not None:
            self._unused(key, RecycleReason.UNUSED)

    def _dropped_by_store(self, prompt_group: PromptGroup) -> None:
        key = self._find_key(prompt_group)
        if key is not None:
            self._drop(key, DropReason.FILTERED)

    def _find_key(self, prompt_group: PromptGroup) -> GroupKey | None:
        """Looks at every open group: for custom stores."""
        return next((key for key in self.ledger.open.values() if key.prompt_group is prompt_group), None)

    def _put_back(self, items: list[DataBufferInput]) -> None:
        for item in items:
            self.ledger.queue(item.key)
        self._returned.extendleft(reversed(items))

    def _close_batch(self, rollout_id: int) -> int:
        batch = self._handed.take(rollout_id)
        if batch is None:
            return 0
        for item in batch.items:
            self.ledger.train(item.key)
        return len(batch.items)

    def _publish(self, version: VersionLabel) -> None:
        if self.versions.publish(version):
            self._admission.version_changes()
            self._wake.set()


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
