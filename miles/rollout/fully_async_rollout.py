"""Fully asynchronous rollout: generation never waits for a training step, a training step never for a straggler.

      data source --get_samples(1)--> _submit_one_group        one prompt group at a time
           ^                               |
           |                               v                   at most max_in_flight_groups tasks
           |                          _run_group  (one task per group: generate_and_rm_group, then put)
           |                               |
           |                               v                   at most queue_capacity groups; full: put waits
           |                            _output  (asyncio.Queue of (prompt_group, group))
           |                               |
           +------- recycled ------- _drain (judges each group) ----> a batch, sorted by index, for the trainer
              aborted, too stale           |
                                           +--> dropped (dynamic filter)

    loop            consumes        waits for                            is unblocked by
    worker          data source     a free slot                          a group task that ends, well or badly
    group task      its prompts     the engines, then room in _output    the engines; the drain
    drain           _output         a finished group, or the worker's    a group task; the worker's death;
                                    end                                  close()

What if the trainer is slow? `_output` fills up, finished tasks wait inside `put` and keep their slots, and the worker
submits nothing more: at most `queue_capacity + max_in_flight_groups` finished groups exist. What if generation is slow?
The drain waits and says so with numbers. What if something fails? An exception in a group task or in the data source
ends the worker, and the next drain raises that very exception, before it uses any group that is still queued.

Guarantees, each with its mechanism
- A group has one owner: its task, `_output`, the drain's list `mine`, or `_returned` (the groups that a failed or
  cancelled drain took and gave back; they come first in the next drain).
- No task outlives its owner: the worker cancels and awaits its group tasks before it ends, `close()` does the same at
  any moment, and a wait for a group ends its `Queue.get` whichever way it ends.
- The worker ends only by an error or by `close()`. Whoever finds it ended any other way raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from miles.rollout._fully_async_config import FullyAsyncConfig
from miles.rollout._fully_async_groups import (
    FinishedGroup,
    Group,
    PromptGroup,
    _first_sample,
    _iter_samples,
    describe,
    group_oldest_weight_version,
    has_aborted,
    require_members,
    sorted_batch,
)
from miles.rollout._fully_async_metrics import DrainReport, RecycleReason
from miles.rollout._fully_async_tasks import GroupTasks
from miles.rollout._submission_gate import PausableSubmission, SubmissionGate
from miles.rollout._weight_version import CachedWeightVersion, query_model_info
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnInput, RolloutFnTrainOutput
from miles.rollout.filter_hub.base_types import call_dynamic_filter
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState, generate_and_rm_group
from miles.utils.http_utils import get
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable

__all__ = [
    "FullyAsyncRolloutFn",
    "GenerateState",
    "Group",
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


class FullyAsyncRolloutFn(PausableSubmission):
    """The rollout function of `train_async.py --fully-async`: one training batch per call.

    The first call starts the worker, a task of the event loop that the call runs on; it lives until `close()`. Every
    call must come from that loop. Evaluation is refused: it has a rollout function of its own, which shares no state
    with this one.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.config = FullyAsyncConfig.from_args(input.args)
        self.state = GenerateState(input.args)
        self._dynamic_filter = load_function(input.args.dynamic_sampling_filter_path)
        self._sample_filter = load_function(input.args.rollout_sample_filter_path)
        self._weight_version = _CachedWeightVersion(ttl=1.0)
        self._worker: asyncio.Future[Any] | None = None
        self._output: asyncio.Queue[FinishedGroup] | None = None
        self._returned: deque[FinishedGroup] = deque()
        self._group_tasks = GroupTasks()
        self.submission_gate = SubmissionGate()
        self._closed = False
        self._unreported = DrainReport()

    @property
    def max_in_flight_groups(self) -> int:
        """`rollout_batch_size`, or `max(1, async_max_concurrent_samples // n_samples_per_prompt)` where that is set."""
        return self.config.max_in_flight_groups

    @property
    def queue_capacity(self) -> int:
        """`OUTPUT_QUEUE_MAX_GROUPS`, or `max(1, int(async_data_buffer_capacity_factor * rollout_batch_size))`."""
        return self.config.queue_capacity(OUTPUT_QUEUE_MAX_GROUPS)

    @property
    def queue_size(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._returned) + (self._output.qsize() if self._output is not None else 0)

    async def __call__(self, input: RolloutFnInput) -> RolloutFnTrainOutput:
        """Wait until `rollout_batch_size` groups are finished and accepted, and hand them over.

        Raises ValueError for an eval input; the original exception where the worker has failed, in this call or before;
        ValueError where a plug-in breaks the shape of the batch; RuntimeError after `close()`.
        """
        if input.evaluation:
            raise ValueError(
                "FullyAsyncRolloutFn does not serve evaluation, which would share its engines' abort flag and its "
                "queue: set --eval-function-path to another rollout function (without that flag, --fully-async keeps "
                "the standard one for evaluation)."
            )
        return await self._drain(input)

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

    # ---- the worker: data source -> in flight -> _output

    def _ensure_started(self) -> None:
        if self._closed:
            raise RuntimeError("this FullyAsyncRolloutFn is closed")
        if self._output is None:
            self._output = asyncio.Queue(maxsize=self.queue_capacity)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run_worker(), name="fully-async-worker")

    async def _run_worker(self) -> NoReturn:
        """Keep `max_in_flight_groups` group tasks going until one fails."""
        tasks = self._group_tasks
        try:
            while tasks.failure is None:
                if not self.submission_gate.is_open:
                    await self.submission_gate.wait_open()
                elif len(tasks) < self.max_in_flight_groups:
                    self._submit_one_group()
                    await asyncio.sleep(0)  # thousands of submissions in a row must not stall the loop
                else:
                    await tasks.wait_until_one_leaves()
            raise tasks.failure
        finally:
            if not self._closed:  # else close() is already at it
                await tasks.stop(CLOSE_GRACE_SECS)

    def _submit_one_group(self) -> None:
        """Take one prompt group from the data source and start its task: the only place that does either.

        No await between the two, so the group is never without an owner.
        """
        groups = self.data_source.get_samples(1)
        if len(groups) != 1:
            raise RuntimeError(
                f"{type(self.data_source).__name__}.get_samples(1) returned {len(groups)} groups; fully-async rollout "
                "takes one at a time, for as long as the run lasts (a data source starts its next epoch by itself)"
            )
        self._group_tasks.start(groups[0], self._run_group)

    async def _run_group(self, prompt_group: PromptGroup) -> None:
        # Generation gets a list of its own: the prompt group stays flat whatever a generate function does to the list.
        group: Any = await generate_and_rm_group(
            self.state, list(prompt_group), sampling_params=self.state.sampling_params, evaluation=False
        )
        if not isinstance(group, list):
            raise TypeError(f"generating {describe(prompt_group)} returned {group!r}, expected a list of its samples")
        if self._group_tasks.stopping:
            return  # user code has outlived its cancellation, and nobody may be left to make room in the queue
        assert self._output is not None
        await self._output.put((prompt_group, group))

    # ---- the drain: _output -> a batch for the trainer

    async def _drain(self, input: RolloutFnInput | None = None) -> RolloutFnTrainOutput:
        """Collect one batch. Where that fails or is cancelled, every group it had taken is given back."""
        self._ensure_started()
        trainer_version: int | None = getattr(input, "weight_version", None)
        report, self._unreported = self._unreported, DrainReport()
        mine: list[FinishedGroup] = []  # the accepted groups and, last, the one being judged
        try:
            while len(mine) < self.config.rollout_batch_size:
                await asyncio.sleep(0)  # filters are synchronous: between two groups the others get their turn
                mine.append(await self._next_group(kept=len(mine)))
                if not await self._accept(mine[-1], trainer_version, report):
                    mine.pop()
            samples = self._to_batch(mine)
        except BaseException:
            self._returned.extendleft(reversed(mine))
            report.forget_ages()
            self._unreported = report
            raise
        report.warn_about_unknown_versions(self.config.max_weight_staleness)
        return RolloutFnTrainOutput(samples=samples, metrics=report.metrics(queue_size=self.queue_size))

    async def _next_group(self, kept: int = 0) -> FinishedGroup:
        """The oldest finished group; waits for one. Raises as soon as the worker has ended, queued groups or not."""
        self._raise_if_worker_ended()
        if self._returned:
            return self._returned.popleft()
        assert self._output is not None
        if not self._output.empty():
            return self._output.get_nowait()
        get_group = asyncio.create_task(self._output.get(), name="fully-async next group")
        try:
            return await self._wait_for(get_group, kept)
        except BaseException:
            if get_group.cancel():  # a cancelled get leaves its group in the queue
                await asyncio.wait({get_group})
            elif not get_group.cancelled():  # it has a group already, which must not go down with this wait
                self._returned.append(get_group.result())
            raise

    async def _wait_for(self, get_group: asyncio.Task[FinishedGroup], kept: int) -> FinishedGroup:
        assert self._worker is not None
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            await asyncio.wait(
                {get_group, self._worker}, timeout=NO_PROGRESS_WARN_SECS, return_when=asyncio.FIRST_COMPLETED
            )
            self._raise_if_worker_ended()
            if get_group.done():
                return get_group.result()
            self._warn_no_progress(kept, waited=loop.time() - since)

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

    def _warn_no_progress(self, kept: int, waited: float) -> None:
        oldest = self._group_tasks.oldest
        now = asyncio.get_running_loop().time()
        logger.warning(
            "no finished group for %.0f s: %d of %d groups kept, %d queued, %d of %d in flight%s",
            waited,
            kept,
            self.config.rollout_batch_size,
            self.queue_size,
            len(self._group_tasks),
            self.max_in_flight_groups,
            f", the oldest for {now - oldest.submitted_at:.0f} s: {describe(oldest.prompt_group)}" if oldest else "",
        )

    async def _accept(self, finished: FinishedGroup, trainer_version: int | None, report: DrainReport) -> bool:
        """Whether the group belongs in the batch; if not, it has been recycled or dropped, and counted."""
        prompt_group, group = finished
        if has_aborted(group):
            self._recycle(prompt_group, RecycleReason.ABORTED, report)
            return False
        staleness = await self._measure_staleness(group, trainer_version, report)
        limit = self.config.max_weight_staleness
        if limit is not None and staleness is not None and staleness > limit:
            self._recycle(prompt_group, RecycleReason.STALE, report)
            return False
        verdict = call_dynamic_filter(self._dynamic_filter, self.args, group)
        if not verdict.keep:  # not recycled: the worker has long replaced it
            report.drops.on_dynamic_filter_drop(verdict.reason)
            return False
        require_members(finished, self.config.n_samples_per_prompt)
        if staleness is not None:
            report.trained.add(staleness)
        return True

    def _recycle(self, prompt_group: PromptGroup, reason: RecycleReason, report: DrainReport) -> None:
        """Give the flat prompt group back to the data source, its answers forgotten."""
        for sample in prompt_group:
            sample.reset_for_retry()
        self.data_source.add_samples([prompt_group])
        report.recycled[reason] += 1

    async def _measure_staleness(self, group: Group, trainer_version: int | None, report: DrainReport) -> int | None:
        """Versions between the oldest that wrote a token of the group and the current one; None where not known.

        The trainer's own number is the authority; the engines are asked only where it is missing and a limit needs it.
        A group that is newer than the number counts as fresh (0): the weights moved on after the number was taken.
        """
        current = trainer_version
        if current is None and self.config.max_weight_staleness is None:
            return None
        if current is None:
            current = await self._weight_version.get(self.args)
        oldest = group_oldest_weight_version(group)
        known = current is not None and oldest is not None
        report.unknown_version_groups = (report.unknown_version_groups or 0) + (not known)
        if current is None or oldest is None:
            return None
        staleness = max(0, current - oldest)
        report.measured.add(staleness)
        return staleness

    def _to_batch(self, finished: Iterable[FinishedGroup]) -> list[list[Any]]:
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
